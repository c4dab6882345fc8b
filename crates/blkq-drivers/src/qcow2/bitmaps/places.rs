//! The clusters of dirty bitmaps in the image. A bitmap gets clusters for all of its bits as soon as it is
//! added, so that saving it cannot fail for lack of space. The directory names it, marked as in use, until
//! the bits are written.
//!
//! The bits are written when the device is detached. If the daemon is killed before that, the bitmap stays marked as in
//! use, so that no program trusts it.

use std::collections::{BTreeSet, HashSet};
use std::path::Path;
use std::sync::Arc;

use blkq::bitmap::Bitmap;
use blkq::sync::{Mutex, lock as locked};
use blkq::{Error, ErrorKind, IoBuffer, IoResult, Status};

use super::format::{BitmapEntry, Layout, entry_name, plan_extension, read};
use crate::bitmaps::{BitmapFormat, Loaded};
use crate::errors::{malformed, unsupported};
use crate::qcow2::format::{AUTOCLEAR_AT, AUTOCLEAR_BITMAPS, BitmapsExtension};
use crate::qcow2::io::allocate::{Clusters, allocate_apart, change_header, free_unused};
use crate::qcow2::io::env::{self, Env, Shared};
use crate::qcow2::io::flush_metadata::{flush_metadata, refcount_of, sync};
use crate::qcow2::io::operations::Op;

/// Attempts to find contiguous clusters for a table or directory.
const SEARCHES_MAX: usize = 64;
const WRITE_BYTES: usize = 1 << 20;

#[derive(Clone)]
struct Place {
    named: BitmapEntry,
    table: Clusters,
    bits: Vec<Clusters>,
}

#[derive(Clone, Default)]
pub struct Places {
    /// The bitmaps in the image are marked as in use, or the image has none.
    pub marked: bool,
    directory: Option<Clusters>,
    places: Vec<Place>,
    /// Clusters of loaded bitmaps that could not be adopted; released once a new directory is written.
    loaded: Vec<u64>,
    /// Directory entries that blkq does not know. They stay unchanged.
    others: Vec<Vec<u8>>,
    /// The bits may be in the file: the directory may name the bitmaps as not in use.
    stored: bool,
}

impl Places {
    /// Whether the directory names exactly `named`, all marked as in use.
    pub fn has(&self, named: &[BitmapEntry]) -> bool {
        let is_empty = named.is_empty() && self.others.is_empty() && self.loaded.is_empty();
        let is_there = self.directory.is_some() || is_empty;
        // QEMU may write them in another order.
        let are_like = named.iter().all(|named| self.places.iter().any(|place| place.named.is_like(named)));
        is_there && !self.stored && self.places.len() == named.len() && are_like
    }

    /// The first name in `named` that an unknown directory entry has too.
    pub fn find_other<'a>(&self, named: &'a [BitmapEntry]) -> Option<&'a str> {
        let has = |name: &&str| self.others.iter().any(|other| entry_name(other) == Some(name.as_bytes()));
        named.iter().map(|named| &named.name[..]).find(has)
    }

    /// Returns these places for [`store`], with the properties in `named`, and notes that the file may have
    /// the bits.
    pub fn begin_store(&mut self, named: Vec<BitmapEntry>) -> Places {
        self.stored = true;
        for named in named {
            if let Some(place) = self.places.iter_mut().find(|place| place.named.name == named.name) {
                place.named = named.in_place_of(&place.named);
            }
        }
        self.clone()
    }

    fn directory(&self, cluster: u64, in_use: bool) -> Vec<u8> {
        let mut directory = self.others.concat();
        for Place { named, table, .. } in &self.places {
            directory.extend(named.to_bytes(table.host, cluster, in_use));
        }
        directory
    }

    fn hosts(&self, cluster: u64) -> Vec<u64> {
        let of_bitmap = |place: &Place| [&[place.table], &place.bits[..]].concat();
        let runs = self.directory.into_iter().chain(self.places.iter().flat_map(of_bitmap));
        runs.flat_map(|run| run.hosts(cluster)).collect()
    }
}

