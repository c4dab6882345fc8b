//! Compares the counters with a model that records every request.

use proptest::prelude::*;

use super::*;

fn new_writer() -> StatsWriter {
    StatsWriter(QueueStats::shared())
}

fn snapshot_at(writer: &StatsWriter, now_ns: u64) -> StatsSnapshot {
    writer.0.snapshot_at(writer.0.busy.load(Relaxed), now_ns)
}

#[derive(Clone, Debug)]
enum Step {
    /// A number of bios of an operation, each of which becomes a request, built at the same time.
    Start(Operation, u8),
    /// A bio joins a request in flight.
    Merge(u8),
    /// A request joins another request of its group.
    Join(u8, u8),
    /// A number of requests complete in one batch. Each has its own delay after the previous one.
    Done(Vec<(u8, u16, bool)>),
    Wait(u32),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..Operation::COUNT, 1u8..5).prop_map(|(op, n)| Step::Start(Operation::ALL[op], n)),
        any::<u8>().prop_map(Step::Merge),
        (any::<u8>(), any::<u8>()).prop_map(|(a, b)| Step::Join(a, b)),
        proptest::collection::vec((any::<u8>(), prop_oneof![Just(0u16), any::<u16>()], any::<bool>()), 1..6)
            .prop_map(Step::Done),
        (0u32..5_000_000).prop_map(Step::Wait),
    ]
}

#[derive(Default)]
struct Model {
    now_ns: u64,
    busy_ns: u64,
    bios: [u64; 4],
    completed: [Vec<u64>; 4],
    sectors: [u64; 4],
    failed: [u64; 4],
    in_flight: Vec<(StatGroup, u32, u64)>,
    merges: [u64; 4],
}

impl Model {
    fn wait(&mut self, ns: u64) {
        if !self.in_flight.is_empty() {
            self.busy_ns += ns;
        }
        self.now_ns += ns;
    }

    fn check(&self, found: &StatsSnapshot) {
        let reads = self.in_flight.iter().filter(|r| r.0 == StatGroup::Read).count() as u64;
        assert_eq!(found.in_flight, [reads, self.in_flight.len() as u64 - reads]);
        assert_eq!(found.busy_ns, self.busy_ns);
        assert!(found.in_flight_max[0] >= reads);
        for group in StatGroup::ALL {
            let (found, i) = (&found[group], group as usize);
            assert_eq!(found.ios, self.completed[i].len() as u64);
            assert_eq!(found.merges, self.merges[i]);
            assert_eq!(found.sectors, self.sectors[i]);
            assert_eq!(found.failed(), self.failed[i]);
            assert_eq!(found.nanoseconds, self.completed[i].iter().sum::<u64>());
            let mut latency = Histogram::default();
            self.completed[i].iter().for_each(|&ns| latency.record(ns));
            assert_eq!(found.latency, latency);
        }
    }
}

proptest! {
    #[test]
    fn counters_follow_the_model(steps in proptest::collection::vec(step(), 1..60)) {
        let mut writer = new_writer();
        let mut model = Model { now_ns: 1_000_000_000_000, ..Model::default() };
        let begin_ns = model.now_ns;
        for step in steps {
            match step {
                Step::Start(operation, n) => {
                    let group = StatGroup::from(operation);
                    writer.start(group, u64::from(n), model.now_ns);
                    model.in_flight.extend((0..n).map(|i| (group, 8 * u32::from(i), model.now_ns)));
                    model.bios[group as usize] += u64::from(n);
                }
                Step::Merge(at) if !model.in_flight.is_empty() => {
                    let at = usize::from(at) % model.in_flight.len();
                    let (group, sectors, _) = &mut model.in_flight[at];
                    *sectors += 8;
                    writer.merged(*group);
                    model.bios[*group as usize] += 1;
                    model.merges[*group as usize] += 1;
                }
                Step::Join(a, b) if model.in_flight.len() > 1 => {
                    let len = model.in_flight.len();
                    let (a, b) = (usize::from(a) % len, usize::from(b) % len);
                    if a != b && model.in_flight[a].0 == model.in_flight[b].0 {
                        let group = model.in_flight[a].0;
                        model.in_flight[a].1 += model.in_flight[b].1;
                        model.in_flight[a].2 = model.in_flight[a].2.min(model.in_flight[b].2);
                        model.in_flight.swap_remove(b);
                        writer.joined(group);
                        model.merges[group as usize] += 1;
                    }
                }
                Step::Done(completions) => {
                    for (at, later_ns, fails) in completions {
                        if model.in_flight.is_empty() {
                            break;
                        }
                        model.wait(u64::from(later_ns));
                        let at = usize::from(at) % model.in_flight.len();
                        let (group, sectors, start_ns) = model.in_flight.swap_remove(at);
                        writer.done(group, (1, sectors as _), start_ns, model.now_ns);
                        if fails {
                            writer.failed(group, Status::Io);
                            model.failed[group as usize] += 1;
                        }
                        model.completed[group as usize].push(model.now_ns - start_ns);
                        model.sectors[group as usize] += u64::from(sectors);
                    }
                }
                Step::Wait(ns) => model.wait(u64::from(ns)),
                Step::Merge(_) | Step::Join(..) => {}
            }
            model.check(&snapshot_at(&writer, model.now_ns));
        }
        let before = snapshot_at(&writer, model.now_ns);
        for (group, sectors, start_ns) in std::mem::take(&mut model.in_flight) {
            writer.done(group, (1, sectors as _), start_ns, model.now_ns);
            model.completed[group as usize].push(model.now_ns - start_ns);
            model.sectors[group as usize] += u64::from(sectors);
        }
        let rest = snapshot_at(&writer, model.now_ns + 1_000_000);
        model.check(&rest);
        prop_assert!(rest.busy_ns <= model.now_ns - begin_ns);
        for group in StatGroup::ALL {
            prop_assert_eq!(rest[group].ios + rest[group].merges, model.bios[group as usize]);
        }
        let fields = rest.fields();
        prop_assert_eq!(fields[8], 0);
        prop_assert_eq!(fields[10], fields[3] + fields[7] + fields[14] + fields[16]);
        let mut sum = rest.delta(&before);
        sum += &before;
        prop_assert_eq!(sum.fields()[..8].to_vec(), fields[..8].to_vec());
    }
}

