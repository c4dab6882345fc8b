//! Creates, starts, takes over, stops and removes a device.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use blkq::sync::{Mutex, MutexGuard, lock};
use blkq::{Disk, EngineHandle, Error, ErrorKind, Source, SourceId};
use rustix::thread::{CapabilitySet, CpuSet, capabilities, set_capabilities};
use zerocopy::IntoBytes;

use super::abi::{ANY_ID, DeviceInfo, Features, QUEUE_DEPTH_MAX, command};
use super::control::{ControlDevice, character_path};
use super::copy::CopyMode;
use super::identity::{Identity, stop};
use super::idle::IdleWatch;
use super::parameters::{REQUEST_MAX_BYTES, parameters};
use super::setup::SetupProcess;
use super::source::{QueueOptions, QueueSource, Shared};
use super::usage;
use crate::retry::retry;

/// Time for a device node to appear, and for udev to set its permissions, which it does later.
const NODE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for the old server of a device to exit, after its I/O in flight.
const TAKE_OVER_TIMEOUT: Duration = Duration::from_secs(30);
/// Time that a server that hands its device over may take to complete its requests.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Time that the kernel waits for each queue to have an idle command when it quiesces a device.
const QUIESCE_WAIT: Duration = Duration::from_secs(1);
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The options of a new device.
pub struct UblkOptions {
    /// The identity that the state file recorded for the device.
    pub identity: Identity,
    /// Whether another process can take the device over. Ignored if the kernel or privileges forbid it.
    pub recoverable: bool,
    /// Whether the kernel scans for partitions. It does so only if root serves the device.
    pub partscan: bool,
    /// Which side copies the data; `None` for the best mode that is possible.
    pub copy: Option<CopyMode>,
    /// Number of engines that serve each queue, at least 1; more only with [`Features::PER_IO_DAEMON`].
    pub threads_per_queue: u16,
    /// The process that creates, starts, stops and removes the device.
    pub setup: SetupProcess,
    /// The process that detects users of the device, and writes back what they wrote.
    pub users: IdleWatch,
    /// A non-blocking eventfd that is written when [`UblkDevice::failure`] has an error.
    pub failure_event: Arc<OwnedFd>,
}

/// A device that this process serves.
pub struct UblkDevice {
    kernel_features: Features,
    info: DeviceInfo,
    threads_per_queue: u16,
    copied_because: Option<&'static str>,
    serving: Mutex<Option<Serving>>,
    setup: Mutex<SetupProcess>,
    /// The lock is held while this process claims the device, because a second claim would find it in use.
    users: Mutex<IdleWatch>,
}

/// Pauses the scans for users of the device until it is dropped: a scan claims the device for a moment.
#[derive(Debug)]
struct Paused<'a>(MutexGuard<'a, IdleWatch>);

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        self.0.resume();
    }
}

/// A block device that is not in use. No process can mount it until this is dropped.
#[derive(Debug)]
pub struct Claimed<'a> {
    _claim: File,
    _paused: Paused<'a>,
}

struct Serving {
    shared: Arc<Shared>,
    sources: Vec<(EngineHandle, SourceId)>,
}

fn has_kernel_buffers(engines: &[EngineHandle], requests: u16) -> bool {
    engines.iter().all(|engine| engine.kernel_buffers() >= requests)
}

/// Opens the control device, reads the features of the driver, and checks that each queue can have
/// `threads_per_queue` threads.
fn open_control(threads_per_queue: u16) -> Result<(ControlDevice, Features), Error> {
    let mut control = ControlDevice::open()?;
    let kernel = control.features()?;
    let (kind, message) = match threads_per_queue {
        0 => (ErrorKind::Invalid, "ublk: each queue needs at least 1 thread"),
        2.. if !kernel.contains(Features::PER_IO_DAEMON) => {
            (ErrorKind::Unsupported, "several threads for each ublk queue need Linux 6.16 or newer")
        }
        _ => return Ok((control, kernel)),
    };
    Err(Error::new(kind, message))
}

