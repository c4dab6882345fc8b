//! Draws a latency histogram as text, with one bar per power of two.

use blkq::stats::Histogram;

use crate::output::{Align, render};

/// Length of the longest bar, in characters.
const BAR: u64 = 40;
/// The last bar ends at 2^40 ns, about 18 minutes, and also counts longer latencies.
const BITS_MAX: u32 = 40;

/// From the shortest latency to the longest: the range in nanoseconds, without its end, and the count.
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

/// Empty if there were no such operations.
pub fn draw(name: &str, histogram: &Histogram) -> String {
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
    use super::*;

    #[test]
    fn bars_are_proportional_and_count_every_latency() {
        let mut histogram = Histogram::default();
        assert_eq!(draw("read", &histogram), "");
        (0..80).for_each(|_| histogram.record(1_500));
        (0..20).for_each(|_| histogram.record(3_000));
        histogram.record(20_000);
        let text = draw("read", &histogram);
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