/// Adopts the clusters of loaded bitmaps, which are marked as in use, for `named`. This needs clusters for
/// all bits that nothing else uses; else none is adopted, and all bitmaps get new clusters.
pub async fn adopt(env: &Env, layout: Layout, named: Vec<BitmapEntry>) -> Places {
    let cluster = 1 << env.state().cluster_bits();
    let run =
        |host: u64, bytes: usize| Clusters { host, count: (bytes as u64).div_ceil(cluster), fresh: false };
    let mut adopted = Places { others: layout.others.clone(), ..Places::default() };
    adopted.directory = Some(run(layout.directory, layout.marked.len()));
    let mut are_whole = true;
    for (mut named, (table, clusters)) in named.into_iter().zip(layout.tables) {
        if !named.has_bits() {
            named.bytes = clusters.len() as u64 * cluster;
        }
        are_whole &= clusters.iter().all(|host| (*host != 0) == named.has_bits());
        let table = run(table, clusters.len() * 8);
        let hosts = if named.has_bits() { &clusters[..] } else { &[] };
        let parts = hosts.chunk_by(|one, next| one + cluster == *next);
        let bits = parts.map(|part| run(part[0], part.len() * cluster as usize)).collect();
        adopted.places.push(Place { named, table, bits });
    }
    let is_same = adopted.directory(cluster, true) == layout.marked;
    if are_whole && is_same && is_exclusive(env, &adopted, cluster).await {
        return adopted;
    }
    Places { loaded: layout.clusters, others: layout.others, ..Places::default() }
}

/// Whether only these bitmaps use the clusters, as far as the image says. Also reserves space for all bits.
async fn is_exclusive(env: &Env, places: &Places, cluster: u64) -> bool {
    let (hosts, mut seen) = (places.hosts(cluster), HashSet::new());
    let tables = env.state().tables_among(hosts.iter().copied());
    if !tables.is_empty() || !hosts.iter().all(|host| seen.insert(*host)) {
        return false;
    }
    for host in hosts {
        if refcount_of(env, host).await != Some(1) {
            return false;
        }
    }
    for run in places.places.iter().flat_map(|place| &place.bits) {
        // In a copy of an image, clusters may be holes.
        match env.io.submit(Op::extend(run.host, run.count * cluster)).await {
            Ok(_) | Err(Status::NotSupported) => {}
            Err(_) => return false,
        }
    }
    true
}

/// Writes a new directory that names `named`, marked as in use and each with space for its bits, and makes
/// the header refer to it, durably. Returns the new places; after an error, the image keeps the old ones. Old
/// clusters are kept where they suit, and else released.
pub async fn exchange(env: &Env, old: Places, named: Vec<BitmapEntry>) -> Result<Places, Status> {
    let mut taken = Vec::new();
    let exchanged = write_directory(env, &old, named, &mut taken).await;
    let Ok(new) = exchanged else {
        // After a failed write of the header, the header on disk may refer to the new clusters.
        let taken = if env.state().writer.failed { Vec::new() } else { taken };
        for clusters in taken {
            free_unused(env, clusters).await;
        }
        return exchanged;
    };
    {
        let mut state = env.state();
        let cluster = 1 << state.cluster_bits();
        let kept = HashSet::<u64>::from_iter(new.hosts(cluster));
        // In a damaged image, tables may be in these clusters, or a cluster may be named twice.
        let released: BTreeSet<u64> = old.hosts(cluster).into_iter().chain(old.loaded).collect();
        let tables = state.tables_among(released.iter().copied());
        let is_unused = |host: &u64| !kept.contains(host) && !tables.contains(host);
        state.writer.released.extend(released.into_iter().filter(is_unused));
    }
    // If this fails, the old clusters stay allocated. They are wasted, but nothing is damaged.
    let _ = flush_metadata(env, true).await;
    Ok(new)
}

async fn write_directory(
    env: &Env,
    old: &Places,
    named: Vec<BitmapEntry>,
    taken: &mut Vec<Clusters>,
) -> Result<Places, Status> {
    let cluster = 1 << env.state().cluster_bits();
    let mut new = Places { others: old.others.clone(), ..Places::default() };
    for named in named {
        let suits = |one: &&Place| one.named.name == named.name && one.named.has_place_of(&named, cluster);
        let place = match old.places.iter().find(suits) {
            Some(place) => Place { named: named.in_place_of(&place.named), ..place.clone() },
            None => make_place(env, named, taken).await?,
        };
        new.places.push(place);
    }
    let directory = new.directory(cluster, true);
    let extension = match (new.places.len() + new.others.len()) as u32 {
        0 => None,
        count => {
            let place = write_new(env, &directory, taken).await?;
            new.directory = Some(place);
            Some(BitmapsExtension { count, directory_bytes: directory.len() as u64, directory: place.host })
        }
    };
    // The flush also makes the new directory and tables durable, before the header refers to them.
    flush_metadata(env, true).await?;
    write_extension(env, extension).await?;
    Ok(new)
}

