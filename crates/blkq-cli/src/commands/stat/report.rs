//! One report of `blkq stat`: as a table, and as JSON. The names in the JSON stay; there may
//! come more.

use blkq::stats::GroupSnapshot;
use blkq::{Counter, StatGroup, StatsSnapshot, Status};
use blkq_export::nbd::NbdCounters;
use serde::Serialize;
use serde_json::{Map, Value};

use super::histogram::{bars, draw};
use crate::statistics::{Gate, Nbd, Statistics};
use crate::table::{Align, render};

/// One report.
pub struct Report {
    figures: Figures,
    /// Of the time that the report covers.
    during: StatsSnapshot,
}

#[derive(Serialize)]
struct Figures {
    name: String,
    /// The time that it covers.
    seconds: f64,
    read: Group,
    write: Group,
    discard: Group,
    flush: Group,
    /// Requests in flight now.
    in_flight: u64,
    /// The most that ever were in flight: reads, and all others.
    in_flight_max: [u64; 2],
    /// Requests in flight on average.
    queue: f64,
    /// Part of the time with anything in flight, in percent.
    busy_percent: f64,
    flushes: Flushes,
    batches: Batches,
    gate: Gate,
    clock: Clock,
    hangs: Hangs,
    /// Null without an NBD server.
    nbd: Option<Nbd>,
    /// Counted in the time that the report covers.
    counters: Map<String, Value>,
    /// The same as `clock.age_max_us`.
    clock_age_max_us: f64,
    /// Counted since the device was attached: the fields of /sys/block/X/stat.
    fields: [u64; 17],
}

/// What a report says of one kind of operation.
#[derive(Serialize)]
struct Group {
    iops: f64,
    mb_per_s: f64,
    merges_per_s: f64,
    latency_average_us: f64,
    latency_p50_us: f64,
    latency_p90_us: f64,
    latency_p99_us: f64,
    latency_p999_us: f64,
    latency_max_us: f64,
    /// Requests failed in the time that the report covers, by the name of the status.
    errors: Map<String, Value>,
    /// The same of I/Os that were refused before they were requests.
    refused: Map<String, Value>,
    /// From the shortest latency on, if it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    histogram: Option<Vec<Bar>>,
}

/// So many latencies below this time, and not below that of the bar before.
#[derive(Serialize)]
struct Bar {
    below_us: f64,
    count: u64,
}

/// How many flushes were needed, given to the driver, and served by one that others needed too.
#[derive(Serialize)]
struct Flushes {
    asked: u64,
    sent: u64,
    coalesced: u64,
}

/// Batches that left the plug and reached the driver, and requests of each on average.
#[derive(Serialize)]
struct Batches {
    plugs: u64,
    plug_mean: f64,
    dispatches: u64,
    dispatch_mean: f64,
    requeues: u64,
    splits: u64,
    tag_waits: u64,
}

#[derive(Serialize)]
struct Clock {
    reads: u64,
    reads_per_io: f64,
    /// The longest that a cached reading was used since the device was attached.
    age_max_us: f64,
}

#[derive(Serialize)]
struct Hangs {
    /// Hung when last looked.
    now: u64,
    found: u64,
    /// How often the thread of a queue did not answer.
    stalls: u64,
    /// 0 if nobody looks.
    warning_seconds: f64,
}

impl Report {
    /// Of all that was counted.
    pub fn whole(name: &str, now: &Statistics) -> Report {
        Report::new(name, &Statistics::default(), now, now.uptime_ns)
    }

    /// Of what was counted between two times.
    pub fn between(name: &str, before: &Statistics, now: &Statistics) -> Report {
        Report::new(name, before, now, now.time_ns.saturating_sub(before.time_ns))
    }

    fn new(name: &str, before: &Statistics, now: &Statistics, elapsed_ns: u64) -> Report {
        let totals = now.snapshot();
        // Of all the time the latencies are known to the nanosecond.
        let during =
            if *before == Statistics::default() { totals.clone() } else { totals.delta(&before.snapshot()) };
        // Nothing divides by zero below; a report of no time shows no rates.
        let seconds = elapsed_ns as f64 / 1e9;
        let group = |group| Group::new(&during[group], seconds);
        let waited_ns: u64 = during.groups.iter().map(|group| group.nanoseconds).sum();
        let counters =
            Counter::ALL.iter().map(|counter| (counter.name().into(), during.counter(*counter).into()));
        let ios: u64 = during.groups.iter().map(|group| group.ios).sum();
        let plugged = ios - during[StatGroup::Flush].ios.min(ios);
        let count = |counter| during.counter(counter);
        let mean = |ios: u64, batches: u64| rate(ios as f64, batches as f64);
        let figures = Figures {
            name: name.to_owned(),
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
            nbd: now.nbd.as_ref().map(|nbd| nbd.since(&before.nbd.clone().unwrap_or_default())),
            counters: counters.collect(),
            clock_age_max_us: totals.clock_age_max_ns as f64 / 1e3,
            fields: totals.fields(),
        };
        Report { figures, during }
    }

