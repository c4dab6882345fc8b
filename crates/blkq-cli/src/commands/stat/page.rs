//! The reports as text: a page for one device, and a table for several devices.

use blkq::StatGroup;
use blkq::stats::Histogram;
use blkq_export::{COUNTER_ROWS, Counted};
use blkq_protocol::control::statistics::{Gate, Nbd, Throttle, VhostUser};
use serde_json::{Map, Value};

use super::report::{Batches, Clock, Figures, Flushes, Group, Hangs, Held, Report, Throttled, bars};
use crate::output::{Align, render, render_figures};

/// The columns of the report of several devices, with the names and units of iostat(1). 1 MB is 10^6 bytes; await is in
/// milliseconds. `rMB`, `wMB` and `errors` are totals for `seconds`.
const HEADS: [&str; 15] = [
    "DEVICE", "seconds", "r/s", "rMB/s", "r_await", "w/s", "wMB/s", "w_await", "d/s", "f/s", "rMB", "wMB",
    "aqu-sz", "%util", "errors",
];

/// Length of the longest bar of a histogram, in characters.
const BAR: u64 = 40;

impl Report {
    /// Operations and mechanisms that were idle are omitted, unless `verbose`.
    pub fn page(&self, histogram: bool, verbose: bool) -> String {
        let figures @ Figures { name, seconds, .. } = &self.figures;
        let heading = match self.is_whole {
            true => format!("{name}: totals and average rates of the {seconds:.1} s since it was attached\n"),
            false => format!("{name}: totals and rates of the last {seconds:.2} s\n"),
        };
        let mut page = heading + &figures.table(verbose) + &figures.lines(verbose);
        if histogram {
            for group in StatGroup::ALL {
                page += &draw_histogram(group.name(), &self.during[group].latency);
            }
        }
        page
    }
}

impl Figures {
    pub fn groups(&self) -> impl Iterator<Item = (&'static str, &Group)> {
        let groups = [&self.read, &self.write, &self.discard, &self.flush];
        StatGroup::ALL.iter().map(|group| group.name()).zip(groups)
    }

    pub fn is_idle(&self) -> bool {
        self.in_flight == 0 && self.groups().all(|(_, group)| group.is_idle())
    }

    fn table(&self, verbose: bool) -> String {
        let heads = [
            "", "iops", "MB/s", "merges/s", "avg us", "p50 us", "p90 us", "p99 us", "p99.9 us", "max us",
            "errors",
        ];
        let cells = |(name, group): (&str, &Group)| {
            let errors = by_status(&group.errors);
            // The widths keep the columns of successive reports aligned.
            vec![
                format!("{name:9}"),
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
            ]
        };
        render_figures(&heads, self.groups().filter(|(_, group)| verbose || !group.is_idle()).map(cells))
    }

