//! Opening an image and the images behind it.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;

use blkq::text::shell_word;
use blkq::{Error, ErrorKind};
use rustix::fs::{CWD, Mode as FileMode, OFlags, ResolveFlags, openat, openat2};

use crate::r#loop::backing::{self, Backing};
use crate::r#loop::format;
use crate::r#loop::lock::{self, LockKind};

use super::header::{BackingName, FIXED_BYTES, Header, MAGIC, SNAPSHOT_BYTES, cluster_bytes};
use super::journal::{self, Journals};
use super::options::BackingChain;
use super::state::Tables;

/// Most images behind one.
pub(super) const DEPTH_MAX: usize = 64;
/// Most bytes of L1 tables of a chain, which are in memory.
const L1_TABLES_MAX_BYTES: u64 = 128 << 20;
/// The bytes of a file that are locked.
pub(super) const LOCKED: std::ops::Range<u64> = lock::WHOLE_FILE;

/// An image of a chain that was opened.
pub(super) struct Opened {
    pub backing: Backing,
    pub tables: Option<Tables>,
    /// Virtual size in bytes.
    pub size: u64,
}

/// Reads the header of a qcow2 image.
///
/// # Errors
/// One line: what is wrong with the image, and the cure.
pub(super) fn read_header(backing: &Backing) -> Result<Header, Error> {
    let mut head = vec![0; FIXED_BYTES];
    read_at(&backing.file, &backing.path, &mut head, 0)?;
    let mut bytes = vec![0; cluster_bytes(&head).map_err(|e| not_served(backing, &e))?];
    read_at(&backing.file, &backing.path, &mut bytes, 0)?;
    Header::parse(&bytes).map_err(|e| not_served(backing, &e))
}

fn not_served(backing: &Backing, error: &Error) -> Error {
    Error::new(error.kind(), format!("{} cannot be served as qcow2: {error}", backing.path.display()))
}

/// Reads the tables of a qcow2 image that are always in memory.
///
/// # Errors
/// As [`read_header`].
pub(super) fn read_tables(backing: &Backing) -> Result<Tables, Error> {
    let header = read_header(backing)?;
    let file_bytes = backing::size(&backing.file, &backing.path)?;
    let tables = [
        ("L1", header.l1_offset, u64::from(header.l1_entries) * 8),
        (
            "refcount",
            header.refcount_table_offset,
            u64::from(header.refcount_table_clusters) << header.cluster_bits,
        ),
        ("snapshot", header.snapshots_offset, u64::from(header.snapshots) * SNAPSHOT_BYTES),
    ];
    for (name, offset, bytes) in tables {
        if bytes > 0 && offset.checked_add(bytes).is_none_or(|end| end > file_bytes) {
            let message = format!("its {name} table is not all in the file; restore it from a copy");
            return Err(not_served(backing, &Error::new(ErrorKind::Format, message)));
        }
    }
    let l1 = read_numbers(backing, header.l1_offset, header.l1_entries as usize)?;
    Ok(Tables { header, l1 })
}

/// Reads a table of big-endian numbers. Behind the end of the file it is zeroes.
///
/// # Errors
/// That of the file.
pub(super) fn read_numbers(backing: &Backing, offset: u64, count: usize) -> Result<Vec<u64>, Error> {
    let mut bytes = vec![0; count * 8];
    read_at(&backing.file, &backing.path, &mut bytes, offset)?;
    Ok(bytes.chunks_exact(8).map(|entry| super::header::u64_at(entry, 0)).collect())
}

