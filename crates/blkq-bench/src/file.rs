//! The file that is measured on.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::Result;
use crate::progress::Progress;
use crate::random::Random;

/// Bytes written at once while the file is filled.
const CHUNK_BYTES: usize = 1 << 20;

/// A file filled with data. If it was made for the measurement it goes with this.
pub struct TestFile {
    path: PathBuf,
    bytes: u64,
    temporary: bool,
}

impl TestFile {
    /// Makes a file of `bytes` and fills it with data that no file system can compress or
    /// leave out: at `path`, where it stays, or else in the current directory.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn create(path: Option<&Path>, bytes: u64, progress: &mut Progress) -> Result<TestFile> {
        let temporary = path.is_none();
        let path = match path {
            Some(path) => path.to_owned(),
            None => std::env::current_dir()?.join(format!(".blkq-bench-{}", std::process::id())),
        };
        let said = |e: std::io::Error| {
            format!("{}: {e}; choose another place with --file, or another --size", path.display())
        };
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(said)?;
        // From here on the file goes if filling it fails.
        let made = TestFile { path: path.clone(), bytes, temporary };
        if temporary {
            crate::run::remove_on_signal(&path)?;
        }
        let mut random = Random(bytes);
        let mut chunk = vec![0u8; CHUNK_BYTES];
        let mut left = bytes;
        while left > 0 {
            for word in chunk.chunks_exact_mut(8) {
                word.copy_from_slice(&random.below(u64::MAX).to_le_bytes());
            }
            let now = left.min(CHUNK_BYTES as u64);
            file.write_all(&chunk[..now as usize]).map_err(said)?;
            left -= now;
            progress.say(&format!("filling {} ({} MiB left)", path.display(), left >> 20));
        }
        file.set_len(bytes).map_err(said)?;
        file.sync_all().map_err(said)?;
        crate::cache::evict(&file)?;
        Ok(made)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Opens it to look at its page cache.
    ///
    /// # Errors
    /// If somebody removed it.
    pub fn open(&self) -> Result<File> {
        Ok(File::open(&self.path)?)
    }
}

impl Drop for TestFile {
    fn drop(&mut self) {
        if self.temporary {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
