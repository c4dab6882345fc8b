//! A wrapper of a driver queue that sets the bits of dirty bitmaps for each write. A disk without bitmaps has
//! no wrapper, and so no cost.

use std::borrow::Cow;
use std::sync::Arc;

use crate::bitmap::Bitmap;
use crate::disk::Disk;
use crate::driver::{DriverContext, DriverQueue, Taken};
use crate::request::Request;
use crate::ring::Cqe;
use crate::sector::SECTOR_SHIFT;
use crate::tags::Tag;

pub(super) struct TrackedQueue {
    inner: Box<dyn DriverQueue>,
    disk: Arc<Disk>,
    bitmaps: Vec<Arc<Bitmap>>,
}

/// Wraps `queue` if the disk has recording bitmaps. Returns whether it has.
pub(super) fn track(queue: &mut Box<dyn DriverQueue>, disk: &Arc<Disk>) -> bool {
    let has_bitmaps = disk.bitmaps.has_recording();
    if has_bitmaps {
        let inner = std::mem::replace(queue, Box::new(super::broken::BrokenQueue));
        *queue = Box::new(TrackedQueue { inner, disk: disk.clone(), bitmaps: disk.bitmaps.recording() });
    }
    has_bitmaps
}

// SAFETY: all calls are passed to the wrapped queue unchanged.
unsafe impl DriverQueue for TrackedQueue {
    fn queue_requests(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag]) -> Taken {
        // Bits are set before the write is issued: a bitmap may mark too much, but never too little.
        for tag in tags {
            let request = cx.request(*tag);
            if request.operation().is_write() && request.sectors > 0 {
                let start = request.sector().0 << SECTOR_SHIFT;
                let range = start..start + (request.sectors << SECTOR_SHIFT);
                self.bitmaps.iter().for_each(|bitmap| bitmap.mark(range.clone()));
            }
        }
        self.inner.queue_requests(cx, tags)
    }

    fn commit(&mut self, cx: &mut DriverContext<'_>) {
        self.inner.commit(cx);
    }

    fn complete_cqe(&mut self, cx: &mut DriverContext<'_>, cqe: Cqe) {
        self.inner.complete_cqe(cx, cqe);
    }

    fn poll(&mut self, cx: &mut DriverContext<'_>) {
        self.inner.poll(cx);
    }

    fn state(&self, tag: Tag, request: &Request) -> Cow<'static, str> {
        self.inner.state(tag, request)
    }

    fn deadline_ns(&self) -> Option<u64> {
        self.inner.deadline_ns()
    }

    fn reload(&mut self, cx: &mut DriverContext<'_>) {
        self.bitmaps = self.disk.bitmaps.recording();
        self.inner.reload(cx);
    }

    fn close(&mut self, cx: &mut DriverContext<'_>) {
        self.inner.close(cx);
    }
}
