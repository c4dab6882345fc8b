//! The lock on ranges of a device, shared by all engines that serve it.
//!
//! A write of a part of a block reads the block, changes it and writes it back. No other write to
//! that block may run meanwhile, or it would be undone. So such a write takes its blocks
//! exclusively: first come, first served among those that overlap. Writes of whole blocks take
//! nothing. While no range is taken they see that from one load ([`RangeLock::is_taken`]); else
//! they look into the table, and wait if they overlap.
//!
//! The writes of whole blocks that were submitted before a range was taken are in no table. So a
//! range is granted only when every member (the server's part on one engine) has found none in
//! flight there: [`Session::check`]. The load may be relaxed for that reason: before a member
//! checked, it may overlook the new range, and what it submits until then is found by its check;
//! since the check it has had the mutex, and sees the range.
//!
//! Engines only try the mutex ([`Member::try_enter`]) and wake each other by messages.

use std::ops::Range;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

/// Has the thread of a member call [`Member::try_enter`] soon.
pub(super) type Wake = Arc<dyn Fn() + Send + Sync>;

/// Orders the writes to parts of blocks of one disk. All servers of the disk share one, in
/// [`NbdOptions::unaligned`](super::NbdOptions::unaligned).
#[derive(Default)]
pub struct RangeLock {
    /// Exclusive ranges in the table, granted or not.
    taken: AtomicUsize,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    next_ticket: u64,
    /// Oldest first: in the order of their tickets.
    entries: Vec<Entry>,
    members: Vec<Option<MemberState>>,
}

struct Entry {
    ticket: u64,
    range: Range<u64>,
    exclusive: bool,
    member: usize,
    /// Its number with its member.
    key: u32,
    /// Older entries that it waits for, and members that have not checked.
    blockers: usize,
}

struct MemberState {
    wake: Wake,
    /// Woken, and has not entered since.
    woken: bool,
    /// Keys of its entries that were granted, which it has not seen.
    granted: Vec<u32>,
    /// Tickets of exclusive ranges in which it may have writes in flight.
    unchecked: Vec<u64>,
}

impl std::fmt::Debug for RangeLock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RangeLock").field("taken", &self.taken).finish_non_exhaustive()
    }
}

impl RangeLock {
    /// Whether any range is taken exclusively, or about to be.
    #[inline]
    pub(super) fn is_taken(&self) -> bool {
        self.taken.load(Relaxed) > 0
    }

    /// Makes a source a member. Its writes count from now on.
    pub(super) fn join(self: &Arc<Self>, wake: Wake) -> Member {
        let state = MemberState { wake, woken: false, granted: Vec::new(), unchecked: Vec::new() };
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let index = match table.members.iter().position(Option::is_none) {
            Some(index) => {
                table.members[index] = Some(state);
                index
            }
            None => {
                table.members.push(Some(state));
                table.members.len() - 1
            }
        };
        drop(table);
        Member { lock: Arc::clone(self), index, to_wake: Vec::new() }
    }
}

/// One source's part in the lock. Dropped, it gives up all that it has.
pub(super) struct Member {
    lock: Arc<RangeLock>,
    index: usize,
    /// Kept for its room.
    to_wake: Vec<Wake>,
}

impl Member {
    /// Looks at the table, unless another thread just does: then call again soon.
    pub fn try_enter(&mut self) -> Option<Session<'_>> {
        let table = match self.lock.table.try_lock() {
            Ok(table) => table,
            // The table is changed by assignments only: it is whole at any time.
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(self.lock.session(table, self.index, &mut self.to_wake))
    }
}

impl RangeLock {
    fn session<'a>(
        &'a self,
        mut table: MutexGuard<'a, Table>,
        member: usize,
        to_wake: &'a mut Vec<Wake>,
    ) -> Session<'a> {
        if let Some(state) = &mut table.members[member] {
            state.woken = false;
        }
        Session { taken: &self.taken, table: Some(table), member, to_wake }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let table = self.lock.table.lock().unwrap_or_else(PoisonError::into_inner);
        let mut session = self.lock.session(table, self.index, &mut self.to_wake);
        let tickets: Vec<u64> =
            session.table().entries.iter().filter(|e| e.member == self.index).map(|e| e.ticket).collect();
        tickets.into_iter().for_each(|ticket| session.release(ticket));
        session.check(|_| false);
        session.table().members[self.index] = None;
    }
}

/// A member with the table in its hands. Those whose ranges were granted are woken when it is
/// dropped.
pub(super) struct Session<'a> {
    taken: &'a AtomicUsize,
    /// Always there but while it is dropped.
    table: Option<MutexGuard<'a, Table>>,
    member: usize,
    to_wake: &'a mut Vec<Wake>,
}

