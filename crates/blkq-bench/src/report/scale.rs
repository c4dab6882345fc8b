//! Scales map values to positions on an axis, and choose its ticks.

/// Approximate maximum number of ticks.
const TICKS: usize = 6;

/// An axis from `min` to `max`, which are at the positions `from` and `to`.
pub struct Scale {
    is_log: bool,
    min: f64,
    max: f64,
    from: f64,
    to: f64,
    /// Values that get a line and a label.
    pub ticks: Vec<f64>,
}

impl Scale {
    /// A linear scale from 0 to the first tick that is not less than `max`.
    pub fn from_zero(max: f64, from: f64, to: f64) -> Scale {
        let max = if max > 0.0 && max.is_finite() { max } else { 1.0 };
        let step_min = max / (TICKS - 1) as f64 * (1.0 - 1e-9);
        let step = nice().find(|step| *step >= step_min).unwrap_or(step_min);
        let count = (max / step - 1e-9).ceil() as u32;
        let ticks = (0..=count).map(|index| f64::from(index) * step).collect();
        Scale { is_log: false, min: 0.0, max: f64::from(count) * step, from, to, ticks }
    }

    /// A logarithmic scale that contains all of `values`, which must be positive.
    pub fn log(values: &[f64], from: f64, to: f64) -> Scale {
        let min = values.iter().copied().fold(f64::INFINITY, f64::min);
        let max = values.iter().copied().fold(0.0, f64::max);
        let first = nice().take_while(|tick| *tick <= min * (1.0 + 1e-9)).last().unwrap_or(min);
        let last = nice().find(|tick| *tick >= max * (1.0 - 1e-9)).unwrap_or(max);
        let mut ticks: Vec<f64> = nice().filter(|tick| (first..=last).contains(tick)).collect();
        let (min, max) = (first, last.max(first * 1.01));
        if ticks.len() > TICKS + 1 {
            ticks.retain(|tick| (tick.log10() - tick.log10().round()).abs() < 1e-9);
        }
        let each = ticks.len().div_ceil(TICKS + 1);
        let ticks = ticks.into_iter().step_by(each).collect();
        Scale { is_log: true, min, max, from, to, ticks }
    }

    /// A scale for the x values of curves. It is logarithmic if each value is at least 1.5 times the previous one. Each
    /// value gets a tick if there are few.
    pub fn of_places(places: &[f64], from: f64, to: f64) -> Scale {
        let (min, max) = (places[0], places[places.len() - 1]);
        let is_log = places.len() > 2 && min > 0.0 && places.windows(2).all(|pair| pair[1] >= 1.5 * pair[0]);
        let each = places.len().div_ceil(TICKS + 3);
        let ticks = places.iter().copied().step_by(each).collect();
        // A single value is drawn in the middle.
        let (min, max) = if min < max { (min, max) } else { (min - 1.0, max + 1.0) };
        Scale { is_log, min, max, from, to, ticks }
    }

    /// Position of `value`; values outside of the axis are at its end.
    pub fn at(&self, value: f64) -> f64 {
        let part = if self.is_log {
            (value / self.min).ln() / (self.max / self.min).ln()
        } else {
            (value - self.min) / (self.max - self.min)
        };
        let part = if part.is_nan() { 0.0 } else { part.clamp(0.0, 1.0) };
        self.from + part * (self.to - self.from)
    }

    /// The labels of the ticks of a horizontal axis, each after `sign`. `width` is the position of its right edge. Labels
    /// that would overlap the previous one are omitted.
    pub fn tick_labels(&self, width: f64, sign: &str) -> String {
        let (mut labels, mut last_end) = (String::new(), f64::NEG_INFINITY);
        for tick in &self.ticks {
            let (middle, label) = (100.0 * self.at(*tick) / width, format!("{sign}{}", label(*tick)));
            // On a phone, a digit takes 3 % of the width of a plot.
            let half = 1.5 * label.chars().count() as f64;
            if middle - half > last_end + 1.0 {
                labels += &format!("<span style=\"left:{middle:.2}%\">{label}</span>");
                last_end = middle + half;
            }
        }
        format!("<div class=\"ticks\">{labels}</div>\n")
    }
}

