//! kyber, a scheduler for fast devices. Each domain (reads, writes, discards, others) is a FIFO with a number
//! of tokens: a request needs one while it is in the driver. The domains dispatch batches in turn. If the
//! device is congested, domains that meet their latency target lose tokens, and domains that miss it gain
//! some. Rules and defaults are those of block/kyber-iosched.c, with two differences: each queue has tokens
//! of its own, and writes may use all of theirs, because bios do not say whether a thread waits for them.

use std::collections::VecDeque;

use super::scheduler::{NS_PER_MS, Scheduler};
use crate::bio::{Operation, Outline};
use crate::error::IoResult;
use crate::limits::MergeSide;
use crate::request::Request;
use crate::tags::Tag;

const READ: usize = 0;
const WRITE: usize = 1;
const DISCARD: usize = 2;
const OTHER: usize = 3;

/// The number of requests, youngest first, with which a bio is compared (blk_bio_list_merge).
const MERGE_CANDIDATES: usize = 8;

/// Latencies are counted in quarters of the domain's target. The last bucket has no upper bound.
const BUCKETS: usize = 8;
/// The number of buckets within the target, and so the number of steps by which depths change.
const GOOD_BUCKETS: usize = 4;
/// Time from the first completion to the evaluation of the latencies, in nanoseconds.
const EVALUATE_AFTER_NS: u64 = 100 * NS_PER_MS;
/// The number of samples that a percentile needs; fewer if the first one is this old, in nanoseconds.
const SAMPLES: u32 = 500;
const SAMPLES_AGE_NS: u64 = 1_000 * NS_PER_MS;

