//! A heat map of latencies: time runs from left to right, latencies rise from the bottom to the top.

use super::devices::{Column, POWERS};
use super::row::latency;
use super::theme::Canvas;
use crate::output::Align;

const LABEL_COLUMNS: u16 = 8;

/// `columns` begins with the latest column, which is drawn at the right.
pub fn draw<'a>(columns: impl Iterator<Item = &'a Column> + Clone, canvas: &mut Canvas<'_>) {
    let theme = canvas.theme;
    let width = canvas.area.width.saturating_sub(LABEL_COLUMNS + 1);
    let shown = columns.take(usize::from(width));
    let Some(scale) = Scale::new(shown.clone(), canvas.area.height) else {
        canvas.put((0, 0), "no I/O yet", theme.faint());
        return;
    };
    for y in 0..scale.rows() {
        let label = format!("<{}", latency((1u64 << scale.powers(y).end()) as f64 / 1e3));
        canvas.put((0, y), &Align::Right.pad(&label, LABEL_COLUMNS.into()), theme.faint());
        canvas.put((LABEL_COLUMNS, y), theme.rule(), theme.faint());
        for (x, column) in (0..width).rev().zip(shown.clone()) {
            let cell = match column {
                None => Some((theme.gap(), theme.faint())),
                Some(counts) => scale.part(counts, y).map(|part| theme.heat(part)),
            };
            if let Some((symbol, style)) = cell {
                canvas.put((LABEL_COLUMNS + 1 + x, y), symbol, style);
            }
        }
    }
}

/// Assigns latencies to rows, and numbers of requests to colours.
struct Scale {
    /// The lowest and the highest power of two with any requests.
    lowest: usize,
    highest: usize,
    /// The number of powers of two that share a row.
    step: usize,
    /// The number of requests in the hottest cell.
    most: u64,
}

impl Scale {
    /// `None` if there were no requests, or there are no rows.
    fn new<'a>(columns: impl Iterator<Item = &'a Column> + Clone, rows: u16) -> Option<Scale> {
        let is_used = |power: &usize| columns.clone().flatten().any(|counts| counts[*power] > 0);
        let lowest = (0..POWERS).find(is_used)?;
        let highest = (0..POWERS).rfind(is_used)?;
        let step = (highest - lowest + 1).div_ceil(usize::from(rows.max(1)));
        let mut scale = Scale { lowest, highest, step, most: 1 };
        let cells = columns.flatten().flat_map(|counts| (0..scale.rows()).map(|y| scale.count(counts, y)));
        scale.most = cells.max()?;
        (rows > 0).then_some(scale)
    }

    fn rows(&self) -> u16 {
        (self.highest - self.lowest + 1).div_ceil(self.step) as u16
    }

    /// Row `y` is counted from the top.
    fn powers(&self, y: u16) -> std::ops::RangeInclusive<usize> {
        let low = self.lowest + usize::from(self.rows() - 1 - y) * self.step;
        low..=(low + self.step - 1).min(POWERS - 1)
    }

    fn count(&self, counts: &[u32; POWERS], y: u16) -> u64 {
        counts[self.powers(y)].iter().map(|count| u64::from(*count)).sum()
    }

    /// On a logarithmic scale up to 1; `None` if the cell is empty.
    fn part(&self, counts: &[u32; POWERS], y: u16) -> Option<f64> {
        let count = self.count(counts, y);
        (count > 0).then(|| (count as f64).ln_1p() / (self.most as f64).ln_1p())
    }
}

#[cfg(test)]
mod tests {
    use ratatui_core::buffer::Buffer;
    use ratatui_core::layout::Rect;

    use super::super::theme::Theme;
    use super::*;

    const PLAIN: Theme = Theme { unicode: false, colour: false };

    fn column(cells: &[(usize, u32)]) -> Column {
        let mut counts = [0; POWERS];
        cells.iter().for_each(|(power, count)| counts[*power] = *count);
        Some(counts)
    }

    fn lines(columns: &[Column], width: u16, height: u16) -> Vec<String> {
        let mut buffer = Buffer::empty(Rect::new(0, 0, width, height));
        draw(columns.iter(), &mut Canvas::new(PLAIN, &mut buffer));
        (0..height).map(|y| (0..width).map(|x| buffer[(x, y)].symbol()).collect()).collect()
    }

    #[test]
    fn the_map_shows_time_latency_and_number_of_requests() {
        let columns = [column(&[(20, 1)]), None, column(&[(18, 1000), (19, 30)])];
        let map = lines(&columns, 13, 5);
        assert_eq!(map[0], "  <1.0ms|  |.", "{map:#?}");
        assert_eq!(map[1], "  <524us| =| ", "{map:#?}");
        assert_eq!(map[2], "  <262us| @| ", "{map:#?}");
        assert_eq!(map[3].trim(), "", "{map:#?}");
    }

    #[test]
    fn all_latencies_fit_into_a_map_of_any_height() {
        let all: Vec<(usize, u32)> = (0..POWERS).map(|power| (power, 1)).collect();
        for height in 1..50 {
            let map = lines(&[column(&all)], 12, height);
            let hot: usize = map.iter().filter(|line| line.ends_with('@')).count();
            assert!(
                hot >= 1 && map.iter().all(|line| line.trim().is_empty() || line.contains('<')),
                "{map:#?}"
            );
        }
        assert_eq!(lines(&[column(&[])], 20, 2)[0].trim(), "no I/O yet");
        assert_eq!(lines(&[], 3, 1)[0], "no ");
        lines(&[column(&all)], 5, 3);
    }
}
