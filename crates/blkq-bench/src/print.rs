//! Prints the tables as text.

use crate::metric::Metric;
use crate::result::{Comparison, Curve, Effect, Published, Table};
use crate::summary::{self, Judged};

const WIDTH: usize = 108;
/// Minimum width of the first column of a table, in characters, if its content is that long.
const FIRST: usize = 36;
/// Maximum width of the other columns, in characters.
const CELL: usize = 40;

/// Explains the notation; printed once, before the first table.
pub const LEGEND: &str = "\
Figures are medians of several rounds, in which the cases take turns. spread: (largest - smallest round) /
median. x: feature / base, the median of the ratios of the rounds; +-: the spread of these ratios.
~: no clear effect, because the ratio is within its spread.
";

/// Prints one table: its main result, the published figures, the measured figures, the mechanisms and targets.
pub fn table(table: &Table) -> String {
    let mut text = paragraph("== ", &table.title);
    if let Some((comparison, effect)) = summary::headline(table) {
        text += &paragraph("   ", &verdict(comparison, effect));
    }
    if let Some(published) = &table.published {
        text += &self::published(table, published);
    }
    for comparison in &table.comparisons {
        text += &self::comparison(comparison);
    }
    text += &plots(table);
    text += &judged("mechanisms", ["seen", "NOT SEEN"], summary::mechanisms(table));
    text += &judged("targets", ["reached", "missed"], summary::targets(table));
    if !table.left_out.is_empty() || !table.notes.is_empty() {
        text.push('\n');
    }
    for left_out in &table.left_out {
        text += &paragraph("left out:  ", left_out);
    }
    for note in &table.notes {
        text += &paragraph("note: ", note);
    }
    text
}

/// `cached relative to precise: IOPS x 2.54 +-2 % (published x 1.10); null, 4 KiB random read`.
fn verdict(comparison: &Comparison, effect: &Effect) -> String {
    let Effect { metric, feature, base, published_ratio, clear, .. } = effect;
    let published = published_ratio.map_or(String::new(), |r| format!(" (published {})", ratio(r)));
    let unclear = if *clear { "" } else { ", within its spread" };
    format!(
        "{feature} relative to {base}: {} {} +-{}{published}{unclear}; {}",
        metric.label(),
        measured_ratio(effect),
        summary::spread(effect),
        comparison.title
    )
}

/// The published figures, next to the measured ratios.
fn published(table: &Table, published: &Published) -> String {
    let Published { origin, setting, unit, .. } = published;
    let source = paragraph("published: ", &format!("{origin} ({setting}), {unit}"));
    let mut rows = vec![["", "base", "feature", "ratio", "measured", ""].map(str::to_owned).to_vec()];
    for (row, effect) in summary::published_beside(table, published) {
        let (measured, spread) = effect.map_or(("-".to_owned(), String::new()), |effect| {
            (measured_ratio(effect), format!("+-{}", summary::spread(effect)))
        });
        rows.push(vec![
            row.name.clone(),
            summary::exact(row.base),
            summary::exact(row.feature),
            ratio(row.ratio()),
            measured,
            spread,
        ]);
    }
    format!("\n{source}{}", columns(&rows))
}

fn comparison(comparison: &Comparison) -> String {
    let Comparison { title, rounds, seconds, .. } = comparison;
    let title = paragraph("", &format!("{title} (median of {rounds} rounds of {seconds} s)"));
    let effects = comparison.effects.iter().map(|effect| {
        let published = effect.published_ratio.map(|r| format!("published {}", ratio(r)));
        vec![
            format!("{}: {}", effect.name, effect.metric.label()),
            measured_ratio(effect),
            format!("+-{}", summary::spread(effect)),
            published.unwrap_or_default(),
        ]
    });
    format!("\n{title}{}{}", columns(&figures(comparison)), columns(&effects.collect::<Vec<_>>()))
}

/// Returns a row for each case and a column for each metric, with the spread of the first metric as third column.
fn figures(comparison: &Comparison) -> Vec<Vec<String>> {
    let metrics = summary::metrics(comparison);
    let mut rows = vec![vec![String::new()]];
    rows[0].extend(metrics.iter().map(|metric| metric.label().to_owned()));
    for case in &comparison.cases {
        let cell = |metric: &Metric| {
            case.find(*metric).map_or("-".to_owned(), |figure| metric.format(figure.median))
        };
        rows.push(std::iter::once(case.name.clone()).chain(metrics.iter().map(cell)).collect());
    }
    let Some(first) = metrics.first() else { return rows };
    rows[0].insert(2, "spread".to_owned());
    for (row, case) in rows[1..].iter_mut().zip(&comparison.cases) {
        let percent = case.find(*first).map(|figure| 100.0 * (figure.max - figure.min) / figure.median);
        let percent = percent.filter(|percent| percent.is_finite());
        row.insert(2, percent.map_or("-".to_owned(), |percent| format!("{percent:.0}%")));
    }
    rows
}

