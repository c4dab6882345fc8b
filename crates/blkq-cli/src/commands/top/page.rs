use ratatui_core::buffer::Buffer;
use ratatui_core::layout::Rect;
use ratatui_core::style::Style;

use super::heat;
use super::row::{count, latency, percent, short};
use super::theme::{Theme, put};
use super::view::View;
use crate::commands::stat::report::{Figures, Queue};
use crate::output::Align;

const TOP_ROWS: u16 = 9;
/// The heat map is drawn if there are more rows than this.
const HEAT_ROWS: u16 = 3;
const COLUMN: usize = 7;

pub fn draw(view: &View, theme: Theme, buffer: &mut Buffer, area: Rect) {
    let name = view.selected.as_deref().unwrap_or_default();
    put(buffer, area, (0, 0), &format!("blkq top: {name}, every {}", view.interval), theme.title());
    let Some(device) = view.devices.get(name) else {
        put(buffer, area, (0, 1), "detached", theme.alarm());
        return;
    };
    let queues = match device.report() {
        Some(report) => figures(&report.figures, theme, buffer, area),
        None => {
            let trouble = device.trouble();
            let (text, style) = match &trouble {
                Some(trouble) => (trouble.as_str(), theme.alarm()),
                None => ("waiting for the second sample", theme.faint()),
            };
            put(buffer, area, (0, 1), text, style);
            0
        }
    };
    let height = area.height.saturating_sub(TOP_ROWS + queues);
    if height > HEAT_ROWS {
        let map = Rect { y: area.y + TOP_ROWS, height, ..area };
        let text = format!(
            "LATENCY of reads, writes, discards; one column per {}, the latest at the right",
            view.interval
        );
        put(buffer, map, (0, 0), &Align::Left.pad(&text, area.width.into()), theme.heading());
        heat::draw(device.columns().iter(), theme, buffer, Rect { y: map.y + 1, height: height - 1, ..map });
    }
}

/// Returns the number of rows that the queues take.
fn figures(figures: &Figures, theme: Theme, buffer: &mut Buffer, area: Rect) -> u16 {
    let plain = Style::new();
    let Figures { in_flight, queue, busy_percent, hangs, held, nbd, vhost_user, flushes, batches, .. } =
        figures;
    let (hung, throttled) = (&hangs.now, percent(figures.throttled_percent()));
    let text = format!(
        "{in_flight} in flight, queue {queue:.2}, busy {busy_percent:.1} %, throttled {throttled}, {hung} hung"
    );
    let text = if held.now > 0 { format!("{text}, {} held", held.now) } else { text };
    let style = if *hung + held.now > 0 { theme.alarm() } else { plain };
    let mut x = put(buffer, area, (0, 1), &text, style);
    if let Some(nbd) = nbd {
        x = put(buffer, area, (x, 1), &format!(", NBD clients: {}", nbd.connected), plain);
    }
    if let Some(vhost_user) = vhost_user {
        put(buffer, area, (x, 1), &format!(", virtual machines: {}", vhost_user.connected), plain);
    }
    let heads = ["IOPS", "MB/s", "MRG/s", "avg", "p50", "p99", "max", "errors"];
    let heading = Align::Left.pad(&line("", &heads), area.width.into());
    put(buffer, area, (0, 2), &heading, theme.heading());
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
        put(buffer, area, (0, y), &line(name, &cells), if errors > 0 { theme.alarm() } else { plain });
    }
    let text = format!(
        "flushes: {} requested, {} sent, {} coalesced; {:.1} per dispatch, {} tag waits",
        flushes.asked, flushes.sent, flushes.coalesced, batches.dispatch_mean, batches.tag_waits
    );
    let limits = &figures.throttle.limits.limits;
    let text = if limits.is_empty() { text } else { format!("{text}; limit {limits}") };
    put(buffer, area, (0, 7), &text, theme.faint());
    queues(&figures.queues, theme, buffer, area)
}

/// A line of a table: a label, and cells of [`COLUMN`] characters.
fn line(label: &str, cells: &[impl AsRef<str>]) -> String {
    let cells = cells.iter().map(|cell| Align::Right.pad(cell.as_ref(), COLUMN));
    std::iter::once(Align::Left.pad(label, 8)).chain(cells).collect()
}

fn queues(queues: &[Queue], theme: Theme, buffer: &mut Buffer, area: Rect) -> u16 {
    // A daemon of an earlier version does not send the figures of queues.
    let room = usize::from(area.height.saturating_sub(TOP_ROWS) / 3);
    if queues.is_empty() || room == 0 {
        return 0;
    }
    let shown = queues.len().min(room);
    let rows = shown as u16 + 1;
    let below = Rect { y: area.y + area.height - rows, height: rows, ..area };
    let mut heading = line("QUEUE", &["IOPS", "MB/s", "avg", "QD", "busy", "hung"]);
    if shown < queues.len() {
        heading += &format!("  the first {shown} of {}", queues.len());
    }
    put(buffer, below, (0, 0), &Align::Left.pad(&heading, area.width.into()), theme.heading());
    for (y, (number, queue)) in (1..).zip(queues.iter().enumerate().take(shown)) {
        let cells = [
            short(queue.iops),
            short(queue.mb_per_s),
            if queue.iops > 0.0 { latency(queue.latency_average_us) } else { "-".to_owned() },
            count(queue.in_flight),
            format!("{:.0}%", queue.busy_percent),
            count(queue.hung),
        ];
        let line = line(&number.to_string(), &cells);
        put(buffer, below, (0, y), &line, if queue.hung > 0 { theme.alarm() } else { Style::new() });
    }
    rows
}
