//! The tables as text.

use crate::metric::Metric;
use crate::result::{Comparison, Expected, Results, Table};

/// All of it.
pub fn text(results: &Results) -> String {
    results.tables.iter().map(table).collect::<Vec<_>>().join("\n")
}

/// One table: published figures, comparisons, curves, what follows from them.
pub fn table(table: &Table) -> String {
    let mut text = format!("== {}\n", table.title);
    if let Some(published) = &table.published {
        text += &format!("\npublished: {} ({}), {}\n", published.origin, published.setting, published.unit);
        let mut rows = vec![["", "base", "feature", "ratio"].map(str::to_owned).to_vec()];
        rows.extend(published.rows.iter().map(|row| {
            let number = |value| Metric::Iops.format(value);
            vec![row.name.clone(), number(row.base), number(row.feature), ratio(row.feature / row.base)]
        }));
        text += &columns(&rows);
    }
    for comparison in &table.comparisons {
        text += &self::comparison(comparison);
    }
    for plot in plots(table) {
        text += &plot;
    }
    if !table.mechanisms.is_empty() {
        text += "\nmechanisms\n";
        text += &columns(
            &table
                .mechanisms
                .iter()
                .map(|mechanism| {
                    let seen = if mechanism.seen { "seen" } else { "NOT SEEN" };
                    vec![
                        mechanism.claim.clone(),
                        number(mechanism.value),
                        bound(mechanism.expected),
                        seen.into(),
                    ]
                })
                .collect::<Vec<_>>(),
        );
    }
    if !table.targets.is_empty() {
        text += "\ntargets\n";
        text += &columns(
            &table
                .targets
                .iter()
                .map(|target| {
                    let reached = if target.reached { "reached" } else { "missed" };
                    vec![target.name.clone(), number(target.value), bound(target.wanted), reached.into()]
                })
                .collect::<Vec<_>>(),
        );
    }
    for left_out in &table.left_out {
        text += &format!("left out: {left_out}\n");
    }
    for note in &table.notes {
        text += &format!("note: {note}\n");
    }
    text
}

fn comparison(comparison: &Comparison) -> String {
    let mut text = format!(
        "\n{} (median of {} rounds of {} s)\n",
        comparison.title, comparison.rounds, comparison.seconds
    );
    let mut metrics: Vec<Metric> = Vec::new();
    for figure in comparison.cases.iter().flat_map(|case| &case.figures) {
        if !metrics.contains(&figure.metric) {
            metrics.push(figure.metric);
        }
    }
    let mut rows = vec![vec![String::new()]];
    for (index, metric) in metrics.iter().enumerate() {
        rows[0].push(metric.label().to_owned());
        if index == 0 {
            rows[0].push("spread".to_owned());
        }
    }
    for case in &comparison.cases {
        let mut row = vec![case.name.clone()];
        for (index, metric) in metrics.iter().enumerate() {
            let figure = case.figures.iter().find(|figure| figure.metric == *metric);
            row.push(figure.map_or("-".to_owned(), |figure| metric.format(figure.median)));
            if index == 0 {
                let spread = figure.map(|figure| 100.0 * (figure.max - figure.min) / figure.median);
                row.push(spread.map_or("-".to_owned(), |spread| format!("{spread:.0}%")));
            }
        }
        rows.push(row);
    }
    text += &columns(&rows);
    if !comparison.effects.is_empty() {
        let mut rows = Vec::new();
        for effect in &comparison.effects {
            let published =
                effect.published_ratio.map_or(String::new(), |r| format!("published {}", ratio(r)));
            let unclear = if effect.clear { "" } else { "~" };
            rows.push(vec![
                format!("{}: {}", effect.name, effect.metric.label()),
                format!("{unclear}{}", ratio(effect.ratio)),
                format!("+-{:.0}%", 100.0 * (effect.spread - 1.0)),
                published,
            ]);
        }
        text += &columns(&rows);
    }
    text
}

/// A table per plot: a line for each x, a column for each curve.
fn plots(table: &Table) -> Vec<String> {
    let mut names: Vec<&str> = table.curves.iter().map(|curve| curve.plot.as_str()).collect();
    names.dedup();
    let plot = |name: &str| {
        let curves: Vec<_> = table.curves.iter().filter(|curve| curve.plot == name).collect();
        let mut xs: Vec<f64> =
            curves.iter().flat_map(|curve| curve.points.iter().map(|point| point.x)).collect();
        xs.sort_by(f64::total_cmp);
        xs.dedup();
        let mut rows = vec![vec![curves[0].x_label.clone()]];
        rows[0].extend(curves.iter().map(|curve| curve.name.clone()));
        for x in xs {
            let mut row = vec![number(x)];
            row.extend(curves.iter().map(|curve| {
                let point = curve.points.iter().find(|point| point.x == x);
                point.map_or("-".to_owned(), |point| curve.metric.format(point.median))
            }));
            rows.push(row);
        }
        format!("\n{name}: {}\n{}", curves[0].metric.label(), columns(&rows))
    };
    names.into_iter().map(plot).collect()
}

fn ratio(value: f64) -> String {
    format!("x {value:.2}")
}

/// A number with as many digits as matter.
fn number(value: f64) -> String {
    if value == value.trunc() { format!("{value:.0}") } else { Metric::NsPerIo.format(value) }
}

fn bound(expected: Expected) -> String {
    match expected {
        Expected::AtLeast(bound) => format!(">= {}", number(bound)),
        Expected::AtMost(bound) => format!("<= {}", number(bound)),
        Expected::Exactly(bound) => format!("= {}", number(bound)),
    }
}

/// Rows whose columns line up, the first to the left and the others to the right.
fn columns(rows: &[Vec<String>]) -> String {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..count).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = format!("  {:<width$}", row[0], width = widths[0]);
        for (cell, width) in row.iter().zip(&widths).skip(1) {
            line += &format!("  {cell:>width$}");
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let rows = [vec!["", "IOPS"], vec!["off", "1"], vec!["concurrent", "100"]];
        let rows = rows.map(|row| row.into_iter().map(str::to_owned).collect());
        assert_eq!(columns(&rows), "              IOPS\n  off            1\n  concurrent   100\n");
    }
}
