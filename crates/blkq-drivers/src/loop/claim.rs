//! Whether the kernel itself uses an image: its loop driver, a mount, or whatever else has claimed a
//! block device. Neither knows of the locks in `lock`.

use std::fs::{self, File, OpenOptions};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use blkq::{Error, ErrorKind};

use super::backing::Backing;

/// Where sysfs has the device with that number.
fn sysfs(device: u64) -> String {
    format!("/sys/dev/block/{}:{}", libc::major(device), libc::minor(device))
}

/// Refuses an image of which the kernel's loop driver has bytes of `range`, or that is mounted or
/// claimed. A reader may do so beside a loop device that only reads.
///
/// # Errors
/// [`ErrorKind::Claimed`]: by what.
pub(crate) fn check(backing: &Backing, range: &Range<u64>, read_only: bool) -> Result<(), Error> {
    let shown = backing.path.display();
    let claimed = |by: String| Err(Error::new(ErrorKind::Claimed, format!("{shown} is in use: {by}")));
    if let Some(device) = loop_device(&backing.file, range, read_only) {
        return claimed(format!("the kernel's loop device /dev/{device} uses it"));
    }
    if !backing.block_device {
        // A file is mounted through a loop device, but for erofs and what FUSE mounts.
        if let Some(mount) = mounts().find(|mount| Path::new(&mount.source) == backing.path) {
            return claimed(format!("it is mounted on {}", mount.point));
        }
        let (device, inode) = backing.identity;
        let is_image = |source: &str| {
            fs::metadata(source).is_ok_and(|file| FileId::of(&file) == FileId::File { device, inode })
        };
        return if is_swap(is_image) { claimed("it is swap space".to_owned()) } else { Ok(()) };
    }
    // The kernel's own answer, for the device that is open, whatever is at its path now.
    let same = format!("/proc/self/fd/{}", backing.file.as_raw_fd());
    let exclusive = OpenOptions::new().read(true).custom_flags(libc::O_EXCL | libc::O_NONBLOCK).open(same);
    match exclusive {
        Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {
            let user = backing.file.metadata().ok().and_then(|metadata| user_of(metadata.rdev()));
            claimed(user.unwrap_or("the kernel or another program has claimed it".to_owned()))
        }
        _ => Ok(()),
    }
}

/// The kernel's loop device that has bytes of `range` of the file, such as `loop0`.
fn loop_device(file: &File, range: &Range<u64>, read_only: bool) -> Option<String> {
    let identity = FileId::of(&file.metadata().ok()?);
    let devices = fs::read_dir("/sys/block").ok()?;
    devices.flatten().find_map(|device| {
        let name = device.file_name().into_string().ok()?;
        let attribute = |name: &str| {
            let value = fs::read_to_string(device.path().join(name)).ok()?;
            Some(value.strip_suffix('\n').unwrap_or(&value).to_owned())
        };
        let number = |name: &str| attribute(name)?.parse::<u64>().ok();
        let path = attribute("loop/backing_file")?;
        let by_path = fs::metadata(path).is_ok_and(|metadata| FileId::of(&metadata) == identity);
        // It may have been set up in another mount namespace, or the path be removed.
        let is_same = by_path || FileId::behind_loop(&name) == Some(identity);
        let (start, limit) = (number("loop/offset").unwrap_or(0), number("loop/sizelimit").unwrap_or(0));
        let end = if limit == 0 { u64::MAX } else { start.saturating_add(limit) };
        let overlaps = start < range.end && range.start < end;
        let both_read = read_only && number("ro") == Some(1);
        (is_same && overlaps && !both_read).then_some(name)
    })
}

/// A file, whatever it is called; of a block device, the device.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FileId {
    File { device: u64, inode: u64 },
    BlockDevice(u64),
}

impl FileId {
    fn of(metadata: &fs::Metadata) -> FileId {
        match metadata.file_type().is_block_device() {
            true => FileId::BlockDevice(metadata.rdev()),
            false => FileId::File { device: metadata.dev(), inode: metadata.ino() },
        }
    }

