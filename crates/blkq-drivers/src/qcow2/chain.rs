//! Opens the backing files of an image.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blkq::text::shell_word;
use blkq::{Error, ErrorKind};
use rustix::fs::{CWD, Mode as FileMode, OFlags, ResolveFlags, openat, openat2};

use crate::errors::{malformed, unsupported};
use crate::image_file::{ClientTerms, DirectAlign, ImageFile, LockKind, WHOLE_FILE, name_now};
use crate::options::{BackingChain, Journals};

use super::format::{BackingName, FIXED_BYTES, Header, MAGIC, cluster_bytes};
use super::journal;
use super::tables::state::{Layer, Tables};

/// Most backing files in a chain.
pub(super) const DEPTH_MAX: usize = 64;
/// Limit for all L1 tables of a chain, which are in memory as long as the device exists.
const L1_TABLES_MAX_BYTES: u64 = 128 << 20;

impl Layer {
    /// Reads the tables of a qcow2 image, and chooses its path ([`prefer_link`]). Fails with [`ErrorKind::Format`] if a
    /// table is not completely in the file.
    pub fn with_tables(mut file: ImageFile) -> Result<Layer, Error> {
        let header = read_header(&mut file)?;
        let file_bytes = file.size()?;
        for (name, offset, bytes) in header.tables() {
            if bytes > 0 && offset.checked_add(bytes).is_none_or(|end| end > file_bytes) {
                let message = format!(
                    "its {name} table is not all in the file, which was truncated; restore it from a copy"
                );
                return Err(not_served(&file, &malformed(message)));
            }
        }
        let l1 = read_numbers(&file, header.l1_offset, header.l1_entries as usize)?;
        let size = header.size;
        Ok(Layer { file: Arc::new(file), tables: Some(Tables { header, l1 }), size, align: 1, file_bytes })
    }

    pub fn header(&self) -> Option<&Header> {
        self.tables.as_ref().map(|tables| &tables.header)
    }

    pub fn set_align(&mut self, direct: Option<DirectAlign>) {
        self.align = direct.map_or(1, |align| u64::from(align.offset));
    }
}

/// An image with its backing files, and how it is served. It can become the backing file of a new overlay.
pub struct OverlayBase {
    pub(super) chain: Vec<Layer>,
    /// The size of the device in bytes.
    pub(super) size: u64,
    pub(super) terms: ClientTerms,
}

impl OverlayBase {
    /// The raw image that [`LoopDevice::raw_image`](crate::r#loop::LoopDevice) returned.
    pub(crate) fn of_raw((file, size, align, terms): (Arc<ImageFile>, u64, u64, ClientTerms)) -> OverlayBase {
        OverlayBase { chain: vec![Layer { file, tables: None, size, align, file_bytes: size }], size, terms }
    }
}

/// Reads the header of a qcow2 image, and chooses the path of the image ([`prefer_link`]). Errors have one line: what is
/// wrong with the image, and a hint.
pub(super) fn read_header(image: &mut ImageFile) -> Result<Header, Error> {
    let mut head = vec![0; FIXED_BYTES];
    read_start(image, &mut head)?;
    let mut bytes = vec![0; cluster_bytes(&head).map_err(|e| not_served(image, &e))?];
    read_start(image, &mut bytes)?;
    let header = Header::parse(&bytes).map_err(|e| not_served(image, &e))?;
    prefer_link(image, &header);
    Ok(header)
}

fn not_served(backing: &ImageFile, error: &Error) -> Error {
    Error::new(error.kind(), format!("{} cannot be served as qcow2: {error}", backing.path.display()))
}

/// Reads a table of big-endian numbers, which is completely in the file.
pub(super) fn read_numbers(backing: &ImageFile, offset: u64, count: usize) -> Result<Vec<u64>, Error> {
    let mut bytes = vec![0; count * 8];
    backing.read_exact_at(&mut bytes, offset).map_err(|e| backing.failed("read", e))?;
    Ok(bytes.chunks_exact(8).map(|entry| super::format::u64_at(entry, 0)).collect())
}

/// Reads the beginning of an image of which no size is known yet.
fn read_start(image: &ImageFile, bytes: &mut [u8]) -> Result<(), Error> {
    image.read_padded_at(bytes, 0, 0).map_err(|e| image.failed("read", e))
}

