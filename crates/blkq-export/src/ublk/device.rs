//! The life of a device: made, started, taken over, stopped, removed.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use blkq::{Disk, EngineHandle, Error, ErrorKind, Source, SourceId};
use rustix::thread::{CapabilitySet, CpuSet, capabilities, set_capabilities};

use super::abi::{ANY_ID, DeviceInfo, Features, QUEUE_DEPTH_MAX};
use super::command::{Command, DELETE, STOP};
use super::control::{ControlDevice, character_path};
use super::copy::CopyMode;
use super::identity::{Identity, give_commands, stop};
use super::idle::IdleWatch;
use super::parameters::{REQUEST_MAX_BYTES, parameters};
use super::setup::SetupProcess;
use super::source::{QueueOptions, QueueSource, RefusedCommand, Shared};
use super::usage;

/// How long a device node may take to appear and to be made accessible: devtmpfs is prompt,
/// udev is not.
const NODE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the old server of a device may take to exit: its I/O in flight completes first.
const TAKE_OVER_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a server that leaves may take to complete its requests.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// How a device is made.
pub struct UblkOptions {
    /// Which one it will be.
    pub identity: Identity,
    /// Whether it outlives this process, where the kernel and the user's rights allow it.
    pub recoverable: bool,
    /// Whether the kernel scans for partitions, which it does for root only.
    pub partscan: bool,
    /// How data moves; `None` for the best way.
    pub copy: Option<CopyMode>,
    /// As many engines serve each queue, at least 1; more only with [`Features::PER_IO_DAEMON`].
    pub threads_per_queue: u16,
    /// Makes it, and makes it appear.
    pub setup: SetupProcess,
    /// Watches its users, and writes back what they wrote.
    pub users: IdleWatch,
    /// An eventfd that does not block, written when [`UblkDevice::failure`] has something.
    pub failure_event: Arc<OwnedFd>,
}

/// A device, served by this process.
pub struct UblkDevice {
    identity: Identity,
    /// Features of the kernel.
    kernel: Features,
    info: DeviceInfo,
    threads_per_queue: u16,
    /// Why its data moves in no better way, if that was to be chosen.
    copied_because: Option<&'static str>,
    serving: Mutex<Option<Serving>>,
    /// Stops and removes it.
    setup: Mutex<SetupProcess>,
    /// Locked while the device is claimed: two cannot claim it at once.
    users: Mutex<IdleWatch>,
}

/// While this exists, the users of the device are not scanned.
#[derive(Debug)]
struct Paused<'a>(MutexGuard<'a, IdleWatch>);

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        self.0.resume();
    }
}

/// A block device that nobody uses, nor can mount until this is dropped.
#[derive(Debug)]
pub struct Claimed<'a> {
    _claim: File,
    _paused: Paused<'a>,
}

/// The part of a device that stops with its server.
struct Serving {
    shared: Arc<Shared>,
    sources: Vec<(EngineHandle, SourceId)>,
}

/// Whether the ring of each of `engines` has slots for the pages of `requests`.
fn has_kernel_buffers(engines: &[EngineHandle], requests: u16) -> bool {
    engines.iter().all(|engine| engine.kernel_buffers() >= requests)
}

/// Rejects no thread for a queue, and several where the kernel takes a queue's commands from one only.
fn check_threads(kernel: Features, threads_per_queue: u16) -> Result<(), Error> {
    match threads_per_queue {
        0 => Err(Error::new(ErrorKind::Invalid, "ublk: a queue needs a thread")),
        1 => Ok(()),
        _ if kernel.contains(Features::PER_IO_DAEMON) => Ok(()),
        _ => Err(Error::new(
            ErrorKind::Unsupported,
            "this kernel's ublk has one thread serve a queue (Linux 6.16 and newer allow several)",
        )),
    }
}