    /// The file behind the kernel's loop device `name`, where this process may ask.
    fn behind_loop(name: &str) -> Option<FileId> {
        /// `struct loop_info64` and `LOOP_GET_STATUS64` of the kernel's uapi/linux/loop.h.
        const INFO_WORDS: usize = 232 / 8;
        const GET_STATUS: libc::Ioctl = 0x4c05;
        let device =
            OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(format!("/dev/{name}"));
        let device = device.ok()?;
        if !device.metadata().ok()?.file_type().is_block_device() {
            return None;
        }
        let mut info = [0u64; INFO_WORDS];
        // SAFETY: the descriptor is open, and the kernel writes no more than the structure, which
        // lives through the call.
        if unsafe { libc::ioctl(device.as_raw_fd(), GET_STATUS, info.as_mut_ptr()) } != 0 {
            return None;
        }
        let [device, inode, block_device, ..] = info;
        Some(if block_device != 0 {
            FileId::BlockDevice(block_device)
        } else {
            FileId::File { device, inode }
        })
    }
}

/// The claimant of the block device, or of a partition of it, in words.
fn user_of(device: u64) -> Option<String> {
    let directory = sysfs(device);
    if let Some(user) = user_of_one(device, &directory) {
        return Some(format!("it is {user}"));
    }
    fs::read_dir(&directory).ok()?.flatten().find_map(|entry| {
        let partition = entry.path();
        fs::metadata(partition.join("partition")).ok()?;
        let number = fs::read_to_string(partition.join("dev")).ok()?;
        let (major, minor) = number.trim().split_once(':')?;
        let number = libc::makedev(major.parse().ok()?, minor.parse().ok()?);
        let user = user_of_one(number, partition.to_str()?)?;
        Some(format!("its partition {} is {user}", entry.file_name().display()))
    })
}

fn user_of_one(device: u64, directory: &str) -> Option<String> {
    // Not all file systems have the number of their device.
    let is_source = |source: &str| {
        source.starts_with("/dev/") && fs::metadata(source).is_ok_and(|metadata| metadata.rdev() == device)
    };
    let number = format!("{}:{}", libc::major(device), libc::minor(device));
    if let Some(mount) = mounts().find(|mount| mount.device == number || is_source(&mount.source)) {
        return Some(format!("mounted on {}", mount.point));
    }
    if is_swap(is_source) {
        return Some("swap space".to_owned());
    }
    let holder = fs::read_dir(format!("{directory}/holders")).ok()?.flatten().next()?;
    Some(format!("part of /dev/{}", holder.file_name().display()))
}

/// Whether the kernel swaps to a file or block device that `is_it`.
fn is_swap(is_it: impl Fn(&str) -> bool) -> bool {
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    swaps.lines().filter_map(|line| line.split_whitespace().next()).any(|path| is_it(&unescaped(path)))
}

/// A line of proc_pid_mountinfo(5).
struct Mount {
    device: String,
    point: String,
    source: String,
}

fn mounts() -> impl Iterator<Item = Mount> {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mounts: Vec<Mount> = table.lines().filter_map(mount).collect();
    mounts.into_iter()
}

fn mount(line: &str) -> Option<Mount> {
    let (fields, rest) = line.split_once(" - ")?;
    let mut fields = fields.split(' ').skip(2);
    let (device, point) = (fields.next()?.to_owned(), unescaped(fields.nth(1)?));
    Some(Mount { device, point, source: unescaped(rest.split(' ').nth(1)?) })
}

/// Without the octal escapes of blanks and backslashes.
fn unescaped(text: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .into_iter()
        .fold(text.to_owned(), |text, (escape, character)| text.replace(escape, character))
}

#[cfg(test)]
#[cfg(not(model_check))]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_read_with_their_escapes() {
        let line = r"36 35 98:0 /mnt1 /mnt\0402 rw,noatime master:1 shared:2 - ext4 /dev/a\134b rw";
        let Mount { device, point, source } = mount(line).unwrap();
        assert_eq!([device, point, source], ["98:0", "/mnt 2", r"/dev/a\b"]);
        assert!(mount("").is_none() && mount("1 2 3:4 / - x").is_none());
    }
}