    fn lines(&self, verbose: bool) -> String {
        let Figures { in_flight, in_flight_max: [reads, others], queue, busy_percent, seconds, .. } = self;
        let groups = self.groups().filter(|(_, group)| verbose || group.ios > 0);
        let totals: Vec<String> = groups
            .map(|(name, group)| match name {
                "flush" => format!("flush {}", group.ios),
                _ => format!("{name} {} ({:.2} MB)", group.ios, group.bytes as f64 / 1e6),
            })
            .collect();
        let text = if totals.is_empty() { "no I/O".to_owned() } else { totals.join(", ") };
        let mut rows = vec![row("totals", text)];
        let mut add = |is_active: bool, name: &str, text: String| {
            rows.extend((verbose || is_active).then(|| row(name, text)));
        };
        let text = format!(
            "{in_flight} now (maximum: {reads} reads, {others} others), queue {queue:.2}, busy {busy_percent:.1}% of {seconds:.1} s"
        );
        add(true, "in-flight", text);
        let Flushes { asked, sent, coalesced } = &self.flushes;
        let text = format!("{asked} requested, {sent} sent, {coalesced} coalesced");
        add(asked + sent + coalesced > 0, "flushes", text);
        let Batches { plugs, plug_mean, dispatches, dispatch_mean, requeues, splits, tag_waits, .. } =
            &self.batches;
        let text = format!(
            "{plugs} plugs (mean size {plug_mean:.1}), {dispatches} dispatches (mean size {dispatch_mean:.1}), {requeues} requeues, {splits} splits, {tag_waits} tag waits"
        );
        add(plugs + dispatches + requeues + splits + tag_waits > 0, "batches", text);
        let Gate { waiting, waits, wakeups, grants, largest_grant } = &self.gate;
        let waiting = u64::from(waiting[0] + waiting[1]);
        let text = format!(
            "{waiting} waiting, {waits} waits, {wakeups} wake-ups, {grants} batches admitted (largest: {largest_grant} requests)"
        );
        add(waiting + waits + wakeups + grants > 0, "gate", text);
        let Clock { reads, reads_per_io, age_max_us } = &self.clock;
        let text = format!("{reads} reads, {reads_per_io:.3} per I/O, cached for {age_max_us:.1} us at most");
        add(*reads > 0, "clock", text);
        let Hangs { now, found, stalls, warning_seconds } = &self.hangs;
        let limit = match *warning_seconds {
            0.0 => "warning off".to_owned(),
            seconds => format!("warning after {seconds} s"),
        };
        let text = format!("{now} now, {found} found, {stalls} stalls ({limit})");
        add(now + found + stalls > 0, "hangs", text);
        let Held { now, requests } = &self.held;
        add(now + requests > 0, "held", format!("{now} now, {requests} in total"));
        let throttle = &self.throttle;
        add(*throttle != Throttled::default(), "throttle", throttle.describe(self.seconds));
        if let Some(nbd) = self.nbd.as_ref().filter(|nbd| verbose || **nbd != Nbd::default()) {
            rows.extend(export_rows("nbd", nbd.connected, nbd.counters.each()));
        }
        if let Some(vhost) = self.vhost_user.as_ref().filter(|it| verbose || **it != VhostUser::default()) {
            rows.extend(export_rows("vhost-user", vhost.connected, vhost.counters.each()));
        }
        for (name, group) in self.groups().filter(|(_, group)| !group.refused.is_empty()) {
            rows.push(row("refused", format!("{name} {}", by_status(&group.refused))));
        }
        render([Align::Left, Align::Left], &rows)
    }
}

/// A label and its text.
type Row = [String; 2];

fn row(name: &str, text: String) -> Row {
    [name.to_owned(), text]
}

/// The rows of an export: the number of connected clients, and the counters in their rows.
fn export_rows(
    mut export: &str,
    connected: u64,
    counters: impl Iterator<Item = Counted>,
) -> [Row; COUNTER_ROWS] {
    let mut texts: [Vec<String>; COUNTER_ROWS] = Default::default();
    texts[0].push(format!("{connected} connected"));
    for Counted { row, value, .. } in counters {
        if let Some((row, label)) = row {
            texts[row].push(format!("{value} {label}"));
        }
    }
    // Only the first row names the export.
    texts.map(|texts| row(std::mem::take(&mut export), texts.join(", ")))
}

impl Throttled {
    fn describe(&self, seconds: f64) -> String {
        let Throttled { now, requests, time_ns, limits: Throttle { limits, group, group_limits, weight } } =
            self;
        let waited = *time_ns as f64 / 1e9;
        let [limits, group_limits] =
            [limits, group_limits].map(|limits| if limits.is_empty() { "none" } else { limits });
        let text = format!(
            "{now} now, {requests} requests waited, for {waited:.3} s of {seconds:.1} s; limits: {limits}"
        );
        match group {
            Some(group) => format!("{text}, group {group} (weight {weight}): {group_limits}"),
            None => text,
        }
    }
}

impl Group {
    fn is_idle(&self) -> bool {
        self.ios == 0 && self.errors.is_empty() && self.refused.is_empty()
    }
}

/// Formats the number of errors of each kind, such as `io:3,no-space:1`.
fn by_status(counts: &Map<String, Value>) -> String {
    counts.iter().map(|(name, count)| format!("{name}:{count}")).collect::<Vec<_>>().join(",")
}

