//! Files to which a command writes its results.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// The number of bytes at the beginning of a file by which its content is recognised.
const HEAD_BYTES: u64 = 64 << 10;

/// Opens `path` for writing from its beginning, and creates the file if it does not exist. An existing file
/// is emptied only if `is_earlier` recognises its beginning as an earlier result, so that a mistyped path,
/// such as that of an image, loses no data. Pipes and character devices are written as they are. Fails with
/// an I/O error if the file cannot be opened, has other content, or is a block device.
pub fn create(path: &Path, is_earlier: impl FnOnce(&[u8]) -> bool) -> io::Result<File> {
    let file = open(path, is_earlier)?;
    if file.metadata()?.is_file() {
        file.set_len(0)?;
    }
    Ok(file)
}

/// Checks whether [`create`] would succeed, and returns its error if not. Changes nothing.
pub fn check(path: &Path, is_earlier: impl FnOnce(&[u8]) -> bool) -> io::Result<()> {
    let is_stream = |kind: fs::FileType| kind.is_fifo() || kind.is_char_device();
    if fs::metadata(path).is_ok_and(|metadata| is_stream(metadata.file_type())) {
        // Opening a pipe for writing would wait for its reader, and closing it would end the stream before
        // the result is written.
        return Ok(());
    }
    let is_new = !path.exists();
    open(path, is_earlier)?;
    // If the path is a link, its new target is removed, and not the link.
    if is_new { fs::remove_file(path.canonicalize()?) } else { Ok(()) }
}

fn open(path: &Path, is_earlier: impl FnOnce(&[u8]) -> bool) -> io::Result<File> {
    let refused = |why: &str| Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
    let is_file = fs::metadata(path).is_ok_and(|metadata| metadata.is_file());
    // A pipe can be opened in one direction only.
    let file = OpenOptions::new().read(is_file).write(true).create(true).truncate(false).open(path)?;
    let metadata = file.metadata()?;
    if metadata.file_type().is_block_device() {
        return refused("the path is a block device; choose a file");
    }
    if metadata.is_file() && metadata.len() > 0 {
        let mut head = Vec::new();
        (&file).take(HEAD_BYTES).read_to_end(&mut head)?;
        if !is_earlier(&head) {
            return refused("the file contains other data, which would be lost; choose another file");
        }
        io::Seek::rewind(&mut &file)?;
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn only_an_earlier_result_is_replaced() {
        let dir = std::env::temp_dir().join(format!("blkq-output-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        let path = dir.join("result");
        let is_earlier = |head: &[u8]| head.starts_with(b"{");
        check(&path, is_earlier).unwrap();
        assert!(!path.exists());
        for text in ["{ a long result", "{}"] {
            create(&path, is_earlier).unwrap().write_all(text.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
            check(&path, is_earlier).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        fs::write(&path, [0; 4096]).unwrap();
        assert!(create(&path, is_earlier).unwrap_err().to_string().contains("other data"));
        assert!(check(&path, is_earlier).is_err());
        assert_eq!(fs::read(&path).unwrap(), [0; 4096]);
        // Links are followed, and a missing target is created.
        let link = dir.join("link");
        std::os::unix::fs::symlink("result", &link).unwrap();
        assert!(create(&link, is_earlier).is_err());
        fs::remove_file(&path).unwrap();
        check(&link, is_earlier).unwrap();
        assert!(!path.exists() && fs::read_link(&link).is_ok());
        create(&link, is_earlier).unwrap();
        assert!(path.exists() && fs::read_link(&link).is_ok());
        create(Path::new("/dev/null"), is_earlier).unwrap().write_all(b"x").unwrap();
        check(Path::new("/dev/null"), is_earlier).unwrap();
        let pipe = dir.join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        // No process reads the pipe.
        check(&pipe, is_earlier).unwrap();
        assert!(create(&dir, is_earlier).is_err());
        fs::remove_dir_all(&dir).unwrap();
    }
}
