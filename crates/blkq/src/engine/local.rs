//! [`LocalQueue`]: a hardware queue and its ring, owned by the thread that submits to it and polls it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::bio::{Bio, Completion};
use crate::clock::time_until;
use crate::disk::Disk;
use crate::error::Error;
use crate::limits::QueueLimits;
use crate::queue::Queue;
use crate::queue::hang::HangScan;
use crate::ring::{Cqe, KICK, Registrar, Ring, RingCounters};
use crate::trace::TraceMemory;

const RING_ENTRIES: u32 = 256;
/// The owner in the tokens of the only queue on the ring.
const OWNER: u16 = 0;
/// The longest sleep between two polls, in a wait that no completion of the ring can end.
const IDLE_WAIT: Duration = Duration::from_millis(1);

/// A hardware queue owned by this thread, which submits bios, polls, and takes the completions. The I/O path
/// takes no lock and involves no other thread.
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
    /// Boxed, so that lending the ring means loading one word.
    ring: Option<Box<Ring>>,
    cqes: Vec<Cqe>,
}

impl Disk {
    /// Opens hardware queue `index`, for this thread to submit to and poll. Fails with
    /// [`Busy`](crate::ErrorKind::Busy) if the queue is already open, or with the error of the driver.
    pub fn open_queue(self: &Arc<Self>, index: usize) -> Result<LocalQueue, Error> {
        let mut ring =
            if self.driver().uses_ring() { Some(Box::new(Ring::new(RING_ENTRIES)?)) } else { None };
        let queue = Queue::open(self, index, OWNER, ring.as_deref_mut())?;
        if let Some(ring) = &mut ring {
            ring.watch(&self.hardware_queue(index).kick);
        }
        Ok(LocalQueue { queue, ring, cqes: Vec::with_capacity(RING_ENTRIES as usize * 4) })
    }
}

impl LocalQueue {
    /// Submits a bio. The bio may stay in the plug until [`LocalQueue::poll`] or [`LocalQueue::wait`]. An
    /// error of the bio itself is reported in its completion. Returns the bio if the queue has no room: poll,
    /// then submit the bio again.
    #[inline]
    pub fn submit(&mut self, bio: Bio) -> Result<(), Bio> {
        self.queue.submit(bio, self.ring.as_deref_mut())
    }

    /// Sends all submitted bios to the driver and collects completions, without waiting.
    #[inline]
    pub fn poll(&mut self) {
        self.turn(0);
    }

    /// Sends all submitted bios to the driver and waits until `want` completions can be taken, or all if
    /// fewer bios are in flight.
    pub fn wait(&mut self, want: usize) {
        // With a ring, one system call can both submit and wait.
        if self.ring.is_none() || self.queue.completions().len() >= want {
            self.poll();
        }
        loop {
            let have = self.queue.completions().len();
            let want = want.min(have + self.in_flight());
            if have >= want {
                return;
            }
            self.turn(want);
        }
    }

    /// How long the queue may sleep. Must be called immediately before the sleep, because a driver sets its
    /// deadline in the same flush that hands it requests.
    fn sleep_time(&self) -> Option<Duration> {
        // If the driver has no requests (the disk is frozen or quiesced, or other queues use all tags), no
        // completion wakes this thread.
        let idle = (self.ring.is_none() || !self.queue.has_started()).then_some(IDLE_WAIT);
        [time_until(self.queue.deadline_ns()), idle].into_iter().flatten().min()
    }

    /// Submits, and sleeps unless `want` completions are available. Then processes what has completed.
    #[inline]
    fn turn(&mut self, want: usize) {
        self.queue.dispatch_all(self.ring.as_deref_mut());
        let can_continue = self.queue.has_completed() || self.queue.is_cut_short();
        let waits = self.queue.completions().len() < want && !can_continue;
        if waits && let Some(ring) = &self.ring {
            ring.prepare_sleep();
        }
        // A thread that added work before the queue was seen to sleep has not kicked it.
        let sleeps = waits && !self.queue.has_changed();
        let timeout = if sleeps { self.sleep_time() } else { None };
        if sleeps {
            self.queue.idle();
        }
        self.receive(sleeps, timeout);
        if sleeps {
            self.queue.woke();
        }
        if waits && let Some(ring) = &self.ring {
            ring.woke();
        }
        self.queue.begin_turn(self.ring.as_deref_mut());
        self.queue.dispatch_all(self.ring.as_deref_mut());
        self.queue.end_turn();
    }