impl UblkDevice {
    /// Makes a device of `disk` and serves it on `engines`: as many of them as each queue has threads
    /// are for the first queue, and so on.
    ///
    /// # Errors
    /// Whatever keeps it from being usable; nothing is left of it then.
    pub fn start(
        disk: &Arc<Disk>,
        engines: &[EngineHandle],
        options: UblkOptions,
    ) -> Result<UblkDevice, Error> {
        let UblkOptions { identity, recoverable, partscan, copy, threads_per_queue, .. } = options;
        let UblkOptions { mut setup, users, failure_event, .. } = options;
        let limits = disk.limits();
        let mut control = ControlDevice::open()?;
        let kernel = control.features()?;
        check_threads(kernel, threads_per_queue)?;
        let depth = disk.settings().depth.min(QUEUE_DEPTH_MAX);
        let buffers = has_kernel_buffers(engines, depth.div_ceil(threads_per_queue));
        let (copy, because) = CopyMode::choose(copy, kernel, control.is_privileged(), buffers, &limits)?;
        let parameters = parameters(&limits, copy)?;
        let recovery = Features::USER_RECOVERY | Features::USER_RECOVERY_REISSUE | Features::QUIESCE;
        let recovery = if recoverable { recovery } else { Features::empty() };
        let wanted = match control.is_privileged() {
            true => kernel & (recovery | Features::UPDATE_SIZE | Features::SAFE_STOP_DEV),
            false => Features::UNPRIVILEGED_DEV,
        };
        let mut info = DeviceInfo {
            nr_hw_queues: engines.len() as u16 / threads_per_queue,
            queue_depth: depth,
            max_io_buf_bytes: REQUEST_MAX_BYTES,
            dev_id: ANY_ID,
            flags: (wanted | copy.features() | Features::CMD_IOCTL_ENCODE).bits(),
            ublksrv_flags: identity.cookie,
            ..DeviceInfo::default()
        };
        setup.add(&mut info)?;
        let device = UblkDevice::new(kernel, info, threads_per_queue, setup, users);
        let device = UblkDevice { copied_because: because, ..device };
        // Others than root may do nothing with the device before udev has given it to them.
        let started = open_node(&character_path(info.dev_id))
            .and_then(|file| control.set_parameters(info.dev_id, &parameters).map(|()| file))
            .and_then(|file| device.serve(&mut control, file, engines, partscan, failure_event))
            .and_then(|()| device.setup().start(&info).map_err(|e| device.explain(e)))
            .and_then(|()| device.wait_for_node());
        match started {
            Ok(()) => Ok(device),
            Err(error) => {
                // The error reports why it did not start.
                let mut give = |command| control.give(command, info.dev_id);
                let _ = give_commands(&mut give, &[STOP]).and_then(|()| device.delete(give));
                Err(error)
            }
        }
    }

