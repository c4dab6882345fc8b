//! The result of `blkq bench`, as it is printed, written as JSON and plotted.

use serde::{Deserialize, Serialize};

use crate::What;
use crate::machine::Machine;
use crate::metric::Metric;

/// Version of the JSON document. Raised when a field changes its meaning or is removed.
pub const SCHEMA: u32 = 1;

/// Everything that one `blkq bench` measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Results {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Version of blkq.
    pub version: String,
    /// When it began, in seconds since 1970 (UTC).
    pub started_unix: u64,
    /// How long it took.
    pub elapsed_seconds: f64,
    /// Whether it was a quick run: fewer and shorter rounds.
    pub quick: bool,
    /// Where it ran.
    pub machine: Machine,
    /// The tables, in the order in which they were measured.
    pub tables: Vec<Table>,
}

/// One of the tables: a question, answered by comparisons and curves.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Table {
    /// Which one.
    pub name: What,
    /// Its message, in a line.
    pub title: String,
    /// The figures that the origin of the idea published.
    pub published: Option<Published>,
    /// Interleaved runs.
    pub comparisons: Vec<Comparison>,
    /// A figure as a function of another.
    pub curves: Vec<Curve>,
    /// The counters that show by which mechanism.
    pub mechanisms: Vec<Mechanism>,
    /// Figures with a target (design, "Targets").
    pub targets: Vec<Target>,
    /// Cases that were not measured, and why: `name: reason`.
    pub left_out: Vec<String>,
    /// Notes for the reader.
    pub notes: Vec<String>,
}

/// The figures of an origin.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Published {
    /// Machine, time, what: one line.
    pub origin: String,
    /// How it was measured there.
    pub setting: String,
    /// The unit of the figures.
    pub unit: String,
    /// The rows.
    pub rows: Vec<PublishedRow>,
}

/// One figure before and after.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct PublishedRow {
    /// The work that was published.
    pub name: String,
    /// Without the idea.
    pub base: f64,
    /// With it.
    pub feature: f64,
}

impl PublishedRow {
    /// Feature by base.
    pub fn ratio(&self) -> f64 {
        self.feature / self.base
    }
}

/// Cases that took turns (A B C A B C ...).
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Comparison {
    /// The work that is compared.
    pub title: String,
    /// How often every case ran.
    pub rounds: usize,
    /// How long a run took.
    pub seconds: f64,
    /// The cases.
    pub cases: Vec<Case>,
    /// The effects of the cases on each other.
    pub effects: Vec<Effect>,
}

/// One side of a comparison.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Case {
    /// Its name.
    pub name: String,
    /// Its measurements.
    pub figures: Vec<Figure>,
}

/// A metric over the rounds of a case.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Figure {
    /// Which.
    pub metric: Metric,
    /// The middle one.
    pub median: f64,
    /// The least.
    pub min: f64,
    /// The most.
    pub max: f64,
    /// All, in the order of the rounds.
    pub samples: Vec<f64>,
}

impl Figure {
    /// The figure of these samples, of which there is one at least.
    pub fn new(metric: Metric, samples: Vec<f64>) -> Figure {
        let mut sorted = samples.clone();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (sorted[0], sorted[sorted.len() - 1]);
        Figure { metric, median: sorted[sorted.len() / 2], min, max, samples }
    }
}

/// How one case differs from another in one metric.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Effect {
    /// The cause of the difference.
    pub name: String,
    /// The case that stands below the line.
    pub base: String,
    /// The case that stands above it.
    pub feature: String,
    /// Of what.
    pub metric: Metric,
    /// Feature by base: the median of the ratios of each round, so that what disturbs a
    /// whole round disturbs nothing. `null` where the base is 0.
    #[serde(deserialize_with = "finite_or_null")]
    #[cfg_attr(test, schemars(with = "Option<f64>"))]
    pub ratio: f64,
    /// The ratio may as well be this factor more or less: the root of the largest ratio
    /// of a round by the smallest. `null` where one of them is 0 or has no value.
    #[serde(deserialize_with = "finite_or_null")]
    #[cfg_attr(test, schemars(with = "Option<f64>"))]
    pub spread: f64,
    /// The effect is larger than its spread.
    pub clear: bool,
    /// The same ratio where the idea comes from.
    pub published_ratio: Option<f64>,
}

/// JSON has no number for the ratio of something to nothing, and serde_json writes `null`.
fn finite_or_null<'de, D: serde::Deserializer<'de>>(json: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(json)?.unwrap_or(f64::NAN))
}

