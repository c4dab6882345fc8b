use ratatui_core::style::Style;

use super::devices::{Column, POWERS};
use super::row::{count, latency, percent, short};
use super::theme::{Canvas, TITLE};
use super::view::View;
use crate::commands::stat::report::{Figures, Queue};
use crate::output::Align;

const TOP_ROWS: u16 = 9;
/// The heat map is drawn if there are more rows than this.
const HEAT_ROWS: u16 = 3;
const COLUMN: usize = 7;

pub fn draw(view: &View, canvas: &mut Canvas<'_>) {
    let theme = canvas.theme;
    let name = view.selected.as_deref().unwrap_or_default();
    canvas.put((0, 0), &format!("blkq top: {name}, every {}", view.interval), TITLE);
    let Some(device) = view.devices.get(name) else {
        canvas.put((0, 1), "detached", theme.alarm());
        return;
    };
    let mut queues = 0;
    if let Some(report) = device.report() {
        queues = figures(&report.figures, canvas);
    } else if let Some(trouble) = device.trouble() {
        canvas.put((0, 1), &trouble, theme.alarm());
    } else {
        canvas.put((0, 1), "waiting for the second sample", theme.faint());
    }
    let height = canvas.area.height.saturating_sub(TOP_ROWS + queues);
    if height > HEAT_ROWS {
        let text = format!(
            "LATENCY of reads, writes, discards; one column per {}, the latest at the right",
            view.interval
        );
        canvas.put_heading(TOP_ROWS, &text);
        draw_heat_map(device.columns.iter(), &mut canvas.rows(TOP_ROWS + 1, height - 1));
    }
}

/// Returns the number of rows that the queues take.
fn figures(figures: &Figures, canvas: &mut Canvas<'_>) -> u16 {
    let (plain, alarm) = (Style::new(), canvas.theme.alarm());
    let Figures { in_flight, queue, busy_percent, hangs, held, nbd, vhost_user, flushes, batches, .. } =
        figures;
    let (hung, throttled) = (&hangs.now, percent(figures.throttled_percent()));
    let text = format!(
        "{in_flight} in flight, queue {queue:.2}, busy {busy_percent:.1} %, throttled {throttled}, {hung} hung"
    );
    let text = if held.now > 0 { format!("{text}, {} held", held.now) } else { text };
    let mut x = canvas.put((0, 1), &text, if *hung + held.now > 0 { alarm } else { plain });
    if let Some(nbd) = nbd {
        x = canvas.put((x, 1), &format!(", NBD clients: {}", nbd.connected), plain);
    }
    if let Some(vhost_user) = vhost_user {
        canvas.put((x, 1), &format!(", virtual machines: {}", vhost_user.connected), plain);
    }
    canvas.put_heading(2, &line("", &["IOPS", "MB/s", "MRG/s", "avg", "p50", "p99", "max", "errors"]));
    for (y, (name, group)) in (3..).zip(figures.groups()) {
        let time = |us| if group.ios == 0 { "-".to_owned() } else { latency(us) };
        let errors = group.error_count();
        let cells = [
            short(group.iops),
            short(group.mb_per_s),
            short(group.merges_per_s),
            time(group.latency_average_us),
            time(group.latency_p50_us),
            time(group.latency_p99_us),
            time(group.latency_max_us),
            count(errors),
        ];
        canvas.put((0, y), &line(name, &cells), if errors > 0 { alarm } else { plain });
    }
    let text = format!(
        "flushes: {} requested, {} sent, {} coalesced; {:.1} per dispatch, {} tag waits",
        flushes.asked, flushes.sent, flushes.coalesced, batches.dispatch_mean, batches.tag_waits
    );
    let limits = &figures.throttle.limits.limits;
    let text = if limits.is_empty() { text } else { format!("{text}; limit {limits}") };
    canvas.put((0, 7), &text, canvas.theme.faint());
    queues(&figures.queues, canvas)
}

/// A line of a table: a label, and cells of [`COLUMN`] characters.
fn line(label: &str, cells: &[impl AsRef<str>]) -> String {
    let cells = cells.iter().map(|cell| Align::Right.pad(cell.as_ref(), COLUMN));
    std::iter::once(Align::Left.pad(label, 8)).chain(cells).collect()
}

fn queues(queues: &[Queue], canvas: &mut Canvas<'_>) -> u16 {
    // A daemon of an earlier version does not send the figures of queues.
    let room = usize::from(canvas.area.height.saturating_sub(TOP_ROWS) / 3);
    if queues.is_empty() || room == 0 {
        return 0;
    }
    let shown = queues.len().min(room);
    let rows = shown as u16 + 1;
    let mut below = canvas.rows(canvas.area.height - rows, rows);
    let mut heading = line("QUEUE", &["IOPS", "MB/s", "avg", "QD", "busy", "hung"]);
    if shown < queues.len() {
        heading += &format!("  the first {shown} of {}", queues.len());
    }
    below.put_heading(0, &heading);
    for (y, (number, queue)) in (1..).zip(queues.iter().enumerate().take(shown)) {
        let cells = [
            short(queue.iops),
            short(queue.mb_per_s),
            if queue.iops > 0.0 { latency(queue.latency_average_us) } else { "-".to_owned() },
            count(queue.in_flight),
            format!("{:.0}%", queue.busy_percent),
            count(queue.hung),
        ];
        let style = if queue.hung > 0 { below.theme.alarm() } else { Style::new() };
        below.put((0, y), &line(&number.to_string(), &cells), style);
    }
    rows
}

const LABEL_COLUMNS: u16 = 8;

/// A heat map of latencies: time runs from left to right, latencies rise from the bottom to the top.
/// `columns` begins with the latest column, which is drawn at the right.
fn draw_heat_map<'a>(columns: impl Iterator<Item = &'a Column> + Clone, canvas: &mut Canvas<'_>) {
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
        draw_heat_map(columns.iter(), &mut Canvas::new(PLAIN, &mut buffer));
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