/// Opens the backing files of `top`. Returns the chain: `top`, and its backing files in order from the nearest.
///
/// Errors have one line: what is wrong, why, and a hint, which the caller adds to [`ErrorKind::BackingFile`]
/// (`allowed` does not admit a backing file). A backing file is also rejected if it lacks writes that a
/// journal in `journals` has. If that journal is ignored, a warning is added to `warnings` instead.
pub(super) fn open_chain(
    top: Layer,
    allowed: BackingChain,
    journals: Option<&Journals>,
    warnings: &mut Vec<String>,
) -> Result<Vec<Layer>, Error> {
    let mut chain = vec![top];
    loop {
        let (shown, last) = (chain[0].file.path.display(), &chain[chain.len() - 1]);
        let Some(name) = last.header().and_then(|header| header.backing.clone()) else { return Ok(chain) };
        if chain.len() > DEPTH_MAX {
            return Err(unsupported(format!(
                "{shown} has more than {DEPTH_MAX} backing files; merge some with `qemu-img commit` or \
                 `qemu-img rebase`"
            )));
        }
        let backing = open_one(&last.file.path, &name, allowed)?;
        if chain.iter().any(|one| one.file.identity == backing.identity) {
            let twice = backing.path.display();
            return Err(malformed(format!("the backing chain of {shown} contains {twice} twice")));
        }
        // The lock comes before the tables are read, because another process may be changing them.
        backing.lock(&WHOLE_FILE, LockKind::Reader)?;
        let opened = read_one(&last.file.path, &name, backing)?;
        if let (Some(header), Some(all)) = (opened.header(), journals) {
            journal::check_base(all, &opened.file, header.tag, last.file.identity)?;
            if header.tag == 0 {
                warnings.extend(journal::find_ignored(all, &opened.file));
            }
        }
        chain.push(opened);
        let tables = chain.iter().filter_map(|one| one.tables.as_ref());
        if tables.map(|tables| tables.l1.len() as u64 * 8).sum::<u64>() > L1_TABLES_MAX_BYTES {
            return Err(unsupported(format!(
                "the L1 tables of {} and its backing files need more than {} MiB of memory; merge the \
                 chain into one image with `qemu-img convert`",
                chain[0].file.path.display(),
                L1_TABLES_MAX_BYTES >> 20
            )));
        }
    }
}

/// Opens the file that `image` names as its backing file, read-only. Errors are as for
/// [`open_chain`].
pub(super) fn open_one(image: &Path, name: &BackingName, allowed: BackingChain) -> Result<ImageFile, Error> {
    let directory = image.parent().unwrap_or(Path::new("/"));
    let path = backing_path(image, &name.name)?;
    let opened = match allowed {
        BackingChain::Allow => ImageFile::open(&directory.join(path), true),
        BackingChain::OwnDirectory => open_beneath(directory, image, path),
    };
    opened.map_err(|error| match error.kind() {
        ErrorKind::NotFound => {
            let shown = image.display();
            let message = format!("{shown} has the backing file {}, which does not exist", path.display());
            let hint = match check_is_no_link(image) {
                Ok(()) => format!(
                    "restore it, or record its new path with `qemu-img rebase -u -b FILE -F FORMAT {}`",
                    shell_word(image)
                ),
                Err(_) => format!("{shown} is a symbolic link; use the path of the image itself"),
            };
            Error::new(ErrorKind::NotFound, message).with_hint(hint)
        }
        _ => error,
    })
}

/// A backing file, as the header of its overlay names it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BackingFile {
    /// Absolute, with all symbolic links resolved unless the image is found through a link that must be kept.
    pub path: PathBuf,
    /// The device number of its file system, and its inode.
    pub identity: (u64, u64),
    /// Whether it is a qcow2 image; else it is raw.
    pub qcow2: bool,
}

/// The backing files of the qcow2 image at `image`, in order from the nearest. The files are
/// opened for reading and not locked. The list ends at a file that cannot be opened or read, or that `allowed`
/// does not admit: the image cannot be served with it.
pub fn backing_files(image: &Path, allowed: BackingChain) -> Vec<BackingFile> {
    let mut files = Vec::new();
    let mut last = ImageFile::open(image, true);
    while let Ok(mut file) = last
        && let Ok(header) = read_header(&mut file)
        && files.len() < DEPTH_MAX
    {
        let Some(name) = header.backing else { break };
        let qcow2 = name.format.as_deref() == Some("qcow2");
        last = open_one(&file.path, &name, allowed);
        let found =
            |file: &ImageFile| BackingFile { path: file.path.clone(), identity: file.identity, qcow2 };
        files.extend(last.as_ref().ok().map(found));
        if !qcow2 {
            break;
        }
    }
    files
}

