//! Keeping dirty bitmaps in the image: they are marked as in use before the first write, and written when there are
//! no more. An image whose daemon was killed in between has them marked still, and nobody trusts them.

use std::fs::File;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use crate::bitmap::{Bitmap, BitmapState, bytes_for};
use crate::buffer::IoBuffer;
use crate::error::{Error, ErrorKind, IoResult, Status};
use crate::sync::{Mutex, lock as locked};

use super::allocate::{Clusters, allocate, change_header, free_unused};
use super::bitmaps::{NewEntry, Stored, change_extension, entry_name, entry_without_cluster, read};
use super::blocking;
use super::commit::{commit, sync};
use super::env::{Env, Shared};
use super::header::{AUTOCLEAR_AT, AUTOCLEAR_BITMAPS, BitmapsExtension, Header};

/// How often clusters that follow each other are searched for.
const SEARCHES_MAX: usize = 64;

/// The bitmaps in the image.
#[derive(Default)]
pub(super) struct Kept {
    /// Their clusters in the file.
    clusters: Vec<u64>,
    /// Entries of the directory that stay as they are.
    others: Vec<Vec<u8>>,
    /// They are marked as in use, or there are none.
    marked: bool,
}

/// The image whose bitmaps they are.
pub(super) struct Image<'a> {
    pub shared: &'a Arc<Shared>,
    pub files: &'a [Arc<File>],
    pub path: &'a Path,
    /// It is open for writing.
    pub writable: bool,
    pub kept: &'a Mutex<Kept>,
}