impl UblkDevice {
    /// Creates a device of `disk`. The first `threads_per_queue` of `engines` serve the first queue, and so
    /// on. Returns the error of the first step that fails, after the device was removed again.
    pub fn start(
        disk: &Arc<Disk>,
        engines: &[EngineHandle],
        options: UblkOptions,
    ) -> Result<UblkDevice, Error> {
        let UblkOptions { identity, recoverable, partscan, copy, threads_per_queue, .. } = options;
        let UblkOptions { mut setup, users, failure_event, .. } = options;
        let limits = disk.limits();
        let (mut control, kernel) = open_control(threads_per_queue)?;
        let depth = disk.settings().depth.min(QUEUE_DEPTH_MAX);
        let buffers = has_kernel_buffers(engines, depth.div_ceil(threads_per_queue));
        let (copy, because) = CopyMode::choose(copy, kernel, control.is_privileged(), buffers, &limits)?;
        let mut parameters = parameters(&limits, copy)?;
        let recovery = Features::USER_RECOVERY | Features::USER_RECOVERY_REISSUE | Features::QUIESCE;
        let recovery = if recoverable { recovery } else { Features::empty() };
        let requested = match control.is_privileged() {
            true => kernel & (recovery | Features::UPDATE_SIZE | Features::SAFE_STOP_DEV),
            false => Features::UNPRIVILEGED_DEV,
        };
        let mut info = DeviceInfo {
            nr_hw_queues: engines.len() as u16 / threads_per_queue,
            queue_depth: depth,
            max_io_buf_bytes: REQUEST_MAX_BYTES,
            dev_id: ANY_ID,
            flags: (requested | copy.features() | Features::CMD_IOCTL_ENCODE).bits(),
            ublksrv_flags: identity.cookie,
            ..DeviceInfo::default()
        };
        setup.add(&mut info)?;
        let device = UblkDevice {
            kernel_features: kernel,
            info,
            threads_per_queue,
            copied_because: because,
            serving: Mutex::new(None),
            setup: Mutex::new(setup),
            users: Mutex::new(users),
        };
        // A user other than root cannot use the device before udev has given the node to that user, so the
        // node is opened first.
        let start = || {
            let file = open_node(&character_path(info.dev_id))?;
            control.run(command::SET_PARAMS, info.dev_id, 0, parameters.as_mut_bytes())?;
            device.serve(&mut control, file, engines, partscan, failure_event)?;
            lock(&device.setup).start(&info).map_err(|e| device.explain(e))?;
            device.wait_for_node()
        };
        if let Err(error) = start() {
            // `error` is the cause. A failure of the clean-up would hide it.
            if control.issue(command::STOP_DEV, info.dev_id).is_ok() {
                device.close();
                let _ = control.issue(command::DEL_DEV, info.dev_id);
            }
            return Err(error);
        }
        Ok(device)
    }

