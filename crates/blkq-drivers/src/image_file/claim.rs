//! Detects uses of an image by the kernel: its loop driver, a mount, swap, or another claim of a block device. The
//! kernel does not respect the locks in `lock`.

use std::fs::{self, File, OpenOptions};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use blkq::text::unescape_octal;
use blkq::{Error, ErrorKind};

use super::file::ImageFile;

impl ImageFile {
    /// Rejects an image that is mounted, claimed or swap space, or of which a loop device of the kernel uses
    /// bytes of `range`. If both this device and the kernel's loop device are read-only, they may share the
    /// bytes. Fails with [`ErrorKind::Claimed`] with the name of the user.
    pub fn check_unclaimed(&self, range: &Range<u64>, read_only: bool) -> Result<(), Error> {
        let shown = self.path.display();
        let claimed = |by: String| Err(Error::new(ErrorKind::Claimed, format!("{shown} is in use: {by}")));
        if let Some(device) = loop_device(&self.file, range, read_only) {
            return claimed(format!("the kernel's loop device /dev/{device} uses it"));
        }
        if !self.block_device {
            // Files are mounted through a loop device, found above, except by erofs (Linux 6.12) and FUSE.
            if let Some(mount) = mounts().into_iter().find(|mount| mount.source == self.path) {
                return claimed(format!("it is mounted on {}", mount.point.display()));
            }
            let is_image = |path: &Path| fs::metadata(path).is_ok_and(|file| file_id(&file) == self.identity);
            return if is_swap(is_image) { claimed("it is swap space".to_owned()) } else { Ok(()) };
        }
        // O_EXCL fails if the kernel or another program has claimed the block device. The path under /proc reaches the
        // device that is open, whatever its own path names now.
        let same = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        match OpenOptions::new().read(true).custom_flags(libc::O_EXCL | libc::O_NONBLOCK).open(same) {
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {
                let user = self.file.metadata().ok().and_then(|metadata| user_of(metadata.rdev()));
                claimed(user.unwrap_or("the kernel or another program has claimed it".to_owned()))
            }
            _ => Ok(()),
        }
    }
}

/// The name, such as `loop0`, of a loop device of the kernel that uses bytes of `range` of the file.
fn loop_device(file: &File, range: &Range<u64>, read_only: bool) -> Option<String> {
    let identity = file_id(&file.metadata().ok()?);
    fs::read_dir("/sys/block").ok()?.flatten().find_map(|device| {
        let name = device.file_name().into_string().ok()?;
        let attribute = |name: &str| {
            let value = fs::read_to_string(device.path().join(name)).ok()?;
            Some(value.strip_suffix('\n').unwrap_or(&value).to_owned())
        };
        let number = |name: &str| attribute(name)?.parse::<u64>().ok();
        let path = attribute("loop/backing_file")?;
        let by_path = fs::metadata(path).is_ok_and(|metadata| file_id(&metadata) == identity);
        // The path fails if the loop device was set up in another mount namespace, or the file was renamed.
        let is_same = by_path || backing_file(&name) == Some(identity);
        let (start, limit) = (number("loop/offset").unwrap_or(0), number("loop/sizelimit").unwrap_or(0));
        let end = if limit == 0 { u64::MAX } else { start.saturating_add(limit) };
        let overlaps = start < range.end && range.start < end;
        let both_read = read_only && number("ro") == Some(1);
        (is_same && overlaps && !both_read).then_some(name)
    })
}

/// The identity of a file under any name: the numbers of its file system and its inode. A block device, which several
/// nodes can have, is identified by its own number, with 0 as the inode.
fn file_id(metadata: &fs::Metadata) -> (u64, u64) {
    if metadata.file_type().is_block_device() {
        (metadata.rdev(), 0)
    } else {
        (metadata.dev(), metadata.ino())
    }
}

/// The backing file of the kernel's loop device `name`, if this process may open the device.
fn backing_file(name: &str) -> Option<(u64, u64)> {
    // `struct loop_info64` and `LOOP_GET_STATUS64` of the kernel's uapi/linux/loop.h.
    const INFO_WORDS: usize = 232 / 8;
    const GET_STATUS: libc::Ioctl = 0x4c05;
    let device = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(format!("/dev/{name}"));
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
    Some(if block_device != 0 { (block_device, 0) } else { (device, inode) })
}

fn user_of(device: u64) -> Option<String> {
    let directory = format!("/sys/dev/block/{}:{}", libc::major(device), libc::minor(device));
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
    // Some file systems, such as btrfs, have a device number of their own, so the source is compared as well.
    let is_source = |source: &Path| {
        source.starts_with("/dev/") && fs::metadata(source).is_ok_and(|metadata| metadata.rdev() == device)
    };
    let number = format!("{}:{}", libc::major(device), libc::minor(device));
    if let Some(mount) = mounts().into_iter().find(|mount| mount.device == number || is_source(&mount.source))
    {
        return Some(format!("mounted on {}", mount.point.display()));
    }
    if is_swap(is_source) {
        return Some("swap space".to_owned());
    }
    let holder = fs::read_dir(format!("{directory}/holders")).ok()?.flatten().next()?;
    Some(format!("part of /dev/{}", holder.file_name().display()))
}

fn is_swap(is_it: impl Fn(&Path) -> bool) -> bool {
    let swaps = read_table("/proc/swaps");
    swaps.lines().filter_map(|line| line.split_whitespace().next()).any(|path| is_it(&unescape_octal(path)))
}

/// The kernel does not escape bytes that are not UTF-8. One such path must not hide the other lines of the table.
fn read_table(path: &str) -> String {
    String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned()
}

// proc_pid_mountinfo(5)
struct Mount {
    device: String,
    point: PathBuf,
    source: PathBuf,
}

fn mounts() -> Vec<Mount> {
    read_table("/proc/self/mountinfo").lines().filter_map(mount).collect()
}

fn mount(line: &str) -> Option<Mount> {
    let (fields, rest) = line.split_once(" - ")?;
    let mut fields = fields.split(' ').skip(2);
    let (device, point) = (fields.next()?.to_owned(), unescape_octal(fields.nth(1)?));
    Some(Mount { device, point, source: unescape_octal(rest.split(' ').nth(1)?) })
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_read_with_their_escapes() {
        let line =
            r"36 35 98:0 /mnt1 /mnt\0402 rw,noatime master:1 shared:2 - ext4 /dev/\043a\134b\134043 rw";
        let Mount { device, point, source } = mount(line).unwrap();
        assert_eq!((device.as_str(), point.as_path()), ("98:0", Path::new("/mnt 2")));
        assert_eq!(source, Path::new(r"/dev/#a\b\043"));
        assert!(mount("").is_none() && mount("1 2 3:4 / - x").is_none());
    }
}
