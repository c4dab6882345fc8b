//! Renders the metrics in Prometheus' text exposition format, version 0.0.4. Times are in seconds, sizes in
//! bytes.

use std::fmt::{Display, Write};

use blkq::stats::GroupSnapshot;
use blkq::{Counter, StatGroup, StatsSnapshot, Status};
use blkq_export::Counted;
use blkq_protocol::control::statistics::{Gate, Statistics};

/// The latency buckets end just below these powers of two nanoseconds: from 1 us to 34 s.
const LATENCY_BITS: (u32, u32) = (10, 35);
const DIRECTIONS: [&str; 2] = ["read", "other"];

/// Counters of the endpoint itself.
#[derive(Default)]
pub struct Served {
    pub answered: u64,
    pub refused: u64,
    /// Number of connections closed because they took too long, or to make room for others.
    pub shed: u64,
}

pub struct Sample {
    pub name: String,
    pub size_bytes: u64,
    pub statistics: Statistics,
}

struct Page {
    text: String,
    device: String,
}

pub fn render(sample: &Sample, served: &Served) -> String {
    let Sample { name, size_bytes, statistics } = sample;
    let snapshot = statistics.snapshot();
    let mut page = Page { text: String::with_capacity(32 << 10), device: escape(name) };
    page.family("info", "gauge", "Always 1; the label is the version of the daemon.");
    page.sample("info", &[("version", env!("CARGO_PKG_VERSION"))], 1);
    page.gauge("size_bytes", "Size of the device.", size_bytes);
    page.gauge("uptime_seconds", "Time since the device was attached.", seconds(statistics.uptime_ns));
    page.requests(&snapshot);
    page.latencies(&snapshot);
    page.layer(&snapshot);
    page.gate(&statistics.gate);
    page.waits(statistics, &snapshot);
    if let Some(nbd) = &statistics.nbd {
        page.gauge("nbd_connected", "NBD clients connected.", nbd.connected);
        page.counters("nbd", nbd.counters.each());
    }
    if let Some(vhost) = &statistics.vhost_user {
        page.gauge("vhost_user_connected", "Virtual machines connected.", vhost.connected);
        page.counters("vhost_user", vhost.counters.each());
    }
    page.counter("metrics_answered", "Requests for metrics that were answered.", served.answered);
    page.counter("metrics_refused", "HTTP requests that were rejected.", served.refused);
    page.counter("metrics_shed", "HTTP connections closed because they took too long.", served.shed);
    page.text
}

/// The operations with their counters.
fn groups(snapshot: &StatsSnapshot) -> impl Iterator<Item = (&'static str, &GroupSnapshot)> {
    StatGroup::ALL.iter().map(move |group| (group.name(), &snapshot[*group]))
}

impl Page {
    fn requests(&mut self, snapshot: &StatsSnapshot) {
        let groups = || groups(snapshot);
        let ios = groups().map(|(op, group)| (op, group.ios));
        self.samples("ios_total", "counter", "Requests completed, with or without an error.", "op", ios);
        let merges = groups().map(|(op, group)| (op, group.merges));
        self.samples("merges_total", "counter", "I/Os merged into the request of another I/O.", "op", merges);
        let bytes = groups().filter(|(op, _)| *op != StatGroup::Flush.name());
        let bytes = bytes.map(|(op, group)| (op, u128::from(group.sectors) * 512));
        self.samples("transferred_bytes_total", "counter", "Bytes of the completed requests.", "op", bytes);
        let failed: fn(&GroupSnapshot, Status) -> u64 = |group, status| group.failed_with(status);
        let refused: fn(&GroupSnapshot, Status) -> u64 = |group, status| group.refused_with(status);
        for (name, help, count) in [
            ("errors_total", "Requests that completed with an error.", failed),
            ("refused_total", "I/Os rejected before they became requests.", refused),
        ] {
            self.family(name, "counter", help);
            for (op, group) in groups() {
                for status in Status::ALL {
                    self.sample(name, &[("op", op), ("status", status.name())], count(group, status));
                }
            }
        }
        let in_flight = DIRECTIONS.into_iter().zip(snapshot.in_flight);
        self.samples("in_flight", "gauge", "Requests in flight.", "direction", in_flight);
        let most = DIRECTIONS.into_iter().zip(snapshot.in_flight_max);
        let help = "Most requests ever in flight in a single queue.";
        self.samples("in_flight_max", "gauge", help, "direction", most);
        self.counter("busy_seconds", "Time with requests in flight.", seconds(snapshot.busy_ns));
    }