/// The report of several devices. Unless `verbose`, reports of intervals without I/O are counted and not printed.
pub fn overview(reports: &[Report], verbose: bool) -> String {
    let is_idle = |report: &&Report| !verbose && !report.is_whole && report.figures.is_idle();
    let (idle, shown): (Vec<_>, Vec<_>) = reports.iter().partition(is_idle);
    let table = render_figures(&HEADS, shown.iter().map(|report| columns(&report.figures)));
    match idle.len() {
        0 => table,
        1 => table + "1 device was idle\n",
        count => format!("{table}{count} devices were idle\n"),
    }
}

fn columns(figures: &Figures) -> Vec<String> {
    let Figures { name, seconds, read, write, discard, flush, queue, busy_percent, .. } = figures;
    let ms = |group: &Group| group.latency_average_us / 1e3;
    let megabytes = |group: &Group| group.bytes as f64 / 1e6;
    vec![
        // The widths keep the columns of successive reports aligned.
        format!("{name:12}"),
        format!("{seconds:7.1}"),
        format!("{:8.1}", read.iops),
        format!("{:8.2}", read.mb_per_s),
        format!("{:7.3}", ms(read)),
        format!("{:8.1}", write.iops),
        format!("{:8.2}", write.mb_per_s),
        format!("{:7.3}", ms(write)),
        format!("{:6.1}", discard.iops),
        format!("{:6.1}", flush.iops),
        format!("{:8.1}", megabytes(read)),
        format!("{:8.1}", megabytes(write)),
        format!("{queue:6.2}"),
        format!("{busy_percent:5.1}"),
        [read, write, discard, flush].map(Group::error_count).iter().sum::<u64>().to_string(),
    ]
}

/// Draws the latencies of an operation, with one bar per power of two. Empty if there were no such operations.
fn draw_histogram(name: &str, histogram: &Histogram) -> String {
    let bars = bars(histogram);
    let (all, most) = (histogram.count(), bars.iter().map(|bar| bar.2).max().unwrap_or(0));
    let rows: Vec<[String; 5]> = bars
        .iter()
        .map(|(from_ns, to_ns, count)| {
            // Rounded up, so that a bar with a single latency is visible.
            let length = (u128::from(*count) * u128::from(BAR)).div_ceil(u128::from(most.max(1)));
            let percent = *count as f64 * 100.0 / all as f64;
            [
                format!("  {}", time(*from_ns)),
                time(*to_ns),
                format!("|{:<width$}", "#".repeat(length as usize), width = BAR as usize),
                count.to_string(),
                format!("{percent:.1}%"),
            ]
        })
        .collect();
    if rows.is_empty() {
        return String::new();
    }
    use Align::{Left, Right};
    format!(
        "{name}: {all} latencies (from, to, count, share)\n{}",
        render([Right, Right, Left, Right, Right], &rows)
    )
}

/// Formats nanoseconds with three digits, in a suitable unit.
fn time(ns: u64) -> String {
    let (value, unit) = match ns {
        0..1_000 => return format!("{ns} ns"),
        1_000..1_000_000 => (ns as f64 / 1e3, "us"),
        1_000_000..1_000_000_000 => (ns as f64 / 1e6, "ms"),
        _ => (ns as f64 / 1e9, "s"),
    };
    match value {
        0.0..10.0 => format!("{value:.2} {unit}"),
        10.0..100.0 => format!("{value:.1} {unit}"),
        _ => format!("{value:.0} {unit}"),
    }
}

#[cfg(test)]
mod tests {
    use blkq::StatsSnapshot;
    use blkq_protocol::control::statistics::Statistics;

    use super::super::report::tests::counted;
    use super::*;

