//! A lock on byte ranges of a device, shared by all engines that serve the device with unaligned requests.
//!
//! A write of a part of a block reads the block, changes it, and writes it back. Another write to the block
//! at the same time could be lost. So an unaligned write locks its blocks exclusively; overlapping writes run
//! in the order of their arrival. Writes of whole blocks lock nothing. They check with one load whether any
//! range is locked ([`RangeLock::is_taken`]). Only then they search the table, and wait for entries that they
//! overlap.
//!
//! The table maps each byte to its newest entry, as disjoint ranges ordered by offset. A new entry waits for
//! the entries that it replaces, which in turn wait for older ones. So adding an entry needs a search by
//! offset, and no scan.
//!
//! Writes of whole blocks submitted before a range was locked are not in the table. So a range is granted
//! only after each member (the source of a server on one engine) found no such write in flight:
//! [`LockedTable::check`]. Therefore the load in `is_taken` may be relaxed. Until its check, a member may
//! miss the new range, but the check finds the writes that the member has submitted. After the check, the
//! member has held the mutex, and so sees the range.
//!
//! Engines wait for the mutex only when a source starts or is dropped. Otherwise they try to lock it
//! ([`Member::try_enter`]). They wake each other with messages.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use blkq::sync::{Mutex, MutexGuard, lock, try_lock};
use blkq::{Disk, Error, ErrorKind};

/// Time limit of a resize for the writes to the end of the device.
const RESIZE_TIMEOUT_S: u64 = 30;

/// Makes the thread of a member call [`Member::try_enter`] soon.
pub(super) type Wake = Arc<dyn Fn() + Send + Sync>;

/// Orders unaligned writes of one disk. All servers of the disk must share one lock, in
/// [`NbdOptions::unaligned`](super::NbdOptions::unaligned).
#[derive(Default)]
pub struct RangeLock {
    /// The number of exclusive entries, granted or waiting. Changed under the mutex, and read without it: see
    /// the documentation of the module.
    taken: AtomicUsize,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    next_ticket: u64,
    /// The entries by ticket. A newer entry has a larger ticket.
    entries: BTreeMap<u64, Entry>,
    newest: Newest,
    members: BTreeMap<usize, MemberState>,
}

struct Entry {
    range: Range<u64>,
    exclusive: bool,
    member: usize,
    /// Identifies the entry for its member: see [`LockedTable::take_granted`].
    key: u32,
    /// The number of older entries to wait for, plus the number of members that must still check their
    /// writes. The entry is granted when this is 0.
    blockers: usize,
    /// Tickets of the newer entries that wait for this one.
    waiters: Vec<u64>,
    /// The member left before the entry was granted. The entry stays until it would be granted, so that its
    /// waiters keep their order.
    abandoned: bool,
}

/// For each byte that is part of an entry, the ticket of the newest such entry.
#[derive(Default)]
struct Newest {
    /// Disjoint ranges: the first byte maps to the end and the ticket.
    ranges: BTreeMap<u64, (u64, u64)>,
}

impl Newest {
    /// Makes `ticket` the newest of `range`. Appends the replaced tickets to `older`, some of them several
    /// times.
    fn replace(&mut self, range: &Range<u64>, ticket: u64, older: &mut Vec<u64>) {
        while let Some((start, (end, before))) = self.last_in(range) {
            older.push(before);
            self.ranges.remove(&start);
            if start < range.start {
                self.ranges.insert(start, (range.start, before));
            }
            if end > range.end {
                self.ranges.insert(range.end, (end, before));
            }
        }
        self.ranges.insert(range.start, (range.end, ticket));
    }

    /// The last entry that overlaps `range`: its first byte, its end and its ticket.
    fn last_in(&self, range: &Range<u64>) -> Option<(u64, (u64, u64))> {
        let (&start, &last) = self.ranges.range(..range.end).next_back()?;
        (last.0 > range.start).then_some((start, last))
    }

    fn remove(&mut self, range: &Range<u64>, ticket: u64) {
        self.ranges.extract_if(range.clone(), |_, (_, newest)| *newest == ticket).for_each(drop);
    }
}

struct MemberState {
    wake: Wake,
    /// The member was woken and has not called `try_enter` since.
    woken: bool,
    /// Keys of this member's entries that were granted since its last `take_granted`.
    granted: Vec<u32>,
    /// Tickets of the exclusive entries for which this member must still check its writes in flight.
    unchecked: Vec<u64>,
}

impl MemberState {
    fn wake(&mut self, to_wake: &mut Wakes) {
        if !std::mem::replace(&mut self.woken, true) {
            to_wake.0.push(Arc::clone(&self.wake));
        }
    }
}

impl std::fmt::Debug for RangeLock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RangeLock").field("taken", &self.taken).finish_non_exhaustive()
    }
}

impl RangeLock {
    #[inline]
    pub(super) fn is_taken(&self) -> bool {
        self.taken.load(Relaxed) > 0
    }

    /// Resizes `disk` as [`Disk::resize`] does, while no write to the incomplete block at the end is in
    /// flight: such a write would write back padding over bytes that the resize has made part of the disk.
    ///
    /// # Errors
    /// As [`Disk::resize`], and [`ErrorKind::Busy`] if writes in flight do not complete within 30 s.
    pub fn resize(self: &Arc<Self>, disk: &Disk, bytes: Option<u64>) -> Result<u64, Error> {
        let thread = thread::current();
        let member = self.join(Arc::new(move || thread.unpark()));
        let until = Instant::now() + Duration::from_secs(RESIZE_TIMEOUT_S);
        let end = disk.limits().whole_bytes();
        member.enter().lock(end..u64::MAX, 0);
        loop {
            let mut session = member.enter();
            session.check(|_| false);
            let is_granted = session.take_granted().next().is_some();
            drop(session);
            if is_granted {
                return disk.resize(bytes);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let what = "writes to the end of the device did not complete within";
                return Err(Error::new(ErrorKind::Busy, format!("{what} {RESIZE_TIMEOUT_S} s")));
            }
            thread::park_timeout(left);
        }
    }

