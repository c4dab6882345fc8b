//! The lock on ranges of a device, shared by all engines that serve it.
//!
//! A write of a part of a block reads the block, changes it and writes it back. No other write to
//! that block may run meanwhile, or it would be overwritten. So such a write takes its blocks
//! exclusively: first come, first served among those that overlap. Writes of whole blocks take
//! nothing. While no range is taken they see that from one load ([`RangeLock::is_taken`]); else
//! they search the table, and wait if they overlap with an entry.
//!
//! The table maps every byte to the newest entry that has it, as disjoint ranges ordered by offset.
//! A new entry waits for the entries that it covers there, and takes their place: those waited for
//! the ones before them. So an entry costs a search, and no scan of others that wait elsewhere.
//!
//! The writes of whole blocks that were submitted before a range was taken are in no table. So a
//! range is granted only when every member (the server's part on one engine) has found none in
//! flight there: [`LockedTable::check`]. The load may be relaxed for that reason: before a member
//! checked, it may overlook the new range, and what it submits until then is found by its check;
//! since the check it has had the mutex, and sees the range.
//!
//! Engines only try the mutex ([`Member::try_enter`]) and wake each other by messages.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use blkq::{Disk, Error, ErrorKind};

/// How long a resize waits for the writes to the end of the device.
const RESIZE_TIMEOUT: Duration = Duration::from_secs(30);

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
    /// By their tickets.
    entries: BTreeMap<u64, Entry>,
    newest: Newest,
    members: Vec<Option<MemberState>>,
}

struct Entry {
    range: Range<u64>,
    exclusive: bool,
    member: usize,
    /// Its number with its member.
    key: u32,
    /// Older entries that it waits for, and members that have not checked.
    blockers: usize,
    /// Tickets of the entries that wait for this one.
    waiters: Vec<u64>,
    /// Its member left before it was granted. It stays until it would be, so that its waiters do not
    /// overtake the entries that it waits for.
    abandoned: bool,
}

/// The ticket of the newest entry of each byte that an entry has.
#[derive(Default)]
struct Newest {
    /// Disjoint ranges: the first byte, then the end and the ticket.
    ranges: BTreeMap<u64, (u64, u64)>,
}

impl Newest {
    /// Makes `ticket` the newest of `range`. Appends the tickets that it replaces to `older`, some
    /// maybe several times.
    fn replace(&mut self, range: &Range<u64>, ticket: u64, older: &mut Vec<u64>) {
        if let Some((_, (end, before))) = self.ranges.range_mut(..range.start).next_back()
            && *end > range.start
        {
            older.push(*before);
            let (behind, before) = (std::mem::replace(end, range.start), *before);
            if behind > range.end {
                self.ranges.insert(range.end, (behind, before));
            }
        }
        while let Some((&start, &(end, before))) = self.ranges.range(range.clone()).next() {
            older.push(before);
            self.ranges.remove(&start);
            if end > range.end {
                self.ranges.insert(range.end, (end, before));
            }
        }
        self.ranges.insert(range.start, (range.end, ticket));
    }

    /// Whether an entry has bytes of `range`.
    fn overlaps(&self, range: &Range<u64>) -> bool {
        self.ranges.range(..range.end).next_back().is_some_and(|(_, (end, _))| *end > range.start)
    }

    /// Removes `ticket`, an entry that had `range`.
    fn remove(&mut self, range: &Range<u64>, ticket: u64) {
        let mut from = range.start;
        while let Some((&start, &(end, newest))) = self.ranges.range(from..range.end).next() {
            if newest == ticket {
                self.ranges.remove(&start);
            }
            from = end.min(range.end);
        }
    }
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

    /// Resizes `disk` while no write to the last part of a block is under way, as [`Disk::resize`]
    /// does. Such a write would put back the padding that it read, over bytes that the disk has by
    /// then.
    ///
    /// # Errors
    /// Those of [`Disk::resize`]; [`ErrorKind::Busy`] too if writes in flight do not complete.
    pub fn resize(self: &Arc<Self>, disk: &Disk, bytes: Option<u64>) -> Result<u64, Error> {
        let thread = thread::current();
        let mut member = self.join(Arc::new(move || thread.unpark()));
        let until = Instant::now() + RESIZE_TIMEOUT;
        let (mut granted, end) = (Vec::new(), disk.limits().whole_bytes());
        member.enter().lock(end..u64::MAX, 0);
        loop {
            let mut session = member.enter();
            session.check(|_| false);
            session.take_granted(&mut granted);
            drop(session);
            if !granted.is_empty() {
                return disk.resize(bytes);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let message = format!(
                    "writes to the end of the device did not complete within {} s",
                    RESIZE_TIMEOUT.as_secs()
                );
                return Err(Error::new(ErrorKind::Busy, message));
            }
            thread::park_timeout(left);
        }
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
    /// Scans the table, unless another thread does at the moment: then call again soon.
    pub fn try_enter(&mut self) -> Option<LockedTable<'_>> {
        let table = match self.lock.table.try_lock() {
            Ok(table) => table,
            // The table is changed by assignments only: it is whole at any time.
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(self.lock.session(table, self.index, &mut self.to_wake))
    }

    /// The same for a thread that may wait for others.
    fn enter(&mut self) -> LockedTable<'_> {
        let table = self.lock.table.lock().unwrap_or_else(PoisonError::into_inner);
        self.lock.session(table, self.index, &mut self.to_wake)
    }
}

