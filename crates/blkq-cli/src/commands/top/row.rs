use serde::Serialize;

use crate::commands::stat::report::{Figures, Report};

/// Figures of the last interval. Unknown figures are `None`.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Row {
    pub name: String,
    /// Why there are no figures.
    pub error: Option<String>,
    pub seconds: Option<f64>,
    /// Reads, writes and discards per second.
    pub iops: Option<f64>,
    /// One MB is 10^6 bytes.
    pub mb_per_s: Option<f64>,
    /// The latencies of reads, writes and discards, including the time in queues; `None` if there were none.
    pub latency_p50_us: Option<f64>,
    pub latency_p99_us: Option<f64>,
    /// At the end of the interval.
    pub in_flight: Option<u64>,
    pub merges_per_s: Option<f64>,
    pub flushes_per_s: Option<f64>,
    /// Share of the interval in which requests waited for a limit, in percent.
    pub throttled_percent: Option<f64>,
    pub errors: Option<u64>,
    /// Requests that hung when the daemon last scanned for them.
    pub hung: Option<u64>,
    pub held: Option<u64>,
    /// NBD clients and virtual machines; `None` for a device that has only a ublk export.
    pub clients: Option<u64>,
}

impl Row {
    pub fn new(name: &str, report: Option<&Report>, error: Option<String>) -> Row {
        let empty = Row { name: name.to_owned(), error, ..Row::default() };
        let Some(report) = report else { return empty };
        let Figures { seconds, read, write, discard, flush, in_flight, hangs, held, nbd, vhost_user, .. } =
            &report.figures;
        let data = [read, write, discard];
        let latencies = report.latencies();
        let percentile =
            |percent| (latencies.count() > 0).then(|| latencies.percentile_ns(percent) as f64 / 1e3);
        let connected = [
            nbd.as_ref().map(|nbd| nbd.connected),
            vhost_user.as_ref().map(|vhost_user| vhost_user.connected),
        ];
        Row {
            seconds: Some(*seconds),
            iops: Some(data.iter().map(|group| group.iops).sum()),
            mb_per_s: Some(data.iter().map(|group| group.mb_per_s).sum()),
            latency_p50_us: percentile(50.0),
            latency_p99_us: percentile(99.0),
            in_flight: Some(*in_flight),
            merges_per_s: Some(data.iter().map(|group| group.merges_per_s).sum()),
            flushes_per_s: Some(flush.iops),
            throttled_percent: Some(report.figures.throttled_percent()),
            errors: Some([read, write, discard, flush].iter().map(|group| group.error_count()).sum()),
            hung: Some(hangs.now),
            held: Some(held.now),
            clients: connected.into_iter().flatten().reduce(|all, more| all + more),
            ..empty
        }
    }
}

/// A figure of a row, as the list and `--once` show it.
pub struct Column {
    pub head: &'static str,
    /// The width in the list, in characters.
    pub width: u16,
    pub value: fn(&Row) -> Option<f64>,
    text: fn(f64) -> String,
}

impl Column {
    /// `-` if the value is unknown.
    pub fn cell(&self, row: &Row) -> String {
        (self.value)(row).map_or_else(|| "-".to_owned(), self.text)
    }
}

/// The columns of the list after the name, which are also the orders in which it can be sorted.
pub static COLUMNS: [Column; 10] = [
    Column { head: "IOPS", width: 5, value: |row| row.iops, text: short },
    Column { head: "MB/s", width: 5, value: |row| row.mb_per_s, text: short },
    Column { head: "p50", width: 5, value: |row| row.latency_p50_us, text: latency },
    Column { head: "p99", width: 5, value: |row| row.latency_p99_us, text: latency },
    Column { head: "QD", width: 4, value: |row| number(row.in_flight), text: rounded },
    Column { head: "MRG/s", width: 5, value: |row| row.merges_per_s, text: short },
    Column { head: "FLS/s", width: 5, value: |row| row.flushes_per_s, text: short },
    Column { head: "THR", width: 4, value: |row| row.throttled_percent, text: percent },
    Column { head: "HUNG", width: 4, value: |row| number(row.hung), text: rounded },
    Column { head: "CLI", width: 3, value: |row| number(row.clients), text: rounded },
];

/// Only `--once` has this column, before the one of hung requests.
pub static ERRORS: Column = Column { head: "ERR", width: 4, value: |row| number(row.errors), text: rounded };

fn number(count: Option<u64>) -> Option<f64> {
    count.map(|count| count as f64)
}

fn rounded(number: f64) -> String {
    count(number as u64)
}

/// At most five characters: `0.5`, `48.1`, `999`, `12.3k`, `4.5M`.
pub fn short(value: f64) -> String {
    let (value, unit) = match value {
        ..999.5 => (value, ""),
        ..999_500.0 => (value / 1e3, "k"),
        ..999_500_000.0 => (value / 1e6, "M"),
        _ => (value / 1e9, "G"),
    };
    match value {
        0.0 => "0".to_owned(),
        ..99.95 => format!("{value:.1}{unit}"),
        _ => format!("{value:.0}{unit}"),
    }
}

/// At most four characters: `0%`, `12%`. Rounds up, so that only zero becomes `0%`.
pub fn percent(value: f64) -> String {
    if value > 0.0 { format!("{:.0}%", value.ceil()) } else { "0%".to_owned() }
}

/// At most five characters: `3`, `12.3k`.
pub fn count(number: u64) -> String {
    if number < 1000 { number.to_string() } else { short(number as f64) }
}

/// Up to 10^4 seconds at most five characters: `0.5us`, `327us`, `12ms`, `3.0s`.
pub fn latency(us: f64) -> String {
    let (value, unit) = match us {
        ..999.5 => (us, "us"),
        ..999_500.0 => (us / 1e3, "ms"),
        _ => (us / 1e6, "s"),
    };
    if value < 9.95 { format!("{value:.1}{unit}") } else { format!("{value:.0}{unit}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_any_size_are_shortened() {
        for (value, text) in [
            (0.0, "0"),
            (0.52, "0.5"),
            (9.96, "10.0"),
            (999.4, "999"),
            (999.6, "1.0k"),
            (12_345.0, "12.3k"),
            (99_960.0, "100k"),
            (999_600.0, "1.0M"),
            (1e8, "100M"),
            (999_600_000.0, "1.0G"),
        ] {
            assert_eq!(short(value), text);
        }
        assert_eq!(
            (count(7), count(999), count(1_234)),
            ("7".to_owned(), "999".to_owned(), "1.2k".to_owned())
        );
        assert_eq!([0.0, 0.01, 49.5, 100.0].map(percent), ["0%", "1%", "50%", "100%"]);
        for (us, text) in [
            (0.3, "0.3us"),
            (327.68, "328us"),
            (999.7, "1.0ms"),
            (12_345.0, "12ms"),
            (3e6, "3.0s"),
            (1e9, "1000s"),
        ] {
            assert_eq!(latency(us), text);
        }
        let mut value = 0.001;
        while value < 1e11 {
            assert!(short(value).len() <= 5 && latency(value.min(1e10)).len() <= 6, "{value}");
            value *= 1.01;
        }
    }
}