fn read_at(file: &File, path: &Path, bytes: &mut [u8], offset: u64) -> Result<(), Error> {
    let mut done = 0;
    while done < bytes.len() {
        match file.read_at(&mut bytes[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(Error::system(format!("cannot read {}", path.display()), e)),
        }
    }
    Ok(())
}

/// Opens the images behind `top`, in order.
///
/// # Errors
/// One line: what is wrong, why, and the cure. [`ErrorKind::BackingFile`] for one that `allowed`
/// does not admit, whose cure is the caller's. One that lacks writes in one of `journals` is rejected; if that
/// journal is ignored, `warnings` gets the reason.
pub(super) fn open_behind(
    top: &Opened,
    allowed: BackingChain,
    journals: Option<&Journals>,
    warnings: &mut Vec<String>,
) -> Result<Vec<Opened>, Error> {
    let mut chain: Vec<Opened> = Vec::new();
    loop {
        let last = chain.last().unwrap_or(top);
        let Some(name) = last.tables.as_ref().and_then(|tables| tables.header.backing.clone()) else {
            return Ok(chain);
        };
        if chain.len() == DEPTH_MAX {
            let message =
                format!("{} has more than {DEPTH_MAX} images behind it", top.backing.path.display());
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        let backing = open_one(&last.backing.path, &name, allowed)?;
        if std::iter::once(top).chain(&chain).any(|one| one.backing.identity == backing.identity) {
            let message = format!("{} is behind itself", backing.path.display());
            return Err(Error::new(ErrorKind::Format, message));
        }
        // Before its tables are read: a writer may be changing them.
        lock::acquire(&backing.file, &backing.path, &LOCKED, LockKind::Shared, false)?;
        let opened = read_one(&last.backing.path, &name, backing)?;
        if let (Some(tables), Some(all)) = (&opened.tables, journals) {
            let (path, identity) = (&opened.backing.path, opened.backing.identity);
            let tag = tables.header.tag;
            journal::check_behind(all, path, (identity, tag), last.backing.identity)?;
            if tag == 0 {
                let file = (identity, backing::birth(&opened.backing.file));
                warnings.extend(journal::find_ignored(all, path, file));
            }
        }
        chain.push(opened);
        let l1_bytes = |one: &Opened| one.tables.as_ref().map_or(0, |tables| tables.l1.len() as u64 * 8);
        if std::iter::once(top).chain(&chain).map(l1_bytes).sum::<u64>() > L1_TABLES_MAX_BYTES {
            let message = format!(
                "{} and the images behind it have L1 tables of more than {} MiB, which are in memory; make one image \
                 of them with `qemu-img convert`",
                top.backing.path.display(),
                L1_TABLES_MAX_BYTES >> 20
            );
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
    }
}

/// Opens the file that `image` names as its backing file, for reading.
///
/// # Errors
/// As [`open_behind`].
pub(super) fn open_one(image: &Path, name: &BackingName, allowed: BackingChain) -> Result<Backing, Error> {
    let directory = image.parent().unwrap_or(Path::new("/"));
    let path = backing_path(image, &name.name)?;
    let opened = match allowed {
        BackingChain::Allow => Backing::open(&directory.join(path), true),
        BackingChain::OwnDirectory => open_beneath(directory, image, path),
    };
    opened.map_err(|error| match error.kind() {
        ErrorKind::NotFound => {
            let shown = image.display();
            let message = format!("{}, the backing file of {shown}, is not there", path.display());
            let hint = match check_is_no_link(image) {
                Ok(()) => format!(
                    "bring it back, or name the one that it is now with `qemu-img rebase -u -b FILE -F FORMAT {}`",
                    shell_word(image)
                ),
                Err(_) => format!("{shown} is a symbolic link; name the image by its own path"),
            };
            Error::new(ErrorKind::NotFound, message).with_cure(hint)
        }
        _ => error,
    })
}

/// The image behind `image`, of the format that this names for it.
fn read_one(image: &Path, name: &BackingName, backing: Backing) -> Result<Opened, Error> {
    let size = backing::size(&backing.file, &backing.path)?;
    let shown = backing.path.display();
    let mut magic = [0; 4];
    read_at(&backing.file, &backing.path, &mut magic, 0)?;
    match name.format.as_deref() {
        Some("raw") => {}
        Some("qcow2") => return qcow2(backing),
        // A guest that wrote to a raw image may have put it there, to have other files read.
        None if magic == MAGIC => {
            let message = format!(
                "{} does not record the format of its backing file, which begins as qcow2; if it is, \
                 record that with `qemu-img rebase -u -b {} -F qcow2 {}`",
                image.display(),
                shell_word(&backing.path),
                shell_word(image)
            );
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        None => {
            if let Some(format) = format::detect(&backing.file, size) {
                let message = format!("{shown}, behind {}, is a {format} image", image.display());
                return Err(Error::new(ErrorKind::Unsupported, message));
            }
        }
        Some(other) => {
            let message = format!("{shown}, behind {}, is a {other} image", image.display());
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
    }
    Ok(Opened { backing, tables: None, size })
}

fn qcow2(mut backing: Backing) -> Result<Opened, Error> {
    let tables = read_tables(&backing)?;
    prefer_link(&mut backing, &tables.header);
    let size = tables.header.size;
    Ok(Opened { backing, tables: Some(tables), size })
}

/// Has `backing`, an image with `header`, go by the symbolic link by which it was opened if it names its own backing file
/// relative to a directory: as in QEMU that is the directory of the link, not of the image.
pub(super) fn prefer_link(backing: &mut Backing, header: &Header) {
    let is_relative =
        |name: &BackingName| backing_path(&backing.path, &name.name).is_ok_and(Path::is_relative);
    if header.backing.as_ref().is_some_and(is_relative)
        && let Some(link) = backing.link.take()
    {
        backing.path = link;
    }
}

/// Refuses an image that goes by a symbolic link ([`prefer_link`]) as the backing file of a new image.
///
/// # Errors
///
/// Returns [`ErrorKind::Unsupported`].
pub(super) fn check_is_no_link(path: &Path) -> Result<(), Error> {
    if !std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_symlink()) {
        return Ok(());
    }
    let message = format!(
        "{} is a symbolic link to another directory and the backing file of the image is found from there, which a new image \
         over it cannot record",
        path.display()
    );
    Err(Error::new(ErrorKind::Unsupported, message).with_cure("attach the image by its own path"))
}

/// The path that a name of a backing file is.
fn backing_path<'a>(image: &Path, name: &'a [u8]) -> Result<&'a Path, Error> {
    let name = name.strip_prefix(b"file:").unwrap_or(name);
    // As QEMU has it: letters before a colon, before any slash, are a protocol.
    let before_slash = name.split(|byte| *byte == b'/').next().unwrap_or_default();
    if before_slash.contains(&b':') {
        let message = format!(
            "{} names its backing file as {:?}, which is no path",
            image.display(),
            String::from_utf8_lossy(name)
        );
        return Err(Error::new(ErrorKind::Unsupported, message));
    }
    Ok(Path::new(OsStr::from_bytes(name)))
}

/// Opens a file in `directory`, which is that of `image`, or below it. The kernel sees to it that no `..`
/// and no symbolic link leads out of it, whatever changes meanwhile.
fn open_beneath(directory: &Path, image: &Path, path: &Path) -> Result<Backing, Error> {
    let refused = || {
        let message = format!(
            "{} has the backing file {}, which is not in its directory",
            image.display(),
            path.display()
        );
        Error::new(ErrorKind::BackingFile, message)
    };
    let within = match path.is_absolute() {
        true => path.strip_prefix(directory).map_err(|_| refused())?,
        false => path,
    };
    let failed = |e: rustix::io::Errno| match e {
        rustix::io::Errno::XDEV | rustix::io::Errno::LOOP => refused(),
        e => Error::system(
            format!("cannot open {}, the backing file of {}", path.display(), image.display()),
            e,
        ),
    };
    let at = openat(CWD, directory, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, FileMode::empty())
        .map_err(failed)?;
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    let file = File::from(openat2(&at, within, flags, FileMode::empty(), resolve).map_err(failed)?);
    let name = backing::name_now(&file);
    let mut backing = Backing::of_open(file, name.unwrap_or_else(|| directory.join(within)))?;
    // The directory that the name leads to, by the kernel too: the last part of the name may be a link out of it.
    let parent = within.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let parent = File::from(openat2(&at, parent, flags, FileMode::empty(), resolve).map_err(failed)?);
    let link = backing::name_now(&parent).zip(within.file_name());
    backing.link =
        link.map(|(parent, name)| parent.join(name)).filter(|link| link.parent() != backing.path.parent());
    Ok(backing)
}