impl RangeLock {
    fn session<'a>(
        &'a self,
        mut table: MutexGuard<'a, Table>,
        member: usize,
        to_wake: &'a mut Vec<Wake>,
    ) -> LockedTable<'a> {
        if let Some(state) = &mut table.members[member] {
            state.woken = false;
        }
        LockedTable { taken: &self.taken, table: Some(table), member, to_wake }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let index = self.index;
        let mut session = self.enter();
        let own = |(_, entry): &(&u64, &Entry)| entry.member == index;
        let tickets: Vec<u64> =
            session.table().entries.iter().filter(own).map(|(ticket, _)| *ticket).collect();
        tickets.into_iter().for_each(|ticket| session.release(ticket));
        session.check(|_| false);
        session.table().members[index] = None;
    }
}

/// A member with the table in its hands. Those whose ranges were granted are woken when it is
/// dropped.
pub(super) struct LockedTable<'a> {
    taken: &'a AtomicUsize,
    /// Always there but while it is dropped.
    table: Option<MutexGuard<'a, Table>>,
    member: usize,
    to_wake: &'a mut Vec<Wake>,
}

impl LockedTable<'_> {
    fn table(&mut self) -> &mut Table {
        self.table.as_mut().expect("taken out only when the session is dropped")
    }

    /// Queues for `range` exclusively. [`LockedTable::take_granted`] gives `key` when it is granted.
    /// Returns the ticket to release.
    pub fn lock(&mut self, range: Range<u64>, key: u32) -> u64 {
        self.taken.fetch_add(1, Relaxed);
        let mut unchecked = 0;
        let ticket = self.table().next_ticket;
        for index in 0..self.table().members.len() {
            if let Some(state) = &mut self.table().members[index] {
                state.unchecked.push(ticket);
                unchecked += 1;
                self.wake(index);
            }
        }
        self.insert(range, true, key, unchecked)
    }

    /// Queues a write of whole blocks behind the entries that it overlaps: granted as with
    /// [`LockedTable::lock`]. `None` if there are none, and it may run now.
    pub fn wait(&mut self, range: Range<u64>, key: u32) -> Option<u64> {
        self.table().newest.overlaps(&range).then(|| self.insert(range, false, key, 0))
    }

    fn insert(&mut self, range: Range<u64>, exclusive: bool, key: u32, unchecked: usize) -> u64 {
        let member = self.member;
        let table = self.table();
        let ticket = table.next_ticket;
        table.next_ticket += 1;
        let mut older = Vec::new();
        table.newest.replace(&range, ticket, &mut older);
        older.sort_unstable();
        older.dedup();
        for before in &older {
            if let Some(before) = table.entries.get_mut(before) {
                before.waiters.push(ticket);
            }
        }
        let (blockers, waiters) = (older.len() + unchecked, Vec::new());
        let entry = Entry { range, exclusive, member, key, blockers, waiters, abandoned: false };
        table.entries.insert(ticket, entry);
        ticket
    }

    /// Releases the range of `ticket`, or stops waiting for it.
    pub fn release(&mut self, ticket: u64) {
        let mut next = Some(ticket);
        // Abandoned entries whose turn has come.
        let mut abandoned = Vec::new();
        while let Some(ticket) = next.take().or_else(|| abandoned.pop()) {
            let table = self.table();
            let Some(entry) = table.entries.get_mut(&ticket) else { continue };
            if entry.blockers > 0 {
                entry.abandoned = true;
                continue;
            }
            let Some(released) = table.entries.remove(&ticket) else { continue };
            table.newest.remove(&released.range, ticket);
            if released.exclusive {
                self.taken.fetch_sub(1, Relaxed);
            }
            abandoned.extend(released.waiters.into_iter().filter(|waiter| self.unblock(*waiter)));
        }
    }

    /// Drops the ranges in which this member has no writes in flight from those that it has to
    /// check. True if some are left: check again when writes have completed.
    pub fn check(&mut self, mut has_writes: impl FnMut(&Range<u64>) -> bool) -> bool {
        let member = self.member;
        let Some(state) = &mut self.table().members[member] else { return false };
        let mut unchecked = std::mem::take(&mut state.unchecked);
        unchecked.retain(|ticket| {
            let Some(entry) = self.table().entries.get(ticket) else { return false };
            let busy = has_writes(&entry.range);
            if !busy && self.unblock(*ticket) {
                self.release(*ticket);
            }
            busy
        });
        let left = !unchecked.is_empty();
        if let Some(state) = &mut self.table().members[member] {
            state.unchecked = unchecked;
        }
        left
    }

    /// The entry waits for one thing less. Granted, it is for its member to see; true if that has
    /// left, and the entry is to be released.
    fn unblock(&mut self, ticket: u64) -> bool {
        let Some(entry) = self.table().entries.get_mut(&ticket) else { return false };
        entry.blockers -= 1;
        if entry.blockers > 0 || entry.abandoned {
            return entry.blockers == 0;
        }
        let (member, key) = (entry.member, entry.key);
        if let Some(state) = &mut self.table().members[member] {
            state.granted.push(key);
        }
        self.wake(member);
        false
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

impl Drop for LockedTable<'_> {
    fn drop(&mut self) {
        self.table = None;
        self.to_wake.drain(..).for_each(|wake| wake());
    }
}