    fn latencies(&mut self, snapshot: &StatsSnapshot) {
        self.family("latency_seconds", "histogram", "Time from submission to completion, with queueing.");
        let (from, to) = LATENCY_BITS;
        for (op, group) in groups(snapshot) {
            for (edge_ns, count) in group.latency.below_powers(from, to) {
                // Prometheus counts a value equal to the bound, so the bound is the largest latency below the
                // edge.
                let le = seconds(edge_ns - 1).to_string();
                self.sample("latency_seconds_bucket", &[("op", op), ("le", &le)], count);
            }
            let count = group.latency.count();
            self.sample("latency_seconds_bucket", &[("op", op), ("le", "+Inf")], count);
            self.sample("latency_seconds_sum", &[("op", op)], seconds(group.nanoseconds));
            self.sample("latency_seconds_count", &[("op", op)], count);
        }
        let longest = groups(snapshot).map(|(op, group)| (op, seconds(group.latency.max_ns)));
        let help = "Longest latency since the device was attached.";
        self.samples("latency_max_seconds", "gauge", help, "op", longest);
    }

    fn layer(&mut self, snapshot: &StatsSnapshot) {
        for (counter, help) in [
            (Counter::FlushesAsked, "I/Os that needed a flush."),
            (Counter::FlushesSent, "Flushes sent to the driver."),
            (Counter::FlushesCoalesced, "I/Os that shared their flush with other I/Os."),
            (Counter::PlugFlushes, "Batches of requests that left a plug."),
            (Counter::DispatchBatches, "Batches of requests dispatched to the driver."),
            (Counter::Requeues, "Requests requeued because the driver was busy."),
            (Counter::Splits, "Splits of I/Os that exceeded the queue limits."),
            (Counter::TagWaits, "I/Os that found no free tag."),
            (Counter::Enters, "Calls of io_uring_enter by engines."),
            (Counter::EarlySubmissions, "Calls of io_uring_enter for a part of a batch."),
            (Counter::ClockReads, "Clock readings."),
            (Counter::NegativeLatencies, "Requests with a negative latency."),
            (Counter::Hangs, "Requests that were found to hang."),
            (Counter::ThrottledRequests, "Requests that had to wait for a limit."),
            (Counter::HeldRequests, "Times that a request was held after an error."),
        ] {
            self.counter(&counter.name().replace('-', "_"), help, snapshot.counter(counter));
        }
        let age = seconds(snapshot.clock_age_max_ns);
        self.gauge("clock_age_max_seconds", "Longest use of a cached clock reading.", age);
    }

    fn gate(&mut self, gate: &Gate) {
        let waiting = DIRECTIONS.into_iter().zip(gate.waiting);
        let help = "Threads that wait at the request gate.";
        self.samples("gate_waiting", "gauge", help, "direction", waiting);
        self.counter("gate_waits", "Times that a thread had to wait at the request gate.", gate.waits);
        self.counter("gate_wakeups", "Wake-ups of threads at the request gate.", gate.wakeups);
        self.counter("gate_grants", "Batches of requests admitted at the request gate.", gate.grants);
        let help = "Requests in the largest batch admitted at the gate.";
        self.gauge("gate_largest_grant", help, gate.largest_grant);
    }

    /// Requests that wait for limits and after errors, and hangs.
    fn waits(&mut self, statistics: &Statistics, snapshot: &StatsSnapshot) {
        let limit = seconds(statistics.hang_warning_ns);
        self.gauge("hang_warning_seconds", "Time after which a request counts as hung; 0 if off.", limit);
        self.gauge("hung", "Requests that hung in the last scan.", snapshot.hung);
        self.counter("stalls", "Times that the thread of a queue did not answer in time.", statistics.stalls);
        let throttled = seconds(snapshot.counter(Counter::ThrottledNs));
        let help = "Time in which requests waited, summed over queues.";
        self.counter("throttled_seconds", help, throttled);
        self.gauge("throttled", "Requests that wait for a limit now.", snapshot.throttled);
        self.gauge("held", "Requests held after errors now.", snapshot.held);
    }

    fn counters(&mut self, export: &str, counters: impl Iterator<Item = Counted>) {
        for Counted { name, help, value, .. } in counters {
            self.counter(&format!("{export}_{name}"), help, value);
        }
    }

    /// Writes a counter whose only label is the device. The suffix `_total` is appended to the name.
    fn counter(&mut self, name: &str, help: &str, value: impl Display) {
        let name = format!("{name}_total");
        self.family(&name, "counter", help);
        self.sample(&name, &[], value);
    }

    fn gauge(&mut self, name: &str, help: &str, value: impl Display) {
        self.family(name, "gauge", help);
        self.sample(name, &[], value);
    }

