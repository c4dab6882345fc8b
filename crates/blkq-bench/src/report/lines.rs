//! Line plots: curves over an axis, distinguished by colour, dashes and markers.

use super::bars::{FONT, LINE, WIDTH, measure, open, rule, text, tick_labels};
use super::html::escape;
use super::scale::{self, Scale};
use crate::result::{Curve, Point};
use crate::summary::{self, number, wrap};

/// Height of the area with the curves.
const HEIGHT: f64 = 190.0;
/// Number of curve styles (colour, dashes, marker) in style.css.
const STYLES: usize = 6;
/// The y axis is logarithmic if the largest value / the smallest exceeds this.
const WIDE: f64 = 30.0;
/// Width of the line sample in the legend.
const SAMPLE: f64 = 30.0;

/// Draws curves that share their axes as SVG.
pub fn svg(id: &str, title: &str, curves: &[&Curve]) -> String {
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let places = summary::places(curves);
    let metric = curves[0].metric;
    let (top, bottom) = (LINE + 8.0, LINE + 8.0 + HEIGHT);
    let positive = points().all(|point| point.min > 0.0);
    let least = points().map(|point| point.min).fold(f64::INFINITY, f64::min);
    let most = points().map(|point| point.max).fold(0.0, f64::max);
    let y_scale = if positive && most / least > WIDE {
        Scale::log(&[least, most], bottom, top)
    } else {
        Scale::from_zero(most, bottom, top)
    };
    let y_labels: Vec<String> = y_scale.ticks.iter().copied().map(scale::label).collect();
    let left = y_labels.iter().map(|label| measure(label)).fold(0.0, f64::max) + 8.0;
    let x_scale = Scale::of_places(&places, left + 8.0, WIDTH - 16.0);

    let mut body = text(0.0, LINE - 4.0, "tick start", metric.label());
    for (tick, label) in y_scale.ticks.iter().zip(&y_labels) {
        let y = y_scale.at(*tick);
        body += &rule("grid", (left, y), (WIDTH, y));
        body += &text(left - 6.0, y + FONT / 3.0, "tick end", label);
    }
    let (positions, labels) = tick_labels(&x_scale, scale::label, bottom + LINE);
    body.extend(positions.into_iter().map(|x| rule("axis", (x, bottom), (x, bottom + 4.0))));
    body += &labels;
    body += &rule("axis", (left, bottom), (WIDTH, bottom));
    let mut y = bottom + LINE;
    for line in wrap(&curves[0].x_label, WIDTH, measure) {
        y += LINE;
        body += &text(WIDTH, y, "tick end", &line);
    }
    for (index, curve) in curves.iter().enumerate() {
        body += &line(curve, index % STYLES, &x_scale, &y_scale);
    }
    y += 8.0;
    for (index, curve) in curves.iter().enumerate() {
        let style = index % STYLES;
        for (row, name) in wrap(&curve.name, WIDTH - SAMPLE - 8.0, measure).iter().enumerate() {
            y += LINE;
            if row == 0 {
                let middle = y - 4.0;
                body += &format!("<path class=\"curve s{style}\" d=\"M0 {middle}H{SAMPLE}\"/>\n");
                body += &marker(style, SAMPLE / 2.0, middle);
            }
            body += &text(SAMPLE + 8.0, y, "label", name);
        }
    }
    let described: Vec<String> = curves
        .iter()
        .map(|curve| {
            let at = |point: &Point| format!("{} at {}", metric.format(point.median), number(point.x));
            format!("{}: {}", curve.name, curve.points.iter().map(at).collect::<Vec<_>>().join(", "))
        })
        .collect();
    open(id, title, &described.join("; "), y + 8.0) + &body + "</svg>\n"
}

fn line(curve: &Curve, style: usize, x_scale: &Scale, y_scale: &Scale) -> String {
    let at = |point: &Point| (x_scale.at(point.x), y_scale.at(point.median));
    let path: Vec<String> = curve.points.iter().map(at).map(|(x, y)| format!("{x:.1} {y:.1}")).collect();
    let mut drawn = format!("<path class=\"curve s{style}\" d=\"M{}\"/>\n", path.join("L"));
    for point in &curve.points {
        let (x, y) = at(point);
        let (low, high) = (y_scale.at(point.min), y_scale.at(point.max));
        let title = format!(
            "{}, {} at {}: {} ({} to {})",
            curve.name,
            curve.metric.label(),
            number(point.x),
            curve.metric.format(point.median),
            curve.metric.format(point.min),
            curve.metric.format(point.max)
        );
        drawn += &format!("<g><title>{}</title>", escape(&title));
        drawn += &format!("<path class=\"range s{style}\" d=\"M{x:.1} {low:.1}V{high:.1}\"/>");
        drawn += &marker(style, x, y);
        drawn += "</g>\n";
    }
    drawn
}

fn marker(style: usize, x: f64, y: f64) -> String {
    let class = format!("class=\"marker s{style}\"");
    match style % 4 {
        0 => format!("<circle {class} cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\"/>"),
        1 => format!("<rect {class} x=\"{:.1}\" y=\"{:.1}\" width=\"7\" height=\"7\"/>", x - 3.5, y - 3.5),
        2 => format!("<path {class} d=\"M{x:.1} {:.1}l4.2 7.4h-8.4z\"/>", y - 4.8),
        _ => format!("<path {class} d=\"M{x:.1} {:.1}l4.6 4.6l-4.6 4.6l-4.6 -4.6z\"/>", y - 4.6),
    }
}