/// One text table per plot: a row for each x, a column for each curve.
fn plots(table: &Table) -> String {
    let plot = |(name, curves): (&str, Vec<&Curve>)| {
        let mut rows = vec![vec![curves[0].x_label.clone()]];
        rows[0].extend(curves.iter().map(|curve| curve.name.clone()));
        for x in summary::places(&curves) {
            let mut row = vec![summary::number(x)];
            row.extend(curves.iter().map(|curve| {
                let point = curve.points.iter().find(|point| point.x == x);
                point.map_or("-".to_owned(), |point| curve.metric.format(point.median))
            }));
            rows.push(row);
        }
        let title = format!("{name}: {}", curves[0].metric.label());
        format!("\n{}{}", paragraph("", &title), columns(&rows))
    };
    summary::plots(table).into_iter().map(plot).collect()
}

/// The values with their bounds and verdicts, in the words for a good and a bad one. Without values there is no title.
fn judged(title: &str, [good, bad]: [&str; 2], values: Vec<Judged>) -> String {
    let verdict = |is_good| if is_good { good } else { bad };
    let rows: Vec<_> = values
        .into_iter()
        .map(|(cells, is_good)| [&cells[..], &[verdict(is_good).to_owned()]].concat())
        .collect();
    if rows.is_empty() { String::new() } else { format!("\n{title}\n{}", columns(&rows)) }
}

fn ratio(ratio: f64) -> String {
    format!("x {}", summary::ratio(ratio))
}

/// The ratio of an effect; `~` marks a ratio that is not clear.
fn measured_ratio(effect: &Effect) -> String {
    let unclear = if effect.clear { "" } else { "~" };
    format!("{unclear}{}", ratio(effect.ratio))
}

/// Wraps `text` after `head`; the other lines are indented to the width of `head`.
fn paragraph(head: &str, text: &str) -> String {
    let indent = if head.is_empty() { 2 } else { head.len() };
    let lines = summary::wrap(text, WIDTH - indent);
    format!("{head}{}\n", lines.join(&format!("\n{:indent$}", "")))
}

/// Aligns columns: the first to the left, the others to the right. Text that is too long for the first column is
/// wrapped. Columns that do not fit into a line are printed below, next to the first column again.
fn columns(rows: &[Vec<String>]) -> String {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..count).map(|column| width(column).min(CELL)).collect();
    let mut text = String::new();
    let mut begin = 1;
    loop {
        let mut end = begin;
        let mut taken = 0;
        while end < count && (end == begin || 2 + FIRST.min(width(0)) + taken + 2 + widths[end] <= WIDTH) {
            taken += 2 + widths[end];
            end += 1;
        }
        let first = width(0).min(WIDTH - 2 - taken);
        for row in rows {
            text += &line(row, first, begin..end, &widths);
        }
        if end >= count {
            return text;
        }
        begin = end;
    }
}

fn line(row: &[String], first: usize, others: std::ops::Range<usize>, widths: &[usize]) -> String {
    let name = row.first().map_or("", String::as_str);
    let lines = summary::wrap(name, first.max(1));
    let mut text = format!("  {}", lines.join("\n  "));
    let last = lines.last().map_or(0, |line| line.chars().count());
    text += &" ".repeat(first.saturating_sub(last));
    for column in others {
        let cell = row.get(column).map_or("", String::as_str);
        let cut: String = cell.chars().take(widths[column]).collect();
        text += &format!("  {cut:>width$}", width = widths[column]);
    }
    text.truncate(text.trim_end().len());
    text + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::Results;

    fn text(results: &Results) -> String {
        let tables = results.tables.iter().map(table).collect::<Vec<_>>().join("\n");
        format!("{LEGEND}\n{tables}")
    }

    fn rows(rows: &[&[&str]]) -> Vec<Vec<String>> {
        rows.iter().map(|row| row.iter().map(|&cell| cell.to_owned()).collect()).collect()
    }

    #[test]
    fn columns_line_up() {
        let rows = rows(&[&["", "IOPS"], &["off", "1"], &["in two or three", "100"]]);
        let expected = "                   IOPS\n  off                 1\n  in two or three   100\n";
        assert_eq!(columns(&rows), expected);
    }

    #[test]
    fn no_line_exceeds_the_width() {
        let results: Results = serde_json::from_str(include_str!("../tests/hostile.json")).unwrap();
        let text = text(&results);
        let longest = text.lines().max_by_key(|line| line.chars().count()).unwrap();
        assert!(longest.chars().count() <= WIDTH, "{longest}");
        assert!(text.contains("~x 1.0"), "an effect that is not clear is marked");
        assert!(text.contains("NOT SEEN") && text.contains("missed") && text.contains("left out: "));
    }

    #[test]
    fn published_figures_are_printed_next_to_measured_ratios() {
        let results: Results = serde_json::from_str(include_str!("../tests/hostile.json")).unwrap();
        let text = text(&results);
        let line = text.lines().find(|line| line.trim_start().starts_with("all threads")).unwrap();
        let cells: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(cells, ["all", "threads", "108.36", "118.71", "x", "1.10", "x", "2.54", "+-2", "%"]);
    }
}
