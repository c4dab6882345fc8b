use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Stdio};

use blkq::ErrorKind;
use blkq_export::ublk::{CONTROL_PATH, ControlDevice, CopyMode, Features, Identity};
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::options::{AttachOptions, Export};
use rustix::process::geteuid;

pub(super) struct Exports {
    pub(super) nbd: bool,
    pub(super) ublk: bool,
    /// Why ublk is not used, if it would have been the default.
    pub(super) no_ublk: Option<Failure>,
}

/// The default is NBD if there is an address for it, else ublk if this process may use it, else NBD.
pub(super) fn choose_exports(options: &AttachOptions, inherited: &[OwnedFd]) -> Outcome<Exports> {
    let asked = |export| options.exports.contains(&export);
    if !options.exports.is_empty() {
        if asked(Export::Ublk) {
            check_ublk()?;
        }
        return Ok(Exports { nbd: asked(Export::Nbd), ublk: asked(Export::Ublk), no_ublk: None });
    }
    let addressed = !options.listen.is_empty() || !inherited.is_empty();
    let no_ublk = if addressed { None } else { check_ublk().err() };
    let ublk = !addressed && no_ublk.is_none();
    options.check_exports(!ublk, ublk)?;
    Ok(Exports { nbd: !ublk, ublk, no_ublk })
}

fn check_ublk() -> Outcome {
    load_driver();
    on_own_thread(|| {
        let unusable = |e: blkq::Error| Failure::new(format!("{e}, or use --export nbd"));
        let mut control = ControlDevice::open().map_err(unusable)?;
        let is_usable = control.features()?.contains(Features::UNPRIVILEGED_DEV) || control.is_privileged();
        let why = "on this kernel only root can create ublk devices; run as root, or use --export nbd";
        if is_usable { Ok(()) } else { Err(Failure::new(why)) }
    })
}

/// The kernel's io_uring workers of the short-lived thread exit with it. They must not survive, because they
/// were created before the process dropped its privileges and changed its mounts.
fn on_own_thread<T: Send + 'static>(ask: fn() -> Outcome<T>) -> Outcome<T> {
    std::thread::spawn(ask).join().unwrap_or_else(|_| Err(Failure::new("cannot query the features of ublk")))
}

/// Reduces the number of threads per queue to what the kernel supports. Returns a warning if it did.
pub(super) fn limit_threads(options: &mut AttachOptions) -> Outcome<Option<String>> {
    let asked = options.threads_per_queue;
    let shared = || Ok(ControlDevice::open()?.features()?.contains(Features::PER_IO_DAEMON));
    if asked == 1 || on_own_thread(shared)? {
        return Ok(None);
    }
    options.threads_per_queue = 1;
    Ok(Some(format!("--threads-per-queue {asked} needs Linux 6.16; each queue gets one thread")))
}

/// Loads the ublk driver if it is a module. A failure is ignored: the caller reports the missing control
/// device.
fn load_driver() {
    if !Path::new(CONTROL_PATH).exists() && geteuid().is_root() {
        let program = std::fs::read_to_string("/proc/sys/kernel/modprobe").unwrap_or_default();
        let mut modprobe = Command::new(program.trim());
        modprobe.args(["-q", "ublk_drv"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let _ = modprobe.status();
    }
}

/// `copy` is the requested copy mode.
pub(super) fn no_block_device(error: blkq::Error, copy: Option<CopyMode>) -> Failure {
    let hint = match (error.kind(), copy) {
        (ErrorKind::Unsupported, Some(CopyMode::User | CopyMode::None)) => {
            "omit --copy, or use --copy kernel"
        }
        (ErrorKind::Invalid, _) => "use --export nbd",
        _ => return error.into(),
    };
    Failure::new(format!("{error}; {hint}"))
}

/// Fails if the block device no longer exists, or the kernel cannot be asked.
pub fn size_of(identity: Identity) -> Outcome<u64> {
    identity.size_bytes()?.ok_or_else(|| {
        Failure::new(format!("{}: the device no longer exists; attach the image again", identity.path()))
    })
}

pub(super) fn not_taken_over(error: blkq::Error) -> Failure {
    match error.kind() {
        ErrorKind::Mismatch => Failure::new(format!("{error} (`blkq detach` removes the device)")),
        _ => error.into(),
    }
}
