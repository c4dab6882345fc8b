//! How a raw image was when its bitmaps were kept: if it is otherwise when it is opened, another program wrote to it.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

/// Longest wait for another time of the image.
const OUTWAIT_MAX: Duration = Duration::from_millis(2500);

/// The state of an image when its bitmaps were kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Stamp {
    /// Of the device, in bytes.
    pub size: u64,
    /// When it was last written to: seconds and nanoseconds.
    pub modified: (i64, i64),
    /// Another image may have the same time: a copy, or an older one put back.
    pub inode: u64,
}

impl Stamp {
    /// That of `image` now, with a device of `size` bytes.
    ///
    /// # Errors
    /// That of the file.
    pub fn of(image: &File, size: u64) -> io::Result<Stamp> {
        let metadata = image.metadata()?;
        Ok(Stamp { size, modified: (metadata.mtime(), metadata.mtime_nsec()), inode: metadata.ino() })
    }

    /// Waits until a write gives the image another time than this one: file systems count it in ticks of the kernel
    /// or in seconds, FAT in two.
    pub fn outwait(&self) {
        let tick = Duration::from_secs(if self.modified.1 == 0 { 2 } else { 0 });
        let modified = Duration::new(self.modified.0.max(0) as u64, self.modified.1 as u32) + tick;
        let now = || {
            let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
            Duration::new(now.tv_sec.max(0) as u64, now.tv_nsec as u32)
        };
        // A time far ahead was set by hand; no write gives it.
        let until = now() + OUTWAIT_MAX;
        while (now() <= modified) && modified < until && now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[cfg(test)]
#[cfg(not(model_check))]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_write_after_the_wait_gives_another_stamp() {
        let path = std::env::temp_dir().join(format!("blkq-stamp-{}", std::process::id()));
        let image = File::create(&path).unwrap();
        for byte in 0..50 {
            image.write_at(&[byte], 0).unwrap();
            let stamp = Stamp::of(&image, 1).unwrap();
            stamp.outwait();
            image.write_at(&[byte], 0).unwrap();
            assert_ne!(Stamp::of(&image, 1).unwrap(), stamp);
        }
        std::fs::remove_file(path).unwrap();
    }
}