    pub(super) fn join(self: &Arc<Self>, wake: Wake) -> Member {
        let state = MemberState { wake, woken: false, granted: Vec::new(), unchecked: Vec::new() };
        let members = &mut lock(&self.table).members;
        let index = members.last_key_value().map_or(0, |(last, _)| last + 1);
        members.insert(index, state);
        Member { lock: Arc::clone(self), index }
    }
}

/// One member of the lock. When it is dropped, its entries are released.
pub(super) struct Member {
    lock: Arc<RangeLock>,
    index: usize,
}

impl Member {
    /// Returns `None` if another thread has locked the table. The caller must then try again soon.
    pub fn try_enter(&self) -> Option<LockedTable<'_>> {
        // No code that changes the table can panic halfway, so a poisoned table is consistent.
        Some(LockedTable::new(self, try_lock(&self.lock.table)?))
    }

    fn enter(&self) -> LockedTable<'_> {
        LockedTable::new(self, lock(&self.lock.table))
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let index = self.index;
        let mut session = self.enter();
        let own = |(_, entry): &(&u64, &Entry)| entry.member == index;
        let tickets: Vec<u64> = session.table.entries.iter().filter(own).map(|(ticket, _)| *ticket).collect();
        tickets.into_iter().for_each(|ticket| session.release(ticket));
        session.check(|_| false);
        session.table.members.remove(&index);
    }
}

/// The table, locked by one member. When this is dropped, it wakes the members whose entries were granted, or
/// who must check their writes.
pub(super) struct LockedTable<'a> {
    // Fields are dropped in this order: the table is unlocked before the members are woken.
    table: MutexGuard<'a, Table>,
    to_wake: Wakes,
    taken: &'a AtomicUsize,
    member: usize,
}

/// Wakes these members when it is dropped.
struct Wakes(Vec<Wake>);

impl Drop for Wakes {
    fn drop(&mut self) {
        self.0.iter().for_each(|wake| wake());
    }
}

impl<'a> LockedTable<'a> {
    fn new(member: &'a Member, table: MutexGuard<'a, Table>) -> LockedTable<'a> {
        let (taken, to_wake) = (&member.lock.taken, Wakes(Vec::new()));
        let mut locked = LockedTable { table, to_wake, taken, member: member.index };
        locked.own().woken = false;
        locked
    }

    /// The state of the member that has locked the table.
    fn own(&mut self) -> &mut MemberState {
        self.table.members.get_mut(&self.member).expect("a member is in the table until it is dropped")
    }

    /// Adds an exclusive entry, and returns its ticket. When the entry is granted,
    /// [`LockedTable::take_granted`] returns `key`.
    pub fn lock(&mut self, range: Range<u64>, key: u32) -> u64 {
        self.taken.fetch_add(1, Relaxed);
        let table = &mut *self.table;
        for (member, state) in &mut table.members {
            state.unchecked.push(table.next_ticket);
            if *member != self.member {
                state.wake(&mut self.to_wake);
            }
        }
        let unchecked = table.members.len();
        self.insert(range, true, key, unchecked)
    }

    /// Adds an entry for a write of whole blocks, as [`LockedTable::lock`] does. Returns `None` if no entry
    /// overlaps `range`: the write can run now.
    pub fn wait(&mut self, range: Range<u64>, key: u32) -> Option<u64> {
        self.table.newest.last_in(&range).map(|_| self.insert(range, false, key, 0))
    }

    fn insert(&mut self, range: Range<u64>, exclusive: bool, key: u32, unchecked: usize) -> u64 {
        let (member, table) = (self.member, &mut *self.table);
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

    /// Removes the entry `ticket`, whether it was granted or not.
    pub fn release(&mut self, ticket: u64) {
        let mut next = Some(ticket);
        // Abandoned entries that would be granted now.
        let mut abandoned = Vec::new();
        while let Some(ticket) = next.take().or_else(|| abandoned.pop()) {
            let table = &mut *self.table;
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

    /// For each exclusive entry that waits for this member's check, calls `has_writes` to find out whether
    /// the member has writes in flight in the range. Returns true if it has: then call this again when writes
    /// have completed.
    pub fn check(&mut self, mut has_writes: impl FnMut(&Range<u64>) -> bool) -> bool {
        let mut unchecked = std::mem::take(&mut self.own().unchecked);
        unchecked.retain(|ticket| {
            let Some(entry) = self.table.entries.get(ticket) else { return false };
            let busy = has_writes(&entry.range);
            if !busy && self.unblock(*ticket) {
                self.release(*ticket);
            }
            busy
        });
        let left = !unchecked.is_empty();
        self.own().unchecked = unchecked;
        left
    }

    /// Removes one blocker of an entry, and grants the entry if none is left. Returns true if its member left
    /// instead: the caller must release the entry.
    fn unblock(&mut self, ticket: u64) -> bool {
        let table = &mut *self.table;
        let Some(entry) = table.entries.get_mut(&ticket) else { return false };
        entry.blockers -= 1;
        if entry.blockers > 0 || entry.abandoned {
            return entry.blockers == 0;
        }
        if let Some(state) = table.members.get_mut(&entry.member) {
            state.granted.push(entry.key);
            if entry.member != self.member {
                state.wake(&mut self.to_wake);
            }
        }
        false
    }

    /// Takes the keys of this member's entries that were granted since the last call.
    pub fn take_granted(&mut self) -> impl Iterator<Item = u32> {
        self.own().granted.drain(..)
    }
}
