//! The image behind that of a device, for a block commit: a process that may opens it, and the daemon of the device
//! writes it, and then serves it.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use blkq::sync::lock as locked;
use blkq::{Driver, Error, ErrorKind, IoBuffer};

use crate::r#loop::backing::{self, Backing};
use crate::r#loop::base::DeviceTerms;
use crate::r#loop::{LoopDevice, claim};

use super::Qcow2;
use super::blocking::write_data;
use super::chain::{LOCKED, open_one, prefer_link, read_header};
use super::commit::commit;
use super::journal::Journals;
use super::options::BackingChain;
use super::zero::{Wanted, clear};

/// The files of the image behind, as a process that may has opened them.
#[derive(Debug)]
pub struct BaseFiles {
    /// It, for reading and writing.
    pub image: File,
    /// It once more, for syncs.
    pub synced: File,
    /// The file with the dirty bitmaps of a raw image: `IMAGE.bitmaps`.
    pub bitmaps: Option<File>,
}

/// An image behind that was opened.
#[derive(Debug)]
pub struct OpenedBase {
    /// Absolute, without symbolic links.
    pub path: PathBuf,
    /// Whether it is a qcow2 image; else it is raw.
    pub qcow2: bool,
    /// Its dirty bitmaps would be in a file beside it.
    pub has_bitmap_file: bool,
    /// Without that file.
    pub files: BaseFiles,
}

/// Opens the image behind the one at `image`, for [`CommitSource::begin`](super::CommitSource::begin), by what the header
/// says: not the daemon that serves them.
///
/// # Errors
/// [`ErrorKind::Unsupported`] if there is none; [`ErrorKind::BackingFile`] for one that `allowed` does not admit;
/// [`ErrorKind::Claimed`] if the kernel uses it; that of opening one of them.
pub fn open_base(image: &Path, allowed: BackingChain) -> Result<OpenedBase, Error> {
    let mut top = Backing::open(image, true)?;
    let header = read_header(&top)?;
    prefer_link(&mut top, &header);
    let Some(name) = header.backing else {
        let message = format!("{} cannot be committed: it has no backing file", top.path.display());
        return Err(Error::new(ErrorKind::Unsupported, message));
    };
    let found = open_one(&top.path, &name, allowed)?;
    let writable = backing::reopen(&found.file, &found.path, true)?;
    let synced = backing::reopen(&found.file, &found.path, false)?;
    let backing = Backing::of_open(writable, found.path)?;
    claim::check(&backing, &LOCKED, false)?;
    let qcow2 = name.format.as_deref() == Some("qcow2");
    Ok(OpenedBase {
        path: backing.path,
        qcow2,
        has_bitmap_file: !qcow2 && !backing.block_device,
        files: BaseFiles { image: backing.file, synced, bitmaps: None },
    })
}

/// The image behind, as it will be served.
pub enum Target {
    /// A raw one.
    Raw(Box<LoopDevice>),
    /// A qcow2 image.
    Qcow2(Box<Qcow2>),
}

impl Target {
    pub(super) fn driver(&self) -> &dyn Driver {
        match self {
            Target::Raw(raw) => &**raw,
            Target::Qcow2(qcow2) => &**qcow2,
        }
    }

    pub(super) fn write(&self, position: u64, data: IoBuffer) -> Result<(), Error> {
        match self {
            Target::Raw(raw) => raw.write_now(position, &data),
            Target::Qcow2(qcow2) => qcow2.write_now(position, data),
        }
    }

    pub(super) fn zero(&self, range: Range<u64>) -> Result<(), Error> {
        match self {
            Target::Raw(raw) => raw.zero_now(range),
            Target::Qcow2(qcow2) => qcow2.zero_now(range),
        }
    }

    pub(super) fn sync(&self) -> Result<(), Error> {
        match self {
            Target::Raw(raw) => raw.sync(),
            Target::Qcow2(qcow2) => {
                // Also where no table is dirty: data in place may be.
                qcow2.run("make the data durable", async |env| commit(&env, true).await)?;
                qcow2.write_back()
            }
        }
    }

    /// Writes what is in memory of it, as far as that can be, and nothing more.
    pub(super) fn close(self) {
        match self {
            Target::Raw(raw) => raw.supersede(),
            Target::Qcow2(qcow2) => {
                let _ = qcow2.supersede();
            }
        }
    }
}

impl Qcow2 {
    /// Writes to the device while no queue does.
    fn write_now(&self, position: u64, data: IoBuffer) -> Result<(), Error> {
        let what = format!("write to {}", self.path.display());
        write_data(&self.shared, &self.files, &what, position, data)
    }

    /// As [`Qcow2::write_now`], zeroes.
    fn zero_now(&self, range: Range<u64>) -> Result<(), Error> {
        self.run("write zeroes", move |env| async move {
            clear(&env, range.start, range.end - range.start, Wanted::Zeroes).await
        })
    }

    /// Opens `files`, of the image behind at `path`, which is locked, to be written and then served. It is made
    /// longer if it is shorter than the device. Its own dirty bitmaps are marked as in use.
    ///
    /// # Errors
    /// One line: what is wrong, why, and the cure. [`ErrorKind::Mismatch`] if it is longer than the device.
    pub(super) fn open_target(
        &self,
        files: BaseFiles,
        path: PathBuf,
        journals: Option<&Journals>,
    ) -> Result<Target, Error> {
        let size = self.limits().size_bytes();
        let is_raw = locked(&self.shared.state).layers[1].tables.is_none();
        if is_raw {
            let terms = DeviceTerms {
                size,
                logical_block_bytes: self.logical_block_bytes,
                memory_align: self.memory_align,
                requested: self.requested,
                buffered: self.buffered.clone(),
            };
            return LoopDevice::of_base(files.image, files.synced, files.bitmaps, path, terms)
                .map(|raw| Target::Raw(Box::new(raw)));
        }
        let qcow2 = self.of_base(files.image, &path, journals)?;
        // The device over it reads it by the tables that it had when that was opened.
        qcow2.shared.hold();
        let is_shorter = qcow2.limits().size_bytes() < size;
        let resized = if is_shorter { qcow2.resize(Some(size)).map(drop) } else { Ok(()) };
        let target = Target::Qcow2(Box::new(qcow2));
        match resized {
            Ok(()) => Ok(target),
            Err(error) => {
                // It is locked all the time.
                target.close();
                Err(error)
            }
        }
    }
}
