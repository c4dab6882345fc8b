//! The I/O in flight of a queue: the slots of requests and bios, and the zeroes for emulated write-zeroes.

use std::mem::ManuallyDrop;
use std::ops::{Index, IndexMut};

use crate::bio::{Operation, Outline};
use crate::buffer::{Data, IoBuffer};
use crate::completer::Completer;
use crate::limits::{MergeSide, QueueLimits};
use crate::request::{NIL, Request, RequestState};
use crate::slab::{BioSlab, BioSlot};
use crate::tags::Tag;

/// Bios that a queue accepts per tag before it rejects further ones.
const BIOS_PER_TAG: u32 = 8;
/// Bios that a queue accepts at least.
const BIOS_MIN: u32 = 1024;
/// Largest size of the buffer of zeroes. A request may use it once per segment.
const ZEROES_BYTES: u32 = 64 << 10;

/// The buffer of zeroes for devices with these limits. It must be legal as a segment.
fn zeroes_for(limits: &QueueLimits) -> IoBuffer {
    let longest = limits.max_segment_bytes & !(limits.logical_block_bytes - 1);
    IoBuffer::zeroed(longest.min(ZEROES_BYTES) as usize)
}

pub(super) struct InFlight {
    requests: Box<[Request]>,
    bios: BioSlab,
    zeroes: IoBuffer,
    /// Requests in flight that did not start as a plain bio. The slab counts the others.
    in_use: u32,
}

impl InFlight {
    pub fn new(slots: usize, limits: &QueueLimits) -> InFlight {
        InFlight {
            requests: (0..slots).map(|tag| Request::of_tag(tag as u16)).collect(),
            bios: BioSlab::new(slots as u32, (slots as u32 * BIOS_PER_TAG).max(BIOS_MIN)),
            zeroes: zeroes_for(limits),
            in_use: 0,
        }
    }

    pub fn reload(&mut self, limits: &QueueLimits) {
        // While requests are in flight, a driver may only lose capabilities, so the segments in use stay
        // legal. A request that began as a plain bio may use the zeroes too, after a merge.
        if self.in_use() == 0 {
            self.zeroes = zeroes_for(limits);
        }
    }

    #[inline]
    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    #[inline]
    pub fn bios(&self) -> &BioSlab {
        &self.bios
    }

    #[inline]
    pub fn bios_mut(&mut self) -> &mut BioSlab {
        &mut self.bios
    }

    pub fn zeroes(&self) -> &IoBuffer {
        &self.zeroes
    }

    /// The parts that the driver may access. It may write only its own words of the requests.
    #[inline]
    pub fn for_driver(&mut self) -> (&mut [Request], &BioSlab, &IoBuffer) {
        (&mut self.requests, &self.bios, &self.zeroes)
    }

    pub fn tags(&self) -> impl Iterator<Item = Tag> {
        let busy =
            self.requests.iter().enumerate().filter(|(_, request)| request.state != RequestState::Idle);
        busy.map(|(index, _)| Tag(index as u16))
    }

    #[inline]
    pub fn in_use(&self) -> u32 {
        self.in_use + self.bios.plain()
    }

    #[inline]
    pub fn count_segments(&self, index: u32) -> u16 {
        self.bios.count_segments(index, &self.zeroes)
    }

    #[inline(always)]
    pub fn begin(&mut self, tag: Tag, index: u32, outline: &Outline, segments: u16) {
        self.requests[tag.index()].begin(index, outline, segments);
        self.in_use += 1;
    }

    #[inline(always)]
    pub fn begin_plain(&mut self, tag: Tag, outline: &Outline, data: ManuallyDrop<Data>, user_data: u64) {
        self.bios.insert_plain(tag, data, user_data);
        self.requests[tag.index()].begin_plain(outline);
    }

    pub fn begin_flush(&mut self, tag: Tag, start_ns: u64) {
        self.requests[tag.index()] = Request::flush(start_ns);
        self.in_use += 1;
    }