impl Image<'_> {
    /// Loads the dirty bitmaps of the image, and marks them as in use there if it is open for writing: until
    /// [`Image::store_bitmaps`]. To be called once, before a queue is opened. Returns the bitmaps, and warnings.
    ///
    /// # Errors
    /// Those of the file. A damaged directory is none: there are no bitmaps then, and a warning.
    pub fn load_bitmaps(&self) -> Result<(Vec<Bitmap>, Vec<String>), Error> {
        let shown = self.path.display();
        let (header, size) = {
            let state = locked(&self.shared.state);
            let tables = state.top().map_err(|e| Error::system(format!("cannot read {shown}"), e))?;
            (tables.header.clone(), tables.header.size)
        };
        let is_trusted = header.autoclear & AUTOCLEAR_BITMAPS != 0;
        let Some(extension) = header.bitmaps.as_ref().filter(|_| is_trusted) else {
            let lost = header.bitmaps.as_ref().map(|_| {
                format!("the dirty bitmaps in {shown} are lost: a program wrote to it that does not keep them up to date")
            });
            self.ignore_bitmaps(&header)?;
            return Ok((Vec::new(), Vec::from_iter(lost)));
        };
        let Some(file) = self.files.first() else { return Ok((Vec::new(), Vec::new())) };
        let Stored { bitmaps, clusters, marked, others, mut warnings } =
            match read(file, self.path, &header, size) {
                Ok(stored) => stored,
                Err(error) if error.kind() == ErrorKind::Format => {
                    self.ignore_bitmaps(&header)?;
                    return Ok((
                        Vec::new(),
                        vec![format!("the dirty bitmaps in {shown} are damaged: {error}")],
                    ));
                }
                Err(error) => return Err(error),
            };
        for bitmap in bitmaps.iter().filter(|bitmap| bitmap.state() == BitmapState::Inconsistent) {
            warnings.push(format!(
                "the bitmap {} in {shown} is inconsistent: it was not closed; remove it, and make a full backup",
                bitmap.name()
            ));
        }
        if self.writable {
            let place = extension.directory;
            self.run("mark its bitmaps as in use", async move |env| {
                if header.autoclear != AUTOCLEAR_BITMAPS {
                    change_header(&env, AUTOCLEAR_AT, &AUTOCLEAR_BITMAPS.to_be_bytes()).await?;
                }
                write(&env, place, &marked).await?;
                sync(&env).await
            })?;
        }
        *locked(self.kept) = Kept { clusters, others, marked: true };
        Ok((bitmaps, warnings))
    }

    /// Marks bitmaps of the image as not kept up to date.
    fn ignore_bitmaps(&self, header: &Header) -> Result<(), Error> {
        locked(self.kept).marked = true;
        if header.autoclear == 0 || !self.writable {
            return Ok(());
        }
        self.run("change its header", async |env| change_header(&env, AUTOCLEAR_AT, &[0; 4]).await)
    }

    /// Marks bitmaps that nobody loaded as not kept up to date: the image is about to be written to.
    ///
    /// # Errors
    /// That of the file.
    pub fn mark_bitmaps(&self) -> Result<(), Error> {
        if locked(self.kept).marked {
            return Ok(());
        }
        let header = locked(&self.shared.state).top().map(|tables| tables.header.clone());
        header.map_or(Ok(()), |header| self.ignore_bitmaps(&header))
    }

    /// Whether the image has room for bitmaps.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`]: why not.
    pub fn check_bitmaps(&self) -> Result<(), Error> {
        let of_image = |e: Error| Error::new(e.kind(), format!("{}: {e}", self.path.display()));
        if !self.writable {
            return Err(of_image(Error::new(ErrorKind::Unsupported, "it is read-only")));
        }
        let head = Arc::new(Mutex::new(Vec::new()));
        let copy = head.clone();
        self.run("read its header", async move |env| {
            *locked(&copy) = read_head(&env).await?;
            Ok(())
        })?;
        let extension = BitmapsExtension { count: 1, directory_bytes: 0, directory: 0 };
        change_extension(&locked(&head), Some(&extension)).map_err(of_image).map(drop)
    }

    /// Writes the bitmaps to the image, durably, in the place of those that it has. No queue does I/O meanwhile, and
    /// nothing is written to the device afterwards.
    ///
    /// # Errors
    /// Those of the file; the bitmaps that it has stay marked as in use then.
    pub fn store_bitmaps(&self, bitmaps: &[Arc<Bitmap>]) -> Result<(), Error> {
        let has_extension =
            locked(&self.shared.state).top().is_ok_and(|tables| tables.header.bitmaps.is_some());
        if !self.writable || bitmaps.is_empty() && !has_extension {
            return Ok(());
        }
        let (bitmaps, old) = (bitmaps.to_vec(), std::mem::take(&mut locked(self.kept).clusters));
        let others = locked(self.kept).others.clone();
        let new = Arc::new(Mutex::new(Vec::new()));
        let clusters = new.clone();
        let stored = self.run("keep the bitmaps", async move |env| {
            let mut taken = Vec::new();
            let stored = exchange(&env, &bitmaps, &others, &mut taken, old).await;
            if stored.is_err() {
                for clusters in taken {
                    free_unused(&env, clusters).await;
                }
                return stored;
            }
            let cluster = 1 << env.state().cluster_bits();
            let each = |run: Clusters| (0..run.count).map(move |number| run.host + number * cluster);
            locked(&clusters).extend(taken.into_iter().flat_map(each));
            Ok(())
        });
        locked(self.kept).clusters = std::mem::take(&mut locked(&new));
        stored
    }

    /// Runs a task while no queue does I/O.
    fn run<F: Future<Output = IoResult> + 'static>(
        &self,
        what: &str,
        task: impl FnOnce(Rc<Env>) -> F,
    ) -> Result<(), Error> {
        blocking::run(self.shared, self.files, &format!("{what} in {}", self.path.display()), task)
    }
}

