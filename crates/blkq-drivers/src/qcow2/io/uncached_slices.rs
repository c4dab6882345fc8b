//! Lookups on a thread that may wait for I/O, while the queue of the image continues.

use std::io;
use std::sync::Arc;

use blkq::IoBuffer;
use blkq::sync::lock;

use crate::image_file::ImageFile;
use crate::qcow2::tables::state::{Extra, NotReady, State};

use super::env::Shared;

/// Slices of tables that were read without the cache, which only the queue fills.
#[derive(Default)]
pub(in crate::qcow2) struct UncachedSlices {
    /// At most one slice of each image, because a lookup may need one of each.
    extra: Extra,
    flushes: u64,
}

impl UncachedSlices {
    /// Returns the result of `find`, and reads the slices that it lacks from the files. A slice that is not
    /// in memory is not dirty, so the file has its current content. Fails with EIO for damaged tables.
    pub fn find<T>(
        &mut self,
        shared: &Shared,
        files: &[Arc<ImageFile>],
        find: impl Fn(&mut State, &Extra) -> Result<T, NotReady>,
    ) -> io::Result<T> {
        loop {
            let found = {
                let mut state = lock(&shared.state);
                if std::mem::replace(&mut self.flushes, state.flushes) != state.flushes {
                    // Since the last lookup, slices may have been changed in memory, written, and evicted.
                    self.extra.clear();
                }
                find(&mut state, &self.extra)
            };
            match found {
                Ok(found) => return Ok(found),
                Err(NotReady::Slice(key, _)) => {
                    let layer = usize::from(key.layer);
                    let (bytes, file_bytes) = {
                        let state = lock(&shared.state);
                        (state.cache.slice_bytes(), state.layers[layer].file_bytes)
                    };
                    let mut buffer = IoBuffer::zeroed(bytes);
                    files[layer].read_padded_at(&mut buffer, key.offset, file_bytes, None)?;
                    self.extra.retain(|(other, _)| other.layer != key.layer);
                    self.extra.push((key, buffer.to_vec()));
                }
                Err(_) => return Err(io::Error::from_raw_os_error(libc::EIO)),
            }
        }
    }
}
