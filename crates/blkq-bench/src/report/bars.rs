//! Bar plots: rows of horizontal bars. The label and the value of a row are above its bars, so that the plot is
//! readable on a phone.

use super::html::{escape, width_em};
use super::scale::{self, Scale};
use crate::summary::wrap;

/// Width of a plot in SVG units, which are pixels at its natural size.
pub const WIDTH: f64 = 400.0;
/// Font size of all text, in SVG units.
pub const FONT: f64 = 12.0;
/// Distance of two lines of text.
pub const LINE: f64 = 16.0;
/// Space right of an axis for half a tick label and for whiskers.
const SIDE: f64 = 14.0;
const BAR: f64 = 12.0;
/// Vertical space between the bars of a row.
const BETWEEN: f64 = 3.0;
/// Vertical space below a row.
const BELOW: f64 = 10.0;

/// A horizontal bar to `value`. The bar begins at 1 if the plot is one of ratios, else at 0.
pub struct Bar {
    pub value: f64,
    /// Smallest and largest value: the whisker.
    pub range: Option<(f64, f64)>,
    pub class: &'static str,
    pub title: String,
}

pub struct Row {
    /// The heading above this row, if the row is the first of a group.
    pub heading: Option<String>,
    pub label: String,
    pub value: String,
    pub bars: Vec<Bar>,
}

/// Start and end of the axis, in SVG units.
const AXIS: (f64, f64) = (1.0, WIDTH - SIDE);

/// Width of `text` in SVG units.
pub fn measure(text: &str) -> f64 {
    FONT * width_em(text)
}

/// The start tag of a plot, with its title and a description for screen readers.
pub fn open(id: &str, title: &str, description: &str, height: f64) -> String {
    format!(
        "<svg role=\"img\" viewBox=\"0 0 {WIDTH} {height:.0}\" aria-labelledby=\"{id}-t {id}-d\">\n\
         <title id=\"{id}-t\">{}</title><desc id=\"{id}-d\">{}</desc>\n",
        escape(title),
        escape(description)
    )
}

/// A line of text with its baseline at `y`.
pub fn text(x: f64, y: f64, class: &str, content: &str) -> String {
    format!("<text x=\"{x:.1}\" y=\"{y:.1}\" class=\"{class}\">{}</text>\n", escape(content))
}

/// A straight line.
pub fn rule(class: &str, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) -> String {
    format!("<line class=\"{class}\" x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\"/>\n")
}

/// The labels of a horizontal axis, with their baseline at `y`. Also returns the positions of their ticks. Ticks whose
/// labels would overlap the previous one are omitted.
pub fn tick_labels(scale: &Scale, label: impl Fn(f64) -> String, y: f64) -> (Vec<f64>, String) {
    let (mut positions, mut drawn, mut last_end) = (Vec::new(), String::new(), f64::NEG_INFINITY);
    for tick in &scale.ticks {
        let (x, label) = (scale.at(*tick), label(*tick));
        let half = measure(&label) / 2.0;
        let middle = x.clamp(half, WIDTH - half);
        if middle - half > last_end + 4.0 {
            positions.push(x);
            drawn += &text(middle, y, "tick", &label);
            last_end = middle + half;
        }
    }
    (positions, drawn)
}

/// Draws `rows` as SVG; `id` must be unique on the page. The bars of ratios begin at 1, on a logarithmic scale; other bars
/// begin at 0.
pub fn svg(id: &str, title: &str, axis_label: &str, of_ratios: bool, rows: &[Row]) -> String {
    let bars = rows.iter().flat_map(|row| &row.bars);
    let ends = bars.flat_map(|bar| bar.range.map_or([bar.value; 2], |(min, max)| [min, max]));
    let (begin, sign, scale) = if of_ratios {
        let values: Vec<f64> = ends.chain([1.0]).collect();
        (1.0, "\u{d7}", Scale::log(&values, AXIS.0, AXIS.1))
    } else {
        (0.0, "", Scale::from_zero(ends.fold(0.0, f64::max), AXIS.0, AXIS.1))
    };
    let mut body = String::new();
    let mut y = 2.0;
    for row in rows {
        if let Some(heading) = &row.heading {
            for line in wrap(heading, WIDTH, |text| 1.06 * measure(text)) {
                y += LINE;
                body += &text(0.0, y - 4.0, "heading", &line);
            }
            y += 2.0;
        }
        // The label and the value share a line if the label keeps a third of the width.
        let room = WIDTH - 1.06 * measure(&row.value) - FONT;
        let labels = wrap(&row.label, if room > WIDTH / 3.0 { room } else { WIDTH }, measure);
        for label in &labels {
            y += LINE;
            body += &text(0.0, y - 4.0, "label", label);
        }
        if room <= WIDTH / 3.0 {
            y += LINE;
        }
        body += &text(WIDTH, y - 4.0, "value", &row.value);
        for bar in &row.bars {
            body += &bar.svg(&scale, begin, y);
            y += BAR + BETWEEN;
        }
        y += BELOW - BETWEEN;
    }
    let line = |class, x| rule(class, (x, 4.0), (x, y));
    let mut axis: String = scale.ticks.iter().map(|tick| line("grid", scale.at(*tick))).collect();
    axis += &tick_labels(&scale, |tick| format!("{sign}{}", scale::label(tick)), y + LINE - 4.0).1;
    axis += &line("axis", scale.at(begin));
    y += 2.0 * LINE;
    axis += &text(WIDTH, y - 4.0, "tick end", axis_label);
    let described: Vec<String> = rows.iter().map(|row| format!("{}: {}", row.label, row.value)).collect();
    open(id, title, &described.join("; "), y + 2.0) + &axis + &body + "</svg>\n"
}

impl Bar {
    fn svg(&self, scale: &Scale, begin: f64, y: f64) -> String {
        let (begin, end) = (scale.at(begin), scale.at(self.value));
        let (x, width) = (begin.min(end), (end - begin).abs().max(1.0));
        let mut drawn = format!("<g><title>{}</title>", escape(&self.title));
        drawn += &format!(
            "<rect class=\"{}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{BAR}\" rx=\"1.5\"/>",
            self.class
        );
        if let Some((min, max)) = self.range {
            let (min, max, middle) = (scale.at(min), scale.at(max), y + BAR / 2.0);
            let (top, bottom) = (middle - 3.5, middle + 3.5);
            let path = format!("M{min:.1} {top}V{bottom}M{max:.1} {top}V{bottom}M{min:.1} {middle}H{max:.1}");
            drawn += &format!("<path class=\"halo\" d=\"{path}\"/><path class=\"whisker\" d=\"{path}\"/>");
        }
        drawn + "</g>\n"
    }
}
