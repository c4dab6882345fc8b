//! Compares virtual time with a plain model: how much is admitted, for any times and batches.

use proptest::prelude::*;

use super::bucket::DEBT_NS_MAX;
use super::*;
use crate::bio::{BioFlags, Operation, Outline};
use crate::request::Request;
use crate::sector::Sector;
use crate::tags::Tag;

const MS: u64 = 1_000_000;
const S: u64 = 1_000 * MS;
const BEGIN_NS: u64 = 5_000 * S;

fn request(operation: Operation, bytes: u64) -> Request {
    let mut request = Request::of_tag(0);
    let outline =
        Outline { operation, flags: BioFlags::empty(), sector: Sector(0), sectors: bytes / 512, start_ns: 0 };
    request.begin(0, &outline, 1);
    request
}

/// Queues whose batches of equal requests pass the same limits.
struct TestBed {
    requests: Vec<Request>,
    tags: Vec<Tag>,
    queues: Vec<Vec<Meter>>,
}

impl TestBed {
    fn device(limits: &str, queues: usize, request: impl Fn() -> Request) -> TestBed {
        let (limits, buckets) = (limits.parse().expect("limits"), Arc::new(Buckets::default()));
        TestBed::new((0..queues).map(|_| Meter::of_device(&limits, &buckets)).collect(), request)
    }

    fn group(limits: &str, weights: &[u32], request: impl Fn() -> Request) -> TestBed {
        let limits = limits.parse().expect("limits");
        let group = Arc::new(Group::default());
        group.set_limits(&limits);
        let join =
            |(slot, weight): (usize, &u32)| Arc::new(group.clone().join(slot, "m", *weight).expect("a slot"));
        let members = weights.iter().enumerate().map(join);
        TestBed::new(members.map(|member| Meter::of_group(&limits, &member)).collect(), request)
    }

    fn new(queues: Vec<Vec<Meter>>, request: impl Fn() -> Request) -> TestBed {
        let requests = (0..64).map(|_| request()).collect();
        TestBed { requests, tags: (0..64).map(Tag).collect(), queues }
    }

    /// Admits a batch of `wanted` requests on queue `index` at `now_ns`. Returns how many were admitted, and
    /// when the next may start.
    fn admit(&mut self, index: usize, wanted: usize, now_ns: u64, is_late: bool) -> (usize, u64) {
        let (mut count, mut next_ns) = (wanted, now_ns);
        let meters = &mut self.queues[index];
        for at in 0..meters.len() {
            let admitted = meters[at].admit(&self.tags[..count], &self.requests, now_ns, is_late);
            if admitted.count < count {
                let unused = &self.tags[admitted.count..count];
                meters[..at].iter_mut().for_each(|meter| meter.refund(unused, &self.requests));
                (count, next_ns) = (admitted.count, next_ns.max(admitted.next_ns));
            }
        }
        (count, next_ns)
    }

    /// Runs queues that always have more requests, and that wake `late_ns(turn)` after the time for which
    /// they wait. Returns the number of requests that each admits in `length_ns`.
    fn flood(&mut self, length_ns: u64, mut late_ns: impl FnMut(u64) -> u64) -> Vec<u64> {
        let mut counts = vec![0; self.queues.len()];
        let mut wake_ns = vec![BEGIN_NS; self.queues.len()];
        let mut turn = 0;
        loop {
            let (index, now_ns) =
                wake_ns.iter().copied().enumerate().min_by_key(|(_, ns)| *ns).expect("a queue");
            if now_ns >= BEGIN_NS + length_ns {
                return counts;
            }
            turn += 1;
            let (count, next_ns) = self.admit(index, 64, now_ns, counts[index] > 0);
            counts[index] += count as u64;
            assert!(next_ns >= now_ns && next_ns < now_ns + DEBT_NS_MAX);
            // A batch that was admitted completely is followed by the next one immediately.
            wake_ns[index] = if count == 64 { now_ns } else { next_ns.max(now_ns + 1) + late_ns(turn) };
        }
    }
}

fn read() -> Request {
    request(Operation::Read, 4096)
}