/// Changes the header to name the directory of `extension`, or none, durably. Fails with
/// [`Status::NotSupported`] if the header has no room.
pub async fn write_extension(env: &Env, extension: Option<BitmapsExtension>) -> IoResult {
    let changes =
        plan_extension(&read_head(env).await?, extension.as_ref()).map_err(|_| Status::NotSupported)?;
    for (at, bytes) in changes {
        let changed = change_header(env, at, &bytes).await;
        // After an error, the header on disk may be the old or the new one.
        env.state().writer.failed |= changed.is_err();
        changed?;
    }
    let mut state = env.state();
    let header = &mut state.top.header;
    header.autoclear = if extension.is_some() { AUTOCLEAR_BITMAPS } else { 0 };
    header.bitmaps = extension;
    Ok(())
}

async fn make_place(env: &Env, named: BitmapEntry, taken: &mut Vec<Clusters>) -> Result<Place, Status> {
    let cluster = 1 << env.state().cluster_bits();
    let clusters = named.bytes.div_ceil(cluster);
    let (mut bits, mut table) = (Vec::new(), Vec::new());
    while named.has_bits() && (table.len() as u64) < clusters {
        if env.state().is_crowded() {
            flush_metadata(env, false).await?;
        }
        let run = allocate_apart(env, clusters - table.len() as u64).await?;
        taken.push(run);
        bits.push(run);
        table.extend(run.hosts(cluster));
        make_room(env, run, cluster).await?;
    }
    table.resize(clusters as usize, 0);
    let table: Vec<u8> = table.iter().flat_map(|entry| entry.to_be_bytes()).collect();
    Ok(Place { named, table: write_new(env, &table, taken).await?, bits })
}

/// Reserves space in the file for new clusters; writes zeroes where that is not supported.
async fn make_room(env: &Env, run: Clusters, cluster: u64) -> IoResult {
    let (start, end) = (run.host, run.host + run.count * cluster);
    env.state().cache.forget(0, start..end);
    match env.io.submit(Op::extend(start, end - start)).await {
        Err(Status::NotSupported) => {
            for at in (start..end).step_by(WRITE_BYTES) {
                env.io.submit(env.write_op(at).with_zeroes((end - at).min(WRITE_BYTES as u64))).await?;
            }
            Ok(())
        }
        reserved => reserved.map(drop),
    }
}

/// Writes the bits of `bitmaps` to their clusters, and then marks them as not in use, durably; after an error
/// they stay marked as in use. Nothing may be written to the device afterwards.
pub async fn store(env: &Env, places: &Places, bitmaps: &[Arc<Bitmap>]) -> IoResult {
    let size = env.state().top.header.size;
    let cluster = 1 << env.state().cluster_bits();
    for place in places.places.iter().filter(|place| place.named.has_bits()) {
        let named = bitmaps.iter().find(|bitmap| bitmap.name() == place.named.name);
        let bitmap = named.ok_or(Status::Io)?;
        // The bitmap may come from a larger image that was replaced by this one.
        let cut = (bitmap.size() > size).then(|| bitmap.resized(size)).transpose();
        let cut = cut.map_err(|_| Status::NotSupported)?;
        let mut bits = cut.as_ref().unwrap_or(bitmap.as_ref()).to_bytes();
        bits.resize((place.named.bytes.div_ceil(cluster) * cluster) as usize, 0);
        let mut rest = &bits[..];
        for run in &place.bits {
            let (part, after) = rest.split_at_checked((run.count * cluster) as usize).ok_or(Status::Io)?;
            rest = after;
            for (number, bytes) in part.chunks(WRITE_BYTES).enumerate() {
                write(env, run.host + (number * WRITE_BYTES) as u64, bytes).await?;
            }
        }
    }
    sync(env).await?;
    let Some(directory) = places.directory else { return Ok(()) };
    write(env, directory.host, &places.directory(cluster, false)).await?;
    sync(env).await
}

