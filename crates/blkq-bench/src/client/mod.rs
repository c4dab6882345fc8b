//! A client of a device that does I/O like a small file system: it lays files out in extents, caches pages in a bounded
//! cache, reads ahead in sequential reads, writes dirty pages back in the order of the file, and flushes at the end.
//! It models what determines the speed of a loop device below a file system; it has no directories and no journal.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use blkq::{Bio, Data, Disk, IoBuffer, IoResult, Sector, Submitter};

use crate::Result;

mod pages;
#[cfg(test)]
mod tests;

pub use pages::PAGE_BYTES;
use pages::Pages;

/// Pages of an extent (1 MiB), which is contiguous on the device.
const EXTENT_PAGES: u64 = (1 << 20) / PAGE_BYTES as u64;
/// Pages of the first and of the largest read-ahead (128 KiB, the kernel's default of read_ahead_kb).
const READ_AHEAD_MIN: u64 = 4;
const READ_AHEAD_MAX: u64 = 32;
/// Maximum pages of a write (512 KiB), and maximum writes in flight.
const WRITE_PAGES_MAX: usize = 128;
const WRITES_MAX: usize = 32;

/// Maps the pages of a file to the device.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Number of the file, starting at 0.
    pub file: u64,
    /// Number of files that grew at the same time: their extents alternate on the device.
    pub files: u64,
}

impl Layout {
    /// The page of the device that stores `page` of the file.
    fn device_page(self, page: u64) -> u64 {
        (page / EXTENT_PAGES * self.files + self.file) * EXTENT_PAGES + page % EXTENT_PAGES
    }

    /// Number of pages from `page` to the end of its extent.
    fn contiguous(page: u64) -> u64 {
        EXTENT_PAGES - page % EXTENT_PAGES
    }

    /// Size of each file in pages, on a device of `bytes`.
    pub fn file_pages(self, bytes: u64) -> u64 {
        bytes / PAGE_BYTES as u64 / EXTENT_PAGES / self.files * EXTENT_PAGES
    }
}

/// A completed I/O, with the first page that it read or wrote.
struct Completed {
    first: u64,
    write: bool,
    result: IoResult,
    data: Data,
}

/// A file, used by one thread.
pub struct File {
    submitter: Submitter,
    layout: Layout,
    /// Size of the file in pages.
    pub pages: u64,
    cache: Pages,
    /// First page and length of each read-ahead in flight.
    reading: VecDeque<(u64, u64)>,
    /// The page after the read-ahead window.
    window_end: u64,
    /// Length of the read-ahead window, in pages.
    window: u64,
    /// The page whose use triggers the next read-ahead.
    marker: Option<u64>,
    previous: Option<u64>,
    /// Dirty pages that the current write-back pass must still write, in ascending order.
    pass: VecDeque<u64>,
    writes: usize,
    sender: Sender<Completed>,
    completed: Receiver<Completed>,
    /// The first error of a write; the next [`File::sync`] returns it.
    failed: Option<blkq::Status>,
}

impl File {
    /// Opens the file of `layout` on `disk`, with an empty cache of `cache_bytes`.
    pub fn open(disk: &Arc<Disk>, layout: Layout, cache_bytes: usize) -> File {
        let (sender, completed) = channel();
        File {
            submitter: disk.submitter(),
            layout,
            pages: layout.file_pages(disk.limits().capacity_bytes),
            cache: Pages::new(cache_bytes),
            reading: VecDeque::new(),
            window_end: 0,
            window: 0,
            marker: None,
            previous: None,
            pass: VecDeque::new(),
            writes: 0,
            sender,
            completed,
            failed: None,
        }
    }

    pub fn read(&mut self, page: u64, into: &mut [u8]) -> Result {
        self.reap()?;
        let sequential = self.previous.map_or(page == 0, |previous| page == previous + 1);
        self.previous = Some(page);
        if self.marker == Some(page) {
            self.read_ahead((self.window * 2).min(READ_AHEAD_MAX));
        }
        if !self.cache.contains(page) && !self.is_being_read(page) && sequential {
            self.window_end = page;
            self.read_ahead(READ_AHEAD_MIN);
        }
        while self.is_being_read(page) {
            self.wait()?;
        }
        if let Some(bytes) = self.cache.get(page) {
            into.copy_from_slice(bytes);
            return Ok(());
        }
        let (result, data) = self.submitter.submit_and_wait(self.read_bio(page, 1));
        result?;
        let buffer = data.into_buffer().ok_or("a read lost its buffer")?;
        into.copy_from_slice(&buffer);
        // If the cache is full of dirty pages, the page is not cached, and the next read reads it again.
        self.cache.insert(page, &buffer);
        Ok(())
    }

