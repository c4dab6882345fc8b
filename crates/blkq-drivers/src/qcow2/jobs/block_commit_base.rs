//! The base of a block commit: opened by a process that has the permission, then written by the daemon of the
//! device, and served after the pivot.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blkq::sync::lock as locked;
use blkq::{Driver, Error, IoBuffer, Segment, Tag};

use crate::errors::unsupported;
use crate::image_file::{ImageFile, LockKind, WHOLE_FILE};
use crate::r#loop::LoopDevice;
use crate::options::{BackingChain, Journals};
use crate::qcow2::Qcow2;
use crate::qcow2::chain::{open_one, read_header};
use crate::qcow2::io::env;
use crate::qcow2::io::operations::Memory;
use crate::qcow2::io::write::{Source, write};
use crate::qcow2::io::zero::{Wanted, clear};

/// The files of the base, opened by a process that has the permission.
#[derive(Debug)]
pub struct BaseFiles {
    /// The base, open for reading and writing.
    pub image: File,
    /// The base in a second open file description, read-only, for syncs.
    pub synced: File,
    /// The file `IMAGE.bitmaps` with the dirty bitmaps of a raw base.
    pub bitmaps: Option<File>,
}

/// A base that was opened.
#[derive(Debug)]
pub struct OpenedBase {
    /// Absolute, with all symbolic links resolved unless the image is found through a link that must be kept.
    pub path: PathBuf,
    /// Whether the base is a qcow2 image; else it is raw.
    pub qcow2: bool,
    /// Whether the dirty bitmaps of the base belong into a file of their own: a raw image in a regular file.
    pub has_bitmap_file: bool,
    /// The files of the base, without the bitmap file.
    pub files: BaseFiles,
}

/// Opens the backing file of `image` for [`CommitSource::begin`](crate::qcow2::CommitSource::begin), as the header
/// of `image` names it. The daemon that serves the image may lack the permission for this.
///
/// # Errors
/// [`blkq::ErrorKind::Unsupported`] if the image has no backing file; [`blkq::ErrorKind::BackingFile`] if
/// `allowed` does not admit it; [`blkq::ErrorKind::Claimed`] if the kernel uses it; [`blkq::ErrorKind::Busy`] if
/// another process writes to it; the error of opening one of the files.
pub fn open_base(image: &Path, allowed: BackingChain) -> Result<OpenedBase, Error> {
    let mut top = ImageFile::open(image, true)?;
    let Some(name) = read_header(&mut top)?.backing else {
        let message = format!("{} cannot be committed: it has no backing file", top.path.display());
        return Err(unsupported(message));
    };
    let mut found = open_one(&top.path, &name, allowed)?;
    let qcow2 = name.format.as_deref() == Some("qcow2");
    if qcow2 {
        read_header(&mut found)?;
    }
    let base = found.reopen(true)?;
    let synced = found.reopen(false)?.file;
    base.check_unclaimed(&WHOLE_FILE, false)?;
    base.lock(&WHOLE_FILE, LockKind::Reader)?;
    Ok(OpenedBase {
        path: base.path.clone(),
        qcow2,
        has_bitmap_file: !qcow2 && !base.block_device,
        files: BaseFiles { image: base.file, synced, bitmaps: None },
    })
}

/// The driver of an image, such as the base of a commit, which is served after the pivot.
#[derive(Clone)]
pub enum Target {
    /// A raw image.
    Raw(Arc<LoopDevice>),
    /// A qcow2 image.
    Qcow2(Arc<Qcow2>),
}

impl Target {
    pub(in crate::qcow2) fn driver(&self) -> &dyn Driver {
        match self {
            Target::Raw(raw) => &**raw,
            Target::Qcow2(qcow2) => &**qcow2,
        }
    }

    pub(in crate::qcow2) fn write(&self, position: u64, data: IoBuffer) -> Result<(), Error> {
        match self {
            Target::Raw(raw) => raw.write_now(position, &data),
            Target::Qcow2(qcow2) => qcow2.write_now(position, data),
        }
    }

    pub(in crate::qcow2) fn zero(&self, range: Range<u64>) -> Result<(), Error> {
        match self {
            Target::Raw(raw) => raw.zero_now(range),
            Target::Qcow2(qcow2) => qcow2.shared.run("write zeroes", async move |env| {
                clear(env, range.start, range.end - range.start, Wanted::Zeroes).await
            }),
        }
    }

    pub(in crate::qcow2) fn sync(&self) -> Result<(), Error> {
        match self {
            Target::Raw(raw) => raw.sync(),
            Target::Qcow2(qcow2) => qcow2.sync(),
        }
    }

    /// Writes back what is in memory, as far as possible. The overlay hides the base, so errors are ignored.
    pub(in crate::qcow2) fn close(self) {
        match self {
            Target::Raw(raw) => raw.supersede(),
            Target::Qcow2(qcow2) => _ = qcow2.supersede(),
        }
    }
}

impl Qcow2 {
    /// Writes `data` at `position` of the device, while no queue does I/O.
    fn write_now(&self, position: u64, mut data: IoBuffer) -> Result<(), Error> {
        let (bytes, segment) = (data.len() as u64, Segment::new(data.as_mut_ptr(), data.len() as u32));
        // SAFETY: the buffer outlives `run`, which performs all operations before it returns, and no other
        // request in this environment has the tag.
        let memory = unsafe { Memory::new(Tag(0), vec![segment]) };
        env::run(&self.shared, &format!("write to {}", self.path().display()), async move |env| {
            write(env, position, bytes, Source::Memory(&memory)).await
        })
    }

    /// Opens `files` as the target of a block commit. They are those of the backing file at `path`, and
    /// locked. Extends the base if it is shorter than the device, and marks its persistent bitmaps as in use.
    /// Fails with [`blkq::ErrorKind::Mismatch`] if the base is longer than the device, or was truncated.
    pub(in crate::qcow2) fn open_target(
        &self,
        files: BaseFiles,
        path: PathBuf,
        journals: Option<&Journals>,
    ) -> Result<Target, Error> {
        let size = self.limits().size_bytes();
        let (is_raw, bytes) = {
            let base = &locked(&self.shared.state).layers[1];
            (base.tables.is_none(), base.file_bytes)
        };
        self.shared.files[1].check_not_truncated(bytes)?;
        if is_raw {
            let terms = self.terms.clone();
            // The queue needs an open file description that nothing else uses for syncs, such as that of the overlay. A
            // confined process cannot open another.
            let cannot = |e| Error::system("cannot duplicate a descriptor of the backing file", e);
            let own = self.shared.files[1].file.try_clone().map_err(cannot)?;
            let synced = (files.synced, own);
            return LoopDevice::of_base(files.image, synced, files.bitmaps, path, size, terms)
                .map(|raw| Target::Raw(Arc::new(raw)));
        }
        let qcow2 = self.of_base(files.image, &path, journals)?;
        // The overlay reads the base by the tables that the base had when the overlay was opened, so no
        // cluster of them may be reused.
        locked(&qcow2.shared.state).writer.held = Some(Vec::new());
        if qcow2.limits().size_bytes() < size {
            // After an error, this writes the tables back and ends the journal. The base stays locked meanwhile.
            qcow2.resize(Some(size)).inspect_err(|_| _ = qcow2.supersede())?;
        }
        Ok(Target::Qcow2(Arc::new(qcow2)))
    }
}
