//! Metrics: their names, their units, and the format of their values.

use serde::{Deserialize, Serialize};

/// Declares the metrics. Each has a description, which is also the text of schema.json, and a column heading with the unit.
macro_rules! metrics {
    ($($(#[$description:meta])* $Name:ident: $label:literal,)*) => {
        /// A quantity by which runs are compared. Serialized as its name in kebab case.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
        #[serde(rename_all = "kebab-case")]
        #[cfg_attr(test, derive(schemars::JsonSchema))]
        pub enum Metric {
            $($(#[$description])* $Name,)*
        }

        impl Metric {
            /// Column heading, with the unit.
            pub fn label(self) -> &'static str {
                match self {
                    $(Metric::$Name => $label,)*
                }
            }
        }
    };
}

metrics! {
    /// Completed I/Os per second.
    Iops: "IOPS",
    /// Wall time per I/O, in nanoseconds.
    NsPerIo: "ns/IO",
    /// 1024 x 1024 bytes per second.
    MibPerSecond: "MiB/s",
    /// Mean latency, in microseconds.
    LatencyMeanUs: "mean us",
    /// Median latency, in microseconds.
    LatencyP50Us: "p50 us",
    /// 99th percentile of the latency, in microseconds.
    LatencyP99Us: "p99 us",
    /// 99.9th percentile of the latency, in microseconds.
    LatencyP999Us: "p99.9 us",
    /// Longest latency, in microseconds.
    LatencyMaxUs: "max us",
    /// Processor time, user and system, per I/O, in nanoseconds.
    CpuNsPerIo: "cpu ns/IO",
    /// Processor time of the server alone per I/O, in nanoseconds.
    ServerCpuNsPerIo: "server ns/IO",
    /// Processor time of the client alone per I/O, in nanoseconds.
    ClientCpuNsPerIo: "client ns/IO",
    /// Voluntary and involuntary context switches per I/O.
    ContextSwitchesPerIo: "switches/IO",
    /// Context switches of the kernel's io_uring workers, which run the operations that would block, per I/O.
    WorkerSwitchesPerIo: "worker sw/IO",
    /// Context switches of the server alone per I/O.
    ServerSwitchesPerIo: "server sw/IO",
    /// Context switches of the client alone per I/O.
    ClientSwitchesPerIo: "client sw/IO",
    /// Kicks of a vhost-user-blk server per I/O: writes of the front end to the kick eventfd.
    KicksPerIo: "kicks/IO",
    /// Calls of a vhost-user-blk server for which the front end slept, per I/O.
    CallsPerIo: "calls/IO",
    /// Receive operations of an NBD server per I/O.
    ReceivesPerIo: "receives/IO",
    /// Send operations of an NBD server per I/O.
    SendsPerIo: "sends/IO",
    /// Receive operations that an NBD server delayed because its client was busy reading, per I/O.
    ReceiveBackoffsPerIo: "back-offs/IO",
    /// Calls of io_uring_enter per I/O.
    EntersPerIo: "enters/IO",
    /// Submissions to the ring per I/O.
    SubmissionsPerIo: "sqes/IO",
    /// Clock reads per I/O.
    ClockReadsPerIo: "clock/IO",
    /// Bios merged into a request, and requests merged into another request, per I/O.
    MergesPerIo: "merges/IO",
    /// Writes that the loop driver did in the system call of the preceding write, per I/O.
    JoinedPerIo: "joined/IO",
    /// Mean size of a request at the driver, in KiB.
    RequestKib: "request KiB",
    /// Seeks of the modelled disk per request.
    SeeksPerRequest: "seeks/request",
    /// Highest number of reads of the file in flight.
    ReadsInFlightMax: "reads max",
    /// Mean number of reads of the file in flight.
    ReadsInFlightMean: "reads mean",
    /// Highest number of concurrent writers of the file.
    WritersMax: "writers",
    /// Threads that read concurrently.
    Workers: "workers",
    /// Wake-ups of submitters that waited for the request gate, per I/O.
    WakeupsPerIo: "wake-ups/IO",
    /// I/Os of the slowest submitter / I/Os of the fastest submitter.
    ShareMinByMax: "min/max share",
    /// Pages of the file in the page cache after the run, in MiB.
    CachedMib: "cached MiB",
    /// Pages of the file in the page cache before the run, in MiB.
    CachedBeforeMib: "before MiB",
    /// Growth of the page cache of the file during the run, per I/O, in KiB.
    CachedKibPerIo: "cached KiB/IO",
    /// Resident memory of the server, in MiB.
    ResidentMib: "RSS MiB",
    /// Highest resident memory of the server under load, in MiB.
    ResidentMaxMib: "RSS max MiB",
    /// Longest time for which a cached clock value was used, in microseconds.
    ClockAgeMaxUs: "age max us",
    /// Time from the start of the server until its first client is connected, in milliseconds.
    StartMs: "start ms",
}

impl Metric {
    /// Formats a value with four significant digits and thousands separators.
    pub fn format(self, value: f64) -> String {
        if value != 0.0 && value.abs() < 0.001 {
            return format!("{value:.1e}");
        }
        let digits = match value.abs() {
            v if v >= 100.0 => 0,
            v if v >= 10.0 => 1,
            v if v >= 1.0 => 2,
            0.0 => 0,
            _ => 4,
        };
        let counts = matches!(self, Metric::ReadsInFlightMax | Metric::WritersMax | Metric::Workers);
        group_thousands(&format!("{value:.*}", if counts { 0 } else { digits }))
    }
}

/// Inserts thousands separators: `1234567.8` becomes `1,234,567.8`.
pub(crate) fn group_thousands(number: &str) -> String {
    let (whole, fraction) = number.find('.').map_or((number, ""), |point| number.split_at(point));
    let (sign, digits) = whole.strip_prefix('-').map_or(("", whole), |digits| ("-", digits));
    let mut grouped = String::from(sign);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped + fraction
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_few_digits_and_thousands_separators() {
        assert_eq!(Metric::Iops.format(1_234_567.8), "1,234,568");
        assert_eq!(Metric::NsPerIo.format(28.81), "28.8");
        assert_eq!(Metric::ClockReadsPerIo.format(0.0625), "0.0625");
        assert_eq!(Metric::ClockReadsPerIo.format(0.0), "0");
        assert_eq!(Metric::ContextSwitchesPerIo.format(0.000_002), "2.0e-6");
        assert_eq!(Metric::WritersMax.format(1.0), "1");
        assert_eq!(group_thousands("-1000.5"), "-1,000.5");
        assert_eq!(group_thousands("100"), "100");
    }
}
