//! A small file system's way of doing I/O, as the client of a device: files laid out in
//! extents, a bounded page cache, read-ahead for sequential reads, write-back of dirty pages
//! in the order of the file, and a flush at the end. It has all that the rate of a loop device
//! under a file system depends on, and nothing else: no directories, no journal.

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

/// An extent: a contiguous part of a file on the device.
const EXTENT_PAGES: u64 = (1 << 20) / PAGE_BYTES as u64;
/// Pages read at once when a sequential read begins, and at most (as read_ahead_kb = 128).
const READ_AHEAD_MIN: u64 = 4;
const READ_AHEAD_MAX: u64 = 32;
/// Most pages of one write (512 KiB), and most writes in flight.
const WRITE_PAGES_MAX: usize = 128;
const WRITES_MAX: usize = 32;

/// Where the pages of a file are on the device.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Number of the file, from 0.
    pub file: u64,
    /// Files that grew at the same time, so that their extents alternate.
    pub files: u64,
}

impl Layout {
    /// The page of the device with `page` of the file.
    fn device_page(self, page: u64) -> u64 {
        (page / EXTENT_PAGES * self.files + self.file) * EXTENT_PAGES + page % EXTENT_PAGES
    }

    /// Pages from `page` to the end of its extent.
    fn contiguous(page: u64) -> u64 {
        EXTENT_PAGES - page % EXTENT_PAGES
    }

    /// Pages of each file on a device of `bytes`.
    pub fn file_pages(self, bytes: u64) -> u64 {
        bytes / PAGE_BYTES as u64 / EXTENT_PAGES / self.files * EXTENT_PAGES
    }
}

/// A completed I/O: its pages, its result, and its memory.
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
    /// Its size.
    pages: u64,
    cache: Pages,
    /// Reads ahead in flight: first page and count.
    reading: VecDeque<(u64, u64)>,
    /// Where the window of read-ahead ends, how large the last one was, and the page that
    /// asks for the next one.
    window_end: u64,
    window: u64,
    marker: Option<u64>,
    previous: Option<u64>,
    /// Dirty pages still to be written in this pass, in order, and writes in flight.
    pass: VecDeque<u64>,
    writes: usize,
    sender: Sender<Completed>,
    completed: Receiver<Completed>,
    /// The first error of a write, returned by the next [`File::sync`].
    failed: Option<blkq::Status>,
}

impl File {
    /// The file of `layout` on `disk`, with a cache of `cache_bytes`, in which nothing is.
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

    /// Its size in pages.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Pages in its cache, and most that there may be.
    #[cfg(test)]
    pub fn cached(&self) -> (usize, usize) {
        (self.cache.len(), self.cache.capacity())
    }

    /// Reads `page`.
    ///
    /// # Errors
    /// If the device fails.
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
        // Without room it is read again next time.
        self.cache.insert(page, &buffer);
        Ok(())
    }

    /// Writes `page`, to the cache.
    ///
    /// # Errors
    /// If the device failed to do so for an earlier one.
    pub fn write(&mut self, page: u64, bytes: &[u8]) -> Result {
        self.reap()?;
        // A read of these pages in flight has older data; it must not complete after this.
        while self.is_being_read(page) {
            self.wait()?;
        }
        // As a file system is slowed down when half of its memory waits to be written, and
        // begins to write long before.
        while self.cache.unwritten() >= self.cache.capacity() / 2 || !self.cache.write(page, bytes) {
            self.write_back();
            self.wait()?;
        }
        if self.cache.unwritten() >= self.cache.capacity() / 4 {
            self.write_back();
        }
        Ok(())
    }

    /// Writes all that is dirty, and flushes the device.
    ///
    /// # Errors
    /// If a write or the flush failed.
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

    /// Reads the next `count` pages of the window, and asks for more when the first of them
    /// is used.
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

    /// Sends dirty pages to the device, as many as may be in flight. Pages that are written
    /// to meanwhile wait for the next pass, so that no two writes of a page are in flight.
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
            // The file was dropped, and with it the receiver.
            let _ = sender.send(Completed { first, write, result, data });
        });
    }

    /// Takes completed I/Os, without waiting.
    fn reap(&mut self) -> Result {
        while let Ok(completed) = self.completed.try_recv() {
            self.complete(completed)?;
        }
        Ok(())
    }

    /// Waits until an I/O completes, if one is in flight.
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
            // Without room it is read again when it is wanted.
            self.cache.insert(page, bytes);
        }
        Ok(())
    }
}