/// Writes bitmaps to clusters that are `taken`, has the header name them beside the `others`, and releases the `old`
/// clusters.
async fn exchange(
    env: &Env,
    bitmaps: &[Arc<Bitmap>],
    others: &[Vec<u8>],
    taken: &mut Vec<Clusters>,
    old: Vec<u64>,
) -> IoResult {
    let (size, cluster) = {
        let state = env.state();
        let header = &state.top()?.header;
        (header.size, header.cluster_bytes())
    };
    // A new one may have got the name of one that is not known here.
    let is_kept =
        |other: &&Vec<u8>| bitmaps.iter().all(|new| Some(new.name().as_bytes()) != entry_name(other));
    let others: Vec<&Vec<u8>> = others.iter().filter(is_kept).collect();
    let mut directory: Vec<u8> = others.iter().flat_map(|entry| entry.iter().copied()).collect();
    for bitmap in bitmaps {
        // One of a larger image, which was exchanged for this one.
        let cut = (bitmap.size() > size).then(|| bitmap.resized(size)).transpose();
        let cut = cut.map_err(|_| Status::NotSupported)?;
        let bitmap = cut.as_ref().unwrap_or(bitmap.as_ref());
        let clusters = bytes_for(size, bitmap.granularity()).div_ceil(cluster);
        let mut table = vec![0; clusters as usize];
        for (entry, bits) in table.iter_mut().zip(bitmap.to_bytes().chunks(cluster as usize)) {
            *entry = match entry_without_cluster(bits, bits.len() as u64 == cluster) {
                Some(entry) => entry,
                None => write_new(env, bits, taken).await?,
            };
        }
        let table: Vec<u8> = table.iter().flat_map(|entry| entry.to_be_bytes()).collect();
        let table = write_new(env, &table, taken).await?;
        directory.extend(NewEntry { bitmap, table, clusters }.to_bytes());
    }
    let extension = match (bitmaps.len() + others.len()) as u32 {
        0 => None,
        count => {
            let place = write_new(env, &directory, taken).await?;
            Some(BitmapsExtension { count, directory_bytes: directory.len() as u64, directory: place })
        }
    };
    // With the refcounts, what was written is durable.
    commit(env, true).await?;
    let head =
        change_extension(&read_head(env).await?, extension.as_ref()).map_err(|_| Status::NotSupported)?;
    let written = write(env, 0, &head).await;
    if written.is_err() {
        // The file may have either.
        env.state().writer.failed = true;
    }
    written?;
    sync(env).await?;
    {
        let mut state = env.state();
        let is_other = |offset: &u64| state.check_target(*offset..*offset + cluster).is_ok();
        let old: Vec<u64> = old.into_iter().filter(is_other).collect();
        state.writer.released.extend(old);
        let header = &mut state.top_mut()?.header;
        header.autoclear = if extension.is_some() { AUTOCLEAR_BITMAPS } else { 0 };
        header.bitmaps = extension;
    }
    // The old clusters stay allocated if this fails, which harms nobody.
    let _ = commit(env, true).await;
    Ok(())
}

/// Writes `bytes` to new clusters that follow each other; returns where.
async fn write_new(env: &Env, bytes: &[u8], taken: &mut Vec<Clusters>) -> Result<u64, Status> {
    let bits = env.state().cluster_bits();
    let count = (bytes.len() as u64).div_ceil(1 << bits);
    let mut shorter = Vec::new();
    let mut found = Err(Status::NoSpace);
    for search in 0..SEARCHES_MAX {
        if search == SEARCHES_MAX / 2 {
            // There are only short holes: behind the end of a file there is room.
            let writer = &mut env.state().writer;
            writer.next_free = match writer.fresh_from {
                u64::MAX => writer.next_free,
                fresh_from => writer.next_free.max(fresh_from),
            };
        }
        match allocate(env, count).await {
            Ok(clusters) if clusters.count == count => {
                found = Ok(clusters);
                break;
            }
            Ok(clusters) => shorter.push(clusters),
            Err(status) => {
                found = Err(status);
                break;
            }
        }
    }
    for clusters in shorter {
        free_unused(env, clusters).await;
    }
    let clusters = found?;
    taken.push(clusters);
    env.state().cache.forget(0, clusters.host..clusters.host + (count << bits));
    let mut whole = bytes.to_vec();
    whole.resize((count << bits) as usize, 0);
    write(env, clusters.host, &whole).await?;
    Ok(clusters.host)
}

async fn write(env: &Env, offset: u64, bytes: &[u8]) -> IoResult {
    let align = env.state().layers[0].align.max(512) as usize;
    let mut buffer = IoBuffer::zeroed(bytes.len().next_multiple_of(align));
    buffer[..bytes.len()].copy_from_slice(bytes);
    env.io.run(env.write_op(offset).with_buffer(buffer)).await.map(drop)
}

/// Reads the first cluster.
async fn read_head(env: &Env) -> Result<Vec<u8>, Status> {
    let cluster = 1 << env.state().cluster_bits();
    let mut read = env.io.run(env.read_op(0, 0).with_buffer(IoBuffer::zeroed(cluster))).await?;
    Ok(read.buffers.pop().ok_or(Status::Io)?.to_vec())
}
