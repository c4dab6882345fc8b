//! Metrics: names, units, and how figures are written.

use serde::{Deserialize, Serialize};

/// A quantity that runs are compared by. Serialized under its name in kebab case.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub enum Metric {
    /// I/Os per second.
    Iops,
    /// Wall time per I/O, in nanoseconds.
    NsPerIo,
    /// 1024 x 1024 bytes per second.
    MibPerSecond,
    /// Mean latency, in microseconds.
    LatencyMeanUs,
    /// Median latency, in microseconds.
    LatencyP50Us,
    /// 99th percentile of the latency, in microseconds.
    LatencyP99Us,
    /// 99.9th percentile of the latency, in microseconds.
    LatencyP999Us,
    /// Longest latency, in microseconds.
    LatencyMaxUs,
    /// Processor time, user and system, per I/O, in nanoseconds.
    CpuNsPerIo,
    /// Processor time of the server alone per I/O, in nanoseconds.
    ServerCpuNsPerIo,
    /// Processor time of the client alone per I/O, in nanoseconds.
    ClientCpuNsPerIo,
    /// Voluntary and involuntary context switches per I/O.
    ContextSwitchesPerIo,
    /// Those of the kernel's workers for a ring, which do what would block.
    WorkerSwitchesPerIo,
    /// Those of the server alone.
    ServerSwitchesPerIo,
    /// Those of the client alone.
    ClientSwitchesPerIo,
    /// Kicks of a vhost-user-blk server per I/O: eventfd writes of the front end.
    KicksPerIo,
    /// Its calls per I/O: those for which the front end slept.
    CallsPerIo,
    /// Receive operations of an NBD server per I/O.
    ReceivesPerIo,
    /// Its send operations per I/O.
    SendsPerIo,
    /// Times that it received later, as its client was busy reading, per I/O.
    ReceiveBackoffsPerIo,
    /// Calls of io_uring_enter per I/O.
    EntersPerIo,
    /// Submissions to the ring per I/O.
    SubmissionsPerIo,
    /// Readings of the clock per I/O.
    ClockReadsPerIo,
    /// Bios that joined a request, and requests that joined another, per I/O.
    MergesPerIo,
    /// Writes that were done by the call of the one before them, per I/O.
    JoinedPerIo,
    /// Mean size of a request as the driver got it, in KiB.
    RequestKib,
    /// Times that the modelled disk's arm had to move, per request.
    SeeksPerRequest,
    /// Most reads in flight at the file.
    ReadsInFlightMax,
    /// Mean number of reads in flight at the file.
    ReadsInFlightMean,
    /// Most writers of the file at once.
    WritersMax,
    /// Threads that read at once.
    Workers,
    /// Wake-ups of submitters that waited for the device to have room, per I/O.
    WakeupsPerIo,
    /// Share of the submitter that got least, by that of the one that got most.
    ShareMinByMax,
    /// Pages of the file in the page cache after the run, in MiB.
    CachedMib,
    /// The same, before the run.
    CachedBeforeMib,
    /// Growth of the page cache of the file during the run, per I/O, in KiB.
    CachedKibPerIo,
    /// Resident memory of the process, in MiB.
    ResidentMib,
    /// The most that it was under load, in MiB.
    ResidentMaxMib,
    /// Longest time for which a cached reading of the clock was used, in microseconds.
    ClockAgeMaxUs,
    /// Time from the start of the server to its first client, in milliseconds.
    StartMs,
}

impl Metric {
    /// Heading of a column, with the unit.
    pub fn label(self) -> &'static str {
        match self {
            Metric::Iops => "IOPS",
            Metric::NsPerIo => "ns/IO",
            Metric::MibPerSecond => "MiB/s",
            Metric::LatencyMeanUs => "mean us",
            Metric::LatencyP50Us => "p50 us",
            Metric::LatencyP99Us => "p99 us",
            Metric::LatencyP999Us => "p99.9 us",
            Metric::LatencyMaxUs => "max us",
            Metric::CpuNsPerIo => "cpu ns/IO",
            Metric::ServerCpuNsPerIo => "server ns/IO",
            Metric::ClientCpuNsPerIo => "client ns/IO",
            Metric::ContextSwitchesPerIo => "switches/IO",
            Metric::WorkerSwitchesPerIo => "worker sw/IO",
            Metric::ServerSwitchesPerIo => "server sw/IO",
            Metric::ClientSwitchesPerIo => "client sw/IO",
            Metric::KicksPerIo => "kicks/IO",
            Metric::CallsPerIo => "calls/IO",
            Metric::ReceivesPerIo => "receives/IO",
            Metric::SendsPerIo => "sends/IO",
            Metric::ReceiveBackoffsPerIo => "back-offs/IO",
            Metric::EntersPerIo => "enters/IO",
            Metric::SubmissionsPerIo => "sqes/IO",
            Metric::ClockReadsPerIo => "clock/IO",
            Metric::MergesPerIo => "merges/IO",
            Metric::JoinedPerIo => "joined/IO",
            Metric::RequestKib => "request KiB",
            Metric::SeeksPerRequest => "seeks/request",
            Metric::ReadsInFlightMax => "reads max",
            Metric::ReadsInFlightMean => "reads mean",
            Metric::WritersMax => "writers",
            Metric::Workers => "workers",
            Metric::WakeupsPerIo => "wake-ups/IO",
            Metric::ShareMinByMax => "min/max share",
            Metric::CachedMib => "cached MiB",
            Metric::CachedBeforeMib => "before MiB",
            Metric::CachedKibPerIo => "cached KiB/IO",
            Metric::ResidentMib => "RSS MiB",
            Metric::ResidentMaxMib => "RSS max MiB",
            Metric::ClockAgeMaxUs => "age max us",
            Metric::StartMs => "start ms",
        }
    }

    /// A value as people read it: four digits that matter, thousands apart.
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

/// `1234567.8` as `1,234,567.8`.
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
    fn figures_are_written_to_be_read() {
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
