//! The control device, `/dev/ublk-control`. A small io_uring carries one command at a time, with a timeout.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

use blkq::{Error, ErrorKind};
use io_uring::squeue::{Entry128, EntryMarker};
use io_uring::{IoUring, cqueue, opcode, types};
use rustix::thread::{CapabilitySet, CpuSet, capabilities};
use zerocopy::{FromZeros, IntoBytes};

use super::abi::{ANY_ID, ControlCommand, DeviceInfo, Features, NO_QUEUE, Parameters, command};

/// Path of the control device of the ublk driver.
pub const CONTROL_PATH: &str = "/dev/ublk-control";
/// The kernel lists the character devices here.
const CLASS_PATH: &str = "/sys/class/ublk-char";

/// Timeout of commands that the kernel answers from memory.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout of creating and of starting a device, for which the kernel scans partitions. Some kernels never
/// complete such a command: Linux 6.18.4, for one, whose driver is unusable from then on.
pub(super) const START_TIMEOUT: Duration = Duration::from_secs(30);
/// Timeout of stopping a device, which waits for the I/O in flight.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// Time that removing a device waits for processes that have the character device open.
const DELETE_TIMEOUT: Duration = Duration::from_secs(2);
/// Size of a CPU mask: one bit for each CPU of a [`CpuSet`].
const MASK_BYTES: usize = CpuSet::MAX_CPU / 8;

/// An open control device. It runs one command at a time.
pub struct ControlDevice {
    ring: IoUring<Entry128, cqueue::Entry>,
    file: File,
    privileged: bool,
    /// The last command timed out, and the ring has not seen its completion yet.
    pending: bool,
}

/// The timeout of the command `code`, and what the command does, which completes the sentence "ublk cannot".
fn facts(code: u32) -> (Duration, &'static str) {
    match code {
        command::ADD_DEV => (START_TIMEOUT, "create a device"),
        command::START_DEV => (START_TIMEOUT, "start a device"),
        command::STOP_DEV | command::TRY_STOP_DEV => (STOP_TIMEOUT, "stop a device"),
        command::DEL_DEV => (DELETE_TIMEOUT, "remove a device"),
        command::START_USER_RECOVERY => (ANSWER_TIMEOUT, "take over a device"),
        command::END_USER_RECOVERY => (START_TIMEOUT, "take over a device"),
        command::QUIESCE_DEV => (ANSWER_TIMEOUT, "quiesce a device"),
        command::UPDATE_SIZE => (ANSWER_TIMEOUT, "change the size of a device"),
        command::SET_PARAMS => (ANSWER_TIMEOUT, "set the parameters of a device"),
        command::GET_PARAMS => (ANSWER_TIMEOUT, "read the parameters of a device"),
        command::GET_QUEUE_AFFINITY => (ANSWER_TIMEOUT, "read the CPUs of a queue"),
        command::GET_FEATURES => (ANSWER_TIMEOUT, "read the features of the driver"),
        command::GET_DEV_INFO | command::GET_DEV_INFO2 => (ANSWER_TIMEOUT, "read the state of a device"),
        _ => (ANSWER_TIMEOUT, "execute a command"),
    }
}

pub fn character_path(id: u32) -> String {
    format!("/dev/ublkc{id}")
}

/// Path of the block device of device `id`.
pub fn block_path(id: u32) -> String {
    format!("/dev/ublkb{id}")
}

/// Submits the operation in `ring`, if it has not been submitted, and returns the kernel's error if it fails.
///
/// # Errors
/// Returns [`io::ErrorKind::TimedOut`] if the operation does not complete in time, and the error of
/// io_uring_enter(2). The operation is then still in flight.
pub(super) fn complete_one<S: EntryMarker>(
    ring: &mut IoUring<S, cqueue::Entry>,
    timeout: Duration,
) -> io::Result<io::Result<()>> {
    let until = Instant::now() + timeout;
    loop {
        let left = types::Timespec::from(until.saturating_duration_since(Instant::now()));
        let waited = ring.submitter().submit_with_args(1, &types::SubmitArgs::new().timespec(&left));
        if let Some(cqe) = ring.completion().next() {
            let result = cqe.result();
            return Ok(if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(()) });
        }
        match waited {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.raw_os_error() == Some(libc::ETIME) => return Err(io::ErrorKind::TimedOut.into()),
            Err(e) => return Err(e),
            Ok(_) => {}
        }
    }
}

