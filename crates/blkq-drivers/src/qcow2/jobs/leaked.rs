//! Frees the clusters that leaked when a process stopped without a journal, as after a power loss: those that are
//! allocated although nothing refers to them. Nothing is changed unless all references in the image are known and
//! agree with the refcounts.
//!
//! A search reads each table once and skips holes. It needs a byte of memory per cluster.

use std::time::{Duration, Instant};

use blkq::sync::lock as locked;
use blkq::{Error, ErrorKind, Status};

use crate::errors::{malformed, unsupported};
use crate::image_file::ImageFile;
use crate::qcow2::Qcow2;
use crate::qcow2::bitmaps::format::read as read_bitmaps;
use crate::qcow2::format::{
    AUTOCLEAR_BITMAPS, EXTENSION_BACKING_FORMAT, EXTENSION_BITMAPS, EXTENSION_FEATURE_NAMES, Entry, Header,
    L1_MAX_BYTES, SNAPSHOT_BYTES, SNAPSHOT_EXTRA_MAX_BYTES, extensions, table_offset, u32_at, u64_at,
};
use crate::qcow2::io::allocate::{Clusters, free_unused};
use crate::qcow2::io::flush_metadata::sync;
use crate::qcow2::io::operations::Op;
use crate::qcow2::tables::state::{State, Tables, refcount};

/// Most clusters that are searched: 8 TiB of clusters of 64 KiB.
const CLUSTERS_MAX: u64 = 128 << 20;
/// The device cannot be used meanwhile.
const TIME_MAX: Duration = Duration::from_secs(20);
/// Most clusters that are freed at once, so that the time is checked in between.
const RUN_MAX: usize = 1 << 16;
/// References to a cluster are counted up to this number.
const REFERENCES_MAX: u8 = 0x7f;
/// Added to the number of references: the cluster is an L2 table, or has leaked if there are none.
const FLAG: u8 = 0x80;

/// The references of an image that no other process writes.
struct References<'a> {
    file: &'a ImageFile,
    deadline: Instant,
    cluster_bits: u32,
    /// Clusters of the file. The last one may be incomplete.
    in_file: u64,
    /// For each cluster that a refcount block covers the number of references, with [`FLAG`].
    counts: Vec<u8>,
}

impl Qcow2 {
    /// Frees the leaked clusters, durably, and returns their number. Until then, a kill or power loss leaves an image
    /// that can be searched again. Fails without a change of the refcounts if the tables cannot be read, contradict
    /// each other or may have references that blkq does not know, and with [`ErrorKind::Mismatch`] if a cluster in use
    /// could be allocated again. After an error while the refcounts are written, some clusters are free.
    pub(in crate::qcow2) fn free_leaked(&self) -> Result<u64, Error> {
        let deadline = Instant::now() + TIME_MAX;
        // The killed process may have written tables that are not durable. A cluster to which only older tables refer
        // must not be freed before them.
        self.shared.run("make its tables durable", async |env| sync(env).await)?;
        let counts = find_leaked(self.file(), &locked(&self.shared.state), deadline)?;
        let leaked = counts.iter().filter(|count| **count == FLAG).count() as u64;
        if leaked == 0 {
            return Ok(0);
        }
        // A journal in another directory may refer to leaked clusters, and must not be applied from now on.
        self.set_tag(self.tag().wrapping_add(1).max(1))?;
        let freed = self.shared.run("free leaked clusters", async move |env| {
            let bits = env.state().cluster_bits();
            let mut next = 0;
            for run in counts.chunk_by(|one, other| one == other).flat_map(|run| run.chunks(RUN_MAX)) {
                let (host, count) = (next << bits, run.len() as u64);
                next += count;
                if run[0] != FLAG {
                    continue;
                }
                if Instant::now() > deadline {
                    return Err(Status::Timeout);
                }
                // As in a flush of the metadata, the space is freed while the clusters are still allocated, and errors
                // are ignored, because not every file system can punch holes.
                let _ = env.io.submit(Op::punch(host, count << bits)).await;
                free_unused(env, Clusters { host, count, fresh: false }).await;
            }
            Ok(())
        });
        self.flush_all_metadata()?;
        freed.map(|()| leaked)
    }
}