    /// What is put into JSON; with `histogram`, also the latencies of each operation.
    pub fn json(mut self, histogram: bool) -> impl Serialize {
        let Figures { read, write, discard, flush, .. } = &mut self.figures;
        for (group, figures) in StatGroup::ALL.iter().zip([read, write, discard, flush]) {
            let bar = |(_, to_ns, count)| Bar { below_us: to_ns as f64 / 1e3, count };
            let bars = || bars(&self.during[*group].latency).into_iter().map(bar).collect();
            figures.histogram = histogram.then(bars);
        }
        self.figures
    }

    /// As text; with `histogram`, the latencies of each operation below.
    pub fn page(&self, histogram: bool) -> String {
        let mut page = self.figures.table() + &self.figures.lines();
        if histogram {
            for group in StatGroup::ALL {
                page += &draw(group.name(), &self.during[group].latency);
            }
        }
        page
    }
}

impl Figures {
    fn groups(&self) -> impl Iterator<Item = (&'static str, &Group)> {
        let groups = [&self.read, &self.write, &self.discard, &self.flush];
        StatGroup::ALL.iter().map(|group| group.name()).zip(groups)
    }

    fn table(&self) -> String {
        let heads = [
            "", "iops", "MB/s", "merges/s", "avg us", "p50 us", "p90 us", "p99 us", "p99.9 us", "max us",
            "errors",
        ];
        let mut rows = vec![heads.map(str::to_owned)];
        rows[0][0] = self.name.clone();
        for (name, group) in self.groups() {
            let errors = by_status(&group.errors);
            // Wide enough that the columns of most reports stand below each other.
            rows.push([
                format!("{name:8}"),
                format!("{:8.0}", group.iops),
                format!("{:8.2}", group.mb_per_s),
                format!("{:8.0}", group.merges_per_s),
                format!("{:8.1}", group.latency_average_us),
                format!("{:8.1}", group.latency_p50_us),
                format!("{:8.1}", group.latency_p90_us),
                format!("{:8.1}", group.latency_p99_us),
                format!("{:8.1}", group.latency_p999_us),
                format!("{:8.1}", group.latency_max_us),
                if errors.is_empty() { "0".to_owned() } else { errors },
            ]);
        }
        let mut align = [Align::Right; 11];
        align[0] = Align::Left;
        render(align, &rows)
    }

