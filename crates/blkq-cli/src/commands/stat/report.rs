//! The figures of one report of `blkq stat`. The field names are keys of the JSON, which scripts rely on:
//! they do not change, and later versions may add others. docs/watching.md explains each of them.

use std::time::SystemTime;

use blkq::stats::{GroupSnapshot, Histogram};
use blkq::{Counter, StatGroup, StatsSnapshot, Status};
use blkq_export::nbd::NbdCounters;
use blkq_export::vhost_user::VhostUserCounters;
use blkq_protocol::control::statistics::{Gate, Nbd, QueueSums, Statistics, Throttle, VhostUser};
use blkq_protocol::system::rfc3339;
use serde::Serialize;
use serde_json::{Map, Value};

/// The last bar of a histogram ends at 2^40 ns, about 18 minutes, and also counts longer latencies.
const BITS_MAX: u32 = 40;

pub struct Report {
    pub figures: Figures,
    /// The report covers all the time since the device was attached.
    pub is_whole: bool,
    /// The counters of the time that the report covers.
    pub during: StatsSnapshot,
}

#[derive(Serialize)]
pub struct Figures {
    pub name: String,
    /// When the report was made, as in RFC 3339.
    pub time: String,
    pub seconds: f64,
    pub read: Group,
    pub write: Group,
    pub discard: Group,
    pub flush: Group,
    pub in_flight: u64,
    /// The maximum of requests in flight in a single queue since the attach: reads, and all others.
    pub in_flight_max: [u64; 2],
    /// The average number of requests in flight.
    pub queue: f64,
    /// Share of the time with requests in flight, in percent.
    pub busy_percent: f64,
    pub flushes: Flushes,
    pub batches: Batches,
    pub gate: Gate,
    pub clock: Clock,
    pub hangs: Hangs,
    pub throttle: Throttled,
    pub held: Held,
    /// Null if the device has no NBD export.
    pub nbd: Option<Nbd>,
    /// Null if the device has no vhost-user-blk export.
    pub vhost_user: Option<VhostUser>,
    pub queues: Vec<Queue>,
    /// The internal counters, for the time that the report covers.
    pub counters: Map<String, Value>,
    /// Repeats `clock.age_max_us`, for scripts written for earlier versions.
    pub clock_age_max_us: f64,
    /// The fields of /sys/block/X/stat, counted since the device was attached.
    pub fields: [u64; 17],
}

#[derive(Serialize)]
pub struct Group {
    // Totals for the time that the report covers.
    pub ios: u64,
    pub bytes: u64,
    pub merges: u64,
    // Rates per second, and latencies including the time in queues.
    pub iops: f64,
    pub mb_per_s: f64,
    pub merges_per_s: f64,
    pub latency_average_us: f64,
    pub latency_p50_us: f64,
    pub latency_p90_us: f64,
    pub latency_p99_us: f64,
    pub latency_p999_us: f64,
    pub latency_max_us: f64,
    /// The number of requests that failed with each status. Statuses without requests are omitted.
    pub errors: Map<String, Value>,
    /// The number of I/Os that were rejected with each status before they became requests.
    pub refused: Map<String, Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub histogram: Option<Vec<Bar>>,
}

/// The number of latencies below this time that the bars before do not count.
#[derive(Serialize)]
pub struct Bar {
    pub below_us: f64,
    pub count: u64,
}

/// I/Os that needed a flush, flushes sent to the driver, and I/Os that shared their flush with others.
#[derive(Serialize)]
pub struct Flushes {
    pub asked: u64,
    pub sent: u64,
    pub coalesced: u64,
}

/// Batches that left a plug, batches dispatched to the driver, and their mean sizes in requests.
#[derive(Serialize)]
pub struct Batches {
    pub plugs: u64,
    pub plug_mean: f64,
    pub dispatches: u64,
    pub dispatch_mean: f64,
    pub requeues: u64,
    pub splits: u64,
    pub tag_waits: u64,
    /// Calls of io_uring_enter by engines. `early_submissions` counts those that submitted a part of a batch.
    pub enters: u64,
    pub early_submissions: u64,
}

#[derive(Serialize)]
pub struct Queue {
    pub iops: f64,
    pub mb_per_s: f64,
    pub latency_average_us: f64,
    pub in_flight: u64,
    /// Share of the time with requests in flight, in percent.
    pub busy_percent: f64,
    /// Requests that hung when the daemon last scanned for them.
    pub hung: u64,
}

#[derive(Serialize)]
pub struct Clock {
    pub reads: u64,
    pub reads_per_io: f64,
    /// The longest time for which a cached reading was used since the device was attached.
    pub age_max_us: f64,
}

