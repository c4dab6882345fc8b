//! [`LocalQueue`]: a hardware queue and its ring, for a thread that submits and polls.

use std::sync::Arc;
use std::time::Duration;

use crate::bio::{Bio, Completion};
use crate::clock::time_until;
use crate::disk::Disk;
use crate::error::Error;
use crate::limits::QueueLimits;
use crate::queue::Queue;
use crate::queue::hang::HangScan;
use crate::ring::{Cqe, Registrar, Ring, RingCounters};
use crate::trace::TraceMemory;

/// Submissions that the ring of a local queue has room for.
const RING_ENTRIES: u32 = 256;
/// The name of the only queue on the ring.
const OWNER: u16 = 0;
/// How long a wait without a ring sleeps between two polls, when nothing wakes it.
const IDLE_WAIT: Duration = Duration::from_millis(1);

/// A hardware queue owned by this thread: submit, poll, take the completions. No lock
/// and no other thread is on the way.
///
/// ```
/// use blkq::{Bio, Disk, IoBuffer, Sector, drivers::ram::Ram};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let disk = Disk::builder(Box::new(Ram::new(1 << 20, 512, false)?)).build()?;
/// let mut queue = disk.open_queue(0)?;
///
/// let mut buffer = IoBuffer::zeroed(4096);
/// buffer.fill(7);
/// queue.submit(Bio::write(Sector(8), buffer, 1)).expect("a new queue has room");
/// queue.wait(1);
/// let written = queue.take_completion().expect("waited for it");
/// assert_eq!((written.user_data, written.result), (1, Ok(())));
///
/// queue.submit(Bio::read(Sector(8), IoBuffer::zeroed(4096), 2)).expect("still room");
/// queue.wait(1);
/// let read = queue.take_completion().expect("waited for it");
/// assert!(read.data.into_buffer().expect("its own buffer").iter().all(|byte| *byte == 7));
/// # Ok(())
/// # }
/// ```
pub struct LocalQueue {
    queue: Queue,
    /// In a box, so that to lend it is to load a word.
    ring: Option<Box<Ring>>,
    cqes: Vec<Cqe>,
}

impl Disk {
    /// Opens hardware queue `index` for this thread to submit to and poll.
    ///
    /// # Errors
    /// [`Busy`](crate::ErrorKind::Busy) if it is open, and the driver's own.
    pub fn open_queue(self: &Arc<Self>, index: usize) -> Result<LocalQueue, Error> {
        LocalQueue::open(self, index)
    }
}

impl LocalQueue {
    pub(crate) fn open(disk: &Arc<Disk>, index: usize) -> Result<LocalQueue, Error> {
        let mut ring =
            if disk.driver().uses_ring() { Some(Box::new(Ring::new(RING_ENTRIES)?)) } else { None };
        let queue = Queue::open(disk, index, OWNER, ring.as_deref_mut())?;
        Ok(LocalQueue { queue, ring, cqes: Vec::with_capacity(RING_ENTRIES as usize * 4) })
    }

    /// Submits a bio. It may wait under the plug until [`LocalQueue::poll`] or
    /// [`LocalQueue::wait`]. An error of the bio itself is in its completion.
    ///
    /// # Errors
    /// The bio, when the queue has no room: poll, then submit it again.
    #[inline]
    pub fn submit(&mut self, bio: Bio) -> Result<(), Bio> {
        self.queue.submit(bio, self.ring.as_deref_mut())
    }

    /// Sends everything submitted to the driver and collects the completions, without
    /// waiting.
    #[inline]
    pub fn poll(&mut self) {
        self.turn(0);
    }

    /// Sends everything submitted to the driver and waits until `want` completions can
    /// be taken (fewer, if fewer are in flight).
    pub fn wait(&mut self, want: usize) {
        // With a ring, one call can both submit and wait.
        if self.ring.is_none() || self.queue.completions().len() >= want {
            self.poll();
        }
        loop {
            let have = self.queue.completions().len();
            let in_flight = self.queue.in_flight() as usize;
            let want = want.min(have + in_flight);
            if have >= want {
                return;
            }
            self.turn(want);
        }
    }