    /// Writes `page` to the cache. Fails with the error of an earlier read-ahead.
    pub fn write(&mut self, page: u64, bytes: &[u8]) -> Result {
        self.reap()?;
        // A read of the page that is in flight returns older data, so it must not complete after this write.
        while self.is_being_read(page) {
            self.wait()?;
        }
        // Like the kernel's dirty limits: write-back starts when a quarter of the cache is dirty, and the writer waits
        // when half of it is.
        while self.cache.unwritten() >= self.cache.capacity() / 2 || !self.cache.write(page, bytes) {
            self.write_back();
            self.wait()?;
        }
        if self.cache.unwritten() >= self.cache.capacity() / 4 {
            self.write_back();
        }
        Ok(())
    }

    /// Writes all dirty pages, and flushes the device. Fails with the first error of a write since the last
    /// call, or the error of the flush.
    pub fn sync(&mut self) -> Result {
        while self.cache.unwritten() > 0 {
            self.write_back();
            self.wait()?;
        }
        self.failed.take().map_or(Ok(()), Err)?;
        Ok(self.submitter.flush()?)
    }

    fn is_being_read(&self, page: u64) -> bool {
        self.reading.iter().any(|(first, count)| (*first..first + count).contains(&page))
    }

    fn read_bio(&self, page: u64, count: u64) -> Bio {
        let buffer = IoBuffer::zeroed(count as usize * PAGE_BYTES);
        Bio::read(self.sector(page), buffer, 0)
    }

    fn sector(&self, page: u64) -> Sector {
        Sector(self.layout.device_page(page) * (PAGE_BYTES as u64 / 512))
    }

    /// Reads the next `count` pages, and sets the page whose use triggers the next read-ahead.
    fn read_ahead(&mut self, count: u64) {
        let (first, end) = (self.window_end, (self.window_end + count).min(self.pages));
        self.marker = (end < self.pages).then_some(if count == READ_AHEAD_MIN { first + 1 } else { first });
        (self.window, self.window_end) = (count, end);
        let mut page = first;
        while page < end {
            let run = (page..end.min(page + Layout::contiguous(page)))
                .take_while(|page| !self.cache.contains(*page) && !self.is_being_read(*page))
                .count() as u64;
            if run > 0 {
                self.reading.push_back((page, run));
                let bio = self.read_bio(page, run);
                self.submit(page, bio);
            }
            page += run.max(1);
        }
    }

    /// Submits dirty pages, up to the maximum number of writes in flight. A page that is dirtied during a pass is
    /// written in the next pass, so that no two writes of a page are in flight.
    fn write_back(&mut self) {
        if self.pass.is_empty() && self.writes == 0 {
            self.pass.extend(self.cache.dirty());
        }
        while self.writes < WRITES_MAX
            && let Some(&first) = self.pass.front()
        {
            let most = WRITE_PAGES_MAX.min(Layout::contiguous(first) as usize);
            let run =
                self.pass.iter().zip(first..).take(most).take_while(|(page, next)| *page == next).count();
            let mut buffer = IoBuffer::zeroed(run * PAGE_BYTES);
            for (page, bytes) in self.pass.drain(..run).zip(buffer.chunks_exact_mut(PAGE_BYTES)) {
                self.cache.begin_writing(page, bytes);
            }
            self.writes += 1;
            let bio = Bio::write(self.sector(first), buffer, 0);
            self.submit(first, bio);
        }
    }

    fn submit(&mut self, first: u64, bio: Bio) {
        let (sender, write) = (self.sender.clone(), bio.operation.is_write());
        self.submitter.submit(bio, move |result, data| {
            // Sending fails if the file was dropped.
            let _ = sender.send(Completed { first, write, result, data });
        });
    }

    /// Processes completed I/Os, without waiting.
    fn reap(&mut self) -> Result {
        while let Ok(completed) = self.completed.try_recv() {
            self.complete(completed)?;
        }
        Ok(())
    }

    fn wait(&mut self) -> Result {
        if self.reading.is_empty() && self.writes == 0 {
            return Ok(());
        }
        let completed = self.completed.recv()?;
        self.complete(completed)
    }

    fn complete(&mut self, Completed { first, write, result, data }: Completed) -> Result {
        let buffer = data.into_buffer().ok_or("an I/O lost its buffer")?;
        let pages = (first..).zip(buffer.chunks_exact(PAGE_BYTES));
        if write {
            pages.for_each(|(page, _)| self.cache.complete_write(page));
            self.writes -= 1;
            self.failed = self.failed.or(result.err());
            if !self.pass.is_empty() {
                self.write_back();
            }
            return Ok(());
        }
        self.reading.retain(|(reading, _)| *reading != first);
        result?;
        for (page, bytes) in pages {
            // As in `read`: a page that does not fit is read again when it is used.
            self.cache.insert(page, bytes);
        }
        Ok(())
    }
}