#[derive(Serialize)]
pub struct Held {
    pub now: u64,
    /// The number of times that a request was held.
    pub requests: u64,
}

#[derive(Serialize)]
pub struct Hangs {
    /// Requests that hung when the daemon last scanned for them.
    pub now: u64,
    pub found: u64,
    /// The number of times that the thread of a queue did not respond.
    pub stalls: u64,
    /// The hang warning; 0 if it is off.
    pub warning_seconds: f64,
}

#[derive(Serialize, PartialEq, Eq, Default)]
pub struct Throttled {
    /// Requests that wait for a limit now.
    pub now: u64,
    /// Requests that had to wait for a limit.
    pub requests: u64,
    /// The time in which requests waited, summed over the queues.
    pub time_ns: u64,
    #[serde(flatten)]
    pub limits: Throttle,
}

impl Report {
    pub fn whole(name: &str, now: &Statistics) -> Report {
        Report::new(name, &Statistics::default(), now, now.uptime_ns)
    }

    /// If the device was attached between the samples, the report covers the time since then.
    pub fn between(name: &str, before: &Statistics, now: &Statistics) -> Report {
        if now.uptime_ns < now.time_ns.saturating_sub(before.time_ns) {
            return Report::whole(name, now);
        }
        Report::new(name, before, now, now.time_ns.saturating_sub(before.time_ns))
    }

    fn new(name: &str, before: &Statistics, now: &Statistics, elapsed_ns: u64) -> Report {
        let totals = now.snapshot();
        // `delta` cannot know the largest latency of an interval exactly. The totals contain it exactly.
        let is_whole = *before == Statistics::default();
        let during = if is_whole { totals.clone() } else { totals.delta(&before.snapshot()) };
        // May be 0: `rate` returns 0 then, and does not divide.
        let seconds = elapsed_ns as f64 / 1e9;
        let group = |group| Group::new(&during[group], seconds);
        let waited_ns: u64 = during.groups.iter().map(|group| group.nanoseconds).sum();
        let counters = Counter::ALL.iter().map(|it| (it.name().into(), during.counter(*it).into()));
        let ios: u64 = during.groups.iter().map(|group| group.ios).sum();
        let plugged = ios - during[StatGroup::Flush].ios.min(ios);
        let queue = |(i, queue): (usize, &QueueSums)| {
            Queue::new(&queue.since(before.queues.get(i).unwrap_or(&QueueSums::default())), seconds)
        };
        let count = |counter| during.counter(counter);
        let mean = |ios: u64, batches: u64| rate(ios as f64, batches as f64);
        let figures = Figures {
            name: name.to_owned(),
            time: rfc3339(SystemTime::now()),
            seconds: round(seconds, 1e6),
            read: group(StatGroup::Read),
            write: group(StatGroup::Write),
            discard: group(StatGroup::Discard),
            flush: group(StatGroup::Flush),
            in_flight: totals.in_flight.iter().sum(),
            in_flight_max: totals.in_flight_max,
            queue: rate(waited_ns as f64 / 1e9, seconds),
            busy_percent: rate(during.busy_ns as f64 / 1e7, seconds).min(100.0),
            flushes: Flushes {
                asked: count(Counter::FlushesAsked),
                sent: count(Counter::FlushesSent),
                coalesced: count(Counter::FlushesCoalesced),
            },
            batches: Batches {
                plugs: count(Counter::PlugFlushes),
                plug_mean: mean(plugged, count(Counter::PlugFlushes)),
                dispatches: count(Counter::DispatchBatches),
                dispatch_mean: mean(ios, count(Counter::DispatchBatches)),
                requeues: count(Counter::Requeues),
                splits: count(Counter::Splits),
                tag_waits: count(Counter::TagWaits),
                enters: count(Counter::Enters),
                early_submissions: count(Counter::EarlySubmissions),
            },
            gate: now.gate.since(&before.gate),
            clock: Clock {
                reads: count(Counter::ClockReads),
                reads_per_io: mean(count(Counter::ClockReads), ios),
                age_max_us: totals.clock_age_max_ns as f64 / 1e3,
            },
            hangs: Hangs {
                now: totals.hung,
                found: count(Counter::Hangs),
                stalls: now.stalls.saturating_sub(before.stalls),
                warning_seconds: now.hang_warning_ns as f64 / 1e9,
            },
            throttle: Throttled {
                now: totals.throttled,
                requests: count(Counter::ThrottledRequests),
                time_ns: count(Counter::ThrottledNs),
                limits: now.throttle.clone(),
            },
            held: Held { now: totals.held, requests: count(Counter::HeldRequests) },
            nbd: now.nbd.as_ref().map(|nbd| nbd.since(before.nbd.as_ref(), NbdCounters::since)),
            vhost_user: now
                .vhost_user
                .as_ref()
                .map(|vhost| vhost.since(before.vhost_user.as_ref(), VhostUserCounters::since)),
            queues: now.queues.iter().enumerate().map(queue).collect(),
            counters: counters.collect(),
            clock_age_max_us: totals.clock_age_max_ns as f64 / 1e3,
            fields: totals.fields(),
        };
        Report { figures, is_whole, during }
    }