    /// Submits, and sleeps if `sleeps` is set, `timeout` at most. Then passes the completions of the ring to the driver.
    #[inline(always)]
    fn receive(&mut self, sleeps: bool, timeout: Option<Duration>) {
        match &mut self.ring {
            Some(ring) => {
                if sleeps {
                    // One completion of the ring may be enough, because a merged request completes several
                    // bios.
                    ring.enter(1, timeout);
                } else if self.queue.has_started() || ring.has_submissions() {
                    ring.enter(0, None);
                }
                ring.reap_all(&mut self.cqes);
                for cqe in self.cqes.drain(..) {
                    match cqe.token.owner() {
                        KICK => ring.rewatch(cqe),
                        _ => self.queue.complete_cqe(cqe, Some(ring)),
                    }
                }
            }
            None => timeout.into_iter().for_each(std::thread::sleep),
        }
    }

    /// Takes the oldest completion; `None` if no bio has completed.
    pub fn take_completion(&mut self) -> Option<Completion> {
        self.queue.take_completion()
    }

    /// Takes all completions, oldest first.
    #[inline]
    pub fn completions(&mut self) -> std::vec::Drain<'_, Completion> {
        self.queue.completions_mut().drain(..)
    }

    /// Finds the I/O that has been in flight for more than `limit_ns` at `now_ns` of the monotonic clock
    /// ([`monotonic_ns`](crate::clock::monotonic_ns)), and the previously reported I/O that has completed
    /// since: see [`hang`](crate::queue::hang).
    pub fn scan_for_hangs(&mut self, now_ns: u64, limit_ns: u64) -> HangScan {
        let name = |user_data, text: &mut dyn fmt::Write| _ = write!(text, "user_data {user_data}");
        super::scan_queue(&mut self.queue, now_ns, limit_ns, name)
    }

    /// Writes the events of this queue into its ring in `memory` from now on; `None` stops the trace.
    pub fn trace(&mut self, memory: Option<&Arc<TraceMemory>>) {
        self.queue.set_trace(memory);
    }

    /// The number of bios that were submitted and have not completed.
    pub fn in_flight(&self) -> usize {
        self.queue.in_flight() as usize
    }

    /// The current limits of the disk.
    pub fn limits(&self) -> &QueueLimits {
        self.queue.limits()
    }

    /// Registers buffers and files with the queue's ring; `None` if the driver uses no ring.
    pub fn registrar(&mut self) -> Option<Registrar<'_>> {
        self.ring.as_deref_mut().map(Registrar::new)
    }

    /// The counters of the ring; all 0 if the driver uses no ring.
    pub fn ring_counters(&self) -> RingCounters {
        self.ring.as_deref().map(Ring::counters).unwrap_or_default()
    }
}

impl Drop for LocalQueue {
    fn drop(&mut self) {
        // The kernel may still write into the buffers of I/O in flight, so they must not be freed before it
        // completes.
        self.queue.close_to_submitters();
        if std::thread::panicking() {
            // If the driver has panicked, it must get no further requests: a second panic while the stack unwinds aborts
            // the process.
            self.queue.abandon();
            while self.queue.has_started() {
                self.receive(true, Some(IDLE_WAIT));
                self.queue.finish_started(self.ring.as_deref_mut());
            }
        } else {
            // Issues the requests that waited for a limit, which no longer applies.
            self.turn(0);
            // Bios that wait for the next turn are work, though the driver may have no request.
            while self.queue.has_started() || self.queue.has_changed() {
                self.turn(1);
                self.queue.completions_mut().clear();
            }
        }
        self.queue.close(self.ring.as_deref_mut());
    }
}