    /// Takes over the device `identity`, whose server has exited or is exiting: its I/O in flight is
    /// reissued to this process.
    ///
    /// # Errors
    /// [`ErrorKind::Mismatch`] if the disk is not what the device was made of; that the server does not
    /// exit within 30 seconds, and the kernel's error. The device stays as it was.
    pub fn take_over(
        identity: Identity,
        disk: &Arc<Disk>,
        engines: &[EngineHandle],
        threads_per_queue: u16,
        (setup, users): (SetupProcess, IdleWatch),
        failure_event: Arc<OwnedFd>,
    ) -> Result<UblkDevice, Error> {
        let mut control = ControlDevice::open()?;
        let kernel = control.features()?;
        check_threads(kernel, threads_per_queue)?;
        let path = identity.path();
        let unusable = |kind, why: &str| Err(Error::new(kind, format!("{path}: {why}")));
        let Some(info) = identity.info(&mut control)? else { return Err(identity.not_found()) };
        if info.flags & Features::USER_RECOVERY.bits() == 0 {
            return unusable(ErrorKind::Mismatch, "the device was made without recovery");
        }
        if usize::from(info.nr_hw_queues) * usize::from(threads_per_queue) > engines.len() {
            return unusable(ErrorKind::Mismatch, "the device has more queues than the disk");
        }
        let limits = disk.limits();
        let copy = CopyMode::of(Features::from_bits_retain(info.flags));
        if copy == CopyMode::None && !limits.kernel_pages {
            return unusable(
                ErrorKind::Mismatch,
                "its data is not copied, and the driver cannot do that now",
            );
        }
        let buffers = has_kernel_buffers(engines, info.queue_depth.div_ceil(threads_per_queue));
        if copy == CopyMode::None && !buffers {
            return unusable(
                ErrorKind::Unsupported,
                "its data is not copied, and the ring got no table of registered buffers; raise the limit of \
                 locked memory",
            );
        }
        let (was, is) = (control.parameters(identity.id)?.basic, parameters(&limits, copy)?.basic);
        if was.logical_bs_shift != is.logical_bs_shift {
            return unusable(ErrorKind::Mismatch, "the image now has other blocks than the device");
        }
        if was.dev_sectors > is.dev_sectors {
            return unusable(
                ErrorKind::Mismatch,
                "the image is now smaller than the device; make it as large as it was",
            );
        }
        let until = Instant::now() + TAKE_OVER_TIMEOUT;
        while let Err(error) = control.start_recovery(identity.id) {
            if error.kind() != ErrorKind::Busy || Instant::now() > until {
                return Err(error);
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        let device = UblkDevice::new(kernel, info, threads_per_queue, setup, users);
        let file = open_node(&character_path(identity.id))?;
        device.serve(&mut control, file, engines, true, failure_event)?;
        control.end_recovery(identity.id).map_err(|e| device.explain(e))?;
        Ok(device)
    }

    fn new(
        kernel: Features,
        info: DeviceInfo,
        threads_per_queue: u16,
        setup: SetupProcess,
        users: IdleWatch,
    ) -> UblkDevice {
        let identity = Identity { id: info.dev_id, cookie: info.ublksrv_flags };
        let (copied_because, serving) = (None, Mutex::new(None));
        let (setup, users) = (Mutex::new(setup), Mutex::new(users));
        UblkDevice { identity, kernel, info, threads_per_queue, copied_because, serving, setup, users }
    }

    fn users(&self) -> MutexGuard<'_, IdleWatch> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pause_watch(&self) -> Paused<'_> {
        let mut users = self.users();
        users.pause();
        Paused(users)
    }

    fn setup(&self) -> MutexGuard<'_, SetupProcess> {
        self.setup.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the engines fetch from the queues of the character device.
    fn serve(
        &self,
        control: &mut ControlDevice,
        file: File,
        engines: &[EngineHandle],
        partscan: bool,
        failure_event: Arc<OwnedFd>,
    ) -> Result<(), Error> {
        let id = self.identity.id;
        let shared = Arc::new(Shared { file, refused: OnceLock::new(), failure_event });
        let mut serving = self.serving.lock().unwrap_or_else(PoisonError::into_inner);
        let serving = serving.insert(Serving { shared: shared.clone(), sources: Vec::new() });
        let threads = self.threads_per_queue;
        let places =
            (0..self.info.nr_hw_queues).flat_map(|queue| (0..threads).map(move |thread| (queue, thread)));
        for ((queue, thread), engine) in places.zip(engines) {
            // An old kernel or a large machine: then it runs anywhere, and so do threads that would be
            // in each other's way.
            let processors = control.affinity(id, queue).unwrap_or_else(|_| CpuSet::new());
            let crowded = processors.count() < u32::from(threads);
            let options = QueueOptions {
                shared: shared.clone(),
                queue,
                depth: self.info.queue_depth,
                thread,
                threads,
                copy: self.copy(),
                request_max_bytes: self.info.max_io_buf_bytes,
                processors: if crowded { CpuSet::new() } else { processors },
            };
            let make = move || {
                if !partscan {
                    distrust_this_thread();
                }
                Box::new(QueueSource::new(options)) as Box<dyn Source>
            };
            serving.sources.push((engine.clone(), engine.add_source(make)?));
        }
        Ok(())
    }

    /// Why a queue lost a tag, if one did: the kernel refused its command, and never completes what
    /// it has in flight there unless another server takes the device over.
    pub fn failure(&self) -> Option<Error> {
        let serving = self.serving.lock().unwrap_or_else(PoisonError::into_inner);
        let RefusedCommand { queue, tag, errno } = *serving.as_ref()?.shared.refused.get()?;
        let what =
            format!("{}: the kernel refused the command of tag {tag} of queue {queue}", self.identity.path());
        Some(Error::system(what, io::Error::from_raw_os_error(errno)))
    }

    /// The reason of the queues, if they have one, for an error of the whole.
    fn explain(&self, error: Error) -> Error {
        self.failure().unwrap_or(error)
    }

    fn wait_for_node(&self) -> Result<(), Error> {
        let path = self.identity.path();
        let until = Instant::now() + NODE_TIMEOUT;
        while !std::path::Path::new(&path).exists() {
            if Instant::now() > until {
                let message = format!("{path} does not appear; mount a devtmpfs on /dev, or run udev");
                return Err(Error::new(ErrorKind::System, message));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Which device it is.
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// Whether it passes pages that no thread of this process reaches ([`CopyMode::None`]).
    pub fn passes_kernel_pages(&self) -> bool {
        self.copy() == CopyMode::None
    }

    /// How its data moves.
    fn copy(&self) -> CopyMode {
        CopyMode::of(Features::from_bits_retain(self.info.flags))
    }

    /// Whether another process may take it over.
    pub fn is_recoverable(&self) -> bool {
        self.info.flags & Features::USER_RECOVERY.bits() != 0
    }

    /// Facts for `show`.
    pub fn describe(&self) -> String {
        let DeviceInfo { nr_hw_queues, queue_depth, .. } = self.info;
        let queues = if nr_hw_queues == 1 { "queue" } else { "queues" };
        let threads = match self.threads_per_queue {
            1 => String::new(),
            threads => format!(", {threads} threads for each"),
        };
        let recovery = if self.is_recoverable() { "recoverable" } else { "not recoverable" };
        let because = self.copied_because.map(|why| format!(" ({why})")).unwrap_or_default();
        format!(
            "{nr_hw_queues} {queues} of {queue_depth}{threads}, data {}{because}, {recovery}",
            self.copy()
        )
    }

    /// Stops and removes the device: it is removed when this returns. Without `force` not if it is in use; with it,
    /// what is written so far is written back if that takes a moment only, and later I/O fails.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if it is in use; the device keeps running. The kernel's error.
    pub fn stop(&self, force: bool) -> Result<(), Error> {
        let mut paused = self.pause_watch();
        // Neither by this process: the kernel would wait for its I/O, and its exit for the kernel.
        if force {
            paused.0.write_back(self.identity.id);
        }
        let mut setup = self.setup();
        let mut give = |command| setup.give(command, self.identity.id);
        stop(&mut give, self.identity.id, self.kernel, force)?;
        self.delete(give)
    }

    /// While that is `on`, has the event of [`IdleWatch`] written when nobody uses the device any more.
    /// Users from before it is on count if they still are.
    ///
    /// # Errors
    /// If its users cannot be seen.
    pub fn watch_users(&self, on: bool) -> Result<(), Error> {
        let mut users = self.users();
        if !on {
            users.stop();
            return Ok(());
        }
        let path = self.identity.path();
        users.start(self.identity.id).map_err(|e| Error::system(format!("cannot see the users of {path}"), e))
    }

    /// Before this process exits and leaves the device to the next server: has new requests wait,
    /// where the kernel can (Linux 6.16), and those at `disk` complete. Those that do not, within 5 seconds,
    /// are reissued.
    pub fn quiesce(&self, disk: &Disk) {
        let quiesced = self.info.flags & Features::QUIESCE.bits() != 0
            && ControlDevice::open().and_then(|mut control| control.quiesce(self.identity.id)).is_ok();
        let until = Instant::now() + ANSWER_TIMEOUT;
        while quiesced && disk.stats().in_flight != [0; 2] && Instant::now() < until {
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Removes the device, which is stopped.
    fn delete(&self, give: impl FnMut(Command) -> io::Result<()>) -> Result<(), Error> {
        let serving = self.serving.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Serving { shared, sources }) = serving {
            // The kernel has completed all commands, or is about to.
            sources.iter().for_each(|(engine, source)| engine.stop_source(*source, false));
            drop(shared);
        }
        give_commands(give, &[DELETE])
    }

    /// # Errors
    /// [`ErrorKind::Unsupported`] if the size of the device cannot change while it is in use.
    pub fn check_resizable(&self) -> Result<(), Error> {
        if self.kernel.contains(Features::UPDATE_SIZE) {
            return Ok(());
        }
        let message = format!(
            "{}: this kernel cannot resize a ublk device that is in use (Linux 6.16 and newer can)",
            self.identity.path()
        );
        Err(Error::new(ErrorKind::Unsupported, message))
    }

    /// Claims the block device until what this returns is dropped, so that nobody mounts it meanwhile.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if it is in use, as far as this process sees.
    pub fn claim(&self) -> Result<Claimed<'_>, Error> {
        let paused = self.pause_watch();
        Ok(Claimed { _claim: usage::claim(&self.identity.path())?, _paused: paused })
    }

    /// Passes a new size in bytes to the kernel.
    ///
    /// # Errors
    /// As [`UblkDevice::check_resizable`], and the kernel's error.
    pub fn resize(&self, bytes: u64) -> Result<(), Error> {
        self.check_resizable()?;
        ControlDevice::open()?.update_size(self.identity.id, bytes >> 9)
    }

    /// Makes the kernel refuse writes, or take them again.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the device was made read-only and cannot change, and the kernel's
    /// error.
    pub fn set_read_only(&self, read_only: bool) -> Result<(), Error> {
        let path = self.identity.path();
        let set = || {
            let file = File::open(&path)?;
            let value = libc::c_int::from(read_only);
            let mut now = value;
            // SAFETY: BLKROSET reads one int, and BLKROGET writes one.
            let results = unsafe {
                [
                    libc::ioctl(file.as_raw_fd(), BLKROSET, &raw const value),
                    libc::ioctl(file.as_raw_fd(), BLKROGET, &raw mut now),
                ]
            };
            if results == [0, 0] { Ok(now != 0) } else { Err(io::Error::last_os_error()) }
        };
        match set() {
            Ok(now) if now == read_only => Ok(()),
            Ok(_) => {
                let message = format!("the kernel keeps {path} read-only, as it was made");
                Err(Error::new(ErrorKind::Unsupported, message))
            }
            Err(e) => Err(Error::system(format!("cannot change whether {path} is read-only"), e)),
        }
    }
}

/// The kernel scans for partitions, now or when it is asked to, on devices only that threads with
/// CAP_SYS_ADMIN serve (`GD_SUPPRESS_PART_SCAN`). Serving needs none of it.
fn distrust_this_thread() {
    if let Ok(mut sets) = capabilities(None)
        && sets.effective.contains(CapabilitySet::SYS_ADMIN)
    {
        sets.effective.remove(CapabilitySet::SYS_ADMIN);
        // Of the capabilities it has, any may be absent.
        let _ = set_capabilities(None, sets);
    }
}

/// `BLKROSET` of linux/fs.h.
const BLKROSET: libc::Ioctl = 0x125d;
/// `BLKROGET` of linux/fs.h.
const BLKROGET: libc::Ioctl = 0x125e;

/// Opens a character device as soon as it is there and udev has given it to the user.
fn open_node(path: &str) -> Result<File, Error> {
    let until = Instant::now() + NODE_TIMEOUT;
    loop {
        // Without O_NONBLOCK io_uring would have a worker of its own read and write it.
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        match OpenOptions::new().read(true).write(true).custom_flags(flags).open(path) {
            Ok(file) => return Ok(file),
            Err(e) if Instant::now() > until => {
                let cure = match e.kind() {
                    io::ErrorKind::NotFound => "mount a devtmpfs on /dev, or run udev",
                    io::ErrorKind::PermissionDenied => {
                        "become root, or install the udev rules of docs/ublk.md"
                    }
                    _ => "see docs/ublk.md",
                };
                return Err(Error::system(format!("cannot open {path}"), e).with_cure(cure));
            }
            Err(_) => std::thread::sleep(POLL_INTERVAL),
        }
    }
}