    fn lines(&self) -> String {
        let Figures { in_flight_max: [reads, others], flushes, batches, gate, clock, hangs, .. } = self;
        let mut rows = Vec::new();
        let mut row = |name: &str, text: String| rows.push([name.to_owned(), text]);
        let (in_flight, queue, busy, seconds) = (self.in_flight, self.queue, self.busy_percent, self.seconds);
        row(
            "in-flight",
            format!(
                "{in_flight} now (most: {reads} reads, {others} others), queue {queue:.2}, busy {busy:.1}% of {seconds:.1} s"
            ),
        );
        let Flushes { asked, sent, coalesced } = flushes;
        row("flushes", format!("{asked} asked, {sent} sent, {coalesced} coalesced"));
        let Batches { plugs, plug_mean, dispatches, dispatch_mean, requeues, splits, tag_waits } = batches;
        row(
            "batches",
            format!(
                "{plugs} plugs of {plug_mean:.1}, {dispatches} dispatches of {dispatch_mean:.1}, {requeues} requeues, {splits} splits, {tag_waits} tag waits"
            ),
        );
        let Gate { waiting, waits, wakeups, grants, largest_grant } = gate;
        row(
            "gate",
            format!(
                "{} waiting, {waits} waits, {wakeups} wake-ups, {grants} batches granted (largest {largest_grant})",
                waiting[0] + waiting[1]
            ),
        );
        row(
            "clock",
            format!(
                "{} reads, {:.3} per I/O, cached for {:.1} us at most",
                clock.reads, clock.reads_per_io, clock.age_max_us
            ),
        );
        let limit = match hangs.warning_seconds {
            0.0 => "nobody looks".to_owned(),
            seconds => format!("after {seconds} s"),
        };
        row("hangs", format!("{} now, {} found, {} stalls ({limit})", hangs.now, hangs.found, hangs.stalls));
        if let Some(nbd) = &self.nbd {
            let Nbd { connected, counters } = nbd;
            let NbdCounters { connections, refused_connections, violations, timeouts, .. } = counters;
            let NbdCounters { requests, errors, refused_requests, .. } = counters;
            row(
                "nbd",
                format!(
                    "{connected} connected, {connections} connections, {refused_connections} turned away, {violations} broke the protocol, {timeouts} late"
                ),
            );
            row(
                "",
                format!("{requests} requests, {errors} errors, of which {refused_requests} refused at once"),
            );
        }
        for (name, group) in self.groups().filter(|(_, group)| !group.refused.is_empty()) {
            row("refused", format!("{name} {}", by_status(&group.refused)));
        }
        render([Align::Left, Align::Left], &rows)
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
}

/// `io:3,no-space:1`
fn by_status(counts: &Map<String, Value>) -> String {
    counts.iter().map(|(name, count)| format!("{name}:{count}")).collect::<Vec<_>>().join(",")
}

fn rate(count: f64, seconds: f64) -> f64 {
    if seconds > 0.0 { round(count / seconds, 1e3) } else { 0.0 }
}

fn round(value: f64, steps: f64) -> f64 {
    (value * steps).round() / steps
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn counted() -> StatsSnapshot {
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
    fn a_report_is_in_units_per_second() {
        let figures = Report::whole("a", &Statistics::new(&counted(), 5, 2_000_000_000)).figures;
        assert_eq!((figures.read.iops, figures.read.merges_per_s), (50.0, 25.0));
        assert_eq!(figures.read.mb_per_s, 0.205);
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
    fn an_interval_is_what_came_between() {
        let before = Statistics::new(&counted(), 1_000_000_000, 9);
        let mut more = counted();
        let write = &mut more.groups[StatGroup::Write as usize];
        (write.ios, write.sectors) = (30, 300);
        more.counters[Counter::FlushesAsked as usize] = 4;
        more.hung = 2;
        let mut now = Statistics::new(&more, 4_000_000_000, 9);
        now.nbd = Some(Nbd { connected: 2, counters: NbdCounters { requests: 5, ..NbdCounters::default() } });
        now.gate = Gate { waits: 7, waiting: [1, 2], ..Gate::default() };
        let figures = Report::between("a", &before, &now).figures;
        assert_eq!((figures.seconds, figures.read.iops, figures.write.iops), (3.0, 0.0, 10.0));
        assert_eq!((figures.flushes.asked, figures.hangs.now, figures.in_flight), (4, 2, 4));
        let later = Report::between("a", &now, &now).figures;
        assert_eq!((later.gate.waits, later.gate.waiting), (0, [1, 2]));
        assert_eq!(later.nbd.map(|nbd| (nbd.connected, nbd.counters.requests)), Some((2, 0)));
    }

    #[test]
    fn the_table_is_aligned_and_all_is_there() {
        let mut snapshot = counted();
        snapshot.groups[StatGroup::Write as usize].refused[0] = 3;
        let mut statistics = Statistics::new(&snapshot, 5, 2_000_000_000);
        statistics.nbd = Some(Nbd::default());
        let report = Report::whole("a", &statistics);
        let page = report.page(false);
        let lines: Vec<&str> = page.lines().collect();
        assert!(lines[..5].iter().all(|line| line.len() == lines[0].len()), "{page}");
        let begins = [
            "in-flight  4 now",
            "flushes    0",
            "batches    10 plugs of 10.0",
            "gate       0",
            "clock      25 reads",
        ];
        assert!(begins.iter().zip(&lines[5..]).all(|(begin, line)| line.starts_with(begin)), "{page}");
        assert!(page.ends_with("refused    write not-supported:3\n"), "{page}");
        assert!(report.page(true).contains("read: 100 latencies"));
    }

    #[test]
    fn the_names_in_the_json_are_those_of_the_documentation() {
        let mut statistics = Statistics::new(&counted(), 5, 2_000_000_000);
        statistics.nbd = Some(Nbd::default());
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
