//! Bar plots: rows of horizontal bars. The label and the value of a row are above its bars, so that the plot is
//! readable on a phone.

use super::html::{escape, width_em};
use super::scale::Scale;
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

/// A bar from [`Plot::begin`] to `value`.
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

pub struct Plot<'a> {
    /// An id that is unique on the page.
    pub id: String,
    pub title: String,
    /// Maps values to positions in [`AXIS`].
    pub scale: Scale,
    /// The value at which all bars begin.
    pub begin: f64,
    pub tick: fn(f64) -> String,
    pub axis: &'a str,
    pub rows: Vec<Row>,
}

/// Start and end of horizontal axes, in SVG units.
pub const AXIS: (f64, f64) = (1.0, WIDTH - SIDE);

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

impl Plot<'_> {
    pub fn svg(&self) -> String {
        let mut body = String::new();
        let mut y = 2.0;
        for row in &self.rows {
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
                body += &self.bar(bar, y);
                y += BAR + BETWEEN;
            }
            y += BELOW - BETWEEN;
        }
        let mut axis = String::new();
        let mut last_end = f64::NEG_INFINITY;
        for tick in &self.scale.ticks {
            let (x, label) = (self.scale.at(*tick), (self.tick)(*tick));
            axis += &format!("<line class=\"grid\" x1=\"{x:.1}\" y1=\"4\" x2=\"{x:.1}\" y2=\"{y:.1}\"/>\n");
            let half = measure(&label) / 2.0;
            let x = x.clamp(half, WIDTH - half);
            if x - half > last_end + 4.0 {
                axis += &text(x, y + LINE - 4.0, "tick", &label);
                last_end = x + half;
            }
        }
        let x = self.scale.at(self.begin);
        axis += &format!("<line class=\"axis\" x1=\"{x:.1}\" y1=\"4\" x2=\"{x:.1}\" y2=\"{y:.1}\"/>\n");
        y += 2.0 * LINE;
        axis += &text(WIDTH, y - 4.0, "tick end", self.axis);
        let described: Vec<String> =
            self.rows.iter().map(|row| format!("{}: {}", row.label, row.value)).collect();
        open(&self.id, &self.title, &described.join("; "), y + 2.0) + &axis + &body + "</svg>\n"
    }

    fn bar(&self, bar: &Bar, y: f64) -> String {
        let (begin, end) = (self.scale.at(self.begin), self.scale.at(bar.value));
        let (x, width) = (begin.min(end), (end - begin).abs().max(1.0));
        let mut drawn = format!("<g><title>{}</title>", escape(&bar.title));
        drawn += &format!(
            "<rect class=\"{}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{BAR}\" rx=\"1.5\"/>",
            bar.class
        );
        if let Some((min, max)) = bar.range {
            let (min, max, middle) = (self.scale.at(min), self.scale.at(max), y + BAR / 2.0);
            let (top, bottom) = (middle - 3.5, middle + 3.5);
            let path = format!("M{min:.1} {top}V{bottom}M{max:.1} {top}V{bottom}M{min:.1} {middle}H{max:.1}");
            drawn += &format!("<path class=\"halo\" d=\"{path}\"/><path class=\"whisker\" d=\"{path}\"/>");
        }
        drawn + "</g>\n"
    }
}
