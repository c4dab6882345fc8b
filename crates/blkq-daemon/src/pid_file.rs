//! `--pid-file`: a file with the process ID of the daemon, which exists while the daemon serves the device.

use std::fs::{self, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use blkq_drivers::DriverSpec;
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::info::FileId;
use blkq_protocol::options::AttachOptions;
use blkq_protocol::state::{DYING_WAIT, ProcessState};
use blkq_protocol::system::if_exists;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

/// Maximum number of symbolic links that are followed, as in the kernel (`MAXSYMLINKS`).
const LINKS_MAX: usize = 40;
/// How often the path may be changed by another process between the check and the rename before an error is
/// returned.
const ATTEMPTS_MAX: usize = 100;
/// Maximum size of a pid file in bytes: a number of up to ten digits, and white space.
const TEXT_BYTES_MAX: u64 = 32;
/// For `blkq attach`, which has the option.
const HINT: &str = "; choose another path";

/// The pid file of this process. It is locked with flock(2), so that no other daemon replaces it. When this
/// is dropped, the file is removed if it is still the file that was written here.
#[derive(Debug)]
pub struct PidFile {
    /// The path without symbolic links.
    pub path: PathBuf,
    file: File,
}

impl PidFile {
    /// Writes the ID of this process to the pid file of `options`, if they name one. The file appears with
    /// its complete content, and replaces only a pid file that no daemon has locked. Fails if the path holds
    /// anything else, or the file cannot be written. The path is left unchanged.
    pub fn write(options: &AttachOptions) -> Outcome<Option<PidFile>> {
        let Some(path) = &options.pid_file else { return Ok(None) };
        let image = match &options.image {
            DriverSpec::Image(image) => FileId::of(image),
            _ => None,
        };
        PidFile::write_to(path, image).map(Some)
    }

    fn write_to(path: &Path, image: Option<FileId>) -> Outcome<PidFile> {
        let failed = |e: io::Error| Failure::new(format!("cannot write --pid-file {}: {e}", path.display()));
        for _ in 0..ATTEMPTS_MAX {
            // Stays locked until it has been replaced.
            let earlier = look_at(path, image)?;
            let real = real_path(path).map_err(failed)?;
            if let Some(file) = replace(earlier.as_ref(), &real).map_err(failed)? {
                return Ok(PidFile { path: real, file });
            }
        }
        Err(Failure::new(format!("another process keeps replacing --pid-file {}{HINT}", path.display())))
    }

    /// Whether the file at the path is still the one that was written here, with the same content.
    fn is_own(&self) -> bool {
        let mut text = [0; TEXT_BYTES_MAX as usize];
        let read = self.file.read_at(&mut text, 0).unwrap_or(0);
        text[..read] == *format!("{}\n", std::process::id()).as_bytes()
            && identity(&self.file).is_ok_and(|own| identity_at(&self.path) == Some(own))
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        if self.is_own() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// The warning of a daemon that serves its device although [`PidFile::write`] has failed.
pub fn warning(failure: &Failure) -> String {
    format!("the daemon has no pid file: {}", failure.to_string().trim_end_matches(HINT))
}

/// Resolves all symbolic links of `path`. The file itself need not exist, but its directory must.
pub fn real_path(path: &Path) -> io::Result<PathBuf> {
    let mut path = std::path::absolute(path)?;
    for _ in 0..LINKS_MAX {
        if let Some(found) = if_exists(fs::canonicalize(&path))? {
            return Ok(found);
        }
        let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(io::ErrorKind::NotFound.into());
        };
        let directory = fs::canonicalize(directory)?;
        match fs::read_link(&path) {
            // The path is a link to a file that does not exist.
            Ok(target) => path = directory.join(target),
            Err(_) => return Ok(directory.join(name)),
        }
    }
    Err(io::Error::from_raw_os_error(libc::ELOOP))
}

/// Opens and locks the file at `path`, if there is one. Fails if the file is not a pid file that may be
/// replaced.
fn look_at(path: &Path, image: Option<FileId>) -> Outcome<Option<File>> {
    let shown = path.display();
    let failed = |e: io::Error| Failure::new(format!("cannot open --pid-file {shown}: {e}"));
    let refused = |what: &str| Failure::new(format!("--pid-file {shown} {what}{HINT}"));
    // O_PATH, because opening a device or a FIFO can have side effects.
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(path);
    let Some(found) = if_exists(opened).map_err(failed)? else { return Ok(None) };
    let metadata = found.metadata().map_err(failed)?;
    let kind = metadata.file_type();
    if !kind.is_file() {
        let what = match () {
            () if kind.is_dir() => "a directory",
            () if kind.is_fifo() => "a FIFO",
            () if kind.is_socket() => "a socket",
            () => "a device node",
        };
        return Err(refused(&format!("is {what}, not a file")));
    }
    if image.is_some() && image == Some(FileId::from(&metadata)) {
        return Err(refused("is the image of the device"));
    }
    let file = File::open(format!("/proc/self/fd/{}", found.as_raw_fd())).map_err(failed)?;
    let mut text = Vec::new();
    Read::take(&file, TEXT_BYTES_MAX).read_to_end(&mut text).map_err(failed)?;
    // An empty file may be replaced. A power loss or mktemp(1) can leave one.
    let is_pid = text.trim_ascii().iter().all(u8::is_ascii_digit) && (text.len() as u64) < TEXT_BYTES_MAX;
    if !is_pid {
        return Err(refused("contains something other than a process ID and is not overwritten"));
    }
    // The previous daemon may be exiting: it releases its name before its pid file.
    let holder = String::from_utf8_lossy(&text).trim().parse::<u32>().ok();
    let state = || holder.map(ProcessState::of);
    let begin = Instant::now();
    loop {
        // Read before and after the attempt, so that a process that exits in between does not count as running.
        let before = state();
        if lock(&file).map_err(failed)? {
            return Ok(Some(file));
        }
        let waits = before == Some(ProcessState::Dying) || before != state();
        if !waits || begin.elapsed() > DYING_WAIT {
            return Err(refused("belongs to another running device"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Creates a file with the ID of this process at `path`, replacing `earlier` or nothing. Returns `None` if
/// another process has created a file there meanwhile.
fn replace(earlier: Option<&File>, path: &Path) -> io::Result<Option<File>> {
    let pid = std::process::id();
    let name = path.file_name().ok_or(io::ErrorKind::IsADirectory)?;
    let new = path.with_file_name(format!(".{}.{pid}", name.to_string_lossy()));
    let create = || OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&new);
    let mut file = create().or_else(|e| match e.kind() {
        // A process with the same ID was killed and left it. In containers, daemons often have the same ID.
        io::ErrorKind::AlreadyExists => fs::remove_file(&new).and_then(|()| create()),
        _ => Err(e),
    })?;
    let mut put = || {
        writeln!(file, "{pid}")?;
        // All users may read a pid file.
        file.set_permissions(Permissions::from_mode(0o644))?;
        lock(&file)?;
        match earlier {
            Some(earlier) if identity_at(path) != Some(identity(earlier)?) => Ok(false),
            Some(_) => fs::rename(&new, path).map(|()| true),
            None => match renameat_with(CWD, &new, CWD, path, RenameFlags::NOREPLACE) {
                Ok(()) => Ok(true),
                Err(Errno::EXIST) => Ok(false),
                // The file system does not support RENAME_NOREPLACE.
                Err(Errno::INVAL | Errno::NOSYS) => fs::rename(&new, path).map(|()| true),
                Err(e) => Err(e.into()),
            },
        }
    };
    let put = put();
    if !matches!(put, Ok(true)) {
        let _ = fs::remove_file(&new);
    }
    Ok(put?.then_some(file))
}

/// Locks the open file description. Returns whether no other one has the lock.
fn lock(file: &File) -> io::Result<bool> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        // The file system does not support locks.
        Err(TryLockError::Error(e))
            if e.kind() == io::ErrorKind::Unsupported
                || matches!(e.raw_os_error(), Some(libc::ENOLCK | libc::EBADF | libc::EINVAL)) =>
        {
            Ok(true)
        }
        Err(TryLockError::Error(e)) => Err(e),
    }
}

fn identity(file: &File) -> io::Result<FileId> {
    file.metadata().map(|metadata| FileId::from(&metadata))
}

fn identity_at(path: &Path) -> Option<FileId> {
    fs::symlink_metadata(path).ok().map(|metadata| FileId::from(&metadata))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, symlink};

    use blkq_protocol::harness::scratch;

    use super::*;

    fn own() -> String {
        format!("{}\n", std::process::id())
    }

    #[test]
    fn a_pid_file_has_one_daemon_and_is_removed_with_it() {
        let dir = scratch("pid-file");
        let path = dir.path().join("pid");
        let first = PidFile::write_to(&path, None).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), own());
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o644);
        let refused = PidFile::write_to(&path, None).unwrap_err().to_string();
        assert!(refused.contains("another running device"), "{refused}");
        assert_eq!(fs::read_to_string(&path).unwrap(), own());
        drop(first);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        // Pid files of daemons that were killed, and an empty one.
        for stale in ["4194305\n", "1", ""] {
            fs::write(&path, stale).unwrap();
            drop(PidFile::write_to(&path, None).unwrap());
            assert!(!path.exists());
        }
        // A temporary file of a daemon that was killed before it renamed the file.
        fs::write(dir.path().join(format!(".pid.{}", std::process::id())), "").unwrap();
        drop(PidFile::write_to(&path, None).unwrap());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn a_file_that_is_not_a_pid_file_stays() {
        let dir = scratch("pid-file-others");
        let place = |name: &str| dir.path().join(name);
        let refused = |path: &Path, why: &str| {
            let before = fs::symlink_metadata(path).unwrap();
            let refused = PidFile::write_to(path, FileId::of(place("image"))).unwrap_err().to_string();
            assert!(refused.contains(&format!("--pid-file {}", path.display())), "{refused}");
            assert!(refused.contains(why), "{refused}");
            let after = fs::symlink_metadata(path).unwrap();
            assert_eq!((before.ino(), before.len()), (after.ino(), after.len()));
        };
        for (name, text) in [("notes", "precious"), ("zeroes", "\0\0\0\0"), ("long", &"1".repeat(4096))] {
            fs::write(place(name), text).unwrap();
            refused(&place(name), "other than a process ID");
        }
        fs::write(place("image"), "1\n").unwrap();
        refused(&place("image"), "the image of the device");
        fs::hard_link(place("image"), place("image-too")).unwrap();
        refused(&place("image-too"), "the image of the device");
        fs::create_dir(place("directory")).unwrap();
        refused(&place("directory"), "a directory");
        rustix::fs::mknodat(CWD, place("fifo"), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        refused(&place("fifo"), "a FIFO");
        let _socket = std::os::unix::net::UnixListener::bind(place("socket")).unwrap();
        refused(&place("socket"), "a socket");
        for (name, target, why) in [
            ("null", "/dev/null", "a device node"),
            ("out", "/proc/self/fd/0", ""),
            ("link", "notes", "other than"),
        ] {
            symlink(target, place(name)).unwrap();
            refused(&place(name), why);
        }
        assert_eq!(fs::read_to_string(place("notes")).unwrap(), "precious");
        symlink("loop", place("loop")).unwrap();
        refused(&place("loop"), "");
        fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn links_are_followed_and_stay() {
        let dir = scratch("pid-file-links");
        let place = |name: &str| dir.path().join(name);
        fs::create_dir(place("run")).unwrap();
        symlink("run/pid", place("b")).unwrap();
        symlink("b", place("a")).unwrap();
        for _ in 0..2 {
            let file = PidFile::write_to(&place("a"), None).unwrap();
            assert_eq!(file.path, place("run/pid").canonicalize().unwrap());
            assert_eq!(fs::read_to_string(place("run/pid")).unwrap(), own());
            drop(file);
            assert!(!place("run/pid").exists() && fs::read_link(place("a")).is_ok());
            fs::write(place("run/pid"), "7\n").unwrap();
        }
        fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn a_file_that_another_program_has_taken_stays() {
        let dir = scratch("pid-file-taken");
        let path = dir.path().join("pid");
        // The file is overwritten in place.
        let file = PidFile::write_to(&path, None).unwrap();
        fs::write(&path, "1\n").unwrap();
        drop(file);
        assert_eq!(fs::read_to_string(&path).unwrap(), "1\n");
        // The file is replaced.
        let file = PidFile::write_to(&path, None).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, own()).unwrap();
        drop(file);
        assert!(path.exists());
        fs::remove_dir_all(dir.path()).unwrap();
    }
}
