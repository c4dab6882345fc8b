//! Bar plots: rows of horizontal bars. The label and the value of a row are above its bars, so that the plot is
//! readable on a phone.

use super::html::escape;
use super::scale::Scale;

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

/// Draws `rows` as HTML. The bars of ratios begin at 1, on a logarithmic scale; other bars begin at 0.
pub fn html(axis_label: &str, of_ratios: bool, rows: &[Row]) -> String {
    let bars = rows.iter().flat_map(|row| &row.bars);
    let ends = bars.flat_map(|bar| bar.range.map_or([bar.value; 2], |(min, max)| [min, max]));
    // Positions are percentages of the width.
    let (begin, sign, scale) = if of_ratios {
        let values: Vec<f64> = ends.chain([1.0]).collect();
        (1.0, "\u{d7}", Scale::log(&values, 0.0, 100.0))
    } else {
        (0.0, "", Scale::from_zero(ends.fold(0.0, f64::max), 0.0, 100.0))
    };
    let line = |class, value| format!("<i class=\"{class}\" style=\"left:{:.2}%\"></i>", scale.at(value));
    let mut body: String = scale.ticks.iter().map(|tick| line("grid", *tick)).collect();
    body += &line("axis", begin);
    for row in rows {
        if let Some(heading) = &row.heading {
            body += &format!("<p class=\"heading\">{}</p>\n", escape(heading));
        }
        let (label, value) = (escape(&row.label), escape(&row.value));
        body += &format!("<p class=\"row\"><span>{label}</span> <b>{value}</b></p>\n");
        body.extend(row.bars.iter().map(|bar| bar.html(&scale, begin)));
    }
    format!(
        "<div class=\"plot\"><div class=\"bars\">\n{body}</div>\n{}<p class=\"unit\">{}</p></div>\n",
        scale.tick_labels(100.0, sign),
        escape(axis_label)
    )
}

impl Bar {
    fn html(&self, scale: &Scale, begin: f64) -> String {
        let line = |class: &str, from: f64, to: f64| {
            let (from, to) = (scale.at(from), scale.at(to));
            let (left, width) = (from.min(to), (to - from).abs());
            format!("<i class=\"{class}\" style=\"left:{left:.2}%;width:{width:.2}%\"></i>")
        };
        let whisker = self.range.map_or(String::new(), |(min, max)| line("whisker", min, max));
        let bar = line(self.class, begin, self.value);
        format!("<div class=\"bar\" title=\"{}\">{bar}{whisker}</div>\n", escape(&self.title))
    }
}