    /// Takes over the device `identity`, whose server has exited or is exiting. The kernel reissues the
    /// server's I/O in flight to this process. After an error, the device still waits for a server.
    ///
    /// # Errors
    /// [`ErrorKind::Mismatch`] if the disk does not fit the device; an error if the server does not exit
    /// within 30 s; and the kernel's error.
    pub fn take_over(
        identity: Identity,
        disk: &Arc<Disk>,
        engines: &[EngineHandle],
        threads_per_queue: u16,
        (setup, users): (SetupProcess, IdleWatch),
        failure_event: Arc<OwnedFd>,
    ) -> Result<UblkDevice, Error> {
        let (mut control, kernel) = open_control(threads_per_queue)?;
        let path = identity.path();
        let mismatch = |why: &str| Err(Error::new(ErrorKind::Mismatch, format!("{path}: {why}")));
        let Some(info) = identity.info(&mut control)? else {
            return Err(Error::new(ErrorKind::NotFound, format!("{path}: the device no longer exists")));
        };
        if info.flags & Features::USER_RECOVERY.bits() == 0 {
            return mismatch("the device was created without recovery");
        }
        if usize::from(info.nr_hw_queues) * usize::from(threads_per_queue) > engines.len() {
            return mismatch("the device has more queues than there are engines");
        }
        let limits = disk.limits();
        let copy = CopyMode::of(Features::from_bits_retain(info.flags));
        if copy == CopyMode::None && !limits.kernel_pages {
            let why = "the device has copy mode none, which the driver of the image does not support";
            return mismatch(why);
        }
        let buffers = has_kernel_buffers(engines, info.queue_depth.div_ceil(threads_per_queue));
        if copy == CopyMode::None && !buffers {
            let message = format!(
                "{path}: the device has copy mode none, but the ring has no table of registered buffers; raise the \
                 limit of locked memory"
            );
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        let (was, is) = (control.parameters(identity.id)?.basic, parameters(&limits, copy)?.basic);
        if was.logical_bs_shift != is.logical_bs_shift {
            return mismatch("the logical block size of the image is not that of the device");
        }
        if was.dev_sectors > is.dev_sectors {
            return mismatch("the image is smaller than the device; enlarge it to the size of the device");
        }
        let is_busy = |error: &Error| error.kind() == ErrorKind::Busy;
        // The kernel answers EBUSY while the old server is still exiting.
        let begin = || control.run(command::START_USER_RECOVERY, identity.id, 0, &mut []);
        poll(TAKE_OVER_TIMEOUT, begin, is_busy)?;
        let device = UblkDevice {
            kernel_features: kernel,
            info,
            threads_per_queue,
            copied_because: None,
            serving: Mutex::new(None),
            setup: Mutex::new(setup),
            users: Mutex::new(users),
        };
        let file = open_node(&character_path(identity.id))?;
        device.serve(&mut control, file, engines, true, failure_event)?;
        control
            .run(command::END_USER_RECOVERY, identity.id, std::process::id().into(), &mut [])
            .map_err(|e| device.explain(e))?;
        Ok(device)
    }

    fn pause_watch(&self) -> Paused<'_> {
        let mut users = lock(&self.users);
        users.pause();
        Paused(users)
    }

