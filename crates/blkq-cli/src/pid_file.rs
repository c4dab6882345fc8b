//! `--pid-file`: the number of the daemon's process, for as long as it serves.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::failure::{Failure, Outcome};

/// The file, which is removed when this is dropped.
#[derive(Debug)]
pub struct PidFile {
    path: PathBuf,
    /// Device and inode of what was written.
    made: (u64, u64),
}

impl PidFile {
    /// Writes the number of this process to `path`, which then has all of it or what was there before.
    ///
    /// # Errors
    /// If it cannot be written; nothing is left of it then.
    pub fn write(path: &Path) -> Outcome<PidFile> {
        let pid = std::process::id();
        let failure = |e: io::Error| Failure::new(format!("--pid-file {}: {e}", path.display()));
        let path = std::path::absolute(path).map_err(failure)?;
        let name = path.file_name().ok_or_else(|| failure(io::ErrorKind::IsADirectory.into()))?;
        let new = path.with_file_name(format!(".{}.{pid}", name.to_string_lossy()));
        let write = || {
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
            writeln!(file, "{pid}")?;
            // Everybody may know it.
            file.set_permissions(Permissions::from_mode(0o644))?;
            fs::rename(&new, &path)?;
            identity(&file)
        };
        let made = write().map_err(|e| {
            let _ = fs::remove_file(&new);
            failure(e)
        })?;
        Ok(PidFile { path, made })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        // Another daemon may have written its own meanwhile.
        let found = fs::symlink_metadata(&self.path);
        if found.is_ok_and(|found| (found.dev(), found.ino()) == self.made) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn identity(file: &File) -> io::Result<(u64, u64)> {
    file.metadata().map(|found| (found.dev(), found.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pid_file_is_its_daemons_own() {
        let dir = std::env::temp_dir().join(format!("blkq-pid-file-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let path = dir.join("pid");
        let first = PidFile::write(&path).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), format!("{}\n", std::process::id()));
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o644);
        let second = PidFile::write(&path).unwrap();
        drop(first);
        assert!(path.exists());
        drop(second);
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
        // A directory is in the way: nothing is left of the attempt.
        fs::create_dir(&path).unwrap();
        fs::write(path.join("file"), "").unwrap();
        assert!(PidFile::write(&path).unwrap_err().to_string().contains("--pid-file"));
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
        fs::remove_dir_all(&dir).unwrap();
    }
}