    /// How long the queue may sleep. Asked for when nothing is left but to sleep: a driver sets
    /// its deadline in the very flush that gives it requests.
    fn sleep_time(&self) -> Option<Duration> {
        // With nothing in the driver (frozen, quiesced, tags in use elsewhere) nothing wakes it.
        let idle = (self.ring.is_none() || !self.queue.has_started()).then_some(IDLE_WAIT);
        [time_until(self.queue.deadline_ns()), idle].into_iter().flatten().min()
    }

    /// Sleeps unless `want` completions are there.
    #[inline]
    fn turn(&mut self, want: usize) {
        self.queue.dispatch_all(self.ring.as_deref_mut());
        let can_continue = self.queue.has_completed() || self.queue.is_cut_short();
        let sleeps = self.queue.completions().len() < want && !can_continue;
        let timeout = if sleeps { self.sleep_time() } else { None };
        if sleeps {
            self.queue.idle();
        }
        match &mut self.ring {
            Some(ring) => {
                if sleeps {
                    // A merged request completes several bios: one completion of the ring may do.
                    ring.enter(1, timeout);
                } else if self.queue.has_started() || ring.has_submissions() {
                    ring.enter(0, None);
                }
                ring.reap_all(&mut self.cqes);
                for cqe in self.cqes.drain(..) {
                    self.queue.complete_cqe(cqe, Some(ring));
                }
            }
            None => timeout.into_iter().for_each(std::thread::sleep),
        }
        if sleeps {
            self.queue.woke();
        }
        self.queue.begin_turn(self.ring.as_deref_mut());
        self.queue.dispatch_all(self.ring.as_deref_mut());
    }

    /// The next completion, oldest first.
    pub fn take_completion(&mut self) -> Option<Completion> {
        self.queue.take_completion()
    }

    /// All completions that are there, oldest first.
    #[inline]
    pub fn completions(&mut self) -> std::vec::Drain<'_, Completion> {
        self.queue.completions_mut().drain(..)
    }

    /// The I/O that has been in flight for more than `limit_ns` at `now_ns` of the monotonic clock
    /// ([`monotonic_ns`](crate::clock::monotonic_ns)), and which of that has completed: see
    /// [`hang`](crate::queue::hang).
    pub fn scan_for_hangs(&mut self, now_ns: u64, limit_ns: u64) -> HangScan {
        let mut scan = self.queue.scan_for_hangs(now_ns, limit_ns);
        for hang in &mut scan.hangs {
            hang.client =
                hang.user_data.map(|user_data| format!("user_data {user_data}")).or(hang.client.take());
        }
        scan
    }

    /// Traces the queue into the ring of its number in `memory`, if there is one; else no longer.
    pub fn trace(&mut self, memory: Option<&Arc<TraceMemory>>) {
        self.queue.set_trace(memory);
    }

    /// Bios submitted and not completed.
    pub fn in_flight(&self) -> usize {
        self.queue.in_flight() as usize
    }

    /// The limits in force.
    pub fn limits(&self) -> &QueueLimits {
        self.queue.limits()
    }

    /// The registrar of buffers with the queue's ring; `None` if the driver uses no ring.
    pub fn registrar(&mut self) -> Option<Registrar<'_>> {
        self.ring.as_deref_mut().map(Registrar::new)
    }

    /// The ring's counters.
    pub fn ring_counters(&self) -> RingCounters {
        self.ring.as_deref().map(Ring::counters).unwrap_or_default()
    }
}

impl Drop for LocalQueue {
    fn drop(&mut self) {
        // The kernel may still write into buffers of I/O in flight: wait for it.
        self.queue.close_to_submitters();
        while self.queue.has_started() {
            self.turn(1);
            self.queue.completions_mut().clear();
        }
        self.queue.close(self.ring.as_deref_mut());
    }
}
