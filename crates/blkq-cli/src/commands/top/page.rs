use ratatui_core::style::Style;

use super::heat;
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
        heat::draw(device.columns.iter(), &mut canvas.rows(TOP_ROWS + 1, height - 1));
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
