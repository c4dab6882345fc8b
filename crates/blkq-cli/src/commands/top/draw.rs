//! Draws the view into a buffer: the list of devices here, the page of one device in [`page`].

use ratatui_core::buffer::Buffer;
use ratatui_core::style::Style;

use super::page;
use super::row::{COLUMNS, Row, short};
use super::theme::{Canvas, TITLE, Theme};
use super::view::View;
use crate::output::{Align, quantity};

/// The scale of the latency bars: from 10^0 to 10^7 microseconds.
const BAR_DECADES: f64 = 7.0;
/// The smallest width of the column of names, and the most that it grows on a wide terminal.
const NAME_COLUMNS: u16 = 12;
const NAME_COLUMNS_MORE: u16 = 28;

/// The place of the latency bars among the columns of the list, their heading, and their smallest width.
const BAR: usize = 4;
const BAR_HEAD: &str = "1us ... 10s";
const BAR_COLUMNS: u16 = 11;

pub fn draw(view: &mut View, theme: Theme, buffer: &mut Buffer) {
    let Some(last) = buffer.area.height.checked_sub(1) else { return };
    let mut canvas = Canvas::new(theme, buffer);
    let keys = match view.is_page {
        true => {
            page::draw(view, &mut canvas.rows(0, last));
            "Esc list  Up/Down other device  q quit"
        }
        false => {
            list(view, &mut canvas.rows(0, last));
            "Enter page  s/S sort  r reverse  / filter  Up/Down select  q quit"
        }
    };
    match view.is_editing {
        true => canvas.put((0, last), &format!("filter: {}_", view.filter), TITLE),
        false => canvas.put((0, last), keys, theme.faint()),
    };
}

fn list(view: &mut View, canvas: &mut Canvas<'_>) {
    let rows = view.rows();
    title(view, canvas, &rows);
    let layout = Layout::new(canvas.area.width);
    let mark = if view.reversed { "^" } else { "*" };
    let head = |sort: Option<usize>, head: &str| {
        if sort == view.sort { format!("{mark}{head}") } else { head.to_owned() }
    };
    let mut heading = Align::Left.pad(&head(None, "NAME"), layout.name.into());
    for (column, width) in layout.columns() {
        let text = column.map_or(BAR_HEAD.to_owned(), |at| head(Some(at), COLUMNS[at].head));
        heading = heading + " " + &Align::Right.pad(&text, width.into());
    }
    canvas.put_heading(1, &heading);
    let height = usize::from(canvas.area.height.saturating_sub(2)).max(1);
    let selected = view.selected_index(&rows);
    // The list scrolls only as far as is necessary to show the selected row.
    let latest = rows.len().saturating_sub(height);
    view.top_row = view.top_row.clamp((selected + 1).saturating_sub(height), selected).min(latest);
    for (y, (at, row)) in (2..).zip(rows.iter().enumerate().skip(view.top_row).take(height)) {
        line(row, &layout, canvas, y);
        if at == selected {
            canvas.select_row(y);
        }
    }
    if rows.is_empty() {
        let text = match view.filter.is_empty() {
            true => "no devices; create one with `blkq attach`",
            false => "no name contains the filter; Esc shows all devices",
        };
        canvas.put((0, 2), text, canvas.theme.faint());
    }
}

fn title(view: &View, canvas: &mut Canvas<'_>, rows: &[Row]) {
    let theme = canvas.theme;
    let sum = |value: fn(&Row) -> Option<f64>| short(rows.iter().filter_map(value).sum());
    let (iops, mb_per_s) = (sum(|row| row.iops), sum(|row| row.mb_per_s));
    let (devices, interval) = (quantity(rows.len() as u64, "device"), &view.interval);
    let text = format!("blkq top: {devices}, {iops} IOPS, {mb_per_s} MB/s, every {interval}");
    let mut x = canvas.put((0, 0), &text, TITLE);
    if !view.filter.is_empty() {
        x = canvas.put((x, 0), &format!(", names with \"{}\"", view.filter), theme.faint());
    }
    let stuck = rows.iter().filter(|row| is_stuck(row)).count();
    if stuck > 0 {
        canvas.put((x, 0), &format!("  ! {stuck} stuck"), theme.alarm());
    }
}

struct Layout {
    name: u16,
    bar: u16,
    /// The number of columns that fit. On a narrow terminal, columns are omitted, from the right.
    shown: usize,
}

impl Layout {
    fn new(width: u16) -> Layout {
        let mut shown = COLUMNS.len() + 1;
        let needed = |shown| NAME_COLUMNS + columns().take(shown).map(|(_, width)| width + 1).sum::<u16>();
        while shown > 0 && needed(shown) > width {
            shown -= 1;
        }
        // The names get half of the remaining width, the bars the rest.
        let left = width.saturating_sub(needed(shown));
        let more = left.div_ceil(2).min(NAME_COLUMNS_MORE);
        Layout { name: NAME_COLUMNS + more, bar: BAR_COLUMNS + left - more, shown }
    }