impl ControlDevice {
    /// Opens the control device, and sets up a ring for its commands.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if the kernel has no ublk, [`ErrorKind::Denied`] if the user may not use it,
    /// [`ErrorKind::Unsupported`] if io_uring cannot carry its commands.
    pub fn open() -> Result<ControlDevice, Error> {
        let file = OpenOptions::new().read(true).write(true).open(CONTROL_PATH).map_err(|e| {
            let hint = match e.kind() {
                io::ErrorKind::NotFound if has_module() => "modprobe ublk_drv, as root",
                io::ErrorKind::NotFound => "boot a kernel with ublk (CONFIG_BLK_DEV_UBLK)",
                io::ErrorKind::PermissionDenied => {
                    "run this as root, or ask the administrator to install the udev rules of docs/ublk.md"
                }
                _ => "see docs/ublk.md",
            };
            Error::system(format!("cannot open {CONTROL_PATH}"), e).with_hint(hint)
        })?;
        let ring = IoUring::<Entry128, cqueue::Entry>::builder()
            .build(2)
            .map_err(|e| Error::system("cannot set up an io_uring for the commands of ublk", e))?;
        let privileged =
            capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN));
        Ok(ControlDevice { ring, file, privileged, pending: false })
    }

    /// Whether this process has CAP_SYS_ADMIN: without it, the kernel allows only unprivileged devices.
    pub fn is_privileged(&self) -> bool {
        self.privileged
    }

    /// Executes a command. The kernel reads `buffer`, writes it, or both, as the command demands. Fails with the
    /// kernel's error, or with [`io::ErrorKind::TimedOut`].
    pub(super) fn call(&mut self, code: u32, id: u32, data: u64, buffer: &mut [u8]) -> io::Result<()> {
        if self.pending {
            // A new ring, so that the late completion is not taken for that of this command. The old ring is
            // leaked: closing it would keep a kernel worker busy until its command completes.
            let ring = IoUring::<Entry128, cqueue::Entry>::builder().build(2)?;
            std::mem::forget(std::mem::replace(&mut self.ring, ring));
            self.pending = false;
        }
        // A user without CAP_SYS_ADMIN names the device by its path, so that the kernel can check the
        // permissions of the node. The two other commands do not act on an existing device.
        let names_device = code == command::GET_DEV_INFO2
            || !self.privileged && !matches!(code, command::ADD_DEV | command::GET_FEATURES);
        let path = if names_device { format!("{}\0", character_path(id)) } else { String::new() };
        let mut memory = [path.as_bytes(), &*buffer].concat();
        let request = ControlCommand {
            dev_id: id,
            queue_id: NO_QUEUE,
            len: memory.len() as u16,
            addr: if memory.is_empty() { 0 } else { memory.as_mut_ptr().expose_provenance() as u64 },
            data,
            dev_path_len: path.len() as u16,
            pad: 0,
            reserved: 0,
        };
        let mut bytes = [0; 80];
        bytes[..size_of::<ControlCommand>()].copy_from_slice(request.as_bytes());
        let fd = types::Fd(self.file.as_raw_fd());
        let entry = opcode::UringCmd80::new(fd, code).cmd(bytes).build();
        // SAFETY: the file is open as long as the ring is. If the command does not complete in time, the
        // memory is leaked.
        unsafe { self.ring.submission().push(&entry) }.map_err(io::Error::other)?;
        match complete_one(&mut self.ring, facts(code).0) {
            Ok(done) => done.map(|()| buffer.copy_from_slice(&memory[path.len()..])),
            Err(error) => {
                // The kernel may still write to the memory.
                std::mem::forget(memory);
                self.pending = true;
                Err(error)
            }
        }
    }

    /// As [`ControlDevice::call`], with an error that says what the command does.
    pub(super) fn run(&mut self, code: u32, id: u32, data: u64, buffer: &mut [u8]) -> Result<(), Error> {
        self.call(code, id, data, buffer).map_err(|e| failed(code, e))
    }

    /// Waits again for a command without a buffer that did not complete in time. Fails with the kernel's
    /// error, or with [`io::ErrorKind::TimedOut`].
    pub(super) fn wait_again(&mut self) -> io::Result<()> {
        let done = complete_one(&mut self.ring, STOP_TIMEOUT)?;
        self.pending = false;
        done
    }

    /// Reads the features of the kernel's ublk driver.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] before Linux 6.5, which has no such command.
    pub fn features(&mut self) -> Result<Features, Error> {
        let mut features = 0u64;
        let read = self.call(command::GET_FEATURES, ANY_ID, 0, features.as_mut_bytes());
        read.map(|()| Features::from_bits_retain(features)).map_err(|e| match e.kind() {
            io::ErrorKind::TimedOut => failed(command::GET_FEATURES, e),
            _ => {
                let message = "ublk of this kernel is too old; boot Linux 6.5 or newer";
                Error::new(ErrorKind::Unsupported, message)
            }
        })
    }

    /// The numbers of all devices, including those of other users, or the error of reading /sys.
    pub fn devices(&self) -> Result<Vec<u32>, Error> {
        let list = match std::fs::read_dir(CLASS_PATH) {
            Ok(list) => list,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(Error::system(format!("cannot read {CLASS_PATH}"), e)),
        };
        let number = |name: std::ffi::OsString| name.to_str()?.strip_prefix("ublkc")?.parse().ok();
        Ok(list.filter_map(|entry| number(entry.ok()?.file_name())).collect())
    }

    /// Information about device `id`, or the kernel's error; `None` if there is no such device.
    pub fn info(&mut self, id: u32) -> Result<Option<DeviceInfo>, Error> {
        let mut info = DeviceInfo::new_zeroed();
        let mut ask = |code| self.call(code, id, 0, info.as_mut_bytes());
        // For a device that another user created, the kernel demands the path even from root.
        let answer = match ask(command::GET_DEV_INFO) {
            Err(e) if e.raw_os_error() != Some(libc::ENODEV) => ask(command::GET_DEV_INFO2),
            answer => answer,
        };
        match answer {
            Ok(()) => Ok(Some(info)),
            Err(e) if e.raw_os_error() == Some(libc::ENODEV) => Ok(None),
            Err(e) => Err(failed(command::GET_DEV_INFO, e)),
        }
    }

    /// The CPUs whose I/O reaches the server through queue `queue` of device `id`. Fails with the kernel's
    /// error, for example `EINVAL` if its CPU mask is larger than a [`CpuSet`].
    pub fn affinity(&mut self, id: u32, queue: u16) -> Result<CpuSet, Error> {
        let mut mask = [0u8; MASK_BYTES];
        self.run(command::GET_QUEUE_AFFINITY, id, queue.into(), &mut mask)?;
        let mut set = CpuSet::new();
        let has = |cpu: &usize| mask[cpu / 8] & 1 << (cpu % 8) != 0;
        (0..CpuSet::MAX_CPU).filter(has).for_each(|cpu| set.set(cpu));
        Ok(set)
    }

    /// Reads the parameters of device `id`, or returns the kernel's error.
    pub fn parameters(&mut self, id: u32) -> Result<Parameters, Error> {
        let mut parameters = Parameters { len: size_of::<Parameters>() as u32, ..Parameters::default() };
        self.run(command::GET_PARAMS, id, 0, parameters.as_mut_bytes())?;
        Ok(parameters)
    }

    /// Issues a command that stops or removes device `id`, or returns the kernel's error. A removal succeeds if
    /// there is no such device. While the character device is open the kernel only marks it for removal; this
    /// then returns after [`DELETE_TIMEOUT`], and the last close removes the device.
    pub(super) fn issue(&mut self, code: u32, id: u32) -> io::Result<()> {
        if ![command::STOP_DEV, command::TRY_STOP_DEV, command::DEL_DEV].contains(&code) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        match self.call(code, id, 0, &mut []) {
            Err(e) if code == command::DEL_DEV && e.raw_os_error() == Some(libc::ENODEV) => Ok(()),
            Err(e) if code == command::DEL_DEV && e.kind() == io::ErrorKind::TimedOut => Ok(()),
            done => done,
        }
    }
}

