//! Empties an overlay whose clusters were all committed into its backing file: from then on it reads as the
//! backing file does.

use std::collections::BTreeSet;

use blkq::sync::lock;
use blkq::{Error, IoBuffer};

use crate::qcow2::Qcow2;
use crate::qcow2::io::flush_metadata::{flush_metadata, sync};
use crate::qcow2::io::operations::Op;
use crate::qcow2::tables::refcounts::set_refcount;

impl Qcow2 {
    /// Overwrites the L1 table in the file with zeroes, durably. The tables in memory do not change. A power
    /// loss meanwhile may leave some of the old entries.
    pub(in crate::qcow2) fn empty(&self) -> Result<(), Error> {
        self.shared.run("empty its tables", async |env| {
            let (offset, bytes) = {
                let state = env.state();
                let align = state.layers[0].align.max(512) as usize;
                (state.top.header.l1_offset, (state.top.l1.len() * 8).next_multiple_of(align))
            };
            env.io.submit(env.write_op(offset).with_buffer(IoBuffer::zeroed(bytes))).await?;
            sync(env).await
        })
    }

    /// Writes the L1 table in memory back, to undo [`Qcow2::empty`]. If this fails, the next flush writes it.
    pub(in crate::qcow2) fn refill(&self) {
        {
            let mut state = lock(&self.shared.state);
            let entries = state.top.l1.len();
            state.writer.l1_dirty.extend(0..entries);
        }
        let _ = self.shared.run("fill its tables again", async |env| flush_metadata(env, true).await);
    }

    /// Frees all clusters of an emptied overlay except those of its header and tables. After an error,
    /// clusters to which nothing refers are left.
    pub(in crate::qcow2) fn free_unreferenced(&self) -> Result<(), Error> {
        let (header, blocks) = {
            let state = lock(&self.shared.state);
            (state.top.header.clone(), state.writer.refcount_table.clone())
        };
        let (cluster, order) = (header.cluster_bytes(), header.refcount_order);
        let per_block = header.refcounts_per_block();
        let clusters = |offset: u64, bytes: u64| offset / cluster..(offset + bytes).div_ceil(cluster);
        let mut kept: BTreeSet<u64> = clusters(0, cluster).collect();
        // The snapshot table is empty, because an image with snapshots is not committed.
        kept.extend(header.tables().into_iter().flat_map(|(_, offset, bytes)| clusters(offset, bytes)));
        kept.extend(blocks.iter().filter(|block| **block != 0).map(|block| block / cluster));
        let end = self.file().size()?.div_ceil(cluster);
        let ends = kept.iter().map(|number| number + 1);
        let holes: Vec<_> = std::iter::once(0).chain(ends).zip(kept.iter().copied().chain([end])).collect();
        let table = move |number: usize| {
            let first = number as u64 * per_block;
            let mut content = IoBuffer::zeroed(cluster as usize);
            for other in kept.range(first..first + per_block) {
                set_refcount(&mut content, (other - first) as usize, order, 1);
            }
            content
        };
        self.shared.run("free its clusters", async move |env| {
            for (number, block) in blocks.iter().enumerate().filter(|(_, block)| **block != 0) {
                env.io.submit(env.write_op(*block).with_buffer(table(number))).await?;
            }
            for (from, to) in holes.into_iter().filter(|(from, to)| from < to) {
                env.io.submit(Op::punch(from * cluster, (to - from) * cluster)).await?;
            }
            Ok(())
        })
    }
}