    fn columns(&self) -> impl Iterator<Item = (Option<usize>, u16)> {
        let widened = |(column, width): (Option<usize>, u16)| (column, column.map_or(self.bar, |_| width));
        columns().take(self.shown).map(widened)
    }
}

/// The columns after the name: their indexes in [`COLUMNS`], or `None` for the bars, and their smallest widths.
fn columns() -> impl Iterator<Item = (Option<usize>, u16)> {
    let columns = || COLUMNS.iter().enumerate().map(|(at, column)| (Some(at), column.width));
    columns().take(BAR).chain([(None, BAR_COLUMNS)]).chain(columns().skip(BAR))
}

/// The daemon does not answer, or requests hang or are held.
fn is_stuck(row: &Row) -> bool {
    row.error.is_some() || row.hung.unwrap_or(0) + row.held.unwrap_or(0) > 0
}

fn line(row: &Row, layout: &Layout, canvas: &mut Canvas<'_>, y: u16) {
    let is_bad = is_stuck(row) || row.errors.unwrap_or(0) > 0;
    let style = if is_bad { canvas.theme.alarm() } else { Style::new() };
    let mut names = canvas.rows(0, canvas.area.height);
    names.area.width = names.area.width.min(layout.name);
    names.put((0, y), &row.name, style);
    let mut x = layout.name + 1;
    if let Some(error) = &row.error {
        canvas.put((x, y), error, canvas.theme.alarm());
        return;
    }
    for (column, width) in layout.columns() {
        match column {
            None => bar(row, width, canvas, (x, y)),
            Some(at) => {
                canvas.put((x, y), &Align::Right.pad(&COLUMNS[at].cell(row), width.into()), style);
            }
        }
        x += width + 1;
    }
}