    #[test]
    fn a_page_is_aligned_and_omits_idle_parts() {
        let mut snapshot = counted();
        snapshot.groups[StatGroup::Write as usize].refused[0] = 3;
        let mut statistics = Statistics::new(&snapshot, 5, 2_000_000_000);
        statistics.nbd = Some(Nbd::default());
        let report = Report::whole("a", &statistics);
        let page = report.page(false, true);
        let lines: Vec<&str> = page.lines().collect();
        assert_eq!(lines[0], "a: totals and average rates of the 2.0 s since it was attached");
        assert!(lines[1..6].iter().all(|line| line.len() == lines[1].len()), "{page}");
        let begins = [
            "totals     read 100 (0.41 MB), write 0 (0.00 MB), discard 0 (0.00 MB), flush 0",
            "in-flight  4 now",
            "flushes    0",
            "batches    10 plugs (mean size 10.0)",
            "gate       0",
            "clock      25 reads",
            "hangs      0 now, 0 found, 0 stalls (warning off)",
            "held       0 now, 0 in total",
            "throttle   0 now, 0 requests waited, for 0.000 s of 2.0 s; limits: none",
            "nbd        0",
        ];
        assert!(begins.iter().zip(&lines[6..]).all(|(begin, line)| line.starts_with(begin)), "{page}");
        assert!(page.ends_with("refused    write not-supported:3\n"), "{page}");
        assert!(report.page(true, false).contains("read: 100 latencies"));

        let page = report.page(false, false);
        let names: Vec<&str> = page.lines().filter_map(|line| line.split_whitespace().next()).collect();
        assert_eq!(
            names,
            ["a:", "iops", "read", "write", "totals", "in-flight", "batches", "clock", "refused"],
            "{page}"
        );
        let idle = Statistics::new(&StatsSnapshot::default(), 5, 2_000_000_000);
        let page = Report::whole("a", &idle).page(false, false);
        assert_eq!(page.lines().count(), 3, "{page}");
        assert!(page.contains("totals     no I/O\n"), "{page}");
    }

    #[test]
    fn each_device_has_a_line_and_idle_devices_are_counted() {
        let before = Statistics::new(&counted(), 1_000_000_000, 9_000_000_000);
        let mut busy = counted();
        busy.groups[1].ios += 30;
        busy.groups[1].errors[0] += 2;
        busy.in_flight = [0, 0];
        let busy = Statistics::new(&busy, 4_000_000_000, 12_000_000_000);
        let mut idle = counted();
        idle.in_flight = [0, 0];
        let idle = Statistics::new(&idle, 4_000_000_000, 12_000_000_000);
        let reports = || {
            [
                Report::between("busy", &before, &busy),
                Report::between("idle", &before, &idle),
                Report::whole("new", &idle),
            ]
        };
        let text = overview(&reports(), false);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        assert!(lines[..3].iter().all(|line| line.len() == lines[0].len()), "{text}");
        let cells: Vec<&str> = lines[1].split_whitespace().collect();
        assert_eq!((cells[0], cells[1], cells[5], cells[14]), ("busy", "3.0", "10.0", "2"), "{text}");
        assert!(lines[2].starts_with("new ") && lines[3] == "1 device was idle", "{text}");
        assert_eq!(overview(&reports(), true).lines().count(), 4);
        assert!(overview(&reports(), true).contains("idle "));
        assert_eq!(overview(&reports()[1..2], false), "1 device was idle\n");
        assert_eq!(overview(&[], false), "");
    }

    #[test]
    fn bars_are_proportional_and_count_every_latency() {
        let mut histogram = Histogram::default();
        assert_eq!(draw_histogram("read", &histogram), "");
        (0..80).for_each(|_| histogram.record(1_500));
        (0..20).for_each(|_| histogram.record(3_000));
        histogram.record(20_000);
        let text = draw_histogram("read", &histogram);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "read: 101 latencies (from, to, count, share)");
        assert_eq!(lines.len(), 1 + 5);
        assert_eq!(lines[1].matches('#').count(), 40);
        assert_eq!(lines[2].matches('#').count(), 10);
        assert_eq!((lines[3].matches('#').count(), lines[5].matches('#').count()), (0, 1));
        assert!(
            lines[1].contains("1.02 us") && lines[1].contains("2.05 us") && lines[1].ends_with("79.2%"),
            "{text}"
        );
        assert!(lines[5].contains("16.4 us") && lines[5].contains("32.8 us"), "{text}");
        assert!(lines[2..].iter().all(|line| line.len() == lines[1].len()), "{text}");
        histogram.record(u64::MAX);
        histogram.record(0);
        assert_eq!(bars(&histogram).iter().map(|bar| bar.2).sum::<u64>(), 103);
    }
}