    /// Writes a family with a sample for each value of a label.
    fn samples<'a>(
        &mut self,
        name: &str,
        kind: &str,
        help: &str,
        label: &str,
        values: impl IntoIterator<Item = (&'a str, impl Display)>,
    ) {
        self.family(name, kind, help);
        for (text, value) in values {
            self.sample(name, &[(label, text)], value);
        }
    }

    // Writing to a string does not fail.
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = write!(self.text, "# HELP blkq_{name} {help}\n# TYPE blkq_{name} {kind}\n");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl Display) {
        let _ = write!(self.text, "blkq_{name}{{device=\"{}\"", self.device);
        for (label, text) in labels {
            let _ = write!(self.text, ",{label}=\"{}\"", escape(text));
        }
        let _ = writeln!(self.text, "}} {value}");
    }
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
#[path = "../../../blkq-cli/tests/exposition/mod.rs"]
mod exposition;

#[cfg(test)]
mod tests {
    use blkq_export::nbd::NbdCounters;
    use blkq_protocol::control::statistics::{Nbd, VhostUser};

    use super::*;
    use exposition::{Exposition, check};

    fn page(name: &str, statistics: &Statistics) -> String {
        let mut statistics = statistics.clone();
        statistics.nbd =
            Some(Nbd { connected: 0, counters: NbdCounters { requests: 7, ..NbdCounters::default() } });
        statistics.vhost_user = Some(VhostUser::default());
        let sample = Sample { name: name.to_owned(), size_bytes: 1 << 20, statistics };
        render(&sample, &Served::default())
    }

    #[test]
    fn the_text_is_well_formed_whatever_was_counted() {
        check(&page("a", &Statistics::default())).unwrap();
        let mut full = StatsSnapshot { in_flight: [u64::MAX; 2], busy_ns: u64::MAX, ..Default::default() };
        full.counters.fill(u64::MAX);
        for group in &mut full.groups {
            group.latency.buckets.fill(1 << 50);
            group.errors.fill(u64::MAX);
            (group.ios, group.sectors, group.nanoseconds) = (u64::MAX, u64::MAX, u64::MAX);
        }
        check(&page("b", &Statistics::new(&full, u64::MAX, u64::MAX))).unwrap();
        let odd = check(&page("a\\b\"c\nd{}=,", &Statistics::default())).unwrap();
        assert!(odd.value("blkq_size_bytes", &[("device", "a\\b\"c\nd{}=,")]).is_some());
    }

    #[test]
    fn buckets_count_values_up_to_their_bound() {
        let mut snapshot = StatsSnapshot::default();
        let read = &mut snapshot.groups[StatGroup::Read as usize];
        let latencies = [0, 1023, 1024, 1_000_000, 1_048_575, 1_048_576, 3_000_000_000, u64::MAX];
        latencies.iter().for_each(|ns| read.latency.record(*ns));
        (read.ios, read.nanoseconds) = (8, 1_500_000_000);
        let parsed = check(&page("a", &Statistics::new(&snapshot, 1, 1))).unwrap();
        let bucket = |le: &str| parsed.value("blkq_latency_seconds_bucket", &[("op", "read"), ("le", le)]);
        assert_eq!(bucket("0.000001023"), Some(2.0));
        assert_eq!(bucket("0.000002047"), Some(3.0));
        assert_eq!(bucket("0.001048575"), Some(5.0));
        assert_eq!(bucket("0.002097151"), Some(6.0));
        assert_eq!((bucket("4.294967295"), bucket("+Inf")), (Some(7.0), Some(8.0)));
        assert_eq!(parsed.value("blkq_latency_seconds_sum", &[("op", "read")]), Some(1.5));
        assert_eq!(parsed.value("blkq_latency_seconds_count", &[("op", "read")]), Some(8.0));
    }

    // Contract: statistics
    #[test]
    fn the_documentation_has_every_metric_as_it_is() {
        let parsed = check(&page("a", &Statistics::default())).unwrap();
        let documented = include_str!("../../../../docs/watching.md");
        let Exposition { families, .. } = &parsed;
        for family in families {
            let row = documented.lines().find(|line| line.starts_with(&format!("| `{}` ", family.name)));
            let cells: Vec<&str> = row.map(|row| row.split('|').map(str::trim).collect()).unwrap_or_default();
            let [_, _, kind, labels, help, _] = cells[..] else { panic!("{}: no row of four", family.name) };
            let own: Vec<String> = family.labels().iter().map(|label| format!("`{label}`")).collect();
            assert_eq!(
                (kind, labels, help),
                (&*family.kind, &*own.join(" "), &*family.help),
                "{}",
                family.name
            );
        }
        let rows = documented.lines().filter(|line| line.starts_with("| `blkq_")).count();
        assert_eq!(rows, families.len(), "a row for a metric that does not exist");
    }
}