/// On a logarithmic scale: one symbol up to p50, another one from there to p99.
fn bar(row: &Row, width: u16, canvas: &mut Canvas<'_>, (x, y): (u16, u16)) {
    let length = |us: Option<f64>| {
        let decades = us.map_or(0.0, |us| us.max(1.0).log10());
        // Even the shortest latency gets one column.
        let least = u16::from(us.is_some());
        ((decades / BAR_DECADES * f64::from(width)).round() as u16).clamp(least, width)
    };
    let [half, whole] = [length(row.latency_p50_us), length(row.latency_p99_us)];
    let [to_half, to_whole] = canvas.theme.bar();
    for column in 0..whole {
        let (symbol, style) = if column < half { to_half } else { to_whole };
        canvas.put((x + column, y), symbol, style);
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use blkq_protocol::failure::Failure;
    use ratatui_core::layout::Rect;
    use ratatui_core::style::Modifier;

    use super::super::terminal::Key;
    use super::super::view::tests::view;
    use super::*;

    const PLAIN: Theme = Theme { unicode: false, colour: false };

    fn picture(view: &mut View, theme: Theme, width: u16, height: u16) -> Buffer {
        let mut buffer = Buffer::empty(Rect::new(0, 0, width, height));
        draw(view, theme, &mut buffer);
        buffer
    }

    fn lines(view: &mut View, width: u16, height: u16) -> Vec<String> {
        let buffer = picture(view, PLAIN, width, height);
        (0..height).map(|y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>()).collect()
    }

    fn words(line: &str) -> Vec<&str> {
        line.split_whitespace().collect()
    }

    #[test]
    fn eighty_columns_are_enough_for_all_figures() {
        let mut view = view(&[("idle", 0), ("busy.img", 12_300)]);
        let lines = lines(&mut view, 80, 24);
        assert!(lines[0].starts_with("blkq top: 2 devices, 12.3k IOPS, 50.4 MB/s, every 1 s"), "{lines:#?}");
        let heads = [
            "NAME", "*IOPS", "MB/s", "p50", "p99", "1us", "...", "10s", "QD", "MRG/s", "FLS/s", "THR",
            "HUNG", "CLI",
        ];
        assert_eq!(words(&lines[1]), heads);
        let busy = words(&lines[2]);
        assert_eq!(busy[..3], ["busy.img", "12.3k", "50.4"], "{lines:#?}");
        assert!(busy[3].ends_with("us") && busy[5].starts_with("##"), "{lines:#?}");
        assert_eq!(busy[6..], ["3", "6.2k", "0", "0%", "0", "2"], "{lines:#?}");
        assert_eq!(words(&lines[3]), ["idle", "0", "0", "-", "-", "3", "0", "0", "0%", "0", "2"]);
        assert!(lines[23].contains("q quit"));
    }

    #[test]
    fn a_bar_is_logarithmic_and_marks_both_percentiles() {
        let mut row = Row { latency_p50_us: Some(100.0), latency_p99_us: Some(100_000.0), ..Row::default() };
        let drawn = |row: &Row| {
            let area = Rect::new(0, 0, 14, 1);
            let mut buffer = Buffer::empty(area);
            bar(row, 14, &mut Canvas::new(PLAIN, &mut buffer), (0, 0));
            (0..14).map(|x| buffer[(x, 0)].symbol()).collect::<String>()
        };
        assert_eq!(drawn(&row), "####------    ");
        (row.latency_p50_us, row.latency_p99_us) = (Some(0.2), Some(1e12));
        assert_eq!(drawn(&row), "#-------------");
        (row.latency_p50_us, row.latency_p99_us) = (None, None);
        assert_eq!(drawn(&row).trim(), "");
    }

    #[test]
    fn a_silent_daemon_is_marked_in_its_line() {
        let mut view = view(&[("a", 100), ("b", 50)]);
        let now = Instant::now();
        view.devices.asked(vec!["a".into(), "b".into()], now);
        view.devices.answered("b", Err(Failure::new("b: the daemon was killed or crashed")));
        view.devices.mark_silent(now + Duration::from_secs(7));
        let lines = lines(&mut view, 80, 10);
        assert!(lines[0].contains("! 2 stuck"), "{lines:#?}");
        assert!(lines[2].starts_with("a ") && lines[2].contains("not answered for 7 s"), "{lines:#?}");
        assert!(lines[3].contains("the daemon was killed or crashed"), "{lines:#?}");
    }

    #[test]
    fn the_selected_row_is_always_visible() {
        let names: Vec<String> = (0..50).map(|n| format!("disk-{n:02}")).collect();
        let devices: Vec<(&str, u64)> = names.iter().map(|name| (name.as_str(), 10)).collect();
        let mut view = view(&devices);
        let selected = |view: &mut View, height: u16| {
            let buffer = picture(view, PLAIN, 80, height);
            let is_selected = |y: &u16| *y > 1 && buffer[(0, *y)].modifier.contains(Modifier::REVERSED);
            let y = (0..height).find(is_selected)?;
            Some((0..7).map(|x| buffer[(x, y)].symbol()).collect::<String>())
        };
        assert_eq!(selected(&mut view, 24).as_deref(), Some("disk-00"));
        for (key, name) in
            [(Key::End, "disk-49"), (Key::Up, "disk-48"), (Key::PageUp, "disk-38"), (Key::Home, "disk-00")]
        {
            view.press(key);
            for height in [24, 6, 5, 60] {
                assert_eq!(selected(&mut view, height).as_deref(), Some(name), "{key:?}, {height} rows");
            }
        }
    }

    #[test]
    fn the_page_has_operations_latencies_and_queues() {
        let mut view = view(&[("busy.img", 1000)]);
        view.press(Key::Enter);
        let page = lines(&mut view, 80, 24);
        assert!(page[0].starts_with("blkq top: busy.img, every 1 s"), "{page:#?}");
        assert!(page[1].starts_with("3 in flight") && page[1].contains("NBD clients: 2"), "{page:#?}");
        let read = words(&page[3]);
        assert_eq!(read[..4], ["read", "1.0k", "4.1", "500"], "{page:#?}");
        assert_eq!(words(&page[4])[..5], ["write", "0", "0", "0", "-"]);
        let map = page.iter().position(|line| line.starts_with("LATENCY")).unwrap();
        assert!(page[map + 1].starts_with("  <524us|") && page[map + 1].ends_with('@'), "{page:#?}");
        // The daemon has sent the figures of two queues.
        let queues = page.iter().position(|line| line.starts_with("QUEUE")).unwrap();
        assert_eq!(words(&page[queues + 1])[..4], ["0", "600", "2.5", "300us"], "{page:#?}");
        assert_eq!(words(&page[queues + 2])[..2], ["1", "400"]);
        view.devices.asked(Vec::new(), Instant::now());
        assert!(lines(&mut view, 80, 24)[1].starts_with("detached"));
    }

    #[test]
    fn terminals_of_any_size_can_be_drawn_on() {
        let mut view = view(&[("busy.img", 1000), ("名前", 5)]);
        for is_page in [false, true] {
            view.selected = Some("busy.img".to_owned());
            view.is_page = is_page;
            for width in (1..90).chain([200, 500, 1000]) {
                for height in (1..30).chain([200]) {
                    picture(&mut view, Theme { unicode: true, colour: true }, width, height);
                }
            }
        }
    }

    #[test]
    fn a_filter_is_shown_while_it_is_typed() {
        let mut view = view(&[("a", 1), ("b", 2)]);
        for key in [Key::Char('/'), Key::Char('z')] {
            view.press(key);
        }
        let lines = lines(&mut view, 80, 24);
        assert!(
            lines[0].contains("0 devices") && lines[2].starts_with("no name contains the filter"),
            "{lines:#?}"
        );
        assert!(lines[23].starts_with("filter: z_"), "{lines:#?}");
    }
}