/// A figure as a function of another: a line of a plot.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Curve {
    /// The plot that it belongs to; curves of one plot share their axes.
    pub plot: String,
    /// Which line.
    pub name: String,
    /// The quantity that changes from point to point.
    pub x_label: String,
    /// The quantity measured.
    pub metric: Metric,
    /// The points, from left to right.
    pub points: Vec<Point>,
}

/// A point of a curve.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Point {
    /// Where.
    pub x: f64,
    /// The middle of the rounds.
    pub median: f64,
    /// The least.
    pub min: f64,
    /// The most.
    pub max: f64,
}

/// A claim about how something works, and the counter that shows it. Counters do not
/// depend on how fast the machine is: a mechanism that is not seen is a defect.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Mechanism {
    /// The claim.
    pub claim: String,
    /// The value of the counter.
    pub value: f64,
    /// The value that it must have.
    pub expected: Expected,
    /// Whether it does.
    pub seen: bool,
}

/// A figure with a target. Ratios inside one run; what is missed is explained in notes.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Target {
    /// What.
    pub name: String,
    /// The measured value.
    pub value: f64,
    /// The wanted value.
    pub wanted: Expected,
    /// Whether it was reached in this run.
    pub reached: bool,
}

/// A bound.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub enum Expected {
    /// Not less.
    AtLeast(f64),
    /// Not more.
    AtMost(f64),
    /// Just that.
    Exactly(f64),
}

impl Expected {
    /// Whether `value` keeps the bound.
    pub fn holds(self, value: f64) -> bool {
        match self {
            Expected::AtLeast(bound) => value >= bound,
            Expected::AtMost(bound) => value <= bound,
            Expected::Exactly(bound) => value == bound,
        }
    }
}

impl Table {
    /// A table in which nothing stands yet.
    pub fn new(name: What, title: &str) -> Table {
        Table {
            name,
            title: title.to_owned(),
            published: None,
            comparisons: Vec::new(),
            curves: Vec::new(),
            mechanisms: Vec::new(),
            targets: Vec::new(),
            left_out: Vec::new(),
            notes: Vec::new(),
        }
    }

    /// States a mechanism and whether it was seen.
    pub fn mechanism(&mut self, claim: impl Into<String>, value: f64, expected: Expected) {
        let seen = expected.holds(value);
        self.mechanisms.push(Mechanism { claim: claim.into(), value, expected, seen });
    }

    /// States a target and whether it was reached.
    pub fn target(&mut self, name: impl Into<String>, value: f64, wanted: Expected) {
        let reached = wanted.holds(value);
        self.targets.push(Target { name: name.into(), value, wanted, reached });
    }
}

impl Comparison {
    /// The case of that name; a defect if there is none.
    pub fn case(&self, name: &str) -> &Case {
        self.cases.iter().find(|case| case.name == name).unwrap_or_else(|| panic!("no case {name}"))
    }

    /// Adds how `feature` differs from `base` in `metric`, and returns it.
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
    /// The measurements of `metric`; a bug if there are none.
    pub fn figure(&self, metric: Metric) -> &Figure {
        self.figures
            .iter()
            .find(|figure| figure.metric == metric)
            .unwrap_or_else(|| panic!("{}: no {metric:?}", self.name))
    }

    /// The median of `metric`.
    pub fn median(&self, metric: Metric) -> f64 {
        self.figure(metric).median
    }

    /// The smallest sample of `metric`.
    pub fn min(&self, metric: Metric) -> f64 {
        self.figure(metric).min
    }

    /// The largest sample of `metric`.
    pub fn max(&self, metric: Metric) -> f64 {
        self.figure(metric).max
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
    fn an_effect_is_taken_round_by_round() {
        // The machine halved its speed in the second round: the ratio does not move.
        let mut comparison = comparison(&[100.0, 50.0, 110.0], &[200.0, 100.0, 220.0]);
        let effect = comparison.effect("x", "off", "on", Metric::Iops, None);
        assert_eq!((effect.ratio, effect.spread, effect.clear), (2.0, 1.0, true));
    }

    #[test]
    fn a_spread_that_exceeds_the_effect_is_marked() {
        let mut comparison = comparison(&[100.0, 100.0, 100.0], &[90.0, 105.0, 130.0]);
        assert!(!comparison.effect("x", "off", "on", Metric::Iops, None).clear);
    }
}
