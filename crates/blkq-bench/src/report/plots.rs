//! Chooses and draws the plots of a table.

use super::bars::{self, Bar, Row};
use super::html::escape;
use super::lines;
use crate::metric::Metric;
use crate::result::{Case, Comparison, Effect, Figure, Table};
use crate::summary;

/// Maximum number of metrics of a comparison that are drawn; its table shows all of them.
const METRICS_DRAWN: usize = 2;

/// Draws all plots of a table.
pub fn figures(table: &Table) -> String {
    let mut drawn = ratios(table).map_or(String::new(), |plot| {
        figure("Ratios: feature / base", &format!("<p class=\"legend\">{RATIOS_LEGEND}</p>\n{plot}"))
    });
    for comparison in &table.comparisons {
        for metric in drawn_metrics(comparison) {
            let title = format!("{}: {}", comparison.title, metric.label());
            drawn += &figure(&title, &cases(comparison, metric));
        }
    }
    let curves = summary::plots(table).into_iter().map(|(name, curves)| figure(name, &lines::html(&curves)));
    drawn + &curves.collect::<String>()
}

const RATIOS_LEGEND: &str = "<span class=\"key measured\"></span>measured \
    <span class=\"key unclear\"></span>~ not clear \
    <span class=\"key published\"></span>published";

fn figure(title: &str, plot: &str) -> String {
    format!("<figure><figcaption>{}</figcaption>\n{plot}</figure>\n", escape(title))
}

/// The metrics for which ratios were computed; without any, the first metric.
fn drawn_metrics(comparison: &Comparison) -> Vec<Metric> {
    let mut metrics: Vec<Metric> = Vec::new();
    for effect in &comparison.effects {
        if !metrics.contains(&effect.metric) {
            metrics.push(effect.metric);
        }
    }
    if metrics.is_empty() {
        metrics.extend(summary::metrics(comparison).first());
    }
    metrics.truncate(METRICS_DRAWN);
    metrics
}

fn cases(comparison: &Comparison, metric: Metric) -> String {
    let figures = comparison.cases.iter().filter_map(|case| Some((case, case.find(metric)?)));
    let row = |(case, figure): (&Case, &Figure)| {
        let value = metric.format(figure.median);
        let range = format!("{} to {}", metric.format(figure.min), metric.format(figure.max));
        let bar = Bar {
            value: figure.median,
            range: Some((figure.min, figure.max)),
            class: if is_base(comparison, case, metric) { "base" } else { "measured" },
            title: format!("{}: {value} ({range})", case.name),
        };
        Row { heading: None, label: case.name.clone(), value, bars: vec![bar] }
    };
    bars::html(metric.label(), false, &figures.map(row).collect::<Vec<_>>())
}

/// Whether `case` is the base of a ratio of `metric`, and never the feature.
fn is_base(comparison: &Comparison, case: &Case, metric: Metric) -> bool {
    let mut effects = comparison.effects.iter().filter(|effect| effect.metric == metric);
    let is_feature = effects.clone().any(|effect| effect.feature == case.name);
    !is_feature && effects.any(|effect| effect.base == case.name)
}

/// Draws a row for each effect: the measured ratio, and the published ratio below.
fn ratios(table: &Table) -> Option<String> {
    let can_be_drawn = |(_, effect): &(&Comparison, &Effect)| effect.ratio.is_finite() && effect.ratio > 0.0;
    let mut rows: Vec<Row> = Vec::new();
    let mut title = "";
    for (comparison, effect) in summary::effects(table).filter(can_be_drawn) {
        let published = effect.published_ratio.map(|ratio| format!(" (published {})", times(ratio)));
        let heading = (title != comparison.title).then(|| comparison.title.clone());
        title = &comparison.title;
        rows.push(Row {
            heading,
            label: format!("{}: {}", effect.name, effect.metric.label()),
            value: ratio_and_spread(effect) + &published.unwrap_or_default(),
            bars: ratio_bars(effect),
        });
    }
    (!rows.is_empty()).then(|| bars::html("feature / base", true, &rows))
}

/// `×2.54`.
pub fn times(ratio: f64) -> String {
    format!("\u{d7}{}", summary::ratio(ratio))
}

/// `×2.54 ±2 %`; `~` marks a ratio that is not clear.
pub fn ratio_and_spread(effect: &Effect) -> String {
    let unclear = if effect.clear { "" } else { "~" };
    format!("{unclear}{} \u{b1}{}", times(effect.ratio), summary::spread(effect))
}

fn ratio_bars(effect: &Effect) -> Vec<Bar> {
    let Effect { ratio, spread, clear, feature, base, .. } = effect;
    let measured = Bar {
        value: *ratio,
        range: (spread.is_finite() && *spread > 0.0).then(|| (ratio / spread, ratio * spread)),
        class: if *clear { "measured" } else { "unclear" },
        title: format!("measured {}: {feature} relative to {base}", ratio_and_spread(effect)),
    };
    let published = effect.published_ratio.map(|ratio| {
        let title = format!("published {}", times(ratio));
        Bar { value: ratio, range: None, class: "published", title }
    });
    std::iter::once(measured).chain(published).collect()
}