impl Session<'_> {
    fn table(&mut self) -> &mut Table {
        self.table.as_mut().expect("taken out only when the session is dropped")
    }

    /// Queues for `range` exclusively. [`Session::take_granted`] gives `key` when it is granted.
    /// Returns the ticket to release.
    pub fn lock(&mut self, range: Range<u64>, key: u32) -> u64 {
        self.taken.fetch_add(1, Relaxed);
        let older = self.overlapping(&range, false);
        let mut unchecked = 0;
        let ticket = self.table().next_ticket;
        for index in 0..self.table().members.len() {
            if let Some(state) = &mut self.table().members[index] {
                state.unchecked.push(ticket);
                unchecked += 1;
                self.wake(index);
            }
        }
        self.insert(range, true, key, older + unchecked)
    }

    /// Queues a write of whole blocks behind the exclusive ranges that it overlaps: granted as
    /// with [`Session::lock`]. `None` if there are none, and it may run now.
    pub fn wait(&mut self, range: Range<u64>, key: u32) -> Option<u64> {
        let older = self.overlapping(&range, true);
        (older > 0).then(|| self.insert(range, false, key, older))
    }

    fn overlapping(&mut self, range: &Range<u64>, exclusive_only: bool) -> usize {
        let entries = self.table().entries.iter();
        entries.filter(|e| (e.exclusive || !exclusive_only) && overlap(&e.range, range)).count()
    }

    fn insert(&mut self, range: Range<u64>, exclusive: bool, key: u32, blockers: usize) -> u64 {
        let member = self.member;
        let table = self.table();
        let ticket = table.next_ticket;
        table.next_ticket += 1;
        table.entries.push(Entry { ticket, range, exclusive, member, key, blockers });
        ticket
    }

    /// Gives up what `ticket` stands for.
    pub fn release(&mut self, ticket: u64) {
        let Ok(at) = self.table().entries.binary_search_by_key(&ticket, |entry| entry.ticket) else { return };
        let released = self.table().entries.remove(at);
        for index in at..self.table().entries.len() {
            let entry = &self.table().entries[index];
            if (released.exclusive || entry.exclusive) && overlap(&entry.range, &released.range) {
                self.unblock(index);
            }
        }
        if released.exclusive {
            self.taken.fetch_sub(1, Relaxed);
        }
    }

    /// Drops the ranges in which this member has no writes in flight from those that it has to
    /// check. True if some are left: check again when writes have completed.
    pub fn check(&mut self, mut has_writes: impl FnMut(&Range<u64>) -> bool) -> bool {
        let member = self.member;
        let Some(state) = &mut self.table().members[member] else { return false };
        let mut unchecked = std::mem::take(&mut state.unchecked);
        unchecked.retain(|ticket| {
            let entries = &self.table().entries;
            let Ok(at) = entries.binary_search_by_key(ticket, |entry| entry.ticket) else { return false };
            let busy = has_writes(&entries[at].range);
            if !busy {
                self.unblock(at);
            }
            busy
        });
        let left = !unchecked.is_empty();
        if let Some(state) = &mut self.table().members[member] {
            state.unchecked = unchecked;
        }
        left
    }

    /// Entry number `index` waits for one thing less.
    fn unblock(&mut self, index: usize) {
        let entry = &mut self.table().entries[index];
        entry.blockers -= 1;
        if entry.blockers > 0 {
            return;
        }
        let (member, key) = (entry.member, entry.key);
        if let Some(state) = &mut self.table().members[member] {
            state.granted.push(key);
        }
        self.wake(member);
    }

    fn wake(&mut self, member: usize) {
        if member == self.member {
            return;
        }
        if let Some(state) = &mut self.table().members[member]
            && !std::mem::replace(&mut state.woken, true)
        {
            let wake = Arc::clone(&state.wake);
            self.to_wake.push(wake);
        }
    }

    /// Appends the keys of this member's entries that were granted since the last call.
    pub fn take_granted(&mut self, granted: &mut Vec<u32>) {
        let member = self.member;
        if let Some(state) = &mut self.table().members[member] {
            granted.append(&mut state.granted);
        }
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        self.table = None;
        self.to_wake.drain(..).for_each(|wake| wake());
    }
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(lock: &Arc<RangeLock>) -> (Member, Arc<AtomicUsize>) {
        let wakes = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&wakes);
        (lock.join(Arc::new(move || _ = counted.fetch_add(1, Relaxed))), wakes)
    }

    fn granted(session: &mut Session<'_>) -> Vec<u32> {
        let mut keys = Vec::new();
        session.take_granted(&mut keys);
        keys
    }

    #[test]
    fn overlapping_ranges_are_granted_in_order() {
        let lock = Arc::new(RangeLock::default());
        let (mut a, _) = member(&lock);
        assert!(!lock.is_taken());
        let mut session = a.try_enter().unwrap();
        let first = session.lock(0..1024, 1);
        let second = session.lock(512..1536, 2);
        let apart = session.lock(1536..2048, 3);
        assert_eq!(session.wait(2048..4096, 4), None, "whole blocks elsewhere take no notice");
        let whole = session.wait(0..512, 5).unwrap();
        let other_whole = session.wait(0..512, 6).unwrap();
        let behind = session.lock(0..512, 7);
        assert_eq!(granted(&mut session), []);
        assert!(!session.check(|_| false));
        assert_eq!(granted(&mut session), [1, 3]);
        session.release(first);
        assert_eq!(granted(&mut session), [2, 5, 6], "whole blocks do not wait for each other");
        session.release(whole);
        assert_eq!(granted(&mut session), []);
        session.release(other_whole);
        assert_eq!(granted(&mut session), [7], "nobody is overtaken");
        [second, apart, behind].into_iter().for_each(|ticket| session.release(ticket));
        drop(session);
        assert!(!lock.is_taken());
    }

    #[test]
    fn every_member_checks_for_writes_in_flight_first() {
        let lock = Arc::new(RangeLock::default());
        let ((mut a, a_woken), (mut b, b_woken)) = (member(&lock), member(&lock));
        let mut session = a.try_enter().unwrap();
        let ticket = session.lock(0..512, 1);
        assert!(!session.check(|_| false) && granted(&mut session).is_empty());
        drop(session);
        assert_eq!((a_woken.load(Relaxed), b_woken.load(Relaxed)), (0, 1));
        let mut session = b.try_enter().unwrap();
        assert!(session.check(|range| *range == (0..512)), "a write is in flight there");
        drop(session);
        assert_eq!(granted(&mut a.try_enter().unwrap()), []);
        assert!(!b.try_enter().unwrap().check(|_| false));
        assert_eq!(a_woken.load(Relaxed), 1);
        let mut session = a.try_enter().unwrap();
        assert_eq!(granted(&mut session), [1]);
        session.release(ticket);
    }

    #[test]
    fn who_leaves_gives_up_what_it_had() {
        let lock = Arc::new(RangeLock::default());
        let ((mut a, _), (mut b, b_woken)) = (member(&lock), member(&lock));
        a.try_enter().unwrap().lock(0..512, 1);
        let mut session = b.try_enter().unwrap();
        session.lock(0..512, 2);
        assert!(!session.check(|_| false));
        drop(session);
        assert_eq!(b_woken.load(Relaxed), 1);
        drop(a);
        assert_eq!(granted(&mut b.try_enter().unwrap()), [2]);
        assert!(lock.is_taken());
        drop(b);
        assert!(!lock.is_taken());
    }

    /// Threads that each change words of shared blocks: exclusively in two steps, or as whole
    /// blocks at once, the way engines do. A lost update shows in the sum.
    #[test]
    fn no_update_is_lost_among_threads() {
        use std::sync::atomic::AtomicU64;
        const THREADS: usize = 4;
        const ROUNDS: u64 = 2000;
        let lock = Arc::new(RangeLock::default());
        let blocks: Vec<AtomicU64> = (0..4).map(|_| AtomicU64::new(0)).collect();
        let writers: Vec<AtomicU64> = (0..4).map(|_| AtomicU64::new(0)).collect();
        let gone = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (mut member, woken) = member(&lock);
                let (lock, blocks, writers, gone) = (&lock, &blocks, &writers, &gone);
                scope.spawn(move || {
                    let mut seen = 0;
                    let mut keys = Vec::new();
                    for round in 0..ROUNDS {
                        let block = (round as usize * 7 + thread) % blocks.len();
                        let range = block as u64 * 512..(block as u64 + 1) * 512;
                        if round % 3 != 0 && !lock.is_taken() {
                            // A write of whole blocks: between submission and completion others
                            // find it when they check, which this thread does for them below.
                            writers[block].fetch_add(1, Relaxed);
                            blocks[block].fetch_add(1, Relaxed);
                            writers[block].fetch_sub(1, Relaxed);
                        } else {
                            let ticket = loop {
                                let Some(mut session) = member.try_enter() else { continue };
                                let ticket = session.lock(range.clone(), 0);
                                session.check(|_| false);
                                break ticket;
                            };
                            while keys.is_empty() {
                                if let Some(mut session) = member.try_enter() {
                                    session.check(|_| false);
                                    session.take_granted(&mut keys);
                                }
                                std::thread::yield_now();
                            }
                            keys.clear();
                            assert_eq!(writers[block].load(Relaxed), 0, "a write is in flight");
                            let old = blocks[block].load(Relaxed);
                            std::thread::yield_now();
                            blocks[block].store(old + 1, Relaxed);
                            loop {
                                let Some(mut session) = member.try_enter() else { continue };
                                session.check(|_| false);
                                break session.release(ticket);
                            }
                        }
                        // As an engine does when its turn comes.
                        let wakes = woken.load(Relaxed);
                        if wakes > seen
                            && let Some(mut session) = member.try_enter()
                        {
                            session.check(|_| false);
                            seen = wakes;
                        }
                    }
                    // Others may still wait for this member.
                    gone.fetch_add(1, Relaxed);
                    while gone.load(Relaxed) < THREADS {
                        if let Some(mut session) = member.try_enter() {
                            session.check(|_| false);
                        }
                        std::thread::yield_now();
                    }
                });
            }
        });
        let sum: u64 = blocks.iter().map(|block| block.load(Relaxed)).sum();
        assert_eq!(sum, THREADS as u64 * ROUNDS);
        assert!(!lock.is_taken());
    }
}
