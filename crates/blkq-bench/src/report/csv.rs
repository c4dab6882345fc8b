//! All figures as CSV (RFC 4180): a line for each round of a run, and for each point of a curve.

use crate::result::{Point, Results};
use crate::summary::name;

/// A CSV field, quoted if required.
fn field(text: &str) -> String {
    if text.contains(['"', ',', '\n', '\r']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.to_owned()
    }
}

const HEADING: &str = "table,part,title,name,x,metric,round,value,min,max\n";

/// Whether a file with the first bytes `head` was written by [`csv`].
pub(super) fn is_csv(head: &[u8]) -> bool {
    head.starts_with(HEADING.as_bytes())
}

/// Formats all figures under the columns [`HEADING`]. A line of the part `run` contains a round and its value. A line
/// of the part `curve` contains x, the median of the rounds as value, and their smallest and largest value.
pub fn csv(results: &Results) -> String {
    let mut text = HEADING.to_owned();
    for table in &results.tables {
        let table_name = name(&table.name);
        for comparison in &table.comparisons {
            for case in &comparison.cases {
                let (title, case_name) = (field(&comparison.title), field(&case.name));
                for figure in &case.figures {
                    let metric = name(&figure.metric);
                    for (round, value) in (1..).zip(&figure.samples) {
                        text +=
                            &format!("{table_name},run,{title},{case_name},,{metric},{round},{value},,\n");
                    }
                }
            }
        }
        for curve in &table.curves {
            let (title, curve_name, metric) = (field(&curve.plot), field(&curve.name), name(&curve.metric));
            for Point { x, median, min, max } in &curve.points {
                text +=
                    &format!("{table_name},curve,{title},{curve_name},{x},{metric},,{median},{min},{max}\n");
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sample_and_point_has_its_line_and_ten_fields() {
        let results: Results = serde_json::from_str(include_str!("../../tests/hostile.json")).unwrap();
        let csv = csv(&results);
        let samples: usize = results
            .tables
            .iter()
            .flat_map(|table| &table.comparisons)
            .flat_map(|comparison| &comparison.cases)
            .flat_map(|case| &case.figures)
            .map(|figure| figure.samples.len())
            .sum();
        let points: usize =
            results.tables.iter().flat_map(|table| &table.curves).map(|curve| curve.points.len()).sum();
        assert_eq!(csv.lines().count(), 1 + samples + points);
        assert!(csv.lines().any(|line| line.contains("\"say \"\"a, b\"\"\"")), "{csv}");
    }
}