    /// Completes request `tag`; its bios remain. Returns its operation and its first bio. Panics if the
    /// request has already completed, in release builds too: such a driver has corrupted data.
    pub fn complete(&mut self, tag: Tag) -> (Operation, u32) {
        self.fill_plain(tag);
        let request = &mut self.requests[tag.index()];
        match request.state {
            RequestState::Idle => completed_twice(tag),
            RequestState::Busy => self.in_use -= 1,
            // The slab counts them until the plain bio leaves its slot.
            RequestState::PlainRead | RequestState::PlainWrite | RequestState::PlainMerged => {}
        }
        let completed = (request.operation, request.first_bio);
        request.complete(tag.0);
        completed
    }

    /// If request `tag` consists of a single plain bio, completes the fields that the bio's slot lacks.
    #[inline]
    pub fn fill_plain(&mut self, tag: Tag) {
        let request = &self.requests[tag.index()];
        if request.is_plain() {
            self.bios.fill_plain(request);
        }
    }

    /// The requests, and the bio slots of their tags, for completing plain bios. The caller sets the requests
    /// to idle, takes the memory of the bios, and counts them with [`BioSlab::release_plain`].
    #[inline]
    pub fn plain_mut(&mut self) -> (&mut [Request], &mut [BioSlot]) {
        let slots = self.bios.of_tags(self.requests.len());
        (&mut self.requests, slots)
    }

    /// Adds bio `index` to request `tag` at `side`. Together they have `segments`.
    #[inline]
    pub fn merge(&mut self, tag: Tag, index: u32, side: MergeSide, segments: u16) {
        self.fill_plain(tag);
        let request = &mut self.requests[tag.index()];
        let bio = &mut self.bios[index];
        if request.state != RequestState::Busy {
            request.state = RequestState::PlainMerged;
        }
        request.sectors += bio.sectors;
        request.segments = segments;
        match side {
            MergeSide::Back => {
                bio.next = NIL;
                self.bios[request.last_bio].next = index;
                request.last_bio = index;
            }
            MergeSide::Front => {
                bio.next = request.first_bio;
                request.sector = bio.sector;
                request.first_bio = index;
            }
        }
    }

    /// Merges request `second`, which starts where `first` ends, into `first`. The earlier start time wins,
    /// as in the kernel.
    pub fn join(&mut self, first: Tag, second: Tag) {
        let tail = std::mem::replace(&mut self.requests[second.index()], Request::of_tag(second.0));
        debug_assert!(tail.state == RequestState::Busy, "schedulers have no request of a plain bio");
        let head = &mut self.requests[first.index()];
        self.bios[head.last_bio].next = tail.first_bio;
        head.last_bio = tail.last_bio;
        head.sectors += tail.sectors;
        head.segments += tail.segments;
        head.start_ns = head.start_ns.min(tail.start_ns);
        self.in_use -= 1;
    }

    /// Takes the completers of all bios in flight, as [`BioSlab::take_completers`] does, and leaks their
    /// memory, because the kernel may still use it.
    pub fn leak(&mut self) -> Vec<(Completer, Option<Operation>)> {
        let completers = self.bios.take_completers().collect();
        std::mem::forget(std::mem::replace(&mut self.bios, BioSlab::new(0, 0)));
        std::mem::forget(std::mem::replace(&mut self.zeroes, IoBuffer::zeroed(0)));
        completers
    }

    /// Resets the count of requests in use after [`InFlight::leak`].
    pub fn reset(&mut self) {
        self.in_use = 0;
    }
}

#[cold]
fn completed_twice(tag: Tag) -> ! {
    panic!("the driver completed tag {} twice", tag.0);
}

impl Index<Tag> for InFlight {
    type Output = Request;
    #[inline]
    fn index(&self, tag: Tag) -> &Request {
        &self.requests[tag.index()]
    }
}

impl IndexMut<Tag> for InFlight {
    #[inline]
    fn index_mut(&mut self, tag: Tag) -> &mut Request {
        &mut self.requests[tag.index()]
    }
}

impl Index<u32> for InFlight {
    type Output = BioSlot;
    #[inline]
    fn index(&self, index: u32) -> &BioSlot {
        &self.bios[index]
    }
}

impl IndexMut<u32> for InFlight {
    #[inline]
    fn index_mut(&mut self, index: u32) -> &mut BioSlot {
        &mut self.bios[index]
    }
}