    fn serve(
        &self,
        control: &mut ControlDevice,
        file: File,
        engines: &[EngineHandle],
        partscan: bool,
        failure_event: Arc<OwnedFd>,
    ) -> Result<(), Error> {
        let id = self.info.dev_id;
        let shared = Arc::new(Shared { file, refused: OnceLock::new(), failure_event });
        let mut serving = lock(&self.serving);
        let serving = serving.insert(Serving { shared: shared.clone(), sources: Vec::new() });
        let threads = self.threads_per_queue;
        let assignments =
            (0..self.info.nr_hw_queues).flat_map(|queue| (0..threads).map(move |thread| (queue, thread)));
        for ((queue, thread), engine) in assignments.zip(engines) {
            // The thread runs on any CPU if the kernel does not report the CPUs of the queue, and if there
            // are more threads than CPUs, because threads that share a CPU delay each other.
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
                    drop_sys_admin();
                }
                Box::new(QueueSource::new(options)) as Box<dyn Source>
            };
            serving.sources.push((engine.clone(), engine.add_source(make)?));
        }
        Ok(())
    }

    /// Why a queue has lost a tag, if one has: the kernel refused the command of the tag. The kernel never
    /// completes a request of that tag until another server takes the device over.
    pub fn failure(&self) -> Option<Error> {
        let serving = lock(&self.serving);
        let (queue, tag, errno) = *serving.as_ref()?.shared.refused.get()?;
        let what =
            format!("{}: the kernel refused the command of queue {queue}, tag {tag}", self.identity().path());
        Some(Error::system(what, io::Error::from_raw_os_error(errno)))
    }

    /// Replaces `error` by the failure of a queue, if there is one, because that is the cause.
    fn explain(&self, error: Error) -> Error {
        self.failure().unwrap_or(error)
    }

    fn wait_for_node(&self) -> Result<(), Error> {
        let path = self.identity().path();
        let appears = || std::path::Path::new(&path).exists().then_some(()).ok_or(());
        poll(NODE_TIMEOUT, appears, |()| true).map_err(|()| {
            let message = format!("{path} did not appear; mount a devtmpfs on /dev, or run udev");
            Error::new(ErrorKind::System, message)
        })
    }

    /// The number of the device and the cookie that the kernel stores with it.
    pub fn identity(&self) -> Identity {
        Identity { id: self.info.dev_id, cookie: self.info.ublksrv_flags }
    }

    /// Whether requests refer to pages that this process cannot read or write ([`CopyMode::None`]).
    pub fn passes_kernel_pages(&self) -> bool {
        self.copy() == CopyMode::None
    }

    fn copy(&self) -> CopyMode {
        CopyMode::of(Features::from_bits_retain(self.info.flags))
    }

    /// Whether another process can take the device over.
    pub fn is_recoverable(&self) -> bool {
        self.info.flags & Features::USER_RECOVERY.bits() != 0
    }

    /// Queues, depth, copy mode and recovery in a line, for users.
    pub fn describe(&self) -> String {
        let DeviceInfo { nr_hw_queues, queue_depth, .. } = self.info;
        let queues = if nr_hw_queues == 1 { "queue" } else { "queues" };
        let threads = match self.threads_per_queue {
            1 => String::new(),
            threads => format!(", {threads} threads for each"),
        };
        let recovery = if self.is_recoverable() { "recoverable" } else { "not recoverable" };
        let because = self.copied_because.map(|why| format!(" ({why})")).unwrap_or_default();
        let copy = self.copy();
        format!("{nr_hw_queues} {queues} of {queue_depth}{threads}, data {copy}{because}, {recovery}")
    }

    /// Stops and removes the device. With `force`, the kernel writes back cached data if that takes at most a
    /// few seconds, and fails later I/O.
    ///
    /// # Errors
    /// Without `force`, [`ErrorKind::Busy`] if the device is in use; it keeps running. Also the kernel's
    /// error.
    pub fn stop(&self, force: bool) -> Result<(), Error> {
        let mut paused = self.pause_watch();
        // Other processes write back and stop the device. A thread of this one would wait for I/O that the
        // process itself serves, and could not be killed, because the kernel aborts that I/O only when the
        // last thread has exited.
        if force {
            paused.0.write_back(self.info.dev_id);
        }
        let mut setup = lock(&self.setup);
        stop(&mut setup, self.info.dev_id, self.kernel_features, force)?;
        self.close();
        setup.issue(command::DEL_DEV, self.info.dev_id)
    }

    /// While `on`, the event of [`IdleWatch`] is written when the device has no users any longer. Users from
    /// before the call count. Fails if the process that scans for users fails, for example to read the node.
    pub fn watch_users(&self, on: bool) -> Result<(), Error> {
        let mut users = lock(&self.users);
        if !on {
            users.stop();
            return Ok(());
        }
        let path = self.identity().path();
        users
            .start(self.info.dev_id)
            .map_err(|e| Error::system(format!("cannot scan for users of {path}"), e))
    }

    /// Prepares for the exit of this process. New requests wait in the kernel if it can do that (Linux 6.16).
    /// Requests at `disk` that do not complete within 5 s are reissued to the next server.
    pub fn quiesce(&self, disk: &Disk) {
        let (id, wait_ms) = (self.info.dev_id, QUIESCE_WAIT.as_millis() as u64);
        let quiesce = |mut control: ControlDevice| control.run(command::QUIESCE_DEV, id, wait_ms, &mut []);
        if self.info.flags & Features::QUIESCE.bits() != 0 && ControlDevice::open().and_then(quiesce).is_ok()
        {
            let is_idle = || (disk.stats().in_flight == [0; 2]).then_some(()).ok_or(());
            let _ = poll(ANSWER_TIMEOUT, is_idle, |()| true);
        }
    }

    /// Stops serving the device, which must be stopped, so that it can be removed.
    fn close(&self) {
        let serving = lock(&self.serving).take();
        if let Some(Serving { shared, sources }) = serving {
            // The device is stopped, so the kernel has completed all commands, or is about to.
            sources.iter().for_each(|(engine, source)| engine.stop_source(*source, false));
            drop(shared);
        }
    }

    /// Fails with [`ErrorKind::Unsupported`] if the kernel cannot resize a device in use.
    pub fn check_resizable(&self) -> Result<(), Error> {
        if self.kernel_features.contains(Features::UPDATE_SIZE) {
            return Ok(());
        }
        let message =
            format!("{}: resizing a ublk device in use needs Linux 6.16 or newer", self.identity().path());
        Err(Error::new(ErrorKind::Unsupported, message))
    }

    /// Claims the block device until the value is dropped: no other process can mount it meanwhile. Fails
    /// with [`ErrorKind::Busy`] if the device is in use, as far as this process can see.
    pub fn claim(&self) -> Result<Claimed<'_>, Error> {
        let paused = self.pause_watch();
        Ok(Claimed { _claim: usage::claim(&self.identity().path())?, _paused: paused })
    }

    /// Sets the size in bytes. Fails as [`UblkDevice::check_resizable`] does, and with the kernel's error.
    pub fn resize(&self, bytes: u64) -> Result<(), Error> {
        self.check_resizable()?;
        ControlDevice::open()?.run(command::UPDATE_SIZE, self.info.dev_id, bytes >> 9, &mut [])
    }

    /// Makes the kernel reject or accept writes. Fails with [`ErrorKind::Unsupported`] if the device was
    /// created read-only, which the kernel does not change, and with the kernel's error.
    pub fn set_read_only(&self, read_only: bool) -> Result<(), Error> {
        let path = self.identity().path();
        let access = if read_only { "read-only" } else { "writable" };
        let failed = |e| Error::system(format!("cannot make {path} {access}"), e);
        let file = File::open(&path).map_err(failed)?;
        let mut value = libc::c_int::from(read_only);
        for code in [BLKROSET, BLKROGET] {
            // SAFETY: BLKROSET reads one int, and BLKROGET writes one.
            if unsafe { libc::ioctl(file.as_raw_fd(), code, &raw mut value) } != 0 {
                return Err(failed(io::Error::last_os_error()));
            }
        }
        if value != libc::c_int::from(read_only) {
            let message = format!("{path} was created read-only, and the kernel does not change that");
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        Ok(())
    }
}