    /// The latencies of reads, writes and discards together.
    pub fn latencies(&self) -> Histogram {
        let mut sum = Histogram::default();
        for group in [StatGroup::Read, StatGroup::Write, StatGroup::Discard] {
            sum.add(&self.during[group].latency);
        }
        sum
    }

    pub fn json(mut self, histogram: bool) -> impl Serialize {
        let Figures { read, write, discard, flush, .. } = &mut self.figures;
        for (group, figures) in StatGroup::ALL.iter().zip([read, write, discard, flush]) {
            let bar = |(_, to_ns, count)| Bar { below_us: to_ns as f64 / 1e3, count };
            let bars = || bars(&self.during[*group].latency).into_iter().map(bar).collect();
            figures.histogram = histogram.then(bars);
        }
        self.figures
    }
}

impl Group {
    fn new(group: &GroupSnapshot, seconds: f64) -> Group {
        let by_status = |count: &dyn Fn(Status) -> u64| {
            let all = Status::ALL.iter().map(|status| (status.name().to_owned(), count(*status)));
            all.filter(|(_, count)| *count != 0).map(|(name, count)| (name, count.into())).collect()
        };
        let percentile_us = |percent| group.latency.percentile_ns(percent) as f64 / 1e3;
        Group {
            ios: group.ios,
            bytes: group.sectors * 512,
            merges: group.merges,
            iops: rate(group.ios as f64, seconds),
            mb_per_s: rate(group.sectors as f64 * 512.0 / 1e6, seconds),
            merges_per_s: rate(group.merges as f64, seconds),
            latency_average_us: group.mean_ns() as f64 / 1e3,
            latency_p50_us: percentile_us(50.0),
            latency_p90_us: percentile_us(90.0),
            latency_p99_us: percentile_us(99.0),
            latency_p999_us: percentile_us(99.9),
            latency_max_us: group.latency.max_ns as f64 / 1e3,
            errors: by_status(&|status| group.failed_with(status)),
            refused: by_status(&|status| group.refused_with(status)),
            histogram: None,
        }
    }

    pub fn error_count(&self) -> u64 {
        self.errors.values().filter_map(Value::as_u64).sum()
    }
}

impl Figures {
    /// Share of the time in which requests waited for a limit, in percent, averaged over the queues.
    pub fn throttled_percent(&self) -> f64 {
        let queues = self.queues.len().max(1) as f64;
        rate(self.throttle.time_ns as f64 / 1e7 / queues, self.seconds).min(100.0)
    }
}

impl Queue {
    fn new(queue: &QueueSums, seconds: f64) -> Queue {
        let QueueSums { ios, sectors, nanoseconds, in_flight, busy_ns, hung } = *queue;
        Queue {
            iops: rate(ios as f64, seconds),
            mb_per_s: rate(sectors as f64 * 512.0 / 1e6, seconds),
            latency_average_us: rate(nanoseconds as f64 / 1e3, ios as f64),
            in_flight,
            busy_percent: rate(busy_ns as f64 / 1e7, seconds).min(100.0),
            hung,
        }
    }
}

/// The bars of a histogram, from the shortest latency to the longest, one per power of two: the range in nanoseconds,
/// without its end, and the count.
pub fn bars(histogram: &Histogram) -> Vec<(u64, u64, u64)> {
    let (mut from_ns, mut before) = (0, 0);
    let bars = histogram.below_powers(0, BITS_MAX).into_iter().map(|(to_ns, count)| {
        let bar = (from_ns, to_ns, count - before);
        (from_ns, before) = (to_ns, count);
        bar
    });
    let mut bars: Vec<_> = bars.skip_while(|bar| bar.2 == 0).collect();
    while bars.pop_if(|bar| bar.2 == 0).is_some() {}
    bars
}

fn rate(count: f64, seconds: f64) -> f64 {
    if seconds > 0.0 { round(count / seconds, 1e3) } else { 0.0 }
}

