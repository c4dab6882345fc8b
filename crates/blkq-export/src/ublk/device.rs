//! The life of a device: made, started, taken over, stopped, removed.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use blkq::clock::monotonic_ns;
use blkq::{Disk, EngineHandle, Error, ErrorKind, Source};
use rustix::thread::CpuSet;

use super::abi::{ANY_ID, DeviceInfo, Features, QUEUE_DEPTH_MAX};
use super::control::{ControlDevice, block_path, character_path};
use super::parameters::{REQUEST_MAX_BYTES, parameters};
use super::source::{QueueOptions, QueueSource, Shared};
use super::usage;

/// How long a device node may take to appear and to be made accessible: devtmpfs is prompt,
/// udev is not.
const NODE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a device may take until a server that went away is really gone: its I/O in flight
/// ends first.
const TAKE_OVER_TIMEOUT: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Which device it is, for longer than its server lives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Identity {
    /// The number N of `/dev/ublkbN`.
    pub id: u32,
    /// Kept by the kernel with the device: another one that got the same number has another.
    pub cookie: u64,
}

/// A device, served by this process.
pub struct UblkDevice {
    identity: Identity,
    /// What the kernel has.
    kernel: Features,
    info: DeviceInfo,
    serving: Mutex<Option<Serving>>,
}

/// What of a device ends with its server.
struct Serving {
    shared: Arc<Shared>,
    sources: Vec<(EngineHandle, u16)>,
}

impl Identity {
    /// The block device.
    pub fn path(&self) -> String {
        block_path(self.id)
    }

    /// What the kernel knows of the device; `None` if it is gone.
    fn info(&self, control: &mut ControlDevice) -> Result<Option<DeviceInfo>, Error> {
        Ok(control.info(self.id)?.filter(|info| info.ublksrv_flags == self.cookie))
    }

    /// Whether the device, whose server is gone, waits for a new one. What is left of a device that
    /// does not is removed.
    ///
    /// # Errors
    /// If the kernel cannot be asked, or does not remove it.
    pub fn outlives_its_server(&self) -> Result<bool, Error> {
        let mut control = match ControlDevice::open() {
            Ok(control) => control,
            // The driver was unloaded, and that it is only without devices.
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(false),
            Err(e) => return Err(e),
        };
        match self.info(&mut control)? {
            None => Ok(false),
            Some(info) if info.flags & Features::USER_RECOVERY.bits() != 0 => Ok(true),
            // The kernel ends the block device, and leaves the character device.
            Some(_) => control.stop(self.id).and_then(|()| control.delete(self.id)).map(|()| false),
        }
    }

    /// Removes a device whose server is gone. Without `force` not if it is in use; with it, I/O
    /// that waits for a new server fails.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if it is in use, and whatever the kernel says.
    pub fn remove(&self, force: bool) -> Result<(), Error> {
        let mut control = ControlDevice::open()?;
        let kernel = control.features()?;
        if self.info(&mut control)?.is_none() {
            return Ok(());
        }
        stop(&mut control, self.id, kernel, force)?;
        control.delete(self.id)
    }
}

/// Makes the block device disappear. Without `force` not if it is in use.
fn stop(control: &mut ControlDevice, id: u32, kernel: Features, force: bool) -> Result<(), Error> {
    if force {
        return control.stop(id);
    }
    // Held until it is gone, so that nobody begins to use it meanwhile.
    let held = usage::claim(&block_path(id))?;
    if kernel.contains(Features::SAFE_STOP_DEV) {
        // The kernel looks itself, and no moment lies in between.
        drop(held);
        return control.try_stop(id).map_err(|e| match e.kind() {
            ErrorKind::Busy => usage::busy(&block_path(id), "somebody has it open"),
            _ => e,
        });
    }
    control.stop(id)
}

