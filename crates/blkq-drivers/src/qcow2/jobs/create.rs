//! Creates an empty overlay over a backing file. The backing file is not changed.

use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use blkq::Error;

use crate::errors::{invalid, malformed};
use crate::format::ImageFormat;
use crate::image_file::ImageFile;
use crate::qcow2::chain::{Opened, check_is_no_link};
use crate::qcow2::format::header::{
    EXTENSION_BACKING_FORMAT, FIXED_BYTES, L1_MAX_BYTES, MAGIC, NAME_MAX_BYTES,
};

/// The base-2 logarithm of the cluster size in bytes; QEMU's default.
const CLUSTER_BITS: u32 = 16;
const CLUSTER_BYTES: u64 = 1 << CLUSTER_BITS;
const REFCOUNT_ORDER: u32 = 4;
/// Numbers of the clusters of the refcount table, of its first block, and of the start of the L1 table.
const REFCOUNT_TABLE: u64 = 1;
const REFCOUNT_BLOCK: u64 = 2;
const L1_TABLE: u64 = 3;

/// The backing file of a new overlay.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Base {
    /// Absolute and without symbolic links.
    pub(super) path: PathBuf,
    pub(super) qcow2: bool,
    /// Virtual size in bytes.
    pub(super) size: u64,
}

impl Base {
    /// Reads the size of the image at `path`.
    ///
    /// # Errors
    /// The message has one line: what is wrong, why, and a hint, which the caller adds to
    /// [`blkq::ErrorKind::Format`] (the image has another format than `format`).
    pub fn open(path: &Path, format: ImageFormat) -> Result<Base, Error> {
        let backing = ImageFile::open(path, true)?;
        let file_bytes = backing.size()?;
        if format == ImageFormat::Qcow2 {
            let image = Opened::with_tables(backing)?;
            check_is_no_link(&image.file.path)?;
            return Ok(Base { path: image.file.path, qcow2: true, size: image.size });
        }
        if format == ImageFormat::Checked
            && let Some(format) = backing.detect_format(file_bytes)
        {
            return Err(malformed(format!("{} is a {format} image, not raw data", backing.path.display())));
        }
        Ok(Base { path: backing.path, qcow2: false, size: file_bytes })
    }

    /// Makes `file` an overlay over this backing file, of the same size rounded up to whole sectors. `file`
    /// must be empty and in `directory`, which must be absolute and without symbolic links. The overlay names
    /// the backing file relative to `directory` if it is there or below. Nothing is made durable.
    ///
    /// # Errors
    /// [`blkq::ErrorKind::Invalid`] for a name or a size that the format does not allow; the I/O error of the file.
    pub fn write_overlay(&self, file: &File, directory: &Path) -> Result<(), Error> {
        let name = name_in(directory, &self.path)?;
        let size = self.size.next_multiple_of(512);
        let l2_covers = CLUSTER_BYTES << (CLUSTER_BITS - 3);
        let l1_entries = size.div_ceil(l2_covers);
        if l1_entries * 8 > L1_MAX_BYTES {
            return Err(invalid(format!(
                "an image with clusters of 64 KiB can have at most {} bytes, not {size}",
                L1_MAX_BYTES / 8 * l2_covers
            )));
        }
        let clusters = L1_TABLE + (l1_entries * 8).div_ceil(CLUSTER_BYTES).max(1);
        let header = header(size, l1_entries as u32, &name, if self.qcow2 { b"qcow2" } else { b"raw" });
        let block: Vec<u8> = (0..clusters).flat_map(|_| 1u16.to_be_bytes()).collect();
        let write = || -> io::Result<()> {
            file.write_all_at(&header, 0)?;
            let block_at = REFCOUNT_BLOCK * CLUSTER_BYTES;
            file.write_all_at(&block_at.to_be_bytes(), REFCOUNT_TABLE * CLUSTER_BYTES)?;
            file.write_all_at(&block, block_at)?;
            // The L1 table is a hole, which reads as zeroes: no entry names a table.
            file.set_len(clusters * CLUSTER_BYTES)
        };
        write().map_err(|e| Error::system("cannot write the new image", e))
    }
}

fn name_in(directory: &Path, base: &Path) -> Result<Vec<u8>, Error> {
    let below = base.strip_prefix(directory).unwrap_or(base).as_os_str().as_bytes();
    // QEMU takes letters before a colon for a protocol, unless a slash precedes the colon.
    let first = below.split(|byte| *byte == b'/').next().unwrap_or_default();
    let prefix: &[u8] = if first.contains(&b':') { b"./" } else { b"" };
    let name = [prefix, below].concat();
    let why = if name.len() > NAME_MAX_BYTES {
        format!("longer than {NAME_MAX_BYTES} bytes")
    } else if String::from_utf8_lossy(&name).contains(char::is_control) {
        "with control characters".to_owned()
    } else {
        return Ok(name);
    };
    Err(invalid(format!(
        "an image cannot name its backing file by a path {why}; rename or move the backing file"
    )))
}

fn header(size: u64, l1_entries: u32, name: &[u8], format: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; FIXED_BYTES];
    let mut extension = EXTENSION_BACKING_FORMAT.to_be_bytes().to_vec();
    extension.extend((format.len() as u32).to_be_bytes());
    extension.extend(format);
    extension.resize(extension.len().next_multiple_of(8), 0);
    // The end marker of the extensions takes 8 bytes.
    let name_at = (FIXED_BYTES + extension.len() + 8) as u64;
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    put(0, &MAGIC);
    put(4, &3u32.to_be_bytes());
    put(8, &name_at.to_be_bytes());
    put(16, &(name.len() as u32).to_be_bytes());
    put(20, &CLUSTER_BITS.to_be_bytes());
    put(24, &size.to_be_bytes());
    put(36, &l1_entries.to_be_bytes());
    put(40, &(L1_TABLE * CLUSTER_BYTES).to_be_bytes());
    put(48, &(REFCOUNT_TABLE * CLUSTER_BYTES).to_be_bytes());
    put(56, &1u32.to_be_bytes());
    put(96, &REFCOUNT_ORDER.to_be_bytes());
    put(100, &(FIXED_BYTES as u32).to_be_bytes());
    bytes.extend(extension);
    bytes.extend([0; 8]);
    bytes.extend(name);
    bytes
}

#[cfg(test)]
#[cfg(not(model_check))]
mod tests {
    use super::*;
    use crate::qcow2::format::header::Header;

    #[test]
    fn a_new_image_has_a_valid_header() {
        let bytes = header(5 << 40, 10240, b"base.img", b"raw");
        let parsed = Header::parse(&bytes).unwrap();
        assert_eq!((parsed.version, parsed.size, parsed.l1_entries), (3, 5 << 40, 10240));
        let backing = parsed.backing.unwrap();
        assert_eq!((&backing.name[..], backing.format.as_deref()), (&b"base.img"[..], Some("raw")));
        assert!(bytes.len() < CLUSTER_BYTES as usize);
    }

    #[test]
    fn a_base_is_named_relative_to_the_directory_of_the_image() {
        let name = |base: &str| {
            name_in(Path::new("/a"), Path::new(base)).map(|name| String::from_utf8(name).unwrap())
        };
        assert_eq!(name("/a/b.img").unwrap(), "b.img");
        assert_eq!(name("/a/c/b.img").unwrap(), "c/b.img");
        assert_eq!(name("/b/b.img").unwrap(), "/b/b.img");
        assert_eq!(name("/a/nbd:b").unwrap(), "./nbd:b");
        assert!(name("/a/b\n").is_err());
        assert!(name(&format!("/b/{}", "x/".repeat(600))).is_err());
    }
}