fn read_one(image: &Path, name: &BackingName, backing: ImageFile) -> Result<Layer, Error> {
    let size = backing.size()?;
    let (shown, of) = (backing.path.display(), image.display());
    let mut magic = [0; 4];
    read_start(&backing, &mut magic)?;
    let other = match name.format.as_deref() {
        Some("qcow2") => return Layer::with_tables(backing),
        // The header could be written by a guest that had the raw image: as qcow2, it would make the host
        // open other files.
        None if magic == MAGIC => {
            return Err(unsupported(format!(
                "{of} does not record the format of its backing file, which looks like qcow2; if it is, run \
                `qemu-img rebase -u -b {} -F qcow2 {}`",
                shell_word(&backing.path),
                shell_word(image)
            )));
        }
        None => backing.detect_format(size),
        format => format.filter(|format| *format != "raw"),
    };
    match other {
        None => Ok(Layer { file: Arc::new(backing), tables: None, size, align: 1, file_bytes: size }),
        Some(other) => Err(unsupported(format!(
            "{shown}, the backing file of {of}, is a {other} image, which is not supported"
        ))),
    }
}

/// Makes `backing`, an image with `header`, use the symbolic link by which it was opened as its path, if it
/// names its own backing file by a relative name. As in QEMU, such a name is relative to the directory of the
/// link, not of the image.
fn prefer_link(backing: &mut ImageFile, header: &Header) {
    let is_relative =
        |name: &BackingName| backing_path(&backing.path, &name.name).is_ok_and(Path::is_relative);
    if header.backing.as_ref().is_some_and(is_relative)
        && let Some(link) = backing.link.take()
    {
        backing.path = link;
    }
}

/// Refuses an image whose path is a symbolic link ([`prefer_link`]) as the backing file of a new overlay.
pub(super) fn check_is_no_link(path: &Path) -> Result<(), Error> {
    if !std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_symlink()) {
        return Ok(());
    }
    Err(unsupported(format!(
        "{} is a symbolic link, and the relative name of its backing file is resolved from the directory \
         of the link, which a new overlay cannot record",
        path.display()
    ))
    .with_hint("attach the image by its own path"))
}

fn backing_path<'a>(image: &Path, name: &'a [u8]) -> Result<&'a Path, Error> {
    let name = name.strip_prefix(b"file:").unwrap_or(name);
    // As in QEMU, a colon before the first slash ends the name of a protocol.
    if name.split(|byte| *byte == b'/').next().unwrap_or_default().contains(&b':') {
        return Err(unsupported(format!(
            "{} has the backing file {:?}, which is not a path of this machine",
            image.display(),
            String::from_utf8_lossy(name)
        )));
    }
    Ok(Path::new(OsStr::from_bytes(name)))
}

/// Opens a file in `directory`, the directory of `image`, or below it. The kernel (`RESOLVE_BENEATH`) ensures
/// that no `..` and no symbolic link leads out of `directory`, even if the tree changes meanwhile.
fn open_beneath(directory: &Path, image: &Path, path: &Path) -> Result<ImageFile, Error> {
    let refused = || {
        let message = format!(
            "{} has the backing file {}, which is not in its directory or below",
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
    let path_only = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let at = openat(CWD, directory, path_only, FileMode::empty()).map_err(failed)?;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    let open = |path: &Path, flags| openat2(&at, path, flags, FileMode::empty(), resolve).map_err(failed);
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = File::from(open(within, flags)?);
    let name = name_now(&file);
    let mut backing = ImageFile::of_open(file, name.unwrap_or_else(|| directory.join(within)))?;
    // The kernel resolves the parent directory under the same rule. The last component may be a symbolic
    // link, and then the file itself is in another directory.
    let parent = within.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let link = name_now(&File::from(open(parent, path_only)?)).zip(within.file_name());
    backing.link =
        link.map(|(parent, name)| parent.join(name)).filter(|link| link.parent() != backing.path.parent());
    Ok(backing)
}