#[test]
fn rates_are_exact_alone_and_for_eight_members() {
    for rate in [10_u64, 100, 1_000, 10_000, 100_000, 1_000_000, 999_983] {
        // Late by up to 3 ms, as threads on a busy machine are.
        let late = |turn: u64| (turn * 7_919) % 3_000_000;
        let seconds = if rate <= 10 { 10 } else { 2 };
        let exact = |counts: &[u64]| {
            let (sum, want) = (counts.iter().sum::<u64>(), rate * seconds);
            // The credit of an idle limit, and the request that starts in the first nanosecond.
            let more = rate / 200 + 8 * u64::try_from(counts.len()).unwrap();
            assert!(
                sum >= want - want / 100 - 8 && sum <= want + more,
                "{rate}: {sum} of {want}: {counts:?}"
            );
        };
        exact(&TestBed::device(&format!("iops={rate}"), 1, read).flood(seconds * S, late));
        exact(&TestBed::device(&format!("iops={rate}"), 4, read).flood(seconds * S, late));
        exact(&TestBed::group(&format!("iops={rate}"), &[100; 8], read).flood(seconds * S, late));
    }
}

#[test]
fn shares_follow_weights_and_leave_nothing_unused() {
    let counts =
        TestBed::group("iops=10000", &[100, 200, 500], read).flood(4 * S, |turn| turn * 37 % 400_000);
    for (count, weight) in counts.iter().zip([100, 200, 500]) {
        let want = 40_000 * weight / 800;
        assert!(count.abs_diff(want) < want / 20, "{counts:?}");
    }
    // A member that needs little gets that, and the other one gets all the rest.
    let mut bed = TestBed::group("iops=1000", &[900, 100], read);
    let (mut small, mut large, mut wake_ns) = (0, 0, BEGIN_NS);
    for ms in 0..4_000 {
        let now_ns = BEGIN_NS + ms * MS;
        if ms % 10 == 0 {
            let (count, _) = bed.admit(0, 1, now_ns, false);
            assert_eq!(count, 1, "it is within its share, and never waits");
            small += 1;
        }
        while wake_ns <= now_ns {
            let (count, next_ns) = bed.admit(1, 8, wake_ns, true);
            large += count;
            wake_ns = next_ns.max(wake_ns + 1);
        }
    }
    assert!(small == 400 && (3_500..3_650).contains(&large), "{small} {large}");
}

#[test]
fn capacity_left_by_others_is_repaid_briefly() {
    let mut bed = TestBed::group("bps=1M", &[100, 100], read);
    assert_eq!(bed.admit(1, 1, BEGIN_NS, false).0, 1);
    bed.requests[0] = request(Operation::Read, 32 << 10);
    assert_eq!(bed.admit(0, 1, BEGIN_NS, false).0, 1);
    // The share is used up for 60 ms. The limit has room before that, and admits half a megabyte.
    let now_ns = BEGIN_NS + 40 * MS;
    bed.requests[0] = request(Operation::Read, 512 << 10);
    assert_eq!(bed.admit(0, 1, now_ns, false).0, 1);
    bed.requests[0] = read();
    assert_eq!(bed.admit(0, 1, now_ns + 90 * MS, false).0, 0);
    assert_eq!(bed.admit(1, 1, now_ns + 90 * MS, false).0, 1, "it is within its share");
    assert_eq!(bed.admit(0, 1, now_ns + 110 * MS, false).0, 1, "it has repaid");
}

#[test]
fn a_burst_has_its_rate_and_its_length() {
    let mut bed = TestBed::device("iops=500,burst=2000x10s", 1, read);
    let burst = bed.flood(10 * S, |_| 0)[0];
    assert!((20_000..20_100).contains(&burst), "{burst}");
    let mut bed = TestBed::device("iops=500,burst=2000x10s", 1, read);
    let all = bed.flood(20 * S, |_| 0)[0];
    assert!((25_000..25_150).contains(&all), "{all}");
}

/// The limit earns an hour of this burst in 16 days, and the machine was booted three seconds ago.
#[test]
fn a_burst_is_whole_right_after_the_boot() {
    let limits = "read-iops=10,burst=4000x3600s";
    for mut bed in [TestBed::device(limits, 1, read), TestBed::group(limits, &[100], read)] {
        let mut passed = 0;
        for ms in 0..100_000 {
            passed += bed.admit(0, 4, 3 * S + ms * MS, false).0;
        }
        assert!((399_990..=400_010).contains(&passed), "{passed}");
    }
    // After a reboot, and for another member in the slot, nothing counts as used.
    let group = Arc::new(Group::default());
    let limits = limits.parse().unwrap();
    group.set_limits_at(&limits, 3 * S);
    for boot in 1..3 {
        group.restart([boot; 2], 0);
        let member = Arc::new(group.clone().join(0, "m", 100).unwrap());
        let mut bed = TestBed::new(vec![Meter::of_group(&limits, &member)], read);
        let passed: usize = (0..10_000).map(|ms| bed.admit(0, 4, 3 * S + ms * MS, false).0).sum();
        assert!((39_990..=40_010).contains(&passed), "boot {boot}: {passed}");
    }
}