fn has_module() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let module = format!("/lib/modules/{}/kernel/drivers/block/ublk_drv.ko", release.trim());
    ["", ".xz", ".zst", ".gz"].iter().any(|end| Path::new(&format!("{module}{end}")).exists())
}

pub(super) fn not_added(error: io::Error) -> Error {
    match error.raw_os_error() {
        Some(libc::EACCES) => Error::system(
            "cannot create a ublk device: the limit ublks_max of the module ublk_drv is reached",
            error,
        )
        .with_hint("raise it in /sys/module/ublk_drv/parameters/ublks_max, or export over NBD"),
        Some(libc::EPERM) => {
            Error::system("cannot create a ublk device", error).with_hint("run this as root")
        }
        _ => failed(command::ADD_DEV, error),
    }
}

/// The error of the command `code`.
pub(super) fn failed(code: u32, error: io::Error) -> Error {
    let what = facts(code).1;
    let message = match (error.kind(), code) {
        (io::ErrorKind::TimedOut, command::STOP_DEV | command::TRY_STOP_DEV) => {
            "ublk: the device does not stop, because I/O in flight does not complete; try again when the storage of \
             the image responds"
                .to_owned()
        }
        (io::ErrorKind::TimedOut, _) => {
            format!("ublk cannot {what}: the kernel does not answer; see its log (dmesg)")
        }
        _ => return Error::system(format!("ublk cannot {what}"), error),
    };
    Error::new(ErrorKind::System, message)
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    /// A control device with a command that completes when `event` is written.
    fn busy(event: &impl AsRawFd) -> ControlDevice {
        let mut ring = IoUring::<Entry128, cqueue::Entry>::builder().build(2).unwrap();
        let poll = opcode::PollAdd::new(types::Fd(event.as_raw_fd()), libc::POLLIN as u32).build();
        // SAFETY: the descriptor stays open as long as the ring, or both are leaked.
        unsafe { ring.submission().push(&poll.into()) }.unwrap();
        let file = File::open("/dev/zero").unwrap();
        ControlDevice { ring, file, privileged: true, pending: true }
    }

    // Contract: detach
    #[test]
    fn a_late_command_is_waited_for_and_gets_its_own_answer() {
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let timeout = Duration::from_millis(20);
        let mut control = busy(&event);
        assert_eq!(complete_one(&mut control.ring, timeout).unwrap_err().kind(), io::ErrorKind::TimedOut);
        rustix::io::write(&event, &1u64.to_ne_bytes()).unwrap();
        control.wait_again().unwrap();
        assert!(!control.pending);

        let mut control = busy(&event);
        let error = control.call(command::STOP_DEV, 0, 0, &mut []).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP), "/dev/zero has no commands");
    }
}
