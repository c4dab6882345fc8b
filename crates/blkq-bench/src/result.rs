//! The result of `blkq bench`: printed, written as JSON, and plotted. The documentation of these types is also the
//! text of schema.json.

use serde::{Deserialize, Serialize};

use crate::What;
use crate::metric::Metric;

/// Version of the JSON document. It is raised when a field changes its meaning or is removed.
pub const SCHEMA: u32 = 1;

/// Declares the objects of the JSON document, with the attributes for writing, reading and describing them.
macro_rules! objects {
    ($($(#[$description:meta])* pub struct $Name:ident { $($fields:tt)* })*) => {
        $(
            $(#[$description])*
            #[derive(Clone, Debug, Serialize, Deserialize)]
            #[serde(deny_unknown_fields)]
            #[cfg_attr(test, derive(schemars::JsonSchema))]
            pub struct $Name { $($fields)* }
        )*
    };
}

objects! {
    /// Everything that one `blkq bench` measured.
    pub struct Results {
        /// Version of this document: [`SCHEMA`].
        pub schema: u32,
        /// Version of blkq that measured.
        pub version: String,
        /// Start of the run, in seconds since 1970 (UTC).
        pub started_unix: u64,
        /// Duration of the run, in seconds.
        pub elapsed_seconds: f64,
        /// Whether this was a quick run: fewer and shorter rounds.
        pub quick: bool,
        /// The machine that was measured on.
        pub machine: Machine,
        /// The tables, in the order in which they were measured.
        pub tables: Vec<Table>,
    }

    /// The properties of the machine that its figures depend on.
    pub struct Machine {
        /// Model name of the processor.
        pub processor: String,
        /// Processors that the process may use (its affinity and cgroup).
        pub processors: usize,
        /// Memory in bytes, as in /proc/meminfo.
        pub memory_bytes: u64,
        /// Release of the Linux kernel.
        pub kernel: String,
        /// Whether the processor reports a hypervisor.
        pub virtual_machine: bool,
        /// Type and source of the file system of the measured file, as in /proc/self/mountinfo; `null` if no
        /// table measured on a file.
        pub file_system: Option<String>,
        /// Name of the clock source.
        pub clock_source: String,
        /// Load average of the last minute at the start.
        pub load: f64,
    }

    /// One of the tables: a question, answered by comparisons and curves.
    #[derive(Default)]
    pub struct Table {
        /// Name of the table on the command line.
        pub name: What,
        /// The question of the table, in one line.
        pub title: String,
        /// The figures that the author of the idea published.
        pub published: Option<Published>,
        /// Comparisons of cases that took turns.
        pub comparisons: Vec<Comparison>,
        /// Curves: one figure as a function of another.
        pub curves: Vec<Curve>,
        /// The counters that explain the figures.
        pub mechanisms: Vec<Mechanism>,
        /// Figures that have a target.
        pub targets: Vec<Target>,
        /// Cases that were not measured, and why: `name: reason`.
        pub left_out: Vec<String>,
        /// Notes for readers of the table.
        pub notes: Vec<String>,
    }

    /// Figures published by the author of an idea.
    pub struct Published {
        /// The source in one line: who, when, on which machine.
        pub origin: String,
        /// How the figures were measured.
        pub setting: String,
        /// Unit of the figures.
        pub unit: String,
        /// The published figures, one row per workload.
        pub rows: Vec<PublishedRow>,
    }

    /// A published figure without and with the idea.
    pub struct PublishedRow {
        /// The workload.
        pub name: String,
        /// The figure without the idea.
        pub base: f64,
        /// The figure with the idea.
        pub feature: f64,
    }

    /// Cases that took turns (A B C A B C ...).
    pub struct Comparison {
        /// The workload that is compared.
        pub title: String,
        /// Number of runs of each case.
        pub rounds: usize,
        /// Length of a run, in seconds.
        pub seconds: f64,
        /// The cases, in the order in which they ran.
        pub cases: Vec<Case>,
        /// Ratios between cases.
        pub effects: Vec<Effect>,
    }

    /// One side of a comparison.
    pub struct Case {
        /// Name of the case in its comparison.
        pub name: String,
        /// The measured metrics, in the order of the columns.
        pub figures: Vec<Figure>,
    }

    /// One metric of a case, over all rounds.
    pub struct Figure {
        /// The metric that was measured.
        pub metric: Metric,
        /// Median of the rounds.
        pub median: f64,
        /// Smallest value of the rounds.
        pub min: f64,
        /// Largest value of the rounds.
        pub max: f64,
        /// The values in the order of the rounds.
        pub samples: Vec<f64>,
    }

    /// How one case differs from another in one metric.
    pub struct Effect {
        /// The difference between the two cases.
        pub name: String,
        /// The case that is the denominator of the ratio.
        pub base: String,
        /// The case that is the numerator of the ratio.
        pub feature: String,
        /// The metric that is compared.
        pub metric: Metric,
        /// Feature / base: the median of the ratios of the rounds, because a disturbance of a whole round changes
        /// both cases alike. `null` if the base is 0.
        #[serde(deserialize_with = "finite_or_null")]
        #[cfg_attr(test, schemars(with = "Option<f64>"))]
        pub ratio: f64,
        /// The factor by which the ratio may be wrong in either direction: the square root of the largest ratio of
        /// a round / the smallest. `null` if one of them is 0 or not defined.
        #[serde(deserialize_with = "finite_or_null")]
        #[cfg_attr(test, schemars(with = "Option<f64>"))]
        pub spread: f64,
        /// Whether the effect is larger than its spread.
        pub clear: bool,
        /// This ratio as published by the author of the idea.
        pub published_ratio: Option<f64>,
    }

    /// A figure as a function of another: a line of a plot.
    pub struct Curve {
        /// Title of the plot; curves of the same plot share its axes.
        pub plot: String,
        /// Name of the curve in the legend.
        pub name: String,
        /// Label of the x axis.
        pub x_label: String,
        /// The measured metric: the y axis.
        pub metric: Metric,
        /// The points in ascending order of x.
        pub points: Vec<Point>,
    }

    /// A point of a curve.
    pub struct Point {
        /// Position on the x axis.
        pub x: f64,
        /// Median of the rounds.
        pub median: f64,
        /// Smallest value of the rounds.
        pub min: f64,
        /// Largest value of the rounds.
        pub max: f64,
    }

    /// A claim about how something works, and the counter that proves it. Counters do not depend on the speed of the
    /// machine: a mechanism that is not seen is a defect.
    pub struct Mechanism {
        /// The claim in one line.
        pub claim: String,
        /// The measured value of the counter.
        pub value: f64,
        /// The bound that the counter must keep.
        pub expected: Expected,
        /// Whether the counter keeps the bound.
        pub seen: bool,
    }

    /// A figure with a target, as a ratio within one run. Notes explain missed targets.
    pub struct Target {
        /// Name of the figure.
        pub name: String,
        /// The measured value.
        pub value: f64,
        /// The bound that the figure should reach.
        pub wanted: Expected,
        /// Whether this run reached the target.
        pub reached: bool,
    }
}

impl PublishedRow {
    pub fn ratio(&self) -> f64 {
        self.feature / self.base
    }
}

impl Figure {
    /// A figure of at least one sample.
    pub fn new(metric: Metric, samples: Vec<f64>) -> Figure {
        let mut sorted = samples.clone();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (sorted[0], sorted[sorted.len() - 1]);
        Figure { metric, median: sorted[sorted.len() / 2], min, max, samples }
    }
}

/// Reads a ratio whose base was 0: JSON has no number for it, and serde_json writes `null`.
fn finite_or_null<'de, D: serde::Deserializer<'de>>(json: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(json)?.unwrap_or(f64::NAN))
}

/// A bound for a value.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub enum Expected {
    /// The value must not be less.
    AtLeast(f64),
    /// The value must not be greater.
    AtMost(f64),
    /// The value must be equal.
    Exactly(f64),
}

impl Expected {
    pub fn holds(self, value: f64) -> bool {
        match self {
            Expected::AtLeast(bound) => value >= bound,
            Expected::AtMost(bound) => value <= bound,
            Expected::Exactly(bound) => value == bound,
        }
    }
}

impl Table {
    pub fn new(name: What, title: &str) -> Table {
        Table { name, title: title.to_owned(), ..Table::default() }
    }

    /// Adds the published figures. `head` is their origin, setting and unit. A row has a name, and the figures without and
    /// with the idea.
    pub fn publish<N: Into<String>>(
        &mut self,
        head: [&str; 3],
        rows: impl IntoIterator<Item = (N, f64, f64)>,
    ) {
        let row = |(name, base, feature): (N, f64, f64)| PublishedRow { name: name.into(), base, feature };
        let rows = rows.into_iter().map(row).collect();
        let [origin, setting, unit] = head.map(str::to_owned);
        self.published = Some(Published { origin, setting, unit, rows });
    }

    /// Adds a mechanism, and checks whether the counter keeps its bound.
    pub fn mechanism(&mut self, claim: impl Into<String>, value: f64, expected: Expected) {
        let seen = expected.holds(value);
        self.mechanisms.push(Mechanism { claim: claim.into(), value, expected, seen });
    }

    /// Adds a target, and checks whether it was reached.
    pub fn target(&mut self, name: impl Into<String>, value: f64, wanted: Expected) {
        let reached = wanted.holds(value);
        self.targets.push(Target { name: name.into(), value, wanted, reached });
    }
}

impl Comparison {
    pub fn has(&self, name: &str) -> bool {
        self.cases.iter().any(|case| case.name == name)
    }

    /// The case `name`. Panics if it does not exist, which is a bug of the table.
    pub fn case(&self, name: &str) -> &Case {
        self.cases.iter().find(|case| case.name == name).unwrap_or_else(|| panic!("no case {name}"))
    }

    pub fn median(&self, case: &str, metric: Metric) -> f64 {
        self.case(case).figure(metric).median
    }

    /// A curve of `metric` for each of `lines`, with a point at each of `places`. `case` is the name of the case of a
    /// line at a place.
    pub fn curves(
        &self,
        [plot, x_label]: [&str; 2],
        metric: Metric,
        lines: &[&str],
        places: &[usize],
        case: impl Fn(&str, usize) -> String,
    ) -> Vec<Curve> {
        let point = |line: &str, x: usize| {
            let Figure { median, min, max, .. } = *self.case(&case(line, x)).figure(metric);
            Point { x: x as f64, median, min, max }
        };
        let curve = |line: &&str| Curve {
            plot: plot.to_owned(),
            name: (*line).to_owned(),
            x_label: x_label.to_owned(),
            metric,
            points: places.iter().map(|x| point(line, *x)).collect(),
        };
        lines.iter().map(curve).collect()
    }

    /// Adds the ratios of `feature` to `base` in several metrics, each with the published ratio. Returns the ratios.
    pub fn add_effects<const N: usize>(
        &mut self,
        name: &str,
        base: &str,
        feature: &str,
        metrics: [(Metric, Option<f64>); N],
    ) -> [f64; N] {
        metrics.map(|(metric, published)| self.effect(name, base, feature, metric, published).ratio)
    }

    /// Adds the ratio of `feature` to `base` in `metric`, and returns it.
    pub fn effect(
        &mut self,
        name: impl Into<String>,
        base: &str,
        feature: &str,
        metric: Metric,
        published_ratio: Option<f64>,
    ) -> &Effect {
        let (below, above) = (self.case(base).figure(metric), self.case(feature).figure(metric));
        let ratios: Vec<f64> = above.samples.iter().zip(&below.samples).map(|(a, b)| a / b).collect();
        let figure = Figure::new(metric, ratios);
        let spread = (figure.max / figure.min).sqrt();
        self.effects.push(Effect {
            name: name.into(),
            base: base.to_owned(),
            feature: feature.to_owned(),
            metric,
            ratio: figure.median,
            spread,
            clear: figure.median.ln().abs() > spread.ln(),
            published_ratio,
        });
        &self.effects[self.effects.len() - 1]
    }
}

impl Case {
    /// Adds samples, of which there must be at least one, to the figure of `metric`.
    pub fn add(&mut self, metric: Metric, samples: &[f64]) {
        match self.figures.iter_mut().find(|figure| figure.metric == metric) {
            Some(figure) => *figure = Figure::new(metric, [&figure.samples, samples].concat()),
            None => self.figures.push(Figure::new(metric, samples.to_vec())),
        }
    }

    /// The figure of `metric`, if the case measured it.
    pub fn find(&self, metric: Metric) -> Option<&Figure> {
        self.figures.iter().find(|figure| figure.metric == metric)
    }

    /// The figure of `metric`. Panics if the case did not measure it, which is a bug of the table.
    pub fn figure(&self, metric: Metric) -> &Figure {
        self.find(metric).unwrap_or_else(|| panic!("{}: no {metric:?}", self.name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn comparison(base: &[f64], feature: &[f64]) -> Comparison {
        let case = |name: &str, samples: &[f64]| Case {
            name: name.into(),
            figures: vec![Figure::new(Metric::Iops, samples.to_vec())],
        };
        let cases = vec![case("off", base), case("on", feature)];
        Comparison { title: String::new(), rounds: base.len(), seconds: 1.0, cases, effects: Vec::new() }
    }

    #[test]
    fn an_effect_is_the_median_of_the_ratios_of_each_round() {
        // In the second round the machine has half its speed: the ratio stays the same.
        let mut comparison = comparison(&[100.0, 50.0, 110.0], &[200.0, 100.0, 220.0]);
        let effect = comparison.effect("x", "off", "on", Metric::Iops, None);
        assert_eq!((effect.ratio, effect.spread, effect.clear), (2.0, 1.0, true));
    }

    #[test]
    fn an_effect_within_its_spread_is_not_clear() {
        let mut comparison = comparison(&[100.0, 100.0, 100.0], &[90.0, 105.0, 130.0]);
        assert!(!comparison.effect("x", "off", "on", Metric::Iops, None).clear);
    }
}