impl UblkDevice {
    /// Makes a device of `disk` and serves it, one queue on each of `engines`. One that is
    /// `recoverable` outlives this process where the kernel and the user's rights allow it; any
    /// other one goes with it.
    ///
    /// # Errors
    /// Whatever keeps it from being usable; nothing is left of it then.
    pub fn start(disk: &Arc<Disk>, engines: &[EngineHandle], recoverable: bool) -> Result<UblkDevice, Error> {
        let limits = disk.limits();
        let parameters = parameters(&limits)?;
        let mut control = ControlDevice::open()?;
        let kernel = control.features()?;
        let recovery = Features::USER_RECOVERY | Features::USER_RECOVERY_REISSUE;
        let recovery = if recoverable { recovery } else { Features::empty() };
        let wanted = match control.is_privileged() {
            true => kernel & (recovery | Features::UPDATE_SIZE | Features::SAFE_STOP_DEV),
            false => Features::UNPRIVILEGED_DEV,
        };
        let mut info = DeviceInfo {
            nr_hw_queues: engines.len() as u16,
            queue_depth: disk.settings().depth.min(QUEUE_DEPTH_MAX),
            max_io_buf_bytes: REQUEST_MAX_BYTES,
            dev_id: ANY_ID,
            flags: (wanted | Features::CMD_IOCTL_ENCODE).bits(),
            // Differs between any two devices that live between two boots.
            ublksrv_flags: monotonic_ns(),
            ..DeviceInfo::default()
        };
        control.add(&mut info)?;
        let device = UblkDevice::new(kernel, info);
        // Others than root may do nothing with the device before udev has given it to them.
        let started = open_node(&character_path(info.dev_id))
            .and_then(|file| control.set_parameters(info.dev_id, &parameters).map(|()| file))
            .and_then(|file| device.serve(&mut control, file, engines))
            .and_then(|()| control.start(info.dev_id).map_err(|e| device.explain(e)))
            .and_then(|()| device.wait_for_node());
        match started {
            Ok(()) => Ok(device),
            Err(error) => {
                // What is said is why it did not start.
                let _ = control.stop(info.dev_id).and_then(|()| device.delete(&mut control));
                Err(error)
            }
        }
    }