/// Returns a number for each cluster: [`FLAG`] if it has leaked, else 0.
fn find_leaked(file: &ImageFile, state: &State, deadline: Instant) -> Result<Vec<u8>, Error> {
    let (Tables { header, l1 }, blocks) = (&state.top, &state.writer.refcount_table);
    check_known(file, header)?;
    let (cluster, per_block) = (header.cluster_bytes(), header.refcounts_per_block());
    let covered = blocks.iter().rposition(|block| *block != 0).map_or(0, |last| last as u64 + 1) * per_block;
    if covered > CLUSTERS_MAX {
        return Err(unsupported(format!("it has refcounts for more than {CLUSTERS_MAX} clusters")));
    }
    let (cluster_bits, in_file) = (header.cluster_bits, file.size()?.div_ceil(cluster));
    let counts = vec![0; covered as usize];
    let mut references = References { file, deadline, cluster_bits, in_file, counts };
    references.add_table(0, cluster)?;
    let [l1_table, refcount_table, _] = header.tables();
    for (_, offset, bytes) in [l1_table, refcount_table] {
        references.add_table(offset, bytes)?;
    }
    for block in blocks.iter().filter(|block| **block != 0) {
        references.add_table(*block, cluster)?;
    }
    references.add_bitmaps(header)?;
    references.add_l2_tables(l1.iter().copied())?;
    references.add_snapshots(header)?;
    references.add_entries()?;
    references.compare(blocks, header.refcount_order)?;
    Ok(references.counts)
}

/// Fails with [`blkq::ErrorKind::Unsupported`] if the header has what blkq does not know and may own clusters.
fn check_known(file: &ImageFile, header: &Header) -> Result<(), Error> {
    let mut head = vec![0; header.cluster_bytes() as usize];
    file.read_padded_at(&mut head, 0, 0).map_err(|e| file.failed("read", e))?;
    if header.autoclear & !AUTOCLEAR_BITMAPS != 0 {
        return Err(unsupported("it has an unknown autoclear feature"));
    }
    let known = [EXTENSION_BACKING_FORMAT, EXTENSION_BITMAPS, EXTENSION_FEATURE_NAMES];
    let all = extensions(&head, u32_at(&head, 100) as usize)?;
    match all.iter().find(|extension| !known.contains(&extension.kind)) {
        Some(unknown) => Err(unsupported(format!("its header extension {:#x} is unknown", unknown.kind))),
        None => Ok(()),
    }
}