#[test]
fn fields_are_in_the_order_and_units_of_sysfs() {
    let mut writer = new_writer();
    let ms = 1_000_000_u64;
    writer.start(StatGroup::Read, 3, 10 * ms);
    writer.merged(StatGroup::Read);
    writer.done(StatGroup::Read, (1, 16), 10 * ms, 12 * ms);
    writer.done(StatGroup::Read, (1, 8), 10 * ms, 13 * ms);
    writer.start(StatGroup::from(Operation::WriteZeroes), 1, 13 * ms);
    writer.start(StatGroup::Discard, 1, 13 * ms);
    writer.start(StatGroup::Flush, 1, 13 * ms);
    writer.merged(StatGroup::Discard);
    writer.done(StatGroup::Write, (1, 100), 13 * ms, 20 * ms);
    writer.done(StatGroup::Discard, (1, 200), 13 * ms, 22 * ms);
    writer.done(StatGroup::Flush, (1, 0), 13 * ms, 24 * ms);
    let now = snapshot_at(&writer, 30 * ms);
    assert_eq!(now.fields(), [2, 1, 24, 5, 1, 0, 100, 7, 1, 20, 32, 1, 1, 200, 9, 1, 11]);
    assert_eq!(now[StatGroup::Read].mean_ns(), 5 * ms / 2);
    assert_eq!(now.in_flight_max, [3, 3]);
}

#[test]
fn a_completion_before_the_start_counts_as_no_time() {
    let mut writer = new_writer();
    writer.start(StatGroup::Write, 1, 1000);
    writer.done(StatGroup::Write, (1, 8), 1000, 990);
    let now = snapshot_at(&writer, 2000);
    assert_eq!(now.counter(Counter::NegativeLatencies), 1);
    assert_eq!((now[StatGroup::Write].nanoseconds, now.busy_ns), (0, 0));
    assert_eq!(now[StatGroup::Write].latency.count(), 1);
}

#[test]
fn several_queues_are_never_busier_than_the_clock() {
    let mut queues = [new_writer(), new_writer()];
    for queue in &mut queues {
        queue.start(StatGroup::Read, 2, 100);
    }
    let at = |now_ns| {
        let mut sum = StatsSnapshot::default();
        queues.iter().for_each(|queue| sum += &snapshot_at(queue, now_ns));
        sum
    };
    let (then, now) = (at(200), at(1200));
    assert_eq!(now.in_flight, [4, 0]);
    assert_eq!(now.delta(&then).busy_ns, 1000);
}

#[test]
fn a_reader_sees_busy_time_rise_and_no_torn_value() {
    let mut writer = new_writer();
    let stats = writer.0.clone();
    let begin_ns = monotonic_ns();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Relaxed) {
                let busy_ns = stats.snapshot().busy_ns;
                assert!(busy_ns <= monotonic_ns() - begin_ns);
            }
        });
        for _ in 0..200_000 {
            writer.start(StatGroup::Read, 1, monotonic_ns());
            let start_ns = monotonic_ns();
            writer.done(StatGroup::Read, (1, 8), start_ns, monotonic_ns());
        }
        done.store(true, Relaxed);
    });
    let rest = stats.snapshot();
    assert_eq!((rest.in_flight, rest[StatGroup::Read].ios), ([0, 0], 200_000));
}