fn round(value: f64, steps: f64) -> f64 {
    (value * steps).round() / steps
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::json;

    use super::*;

    pub fn counted() -> StatsSnapshot {
        let mut snapshot = StatsSnapshot { in_flight: [3, 1], busy_ns: 500_000_000, ..Default::default() };
        let read = &mut snapshot.groups[StatGroup::Read as usize];
        (read.ios, read.merges, read.sectors, read.nanoseconds) = (100, 50, 800, 1_000_000_000);
        (0..99).for_each(|_| read.latency.record(1_000));
        read.latency.record(1_000_000);
        snapshot.counters[Counter::PlugFlushes as usize] = 10;
        snapshot.counters[Counter::ClockReads as usize] = 25;
        snapshot
    }

    #[test]
    fn figures_of_a_report_have_the_documented_units() {
        let figures = Report::whole("a", &Statistics::new(&counted(), 5, 2_000_000_000)).figures;
        assert_eq!((figures.read.iops, figures.read.merges_per_s), (50.0, 25.0));
        assert_eq!(figures.read.mb_per_s, 0.205);
        assert_eq!((figures.read.ios, figures.read.merges, figures.read.bytes), (100, 50, 800 * 512));
        assert_eq!(figures.read.latency_average_us, 10_000.0);
        assert!((1.0..1.2).contains(&figures.read.latency_p50_us));
        assert!((1.0..1.2).contains(&figures.read.latency_p99_us));
        assert_eq!((figures.read.latency_p999_us, figures.read.latency_max_us), (1_000.0, 1_000.0));
        assert_eq!((figures.queue, figures.busy_percent, figures.in_flight), (0.5, 25.0, 4));
        assert_eq!((figures.batches.plug_mean, figures.clock.reads_per_io), (10.0, 0.25));
        let none = Report::whole("a", &Statistics::default()).figures;
        assert_eq!((none.read.iops, none.queue, none.batches.plug_mean), (0.0, 0.0, 0.0));
    }

    #[test]
    fn a_report_of_an_interval_covers_only_the_interval() {
        let before = Statistics::new(&counted(), 1_000_000_000, 9_000_000_000);
        let mut more = counted();
        let write = &mut more.groups[StatGroup::Write as usize];
        (write.ios, write.sectors) = (30, 300);
        more.counters[Counter::FlushesAsked as usize] = 4;
        more.hung = 2;
        let mut now = Statistics::new(&more, 4_000_000_000, 12_000_000_000);
        now.nbd = Some(Nbd { connected: 2, counters: NbdCounters { requests: 5, ..NbdCounters::default() } });
        now.gate = Gate { waits: 7, waiting: [1, 2], ..Gate::default() };
        now.queues = [(90, 1_500_000), (6, 0)]
            .map(|(ios, nanoseconds)| QueueSums { ios, nanoseconds, ..QueueSums::default() })
            .into();
        let mut before = before;
        before.queues = vec![QueueSums { ios: 60, nanoseconds: 900_000, ..QueueSums::default() }];
        let figures = Report::between("a", &before, &now).figures;
        let queues: Vec<_> = figures.queues.iter().map(|q| (q.iops, q.latency_average_us)).collect();
        assert_eq!(queues, [(10.0, 20.0), (2.0, 0.0)]);
        assert_eq!((figures.seconds, figures.read.iops, figures.write.iops), (3.0, 0.0, 10.0));
        assert_eq!((figures.flushes.asked, figures.hangs.now, figures.in_flight), (4, 2, 4));
        let later = Report::between("a", &now, &now).figures;
        assert_eq!((later.gate.waits, later.gate.waiting), (0, [1, 2]));
        assert_eq!(later.nbd.map(|nbd| (nbd.connected, nbd.counters.requests)), Some((2, 0)));
    }

    #[test]
    fn a_device_attached_within_an_interval_is_reported() {
        let before = Statistics::new(&counted(), 1_000_000_000, 9_000_000_000);
        let now = Statistics::new(&counted(), 4_000_000_000, 2_000_000_000);
        let report = Report::between("a", &before, &now);
        assert!(report.is_whole);
        assert_eq!((report.figures.seconds, report.figures.read.ios), (2.0, 100));
    }

    #[test]
    fn the_documentation_names_every_key_of_the_json() {
        let mut statistics = Statistics::new(&counted(), 5, 2_000_000_000);
        statistics.nbd = Some(Nbd::default());
        statistics.vhost_user = Some(VhostUser::default());
        let value = json!(Report::whole("a", &statistics).json(true));
        assert_eq!(value["read"]["histogram"][0], json!({"below_us": 1.024, "count": 99}));
        let documented = include_str!("../../../../../docs/watching.md");
        let check = |path: String| assert!(documented.contains(&format!("`{path}`")), "{path}");
        for (name, value) in value.as_object().unwrap() {
            match value {
                Value::Object(inner)
                    if name != "counters" && !["write", "discard", "flush"].contains(&&**name) =>
                {
                    inner.keys().for_each(|key| check(format!("{name}.{key}")));
                }
                _ => check(name.clone()),
            }
        }
    }
}
