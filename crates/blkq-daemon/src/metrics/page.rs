//! Renders the metrics in Prometheus' text exposition format, version 0.0.4. Times are in seconds, sizes in
//! bytes.

use std::fmt::{Display, Write};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use blkq::{Counter, StatGroup, Status};
use blkq_export::Counted;
use blkq_protocol::control::statistics::{Nbd, Statistics, VhostUser};

/// The latency buckets end just below these powers of two nanoseconds: from 1 us to 34 s.
const LATENCY_BITS: (u32, u32) = (10, 35);

/// Counters of the endpoint itself.
#[derive(Default)]
pub struct Served {
    pub answered: AtomicU64,
    pub refused: AtomicU64,
    /// Number of connections closed because they took too long, or to make room for others.
    pub shed: AtomicU64,
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
    let mut page = Page { text: String::with_capacity(32 << 10), device: escape(name) };
    page.device(*size_bytes, statistics);
    page.requests(statistics);
    page.layer(statistics);
    page.hangs(statistics);
    if let Some(nbd) = &statistics.nbd {
        page.nbd(nbd);
    }
    if let Some(vhost) = &statistics.vhost_user {
        page.vhost_user(vhost);
    }
    let get = |counter: &AtomicU64| counter.load(Relaxed);
    page.counter("metrics_answered", "Requests for metrics that were answered.", get(&served.answered));
    page.counter("metrics_refused", "HTTP requests that were rejected.", get(&served.refused));
    page.counter("metrics_shed", "HTTP connections closed because they took too long.", get(&served.shed));
    page.text
}

impl Page {
    fn device(&mut self, size_bytes: u64, statistics: &Statistics) {
        self.family("info", "gauge", "Always 1; the label is the version of the daemon.");
        self.sample("info", &[("version", env!("CARGO_PKG_VERSION"))], 1);
        self.gauge("size_bytes", "Size of the device.", size_bytes);
        self.gauge("uptime_seconds", "Time since the device was attached.", seconds(statistics.uptime_ns));
    }

