//! Lookups by a thread that may wait, while the queue of the image goes on.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use crate::buffer::IoBuffer;
use crate::sync::lock;

use super::env::Shared;
use super::state::{Extra, Lack, State};

/// Slices of tables that were read beside the cache, which only the queue fills.
#[derive(Default)]
pub(super) struct Slices {
    /// One of each image: a place of the device may need them all.
    extra: Extra,
    commits: u64,
}

impl Slices {
    /// The result of `find`. Slices that are not in memory are read from the files, which then have what they had in
    /// memory.
    ///
    /// # Errors
    /// That of a file, or EIO for tables that break the format.
    pub fn find<T>(
        &mut self,
        shared: &Shared,
        files: &[Arc<File>],
        find: impl Fn(&mut State, &Extra) -> Result<T, Lack>,
    ) -> io::Result<T> {
        loop {
            let found = {
                let mut state = lock(&shared.state);
                if std::mem::replace(&mut self.commits, state.commits) != state.commits {
                    // Slices may have been changed in memory since, and have left it.
                    self.extra.clear();
                }
                find(&mut state, &self.extra)
            };
            match found {
                Ok(found) => return Ok(found),
                Err(Lack::Slice(key, _)) => {
                    let bytes = lock(&shared.state).cache.slice_bytes();
                    let mut buffer = IoBuffer::zeroed(bytes);
                    let length = files[usize::from(key.layer)].read_at(&mut buffer, key.offset)?;
                    buffer[length..].fill(0);
                    self.extra.retain(|(other, _)| other.layer != key.layer);
                    self.extra.push((key, buffer.to_vec()));
                }
                Err(_) => return Err(io::Error::from_raw_os_error(libc::EIO)),
            }
        }
    }
}