/// 1, 2 and 5 times each power of ten, in ascending order.
fn nice() -> impl Iterator<Item = f64> {
    (-20..20).flat_map(|power| [1.0, 2.0, 5.0].map(|digit| digit * 10_f64.powi(power)))
}

/// Formats a value in few characters: `0`, `0.05`, `20k`, `1.5M`, `5e-6`.
pub fn label(value: f64) -> String {
    if value != 0.0 && value.abs() < 0.001 {
        let text = format!("{value:.1e}");
        return text.replace(".0e", "e");
    }
    let (value, unit) = match value.abs() {
        v if v >= 1e9 => (value / 1e9, "G"),
        v if v >= 1e6 => (value / 1e6, "M"),
        v if v >= 1e4 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let text = format!("{value:.4}");
    format!("{}{unit}", text.trim_end_matches('0').trim_end_matches('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(scale: &Scale) -> Vec<String> {
        scale.ticks.iter().copied().map(label).collect()
    }

    #[test]
    fn ticks_are_round_numbers_and_cover_the_values() {
        let scale = Scale::from_zero(87_000.0, 0.0, 100.0);
        assert_eq!(labels(&scale), ["0", "20k", "40k", "60k", "80k", "100k"]);
        assert_eq!((scale.at(0.0), scale.at(50_000.0), scale.at(1e9)), (0.0, 50.0, 100.0));
        assert_eq!(labels(&Scale::from_zero(0.3, 0.0, 1.0)), ["0", "0.1", "0.2", "0.3"]);
        assert_eq!(labels(&Scale::from_zero(0.0, 0.0, 1.0)).len(), 6);
        assert_eq!(labels(&Scale::from_zero(4e-6, 0.0, 1.0)), ["0", "1e-6", "2e-6", "3e-6", "4e-6"]);
    }

    #[test]
    fn equal_ratios_have_equal_distances_on_a_log_axis() {
        let scale = Scale::log(&[0.6, 14.0], 0.0, 100.0);
        assert_eq!(labels(&scale), ["0.5", "1", "2", "5", "10", "20"]);
        let step = |a: f64, b: f64| scale.at(b) - scale.at(a);
        assert!((step(1.0, 2.0) - step(5.0, 10.0)).abs() < 1e-9);
        let wide = Scale::log(&[0.0003, 90_000.0], 0.0, 100.0);
        assert!(wide.ticks.len() <= TICKS + 1, "{:?}", wide.ticks);
    }

    #[test]
    fn x_values_that_double_use_a_log_axis() {
        let scale = Scale::of_places(&[1.0, 2.0, 4.0, 8.0, 16.0], 0.0, 100.0);
        assert_eq!((scale.is_log, scale.at(4.0)), (true, 50.0));
        let scale = Scale::of_places(&[0.0, 1.0, 2.0], 0.0, 100.0);
        assert_eq!((scale.is_log, scale.at(1.0)), (false, 50.0));
        assert_eq!(Scale::of_places(&[7.0], 0.0, 100.0).at(7.0), 50.0);
    }

    #[test]
    fn tick_labels_do_not_overlap() {
        let places = [1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 512.0];
        let labels = Scale::of_places(&places, 0.0, 340.0).tick_labels(340.0, "");
        let shown: Vec<&str> = labels.split("</span>").filter_map(|one| one.split('>').next_back()).collect();
        assert_eq!(shown[..2], ["1", "512"], "{labels}");
        let scale = Scale::of_places(&[1.0, 2.0, 4.0, 8.0], 0.0, 340.0);
        assert_eq!(scale.tick_labels(340.0, "").matches("<span").count(), 4);
    }
}