    /// Takes over the device `identity`, whose server is gone or going: what it had in flight is
    /// issued again, to this process.
    ///
    /// # Errors
    /// If the disk is not what the device was made of, the server does not go within 30 seconds,
    /// and whatever the kernel says. The device stays as it was.
    pub fn take_over(
        identity: Identity,
        disk: &Arc<Disk>,
        engines: &[EngineHandle],
    ) -> Result<UblkDevice, Error> {
        let mut control = ControlDevice::open()?;
        let kernel = control.features()?;
        let path = identity.path();
        let refuse = |kind, why: &str| Err(Error::new(kind, format!("{path}: {why}")));
        let Some(info) = identity.info(&mut control)? else {
            return refuse(ErrorKind::NotFound, "the device is gone; attach the image again");
        };
        if info.flags & Features::USER_RECOVERY.bits() == 0 {
            return refuse(ErrorKind::Unsupported, "the device was made without recovery; detach it");
        }
        if usize::from(info.nr_hw_queues) > engines.len() {
            return refuse(ErrorKind::Invalid, "the device has more queues than the disk");
        }
        let (was, is) = (control.parameters(identity.id)?.basic, parameters(&disk.limits())?.basic);
        if was.logical_bs_shift != is.logical_bs_shift {
            return refuse(ErrorKind::Invalid, "the image now has other blocks than the device; detach it");
        }
        if was.dev_sectors > is.dev_sectors {
            return refuse(
                ErrorKind::Invalid,
                "the image is now smaller than the device; make it as large as it was, or detach the device",
            );
        }
        let until = Instant::now() + TAKE_OVER_TIMEOUT;
        while let Err(error) = control.start_recovery(identity.id) {
            if error.kind() != ErrorKind::Busy || Instant::now() > until {
                return Err(error);
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        let device = UblkDevice::new(kernel, info);
        device.serve(&mut control, open_node(&character_path(identity.id))?, engines)?;
        control.end_recovery(identity.id).map_err(|e| device.explain(e))?;
        Ok(device)
    }

    fn new(kernel: Features, info: DeviceInfo) -> UblkDevice {
        let identity = Identity { id: info.dev_id, cookie: info.ublksrv_flags };
        UblkDevice { identity, kernel, info, serving: Mutex::new(None) }
    }

    /// Lets the engines fetch from the queues of the character device.
    fn serve(&self, control: &mut ControlDevice, file: File, engines: &[EngineHandle]) -> Result<(), Error> {
        let id = self.identity.id;
        let shared = Arc::new(Shared { file, refused: AtomicI32::new(0) });
        let mut serving = self.serving.lock().unwrap_or_else(PoisonError::into_inner);
        let serving = serving.insert(Serving { shared: shared.clone(), sources: Vec::new() });
        for (queue, engine) in (0..self.info.nr_hw_queues).zip(engines) {
            let options = QueueOptions {
                shared: shared.clone(),
                queue,
                depth: self.info.queue_depth,
                buffer_bytes: self.info.max_io_buf_bytes as usize,
                // An old kernel or a large machine: then it runs anywhere.
                processors: control.affinity(id, queue).unwrap_or_else(|_| CpuSet::new()),
            };
            let make = move || Box::new(QueueSource::new(options)) as Box<dyn Source>;
            serving.sources.push((engine.clone(), engine.add_source(make)?));
        }
        Ok(())
    }

    /// The reason of the queues, if they have one, for an error of the whole.
    fn explain(&self, error: Error) -> Error {
        let serving = self.serving.lock().unwrap_or_else(PoisonError::into_inner);
        match serving.as_ref().map_or(0, |serving| serving.shared.refused.load(Ordering::Relaxed)) {
            0 => error,
            errno => Error::system("ublk: fetching from a queue", io::Error::from_raw_os_error(-errno)),
        }
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

    /// Whether another process may take it over.
    pub fn is_recoverable(&self) -> bool {
        self.info.flags & Features::USER_RECOVERY.bits() != 0
    }

    /// Facts for `show`.
    pub fn describe(&self) -> String {
        let DeviceInfo { nr_hw_queues, queue_depth, .. } = self.info;
        let queues = if nr_hw_queues == 1 { "queue" } else { "queues" };
        let recovery = if self.is_recoverable() { "recoverable" } else { "not recoverable" };
        format!("{nr_hw_queues} {queues} of {queue_depth}, data copied, {recovery}")
    }

    /// Ends the device: it is gone when this returns. Without `force` not if it is in use; with it,
    /// what is written so far is written back if that takes a moment only, and later I/O fails.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if it is in use; the device goes on. Whatever the kernel says.
    pub fn stop(&self, force: bool) -> Result<(), Error> {
        let mut control = ControlDevice::open()?;
        if force && usage::claim(&self.identity.path()).is_err() {
            usage::write_back();
        }
        stop(&mut control, self.identity.id, self.kernel, force)?;
        self.delete(&mut control)
    }

    /// Removes the device, which is stopped.
    fn delete(&self, control: &mut ControlDevice) -> Result<(), Error> {
        let serving = self.serving.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Serving { shared, sources }) = serving {
            // The kernel has given back all commands, or is about to.
            sources.iter().for_each(|(engine, source)| engine.stop_source(*source, false));
            drop(shared);
        }
        control.delete(self.identity.id)
    }

    /// # Errors
    /// [`ErrorKind::Unsupported`] if the size of the device cannot change while it is in use.
    pub fn check_resizable(&self) -> Result<(), Error> {
        if self.kernel.contains(Features::UPDATE_SIZE) {
            return Ok(());
        }
        let message = format!(
            "{}: this kernel cannot resize a ublk device that is in use (Linux 6.16 and newer can); detach it and attach it again",
            self.identity.path()
        );
        Err(Error::new(ErrorKind::Unsupported, message))
    }

    /// Tells the kernel a new size in bytes.
    ///
    /// # Errors
    /// As [`UblkDevice::check_resizable`], and whatever the kernel says.
    pub fn resize(&self, bytes: u64) -> Result<(), Error> {
        self.check_resizable()?;
        ControlDevice::open()?.update_size(self.identity.id, bytes >> 9)
    }

    /// Makes the kernel refuse writes, or take them again.
    ///
    /// # Errors
    /// Whatever the kernel says.
    pub fn set_read_only(&self, read_only: bool) -> Result<(), Error> {
        let path = self.identity.path();
        let set = || {
            let file = File::open(&path)?;
            let value = libc::c_int::from(read_only);
            // SAFETY: BLKROSET reads one int.
            match unsafe { libc::ioctl(file.as_raw_fd(), BLKROSET, &raw const value) } {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        };
        set().map_err(|e| Error::system(format!("cannot change whether {path} is read-only"), e))
    }
}

/// `BLKROSET` of linux/fs.h.
const BLKROSET: libc::c_ulong = 0x125d;

/// Opens a character device as soon as it is there and udev has given it to the user.
fn open_node(path: &str) -> Result<File, Error> {
    let until = Instant::now() + NODE_TIMEOUT;
    loop {
        match OpenOptions::new().read(true).write(true).custom_flags(libc::O_CLOEXEC).open(path) {
            Ok(file) => return Ok(file),
            Err(e) if Instant::now() > until => {
                let cure = match e.kind() {
                    io::ErrorKind::NotFound => "mount a devtmpfs on /dev, or run udev",
                    io::ErrorKind::PermissionDenied => {
                        "become root, or install the udev rules of docs/ublk.md"
                    }
                    _ => "see docs/ublk.md",
                };
                return Err(Error::system(format!("cannot open {path} ({cure})"), e));
            }
            Err(_) => std::thread::sleep(POLL_INTERVAL),
        }
    }
}
