//! The fingerprint of a raw image, saved with its dirty bitmaps. If the image has another fingerprint when it is
//! opened, another program has written to it, and the bitmaps are inconsistent.

use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use blkq::Error;

use crate::image_file::ImageFile;

/// Limit of [`ImageFingerprint::wait_until_older`]: a little more than the coarsest time stamp, 2 s on FAT.
const WAIT_MAX: Duration = Duration::from_millis(2500);

/// Facts that change whenever a program writes to the image or replaces it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ImageFingerprint {
    pub size: u64,
    /// The modification time of the file, in seconds and nanoseconds.
    pub modified: (i64, i64),
    /// Distinguishes a copy or a restored backup with the same modification time.
    pub inode: u64,
}

impl ImageFingerprint {
    pub fn of(image: &ImageFile, size: u64) -> Result<ImageFingerprint, Error> {
        let metadata = image.metadata().map_err(|e| image.failed("read", e))?;
        Ok(ImageFingerprint {
            size,
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            inode: metadata.ino(),
        })
    }

    /// Waits until a new write would change the modification time. File systems record it in ticks of the kernel or
    /// in seconds, FAT in units of two seconds. A modification time without nanoseconds is taken as one of these.
    pub fn wait_until_older(&self) {
        let tick = Duration::from_secs(if self.modified.1 == 0 { 2 } else { 0 });
        let modified = Duration::new(self.modified.0.max(0) as u64, self.modified.1 as u32) + tick;
        let now = || {
            let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
            Duration::new(now.tv_sec.max(0) as u64, now.tv_nsec as u32)
        };
        // A modification time in the far future was set by hand, so a write changes it in any case.
        let until = now() + WAIT_MAX;
        while (now() <= modified) && modified < until && now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[cfg(test)]
#[cfg(not(model_check))]
mod tests {
    use super::*;

    #[test]
    fn a_write_after_the_wait_gives_another_fingerprint() {
        let path = std::env::temp_dir().join(format!("blkq-fingerprint-{}", std::process::id()));
        std::fs::write(&path, []).unwrap();
        let image = ImageFile::open(&path, false).unwrap();
        for byte in 0..50 {
            image.write_all_at(&[byte], 0).unwrap();
            let fingerprint = ImageFingerprint::of(&image, 1).unwrap();
            fingerprint.wait_until_older();
            image.write_all_at(&[byte], 0).unwrap();
            assert_ne!(ImageFingerprint::of(&image, 1).unwrap(), fingerprint);
        }
        std::fs::remove_file(path).unwrap();
    }
}