#[test]
fn bytes_and_request_sizes_are_charged_exactly() {
    let flood = |limits: &str, bytes| {
        TestBed::device(limits, 1, || request(Operation::Write, bytes)).flood(4 * S, |_| 0)[0]
    };
    assert!((99..=101).contains(&(flood("bps=100M", 1 << 20) / 4)));
    assert!((249..=252).contains(&(flood("iops=1000,iops-size=16K", 64 << 10) / 4)));
    assert!((333..=335).contains(&(flood("iops=1000,iops-size=16K", 33 << 10) / 4)));
    // The stricter of two limits decides, and the other one is not charged for refused requests.
    assert!((99..=101).contains(&(flood("iops=1000,write-iops=100", 4096) / 4)));
    assert!((99..=101).contains(&(flood("iops=100,write-iops=1000", 4096) / 4)));
    // The bytes of reads and discards do not count as bytes of writes.
    for other in [read(), request(Operation::Discard, 1 << 30)] {
        let mut bed = TestBed::device("write-bps=1M", 1, || request(other.operation(), other.bytes()));
        assert_eq!((0..100).map(|_| bed.admit(0, 64, BEGIN_NS, false).0).sum::<usize>(), 6400);
    }
}

#[test]
fn a_killed_member_delays_others_only_briefly() {
    let mut bed = TestBed::group("iops=1000", &[10_000, 1], read);
    // This member has taken what it could, and never returns.
    bed.admit(0, 64, BEGIN_NS, true);
    let mut others = 0;
    let mut wake_ns = BEGIN_NS;
    while wake_ns < BEGIN_NS + S {
        let (count, next_ns) = bed.admit(1, 8, wake_ns, true);
        others += count;
        wake_ns = next_ns.max(wake_ns + 1);
    }
    assert!(others >= 880, "{others}");
}

#[test]
fn a_damaged_group_word_blocks_for_a_minute_at_most() {
    let limits: RateLimits = "iops=1000".parse().unwrap();
    let group = Arc::new(Group::default());
    group.set_limits_at(&limits, BEGIN_NS);
    let member = Arc::new(group.clone().join(0, "m", 100).unwrap());
    let word = &member.buckets().average[0];
    word.store(i64::MAX, SeqCst);
    let mut bed = TestBed::new(vec![Meter::of_group(&limits, &member)], read);
    assert_eq!(bed.admit(0, 1, BEGIN_NS, true), (0, BEGIN_NS + DEBT_NS_MAX));
    assert_eq!(bed.admit(0, 1, BEGIN_NS + DEBT_NS_MAX, true).0, 1);
    word.store(i64::MAX, SeqCst);
    assert_eq!(bed.admit(0, 1, BEGIN_NS, true).0, 0);
    member.buckets().forgive_debt(BEGIN_NS);
    assert_eq!(bed.admit(0, 1, BEGIN_NS, true).0, 1);
}

#[test]
fn a_device_repays_a_large_request_at_a_low_rate_in_full() {
    // 1 MiB at 1 KiB per second, or 2,048 I/Os of 512 bytes at one per second: each takes more than a minute.
    for (limits, cost_s) in [("bps=1K", 1_024), ("iops=1,iops-size=512", 2_048)] {
        let mut bed = TestBed::device(limits, 1, || request(Operation::Read, 1 << 20));
        let (mut now_ns, mut passed) = (BEGIN_NS, 0);
        while now_ns < BEGIN_NS + 4 * cost_s * S {
            let (count, next_ns) = bed.admit(0, 1, now_ns, passed > 0);
            passed += count;
            // Other requests read the word meanwhile.
            now_ns = next_ns.clamp(now_ns + 1, now_ns + 10 * S);
        }
        assert!((4..=5).contains(&passed), "{limits}: {passed}");
    }
}

#[test]
fn far_from_its_limit_a_queue_seldom_touches_the_word() {
    for limits in ["iops=10000000", "bps=1T", "read-iops=1000000", "iops=1000000,bps=1T"] {
        let (parsed, buckets) = (limits.parse().unwrap(), Arc::new(Buckets::default()));
        let mut bed = TestBed::new(vec![Meter::of_device(&parsed, &buckets)], read);
        let words = || buckets.average.iter().map(|word| word.load(SeqCst)).collect::<Vec<_>>();
        let (mut before, mut changes) = (words(), 0);
        for turn in 0..1_000 {
            assert_eq!(bed.admit(0, 1, BEGIN_NS + turn * 10_000, false).0, 1);
            changes += usize::from(words() != before);
            before = words();
        }
        assert!((1..=32).contains(&changes), "{limits}: {changes}");
    }
    // Near the limit each request is charged alone.
    let buckets = Arc::new(Buckets::default());
    let mut bed = TestBed::new(vec![Meter::of_device(&"iops=1000".parse().unwrap(), &buckets)], read);
    for turn in 1..=100 {
        assert_eq!(bed.admit(0, 1, BEGIN_NS + turn * MS, false).0, 1);
        assert_eq!(buckets.average[0].load(SeqCst).cast_unsigned(), BEGIN_NS + turn * MS - MS * 3 / 4);
    }
}

