//! Figures that the text output and the HTML page both compute from a table.

use crate::metric::{Metric, group_thousands};
use crate::result::{Comparison, Curve, Effect, Expected, Published, PublishedRow, Table};

/// All effects of a table, each with its comparison.
pub fn effects(table: &Table) -> impl Iterator<Item = (&Comparison, &Effect)> {
    let comparisons = table.comparisons.iter();
    comparisons.flat_map(|comparison| comparison.effects.iter().map(move |effect| (comparison, effect)))
}

/// The first effect for which a ratio was published, or else the first effect, with its comparison.
pub fn headline(table: &Table) -> Option<(&Comparison, &Effect)> {
    effects(table).find(|(_, effect)| effect.published_ratio.is_some()).or_else(|| effects(table).next())
}

/// Pairs each published row with its measured counterpart: the effect whose published ratio is that of the row.
pub fn published_beside<'a>(
    table: &'a Table,
    published: &'a Published,
) -> Vec<(&'a PublishedRow, Option<&'a Effect>)> {
    let same = |row: &PublishedRow, ratio: f64| (row.ratio() / ratio - 1.0).abs() < 1e-9;
    let measured = |row| {
        let mut effects = effects(table).map(|(_, effect)| effect);
        effects.find(|effect| effect.published_ratio.is_some_and(|ratio| same(row, ratio)))
    };
    published.rows.iter().map(|row| (row, measured(row))).collect()
}

/// The metrics of a comparison in the order of measurement, without those that are 0 in all cases.
pub fn metrics(comparison: &Comparison) -> Vec<Metric> {
    let mut metrics: Vec<Metric> = Vec::new();
    for figure in comparison.cases.iter().flat_map(|case| &case.figures) {
        if !metrics.contains(&figure.metric) && figure.median != 0.0 {
            metrics.push(figure.metric);
        }
    }
    metrics
}

/// The plots of a table: for each title, the curves that share its axes.
pub fn plots(table: &Table) -> Vec<(&str, Vec<&Curve>)> {
    let mut plots: Vec<(&str, Vec<&Curve>)> = Vec::new();
    for curve in &table.curves {
        match plots.iter_mut().find(|(name, _)| *name == curve.plot) {
            Some((_, curves)) => curves.push(curve),
            None => plots.push((&curve.plot, vec![curve])),
        }
    }
    plots
}

/// The x values of all points of a plot, in ascending order.
pub fn places(curves: &[&Curve]) -> Vec<f64> {
    let mut places: Vec<f64> =
        curves.iter().flat_map(|curve| curve.points.iter().map(|point| point.x)).collect();
    places.sort_by(f64::total_cmp);
    places.dedup();
    places
}

/// The spread of a ratio in percent: `2 %`.
pub fn spread(effect: &Effect) -> String {
    match 100.0 * (effect.spread - 1.0) {
        percent if !percent.is_finite() => "?".to_owned(),
        percent => format!("{percent:.0} %"),
    }
}

/// Formats a ratio with two decimals, or with four if it is less than 0.1.
pub fn ratio(ratio: f64) -> String {
    match ratio {
        r if !r.is_finite() => "?".to_owned(),
        r if r < 0.1 => format!("{r:.4}"),
        r => format!("{r:.2}"),
    }
}

pub fn number(value: f64) -> String {
    if value == value.trunc() { format!("{value:.0}") } else { Metric::NsPerIo.format(value) }
}

/// The name that serde writes for a unit variant.
pub fn name(variant: &impl serde::Serialize) -> String {
    let json = serde_json::to_value(variant).unwrap_or_default();
    json.as_str().unwrap_or_default().to_owned()
}

/// Formats a published figure with all its digits and thousands separators.
pub fn exact(value: f64) -> String {
    group_thousands(&value.to_string())
}

/// The name, the value and the bound of a mechanism or a target, and whether the value keeps the bound.
pub type Judged = ([String; 3], bool);

fn judged(name: &str, value: f64, expected: Expected, is_good: bool) -> Judged {
    let (relation, bound) = match expected {
        Expected::AtLeast(bound) => (">=", bound),
        Expected::AtMost(bound) => ("<=", bound),
        Expected::Exactly(bound) => ("=", bound),
    };
    ([name.to_owned(), number(value), format!("{relation} {}", number(bound))], is_good)
}

pub fn mechanisms(table: &Table) -> Vec<Judged> {
    table.mechanisms.iter().map(|of| judged(&of.claim, of.value, of.expected, of.seen)).collect()
}

pub fn targets(table: &Table) -> Vec<Judged> {
    table.targets.iter().map(|of| judged(&of.name, of.value, of.wanted, of.reached)).collect()
}

/// Wraps `text` into lines of at most `width` characters: between words, or within a word that is longer than a line.
pub fn wrap(text: &str, width: usize) -> Vec<String> {
    let length = |text: &str| text.chars().count();
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("there is at least one line");
        let joined = if line.is_empty() { word.to_owned() } else { format!("{line} {word}") };
        if length(&joined) <= width {
            *line = joined;
            continue;
        }
        if line.is_empty() {
            lines.pop();
        }
        lines.extend(word.chars().collect::<Vec<_>>().chunks(width).map(String::from_iter));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_wrapped_between_words_and_within_long_words() {
        assert_eq!(wrap("one two  three", 7), ["one two", "three"]);
        assert_eq!(wrap("a abcdefgh b", 3), ["a", "abc", "def", "gh", "b"]);
        assert_eq!(wrap("", 3), [""]);
    }

    #[test]
    fn ratios_are_formatted_with_two_or_four_decimals() {
        assert_eq!([2.5, 0.1, 0.012, f64::NAN].map(ratio), ["2.50", "0.10", "0.0120", "?"]);
    }
}
