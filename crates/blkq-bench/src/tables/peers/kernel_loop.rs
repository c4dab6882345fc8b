//! The kernel's loop device on a file, as long as this process keeps the device open.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use crate::{Result, ensure};

// From include/uapi/linux/loop.h.
const LOOP_CTL_GET_FREE: libc::Ioctl = 0x4C82;
const LOOP_CONFIGURE: libc::Ioctl = 0x4C0A;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
const LO_FLAGS_DIRECT_IO: u32 = 16;

/// Size of struct loop_config, which begins with the file descriptor, and offset of lo_flags in it; both in words of 32
/// bits.
const CONFIG_WORDS: usize = 304 / 4;
const FLAGS_AT: usize = 60 / 4;

/// Maximum number of attempts: another process may attach the free device first.
const TRIES: usize = 16;

/// A loop device. Because of LO_FLAGS_AUTOCLEAR, the kernel detaches it on the last close, even if this process
/// is killed.
pub struct KernelLoop {
    pub path: PathBuf,
    _device: File,
}

impl KernelLoop {
    /// Attaches `file`. With `direct`, the device does direct I/O on the file. Fails if the user lacks the
    /// permission, the kernel has no loop devices, or direct I/O on this file is not possible.
    pub fn attach(file: &Path, direct: bool) -> Result<KernelLoop> {
        let both = |path: &Path| {
            let file = OpenOptions::new().read(true).write(true).open(path);
            file.map_err(|e| {
                format!("{}: {e} (loop devices require root and the module loop)", path.display())
            })
        };
        let control = both(Path::new("/dev/loop-control"))?;
        let backing = both(file)?;
        for attempt in 0.. {
            // SAFETY: the request takes no argument.
            let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
            ensure(number >= 0, || format!("no free loop device: {}", std::io::Error::last_os_error()))?;
            let path = PathBuf::from(format!("/dev/loop{number}"));
            let device = both(&path)?;
            let mut config = [0_u32; CONFIG_WORDS];
            config[0] = backing.as_raw_fd() as u32;
            config[FLAGS_AT] = LO_FLAGS_AUTOCLEAR | if direct { LO_FLAGS_DIRECT_IO } else { 0 };
            // SAFETY: the kernel reads the structure during the call.
            if unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &raw const config) } != 0 {
                let error = std::io::Error::last_os_error();
                if error.raw_os_error() == Some(libc::EBUSY) && attempt < TRIES {
                    continue;
                }
                return Err(format!("{}: {error}", path.display()).into());
            }
            let does = std::fs::read_to_string(format!("/sys/block/loop{number}/loop/dio"))?;
            ensure((does.trim() == "1") == direct, || {
                let (wanted, found) = if direct { ("on", "off") } else { ("off", "on") };
                let name = path.display();
                format!(
                    "{name}: direct I/O must be {wanted} for this measurement, but the kernel set it {found}"
                )
            })?;
            return Ok(KernelLoop { path, _device: device });
        }
        unreachable!("the loop above returns")
    }
}