async fn write_new(env: &Env, bytes: &[u8], taken: &mut Vec<Clusters>) -> Result<Clusters, Status> {
    let bits = env.state().cluster_bits();
    let count = (bytes.len() as u64).div_ceil(1 << bits);
    let mut shorter = Vec::new();
    let found = loop {
        match allocate_apart(env, count).await {
            Ok(clusters) if clusters.count < count => shorter.push(clusters),
            found => break found,
        }
        if shorter.len() == SEARCHES_MAX {
            break Err(Status::NoSpace);
        }
        let writer = &mut env.state().writer;
        if shorter.len() == SEARCHES_MAX / 2 && writer.fresh_from < u64::MAX {
            // The searches found only short runs. Beyond the end of the file a long one is free.
            writer.next_free = writer.next_free.max(writer.fresh_from);
        }
    };
    for clusters in shorter {
        free_unused(env, clusters).await;
    }
    let clusters = found?;
    taken.push(clusters);
    env.state().cache.forget(0, clusters.host..clusters.host + (count << bits));
    let mut whole = bytes.to_vec();
    whole.resize((count << bits) as usize, 0);
    write(env, clusters.host, &whole).await?;
    Ok(clusters)
}

pub async fn write(env: &Env, offset: u64, bytes: &[u8]) -> IoResult {
    let align = env.state().layers[0].align.max(512) as usize;
    let mut buffer = IoBuffer::zeroed(bytes.len().next_multiple_of(align));
    buffer[..bytes.len()].copy_from_slice(bytes);
    env.io.submit(env.write_op(offset).with_buffer(buffer)).await.map(drop)
}

pub async fn read_head(env: &Env) -> Result<Vec<u8>, Status> {
    let cluster = 1 << env.state().cluster_bits();
    Ok(env.read(0, 0, cluster).await?.to_vec())
}

pub struct Qcow2Bitmaps {
    shared: Arc<Shared>,
    writable: bool,
    places: Mutex<Places>,
}

impl Qcow2Bitmaps {
    pub fn new(shared: &Arc<Shared>, writable: bool) -> Qcow2Bitmaps {
        Qcow2Bitmaps { shared: Arc::clone(shared), writable, places: Mutex::default() }
    }

    /// Rejects a directory that overlaps a table of the image, because the directory is about to be written.
    fn check_directory(&self, loaded: Loaded<Layout>) -> Result<Loaded<Layout>, Error> {
        let state = locked(&self.shared.state);
        let range = |layout: &Layout| layout.directory..layout.directory + layout.marked.len() as u64;
        let range = loaded.place.as_ref().map_or(0..0, range);
        match state.tables_among(range.step_by(1 << state.cluster_bits())).is_empty() {
            true => Ok(loaded),
            false => Err(malformed("their directory overlaps another table of the image")),
        }
    }

    /// Clears the autoclear bit, so that no program trusts the bitmaps in the image.
    fn ignore_bitmaps(&self) -> Result<(), Error> {
        locked(&self.places).marked = true;
        if locked(&self.shared.state).top.header.autoclear == 0 || !self.writable {
            return Ok(());
        }
        self.shared.run("change its header", async |env| change_header(env, AUTOCLEAR_AT, &[0; 4]).await)
    }

    /// Marks bitmaps that were not loaded as outdated. To be called before the image is written to.
    pub fn mark_bitmaps(&self) -> Result<(), Error> {
        let marked = locked(&self.places).marked;
        if marked { Ok(()) } else { self.ignore_bitmaps() }
    }

    /// Makes the image name `bitmaps`, for a device of `size` bytes, besides entries that blkq does not know.
    fn reserve_for(&self, bitmaps: &[&Bitmap], size: u64) -> Result<(), Error> {
        let named: Vec<BitmapEntry> = bitmaps.iter().map(|bitmap| BitmapEntry::of(bitmap, size)).collect();
        if locked(&self.places).has(&named) {
            return Ok(());
        }
        if let Some(name) = locked(&self.places).find_other(&named) {
            let shown = self.path().display();
            return Err(unsupported(format!(
                "{shown} already has a bitmap {name}, of a kind that blkq does not know"
            ))
            .with_hint("detach the device, and remove the bitmap with `qemu-img bitmap`"));
        }
        self.change_places("make room for the bitmaps", async move |env, old| exchange(env, old, named).await)
    }