    fn requests(&mut self, statistics: &Statistics) {
        let snapshot = statistics.snapshot();
        let groups = || StatGroup::ALL.iter().map(|group| (group.name(), &snapshot[*group]));
        self.family("ios_total", "counter", "Requests completed, with or without an error.");
        groups().for_each(|(op, group)| self.sample("ios_total", &[("op", op)], group.ios));
        self.family("merges_total", "counter", "I/Os merged into the request of another I/O.");
        groups().for_each(|(op, group)| self.sample("merges_total", &[("op", op)], group.merges));
        self.family("transferred_bytes_total", "counter", "Bytes of the completed requests.");
        groups().filter(|(op, _)| *op != StatGroup::Flush.name()).for_each(|(op, group)| {
            self.sample("transferred_bytes_total", &[("op", op)], u128::from(group.sectors) * 512);
        });
        self.family("errors_total", "counter", "Requests that completed with an error.");
        for (op, group) in groups() {
            for status in Status::ALL {
                let labels = [("op", op), ("status", status.name())];
                self.sample("errors_total", &labels, group.failed_with(status));
            }
        }
        self.family("refused_total", "counter", "I/Os rejected before they became requests.");
        for (op, group) in groups() {
            for status in Status::ALL {
                let labels = [("op", op), ("status", status.name())];
                self.sample("refused_total", &labels, group.refused_with(status));
            }
        }
        self.family("latency_seconds", "histogram", "Time from submission to completion, with queueing.");
        let (from, to) = LATENCY_BITS;
        for (op, group) in groups() {
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
        self.family("latency_max_seconds", "gauge", "Longest latency since the device was attached.");
        groups().for_each(|(op, group)| {
            self.sample("latency_max_seconds", &[("op", op)], seconds(group.latency.max_ns));
        });
        let directions = ["read", "other"];
        self.family("in_flight", "gauge", "Requests in flight.");
        for (direction, count) in directions.iter().zip(snapshot.in_flight) {
            self.sample("in_flight", &[("direction", direction)], count);
        }
        self.family("in_flight_max", "gauge", "Most requests ever in flight in a single queue.");
        for (direction, count) in directions.iter().zip(snapshot.in_flight_max) {
            self.sample("in_flight_max", &[("direction", direction)], count);
        }
        self.counter("busy_seconds", "Time with requests in flight.", seconds(snapshot.busy_ns));
    }

    fn layer(&mut self, statistics: &Statistics) {
        let snapshot = statistics.snapshot();
        let counted = [
            (Counter::FlushesAsked, "flushes_asked", "I/Os that needed a flush."),
            (Counter::FlushesSent, "flushes_sent", "Flushes sent to the driver."),
            (Counter::FlushesCoalesced, "flushes_coalesced", "I/Os that shared their flush with other I/Os."),
            (Counter::PlugFlushes, "plug_flushes", "Batches of requests that left a plug."),
            (Counter::DispatchBatches, "dispatch_batches", "Batches of requests dispatched to the driver."),
            (Counter::Requeues, "requeues", "Requests requeued because the driver was busy."),
            (Counter::Splits, "splits", "Splits of I/Os that exceeded the queue limits."),
            (Counter::TagWaits, "tag_waits", "I/Os that found no free tag."),
            (Counter::Enters, "enters", "Calls of io_uring_enter by engines."),
            (
                Counter::EarlySubmissions,
                "early_submissions",
                "Calls of io_uring_enter for a part of a batch.",
            ),
            (Counter::ClockReads, "clock_reads", "Clock readings."),
            (Counter::NegativeLatencies, "negative_latencies", "Requests with a negative latency."),
        ];
        for (counter, name, help) in counted {
            self.counter(name, help, snapshot.counter(counter));
        }
        let age = seconds(snapshot.clock_age_max_ns);
        self.gauge("clock_age_max_seconds", "Longest use of a cached clock reading.", age);
        let gate = &statistics.gate;
        self.family("gate_waiting", "gauge", "Threads that wait at the request gate.");
        for (direction, count) in ["read", "other"].iter().zip(gate.waiting) {
            self.sample("gate_waiting", &[("direction", direction)], count);
        }
        self.counter("gate_waits", "Times that a thread had to wait at the request gate.", gate.waits);
        self.counter("gate_wakeups", "Wake-ups of threads at the request gate.", gate.wakeups);
        self.counter("gate_grants", "Batches of requests admitted at the request gate.", gate.grants);
        self.gauge(
            "gate_largest_grant",
            "Requests in the largest batch admitted at the gate.",
            gate.largest_grant,
        );
    }

    fn hangs(&mut self, statistics: &Statistics) {
        let snapshot = statistics.snapshot();
        let limit = seconds(statistics.hang_warning_ns);
        self.gauge("hang_warning_seconds", "Time after which a request counts as hung; 0 if off.", limit);
        self.counter("hangs", "Requests that were found to hang.", snapshot.counter(Counter::Hangs));
        self.gauge("hung", "Requests that hung in the last scan.", snapshot.hung);
        self.counter(
            "throttled_requests",
            "Requests that had to wait for a limit.",
            snapshot.counter(Counter::ThrottledRequests),
        );
        self.counter(
            "throttled_seconds",
            "Time in which requests waited, summed over queues.",
            seconds(snapshot.counter(Counter::ThrottledNs)),
        );
        self.gauge("held", "Requests held after errors now.", snapshot.held);
        self.counter(
            "held_requests",
            "Times that a request was held after an error.",
            snapshot.counter(Counter::HeldRequests),
        );
        self.gauge("throttled", "Requests that wait for a limit now.", snapshot.throttled);
        self.counter("stalls", "Times that the thread of a queue did not answer in time.", statistics.stalls);
    }

    fn vhost_user(&mut self, vhost: &VhostUser) {
        self.gauge("vhost_user_connected", "Virtual machines connected.", vhost.connected);
        self.counters("vhost_user", vhost.counters.each());
    }

    fn nbd(&mut self, nbd: &Nbd) {
        self.gauge("nbd_connected", "NBD clients connected.", nbd.connected);
        self.counters("nbd", nbd.counters.each());
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
    use blkq::StatsSnapshot;
    use blkq_export::nbd::NbdCounters;

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
