//! The attachments that serve a device: those that are asked for, or the best that there is.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Stdio};

use blkq::ErrorKind;
use blkq_export::ublk::{CONTROL_PATH, ControlDevice, CopyMode, Features, Identity};
use rustix::process::geteuid;

use crate::failure::{Failure, Outcome};
use crate::options::{AttachOptions, Export};

/// Which attachments serve a device.
pub(super) struct Exports {
    pub(super) nbd: bool,
    pub(super) ublk: bool,
    /// Why there is no ublk, where it would have been the first choice.
    pub(super) no_ublk: Option<Failure>,
}

/// Those that are asked for. If none is: NBD if there is an address for it, else ublk where the
/// kernel has it and the user may use it, else NBD.
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

/// Refuses if this process may not make ublk devices.
fn check_ublk() -> Outcome {
    load_driver();
    on_own_thread(|| {
        let unusable = |e: blkq::Error| Failure::new(format!("{e}, or use --export nbd"));
        let mut control = ControlDevice::open().map_err(unusable)?;
        match control.features()?.contains(Features::UNPRIVILEGED_DEV) || control.is_privileged() {
            true => Ok(()),
            false => Err(Failure::new("this kernel makes ublk devices for root only; use --export nbd")),
        }
    })
}

/// Runs `ask` on a thread that exits then. The kernel's workers for its ring exit with it: none shall be
/// left that is not fit to serve a block device.
fn on_own_thread<T: Send + 'static>(ask: fn() -> Outcome<T>) -> Outcome<T> {
    std::thread::spawn(ask).join().unwrap_or_else(|_| Err(Failure::new("asking for ublk's features failed")))
}

/// Reduces the threads for each queue of a block device to as many as the kernel allows. Returns a
/// warning if that is fewer.
///
/// # Errors
/// If the kernel cannot be asked.
pub(super) fn limit_threads(options: &mut AttachOptions) -> Outcome<Option<String>> {
    let asked = options.threads_per_queue;
    let shared = || Ok(ControlDevice::open()?.features()?.contains(Features::PER_IO_DAEMON));
    if asked == 1 || on_own_thread(shared)? {
        return Ok(None);
    }
    options.threads_per_queue = 1;
    Ok(Some(format!(
        "each queue is served by one thread, not {asked}: this kernel's ublk allows no more (Linux 6.16 and newer do)"
    )))
}

/// Loads the kernel's driver where it is a module that is not loaded. A failure is reported
/// by the command that then finds no control device.
fn load_driver() {
    if !Path::new(CONTROL_PATH).exists() && geteuid().is_root() {
        let program = std::fs::read_to_string("/proc/sys/kernel/modprobe").unwrap_or_default();
        let mut modprobe = Command::new(program.trim());
        modprobe.args(["-q", "ublk_drv"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let _ = modprobe.status();
    }
}

/// Why there is no block device, with the cure. The requested copy mode is `copy`.
pub(super) fn no_block_device(error: blkq::Error, copy: Option<CopyMode>) -> Failure {
    let cure = match (error.kind(), copy) {
        (ErrorKind::Unsupported, Some(CopyMode::User | CopyMode::None)) => {
            "omit --copy, or use --copy kernel"
        }
        (ErrorKind::Invalid, _) => "use --export nbd",
        _ => return error.into(),
    };
    Failure::new(format!("{error}; {cure}"))
}

/// The size in bytes of a block device that is to be taken over.
///
/// # Errors
/// If it no longer exists, and the kernel's error.
pub(super) fn size_of(identity: Identity) -> Outcome<u64> {
    identity.size_bytes()?.ok_or_else(|| {
        Failure::new(format!("{}: the device no longer exists; attach the image again", identity.path()))
    })
}

/// Why a block device was not taken over, with what is left to do about it.
pub(super) fn not_taken_over(error: blkq::Error) -> Failure {
    match error.kind() {
        ErrorKind::Mismatch => Failure::new(format!("{error} (blkq detach removes the device)")),
        _ => error.into(),
    }
}