impl References<'_> {
    /// Adds `times` references to each cluster of a range of the file.
    fn add(&mut self, offset: u64, bytes: u64, times: u8) -> Result<(), Error> {
        let end = offset.saturating_add(bytes).div_ceil(1 << self.cluster_bits);
        for cluster in offset >> self.cluster_bits..end {
            if cluster >= self.in_file {
                return Err(malformed(format!("cluster {cluster} is used, but is not in the file")));
            }
            let Some(count) = self.counts.get_mut(cluster as usize) else { return Err(too_low(cluster)) };
            let references = (*count & REFERENCES_MAX).saturating_add(times).min(REFERENCES_MAX);
            *count = *count & FLAG | references;
        }
        Ok(())
    }

    /// Adds the references to a table. As nothing else may use its clusters, all these tables together are not larger
    /// than the file.
    fn add_table(&mut self, offset: u64, bytes: u64) -> Result<(), Error> {
        let first = (offset >> self.cluster_bits) as usize;
        let count = bytes.div_ceil(1 << self.cluster_bits) as usize;
        if !offset.is_multiple_of(1 << self.cluster_bits)
            || self.counts.iter().skip(first).take(count).any(|count| *count != 0)
        {
            return Err(malformed(format!("its table at byte {offset} overlaps another one")));
        }
        self.add(offset, bytes, 1)
    }

    /// Adds the references of persistent bitmaps. Without the autoclear bit they do not exist for any program.
    fn add_bitmaps(&mut self, header: &Header) -> Result<(), Error> {
        if header.autoclear & AUTOCLEAR_BITMAPS == 0 {
            return Ok(());
        }
        let loaded = read_bitmaps(self.file, header, header.size)?;
        let layout = loaded.place.unwrap_or_default();
        if !loaded.warnings.is_empty() || !layout.others.is_empty() {
            return Err(unsupported("one of its bitmaps is damaged or of an unknown kind"));
        }
        layout.clusters.into_iter().try_for_each(|host| self.add(host, 1 << self.cluster_bits, 1))
    }

    /// Adds the references of L1 entries.
    fn add_l2_tables(&mut self, mut entries: impl Iterator<Item = u64>) -> Result<(), Error> {
        entries.try_for_each(|entry| {
            let table = table_offset(entry, self.cluster_bits).map_err(|_| invalid_entry(entry))?;
            let Some(table) = table else { return Ok(()) };
            self.add(table, 1 << self.cluster_bits, 1)?;
            self.counts[(table >> self.cluster_bits) as usize] |= FLAG;
            Ok(())
        })
    }

    fn add_snapshots(&mut self, header: &Header) -> Result<(), Error> {
        let mut at = header.snapshots_offset;
        for _ in 0..header.snapshots {
            let mut entry = [0; SNAPSHOT_BYTES as usize];
            self.file
                .read_padded_at(&mut entry, at, 0)
                .map_err(|e| self.file.failed("read a snapshot of", e))?;
            let (l1_offset, l1_bytes) = (u64_at(&entry, 0), u64::from(u32_at(&entry, 8)) * 8);
            let (names, extra) = (u32_at(&entry, 12), u64::from(u32_at(&entry, 36)));
            if l1_bytes > L1_MAX_BYTES || extra > SNAPSHOT_EXTRA_MAX_BYTES {
                return Err(unsupported("one of its snapshots is too large or of an unknown kind"));
            }
            // The lengths of the ID and of the name.
            let names = u64::from(names >> 16) + u64::from(names & 0xffff);
            at += (SNAPSHOT_BYTES + extra + names).next_multiple_of(8);
            self.add_table(l1_offset, l1_bytes)?;
            for (_, part) in self.read(l1_offset, l1_bytes)? {
                self.add_l2_tables(part.chunks_exact(8).map(|entry| u64_at(entry, 0)))?;
            }
        }
        self.add_table(header.snapshots_offset, at - header.snapshots_offset)
    }

    /// Adds the references of all L2 tables. Those of a table that snapshots share count once for each reference to it.
    fn add_entries(&mut self) -> Result<(), Error> {
        let bits = self.cluster_bits;
        for cluster in 0..self.counts.len() {
            let times = self.counts[cluster] & REFERENCES_MAX;
            if self.counts[cluster] & FLAG == 0 {
                continue;
            }
            for (_, part) in self.read((cluster as u64) << bits, 1 << bits)? {
                for entry in part.chunks_exact(8).map(|entry| u64_at(entry, 0)) {
                    let parsed = Entry::parse(entry, bits).map_err(|_| invalid_entry(entry))?;
                    parsed.hosts(bits).try_for_each(|host| self.add(host, 1 << bits, times))?;
                }
            }
        }
        Ok(())
    }

    /// Compares the refcounts with the references. Afterwards the number of a cluster is [`FLAG`] if it has leaked,
    /// or else 0.
    fn compare(&mut self, blocks: &[u64], order: u32) -> Result<(), Error> {
        for (number, block) in blocks.iter().enumerate().filter(|(_, block)| **block != 0) {
            let first = number << (self.cluster_bits + 3 - order);
            for (at, part) in self.read(*block, 1 << self.cluster_bits)? {
                let first = first + ((at * 8) >> order);
                let counts = &mut self.counts[first..][..(part.len() * 8) >> order];
                for (index, count) in counts.iter_mut().enumerate() {
                    let (references, refcount) = (*count & REFERENCES_MAX, refcount(&part, index, order));
                    if refcount < u64::from(references) {
                        return Err(too_low((first + index) as u64));
                    }
                    *count = if references == 0 && refcount > 0 { FLAG } else { 0 };
                }
            }
        }
        // The refcounts in holes are 0.
        match self.counts.iter().position(|count| count & REFERENCES_MAX > 0) {
            Some(cluster) => Err(too_low(cluster as u64)),
            None => Ok(()),
        }
    }

    /// Reads the parts of a table that are not in holes of the file, each with its offset in the table.
    fn read(&self, offset: u64, bytes: u64) -> Result<Vec<(usize, Vec<u8>)>, Error> {
        if Instant::now() > self.deadline {
            let message = format!("reading its tables takes more than {} s", TIME_MAX.as_secs());
            return Err(unsupported(message));
        }
        let failed = |e| self.file.failed("read the tables of", e);
        let (mut parts, mut at) = (Vec::new(), 0);
        for extent in self.file.extents(offset, 512, 0..bytes, usize::MAX, u64::MAX).map_err(failed)? {
            if !extent.hole {
                let mut part = vec![0; extent.length as usize];
                self.file.read_padded_at(&mut part, offset + at, 0).map_err(failed)?;
                parts.push((at as usize, part));
            }
            at += extent.length;
        }
        Ok(parts)
    }
}

fn too_low(cluster: u64) -> Error {
    Error::new(ErrorKind::Mismatch, format!("the refcount of cluster {cluster} is too low"))
}

fn invalid_entry(entry: u64) -> Error {
    malformed(format!("the entry {entry:#x} of a table is invalid"))
}