/// Drops CAP_SYS_ADMIN from this thread, which does not need it to serve. If a thread that serves a device
/// lacks it, the kernel never scans the device for partitions (`GD_SUPPRESS_PART_SCAN`), not even on request.
fn drop_sys_admin() {
    if let Ok(mut sets) = capabilities(None)
        && sets.effective.contains(CapabilitySet::SYS_ADMIN)
    {
        sets.effective.remove(CapabilitySet::SYS_ADMIN);
        // A failure means only that the kernel scans for partitions.
        let _ = set_capabilities(None, sets);
    }
}

// From linux/fs.h.
const BLKROSET: libc::Ioctl = 0x125d;
const BLKROGET: libc::Ioctl = 0x125e;

fn open_node(path: &str) -> Result<File, Error> {
    // Without O_NONBLOCK, io_uring would read and write the device on a kernel worker thread.
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    let open = || OpenOptions::new().read(true).write(true).custom_flags(flags).open(path);
    poll(NODE_TIMEOUT, open, |_| true).map_err(|e| {
        let hint = match e.kind() {
            io::ErrorKind::NotFound => "mount a devtmpfs on /dev, or run udev",
            io::ErrorKind::PermissionDenied => "run this as root, or install the udev rules of docs/ublk.md",
            _ => "see docs/ublk.md",
        };
        Error::system(format!("cannot open {path}"), e).with_hint(hint)
    })
}

fn poll<T, E>(
    timeout: Duration,
    attempt: impl FnMut() -> Result<T, E>,
    is_temporary: impl Fn(&E) -> bool,
) -> Result<T, E> {
    retry(Instant::now() + timeout, POLL_INTERVAL, attempt, is_temporary)
}