fn domain_of(operation: Operation) -> usize {
    match operation {
        Operation::Read => READ,
        Operation::Write => WRITE,
        Operation::Discard => DISCARD,
        Operation::WriteZeroes | Operation::Flush => OTHER,
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Histogram([u32; BUCKETS]);

impl Histogram {
    fn count(&mut self, latency_ns: u64, target_ns: u64) {
        let bucket = latency_ns.saturating_sub(1) / (target_ns / GOOD_BUCKETS as u64);
        self.0[bucket.min(BUCKETS as u64 - 1) as usize] += 1;
    }

    /// The bucket that `percent` of the samples do not exceed.
    fn percentile(&self, percent: u64) -> usize {
        let samples: u64 = self.0.iter().map(|&count| u64::from(count)).sum();
        let mut left = (samples * percent).div_ceil(100);
        let reached = self.0.iter().position(|&count| {
            left = left.saturating_sub(u64::from(count));
            left == 0
        });
        reached.unwrap_or(BUCKETS - 1)
    }
}

/// The latencies of a domain since its percentiles were last taken.
#[derive(Debug, Default)]
struct Samples {
    /// Latencies from the dispatch to the driver.
    io: Histogram,
    /// Latencies from the insertion into the scheduler.
    total: Histogram,
    count: u32,
    first_ns: u64,
}

#[derive(Debug)]
struct Domain {
    /// Queued requests in order of arrival, with room for every tag.
    held: VecDeque<Tag>,
    in_flight: u32,
    /// The number of tokens: requests that may be in the driver now.
    depth: u32,
    depth_max: u32,
    /// Largest number of requests in a batch.
    batch: u32,
    /// `None`: the latencies of this domain are not checked.
    target_ns: Option<u64>,
    samples: Samples,
    /// The bucket of the last 99th percentile of the total latency, kept for the next congestion; see
    /// `adjust_depths`.
    p99: Option<usize>,
}

impl Domain {
    fn new(tags: usize, depth: u32, batch: u32, target_ms: Option<u64>) -> Domain {
        Domain {
            held: VecDeque::with_capacity(tags),
            in_flight: 0,
            depth,
            depth_max: depth,
            batch,
            target_ns: target_ms.map(|target| target * NS_PER_MS),
            samples: Samples::default(),
            p99: None,
        }
    }

    fn sample(&mut self, entry: &Entry, now_ns: u64) {
        let Some(target_ns) = self.target_ns else { return };
        if self.samples.count == 0 {
            self.samples.first_ns = now_ns;
        }
        self.samples.count += 1;
        self.samples.io.count(now_ns.saturating_sub(entry.dispatched_ns), target_ns);
        self.samples.total.count(now_ns.saturating_sub(entry.inserted_ns), target_ns);
    }

    fn take_samples(&mut self, now_ns: u64) -> Option<Samples> {
        let Samples { count, first_ns, .. } = self.samples;
        let aged = count > 0 && now_ns.saturating_sub(first_ns) >= SAMPLES_AGE_NS;
        (count >= SAMPLES || aged).then(|| std::mem::take(&mut self.samples))
    }
}

#[derive(Clone, Debug, Default)]
struct Entry {
    inserted_ns: u64,
    dispatched_ns: u64,
    /// The request is queued here.
    held: bool,
    /// The domain whose token the request holds.
    token: Option<usize>,
}

#[derive(Debug)]
pub(super) struct Kyber {
    domains: [Domain; 4],
    entries: Box<[Entry]>,
    /// The domain of the current batch, and the number of requests that it has had.
    batch_domain: usize,
    batched: u32,
    evaluate_at_ns: Option<u64>,
}

impl Kyber {
    pub fn new(tags: usize) -> Kyber {
        Kyber {
            domains: [
                Domain::new(tags, 256, 16, Some(2)),
                Domain::new(tags, 128, 8, Some(10)),
                Domain::new(tags, 64, 1, Some(5_000)),
                Domain::new(tags, 16, 1, None),
            ],
            entries: vec![Entry::default(); tags].into_boxed_slice(),
            batch_domain: READ,
            batched: 0,
            evaluate_at_ns: None,
        }
    }

    /// Removes the oldest request of the current domain, if that domain is open and has a free token.
    fn take(&mut self, open: [bool; 2], now_ns: u64) -> Option<Tag> {
        let domain = &mut self.domains[self.batch_domain];
        if domain.in_flight >= domain.depth || !open[usize::from(self.batch_domain != READ)] {
            return None;
        }
        let tag = domain.held.pop_front()?;
        domain.in_flight += 1;
        self.batched += 1;
        let entry = &mut self.entries[tag.index()];
        (entry.held, entry.dispatched_ns, entry.token) = (false, now_ns, Some(self.batch_domain));
        Some(tag)
    }

    /// Returns the token of the request, if it holds one, and the domain of the token.
    fn return_token(&mut self, tag: Tag) -> Option<usize> {
        let number = self.entries[tag.index()].token.take()?;
        self.domains[number].in_flight -= 1;
        Some(number)
    }

    /// Adjusts the depths to the measured latencies. A domain that misses its target gets more tokens. A
    /// domain that meets it gives tokens up, but only if the device itself is too slow for some domain.
    fn adjust_depths(&mut self, now_ns: u64) {
        let mut congested = false;
        let seen = self.domains.each_mut().map(|domain| {
            let samples = domain.take_samples(now_ns)?;
            congested |= samples.io.percentile(90) >= GOOD_BUCKETS;
            Some(samples.total.percentile(99))
        });
        for (domain, seen) in self.domains.iter_mut().zip(seen) {
            // Domains collect enough samples at different times. A percentile is therefore kept for the next
            // congestion, but limits its domain only once.
            let p99 = if congested {
                seen.or(domain.p99.take())
            } else {
                domain.p99 = seen.or(domain.p99);
                seen
            };
            if let Some(p99) = p99
                && (congested || p99 >= GOOD_BUCKETS)
            {
                let depth = domain.depth * (p99 as u32 + 1) / GOOD_BUCKETS as u32;
                domain.depth = depth.clamp(1, domain.depth_max);
            }
        }
    }
}

impl Scheduler for Kyber {
    fn insert(&mut self, tag: Tag, requests: &[Request], now_ns: u64) {
        let entry = &mut self.entries[tag.index()];
        debug_assert!(entry.token.is_none() && !entry.held);
        (entry.held, entry.inserted_ns) = (true, now_ns);
        self.domains[domain_of(requests[tag.index()].operation)].held.push_back(tag);
    }

    fn dispatch(&mut self, _requests: &[Request], open: [bool; 2], now_ns: u64) -> Option<Tag> {
        if self.batched < self.domains[self.batch_domain].batch
            && let Some(tag) = self.take(open, now_ns)
        {
            return Some(tag);
        }
        // The domain has had its batch, has no request, or has no token. The others are next, and this domain
        // comes last.
        self.batched = 0;
        (0..self.domains.len()).find_map(|_| {
            self.batch_domain = (self.batch_domain + 1) % self.domains.len();
            self.take(open, now_ns)
        })
    }

    fn find_merge(&self, requests: &[Request], bio: &Outline) -> Option<(Tag, MergeSide)> {
        let held = &self.domains[domain_of(bio.operation)].held;
        held.iter().rev().take(MERGE_CANDIDATES).find_map(|&tag| {
            let request = &requests[tag.index()];
            let side = MergeSide::of(request.sector, request.end(), bio.sector, bio.sectors)?;
            (request.operation == bio.operation).then_some((tag, side))
        })
    }

    fn joined(&mut self, kept: Tag, gone: Tag) {
        let inserted_ns = self.entries[gone.index()].inserted_ns;
        let entry = &mut self.entries[kept.index()];
        entry.inserted_ns = entry.inserted_ns.min(inserted_ns);
        self.remove(gone);
    }

    fn holds(&self, tag: Tag) -> bool {
        self.entries[tag.index()].held
    }

    fn remove(&mut self, tag: Tag) -> bool {
        if !std::mem::take(&mut self.entries[tag.index()].held) {
            return false;
        }
        self.domains.iter_mut().any(|domain| {
            let place = domain.held.iter().position(|&held| held == tag);
            place.and_then(|place| domain.held.remove(place)).is_some()
        })
    }

    fn len(&self) -> usize {
        self.domains.iter().map(|domain| domain.held.len()).sum()
    }

    fn requeued(&mut self, tag: Tag) {
        self.return_token(tag);
    }

    fn completed(&mut self, completed: &[(Tag, IoResult)], now_ns: u64) {
        for (tag, _) in completed {
            if let Some(number) = self.return_token(*tag) {
                self.domains[number].sample(&self.entries[tag.index()], now_ns);
            }
        }
        if now_ns >= *self.evaluate_at_ns.get_or_insert(now_ns + EVALUATE_AFTER_NS) {
            self.evaluate_at_ns = None;
            self.adjust_depths(now_ns);
        }
    }
}

#[cfg(test)]
mod tests;
