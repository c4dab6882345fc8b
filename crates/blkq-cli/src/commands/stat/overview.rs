//! The report of several devices, with the column names and units of iostat(1).

use super::report::{Figures, Group, Report};
use crate::output::render_figures;

/// 1 MB is 10^6 bytes; await is in milliseconds. `rMB`, `wMB` and `errors` are totals for `seconds`.
const HEADS: [&str; 15] = [
    "DEVICE", "seconds", "r/s", "rMB/s", "r_await", "w/s", "wMB/s", "w_await", "d/s", "f/s", "rMB", "wMB",
    "aqu-sz", "%util", "errors",
];

/// Unless `verbose`, reports of intervals without I/O are counted and not printed.
pub fn overview(reports: &[Report], verbose: bool) -> String {
    let is_idle = |report: &&Report| !verbose && !report.is_whole && report.figures.is_idle();
    let (idle, shown): (Vec<_>, Vec<_>) = reports.iter().partition(is_idle);
    let table = render_figures(&HEADS, shown.iter().map(|report| row(&report.figures)));
    match idle.len() {
        0 => table,
        1 => table + "1 device was idle\n",
        count => format!("{table}{count} devices were idle\n"),
    }
}

fn row(figures: &Figures) -> Vec<String> {
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

#[cfg(test)]
mod tests {
    use blkq_protocol::control::statistics::Statistics;

    use super::super::report::tests::counted;
    use super::*;

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
}