#[test]
fn each_change_of_the_limits_gets_a_new_number() {
    let group = Group::default();
    let mut numbers = Vec::new();
    for _ in 0..3 {
        group.set_limits(&"iops=5".parse().unwrap());
        numbers.push(group.limits().unwrap().0);
        // The group is repaired, as after damage.
        let limits: RateLimits = "iops=7".parse().unwrap();
        group.reset([0; 2], 0, &limits);
        assert_eq!(group.limits(), Some((group.sequence(), limits)));
        numbers.push(group.sequence());
    }
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), 6);
}

#[test]
fn a_prepayment_is_returned_when_it_does_not_suffice() {
    let buckets = Arc::new(Buckets::default());
    let mut bed = TestBed::new(vec![Meter::of_device(&"iops=100000".parse().unwrap(), &buckets)], read);
    assert_eq!(bed.admit(0, 1, BEGIN_NS, false).0, 1);
    let spent_ns = || buckets.average[0].load(SeqCst).cast_unsigned();
    let spent = spent_ns();
    // One request, and 25 that are prepaid: 0.25 ms.
    assert_eq!(spent, BEGIN_NS - 1_750_000 + 26 * 10_000);
    assert_eq!(bed.admit(0, 20, BEGIN_NS, false).0, 20);
    assert_eq!(spent_ns(), spent);
    // The batch exceeds the room: the five prepaid units that are left are refunded, and nothing is lost.
    let mut passed = 21;
    while passed < 176 {
        passed += bed.admit(0, 64, BEGIN_NS, true).0;
    }
    assert_eq!(bed.admit(0, 64, BEGIN_NS, false).0, 0);
    assert_eq!(spent_ns(), BEGIN_NS - 1_750_000 + passed as u64 * 10_000);
}

proptest! {
    /// In any window, and in any order of the queues: no more than the rate, 2 ms of it for one queue, and
    /// 0.25 ms for each other queue that has prepaid.
    #[test]
    fn prepayments_stay_within_the_window(
        rate in 10_000_u64..10_000_000,
        steps in prop::collection::vec((0_u64..400_000, 1_usize..64, 0_usize..3), 1..300),
    ) {
        let mut bed = TestBed::device(&format!("iops={rate}"), 3, read);
        // Units beyond the rate, times one second, for the window in which they are the most.
        let (mut now_ns, mut level) = (BEGIN_NS, 0_u128);
        for (gap_ns, wanted, queue) in steps {
            now_ns += gap_ns;
            level = level.saturating_sub(u128::from(gap_ns) * u128::from(rate));
            let count = bed.admit(queue, wanted, now_ns, false).0;
            level += count as u128 * 1_000_000_000;
            let most = u128::from(rate) * (2_000_000 + 2 * 250_000) + 2_000_000_000;
            prop_assert!(level <= most, "{level} {most}");
        }
    }

    /// In any window, at most as much is admitted as rate and credit allow. A queue with further requests never waits
    /// longer than for its next request.
    #[test]
    fn no_window_has_more_than_its_rate(
        rate in 1_u64..2_000_000,
        steps in prop::collection::vec((0_u64..5_000_000, 1_usize..64, 0_usize..3), 1..200),
    ) {
        let mut bed = TestBed::device(&format!("iops={rate}"), 3, read);
        let mut now_ns = BEGIN_NS;
        let (mut passed, mut next_free_ns) = (0_u64, None::<u64>);
        for (gap_ns, wanted, queue) in steps {
            now_ns += gap_ns;
            let (count, next_ns) = bed.admit(queue, wanted, now_ns, false);
            if let Some(free_ns) = next_free_ns {
                prop_assert!(now_ns < free_ns || count > 0, "{now_ns} {free_ns}");
            }
            passed += count as u64;
            let elapsed_ns = u128::from(now_ns - BEGIN_NS) + 2_000_000;
            // A batch of each queue may be rounded in its favour by a nanosecond.
            let most = elapsed_ns * u128::from(rate) / 1_000_000_000 + 1 + u128::from(passed * rate / 1_000_000_000);
            prop_assert!(u128::from(passed) <= most, "{passed} {most}");
            next_free_ns = (count < wanted).then_some(next_ns);
        }
    }
}
