//! Line plots: curves over an axis, distinguished by colour, dashes and markers.

use super::html::escape;
use super::scale::{self, Scale};
use crate::result::{Curve, Point};
use crate::summary::{self, number};

/// Size of the area with the curves, in SVG units, which are pixels at its natural size.
const WIDTH: f64 = 340.0;
const HEIGHT: f64 = 190.0;
/// Number of curve styles (colour, dashes, marker) in style.css.
const STYLES: usize = 6;
/// The y axis is logarithmic if the largest value / the smallest exceeds this.
const WIDE: f64 = 30.0;

/// Draws curves that share their axes: the lines as SVG, with texts in HTML.
pub fn html(curves: &[&Curve]) -> String {
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let metric = curves[0].metric;
    let positive = points().all(|point| point.min > 0.0);
    let least = points().map(|point| point.min).fold(f64::INFINITY, f64::min);
    let most = points().map(|point| point.max).fold(0.0, f64::max);
    let y_scale = if positive && most / least > WIDE {
        Scale::log(&[least, most], HEIGHT, 0.0)
    } else {
        Scale::from_zero(most, HEIGHT, 0.0)
    };
    let x_scale = Scale::of_places(&summary::places(curves), 8.0, WIDTH - 8.0);
    let (mut y_labels, mut body, mut legend) = (String::new(), String::new(), String::new());
    for tick in &y_scale.ticks {
        let (y, label) = (y_scale.at(*tick), scale::label(*tick));
        y_labels += &format!("<span style=\"top:{:.2}%\">{label}</span>", 100.0 * y / HEIGHT);
        body += &format!("<path class=\"grid\" d=\"M0 {y:.1}H{WIDTH}\"/>\n");
    }
    for tick in &x_scale.ticks {
        body += &format!("<path class=\"axis\" d=\"M{:.1} {HEIGHT}v4\"/>\n", x_scale.at(*tick));
    }
    body += &format!("<path class=\"axis\" d=\"M0 {HEIGHT}H{WIDTH}\"/>\n");
    for (curve, style) in curves.iter().zip((0..STYLES).cycle()) {
        body += &line(curve, style, &x_scale, &y_scale);
        let (marker, name) = (marker(style, 15.0, 8.0), escape(&curve.name));
        let sample = format!("<path class=\"curve s{style}\" d=\"M0 8H30\"/>{marker}");
        legend += &format!("<li><svg viewBox=\"0 0 30 16\">{sample}</svg><span>{name}</span></li>\n");
    }
    let described: Vec<String> = curves
        .iter()
        .map(|curve| {
            let at = |point: &Point| format!("{} at {}", metric.format(point.median), number(point.x));
            format!("{}: {}", curve.name, curve.points.iter().map(at).collect::<Vec<_>>().join(", "))
        })
        .collect();
    format!(
        "<div class=\"plot lines\"><p>{}</p>\n<div class=\"area\">{y_labels}\n\
         <svg role=\"img\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" aria-label=\"{}\">\n{body}</svg></div>\n\
         {}<p class=\"unit\">{}</p>\n<ul>\n{legend}</ul></div>\n",
        escape(metric.label()),
        escape(&described.join("; ")),
        x_scale.tick_labels(WIDTH, ""),
        escape(&curves[0].x_label)
    )
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