    /// Runs a task that gets the present places and returns the new ones, and stores these.
    fn change_places(
        &self,
        what: &str,
        task: impl AsyncFnOnce(&Env, Places) -> Result<Places, Status> + 'static,
    ) -> Result<(), Error> {
        let old = locked(&self.places).clone();
        let mut places = self.shared.run(what, async move |env| task(env, old).await)?;
        places.marked = true;
        *locked(&self.places) = places;
        Ok(())
    }

    fn size(&self) -> u64 {
        locked(&self.shared.state).top.header.size
    }

    /// Removes all bitmaps from the header, durably. Their clusters stay allocated.
    pub fn remove_bitmaps(&self) -> Result<(), Error> {
        if locked(&self.shared.state).top.header.bitmaps.is_none() {
            return Ok(());
        }
        self.shared.run("remove the bitmaps", async |env| write_extension(env, None).await)
    }
}

impl BitmapFormat for Qcow2Bitmaps {
    type Place = Layout;

    const INCONSISTENT: &'static str = "the image was not closed";

    fn path(&self) -> &Path {
        self.shared.path()
    }

    fn is_writable(&self) -> bool {
        self.writable
    }

    /// If the bitmaps cannot be trusted, clears the autoclear bit. Must be called once, before a queue is opened.
    fn read(&self) -> Result<Loaded<Layout>, Error> {
        let shown = self.path().display();
        let header = locked(&self.shared.state).top.header.clone();
        let unusable = if header.bitmaps.is_none() {
            None
        } else if header.autoclear & AUTOCLEAR_BITMAPS == 0 {
            Some(format!(
                "the dirty bitmaps in {shown} are lost, because a program wrote to it without updating them"
            ))
        } else {
            let loaded = read(&self.shared.files[0], &header, header.size);
            match loaded.and_then(|loaded| self.check_directory(loaded)) {
                Ok(loaded) => return Ok(loaded),
                Err(error) if error.kind() == ErrorKind::Format => {
                    Some(format!("the dirty bitmaps in {shown} are damaged: {error}"))
                }
                Err(error) => return Err(error),
            }
        };
        self.ignore_bitmaps()?;
        Ok(Loaded::nothing(unusable))
    }

    fn mark(&self, layout: Layout, bitmaps: &[&Bitmap]) -> Result<Option<Error>, Error> {
        let (size, autoclear) = (self.size(), locked(&self.shared.state).top.header.autoclear);
        let named: Vec<BitmapEntry> = bitmaps.iter().map(|bitmap| BitmapEntry::of(bitmap, size)).collect();
        self.change_places("mark its bitmaps as in use", async move |env, _| {
            if autoclear != AUTOCLEAR_BITMAPS {
                change_header(env, AUTOCLEAR_AT, &AUTOCLEAR_BITMAPS.to_be_bytes()).await?;
            }
            write(env, layout.directory, &layout.marked).await?;
            sync(env).await?;
            Ok(adopt(env, layout, named).await)
        })?;
        Ok(self.reserve_for(bitmaps, size).err())
    }

    fn check(&self) -> Result<(), Error> {
        // Without the path of the image, which `ImageBitmaps` adds to the error.
        let head = env::run(&self.shared, "read its header", async |env| read_head(env).await)?;
        let extension = BitmapsExtension { count: 1, directory_bytes: 0, directory: 0 };
        plan_extension(&head, Some(&extension)).map(drop)
    }

    /// Fails with [`ErrorKind::Unsupported`] if the image has an unknown entry with the name of one of `bitmaps`.
    fn reserve(&self, bitmaps: &[&Bitmap]) -> Result<(), Error> {
        // Before the image grows, the bitmaps already have the new size.
        let size = bitmaps.iter().map(|bitmap| bitmap.size()).fold(self.size(), u64::max);
        self.reserve_for(bitmaps, size)
    }

    fn write(&self, bitmaps: &[Arc<Bitmap>]) -> Result<(), Error> {
        let size = self.size();
        self.reserve_for(&bitmaps.iter().map(|bitmap| &**bitmap).collect::<Vec<_>>(), size)?;
        let named = bitmaps.iter().map(|bitmap| BitmapEntry::of(bitmap, size)).collect();
        let (bitmaps, places) = (bitmaps.to_vec(), locked(&self.places).begin_store(named));
        self.shared.run("save the bitmaps", async move |env| store(env, &places, &bitmaps).await)
    }
}
