//! Draws the view into a buffer: the list of devices here, the page of one device in [`page`].

use ratatui_core::buffer::Buffer;
use ratatui_core::layout::Rect;
use ratatui_core::style::Style;

use super::page;
use super::row::{COLUMNS, Row, short};
use super::theme::{Theme, put};
use super::view::View;
use crate::output::Align;

/// The scale of the latency bars: from 10^0 to 10^7 microseconds.
const BAR_DECADES: std::ops::Range<f64> = 0.0..7.0;
/// The smallest width of the column of names, and the most that it grows on a wide terminal.
const NAME_COLUMNS: u16 = 12;
const NAME_COLUMNS_MORE: u16 = 28;

/// The place of the latency bars among the columns of the list, their heading, and their smallest width.
const BAR: usize = 4;
const BAR_HEAD: &str = "1us ... 10s";
const BAR_COLUMNS: u16 = 11;

pub fn draw(view: &mut View, theme: Theme, buffer: &mut Buffer) {
    let area = buffer.area;
    if area.width == 0 || area.height == 0 {
        return;
    }
    let keys = if view.is_page {
        page::draw(view, theme, buffer, Rect { height: area.height.saturating_sub(1), ..area });
        "Esc list  Up/Down other device  q quit"
    } else {
        list(view, theme, buffer, Rect { height: area.height.saturating_sub(1), ..area });
        "Enter page  s/S sort  r reverse  / filter  Up/Down select  q quit"
    };
    let prompt;
    let (text, style) = if view.is_editing {
        prompt = format!("filter: {}_", view.filter);
        (prompt.as_str(), theme.title())
    } else {
        (keys, theme.faint())
    };
    put(buffer, area, (0, area.height - 1), text, style);
}

fn list(view: &mut View, theme: Theme, buffer: &mut Buffer, area: Rect) {
    let rows = view.rows();
    title(view, theme, buffer, area, &rows);
    let layout = Layout::new(area.width);
    let head = |sort: Option<usize>, head: &str| {
        if sort == view.sort {
            format!("{}{head}", if view.reversed { '^' } else { '*' })
        } else {
            head.to_owned()
        }
    };
    let mut heading = Align::Left.pad(&head(None, "NAME"), layout.name.into());
    for (column, width) in layout.columns() {
        let text = column.map_or(BAR_HEAD.to_owned(), |at| head(Some(at), COLUMNS[at].head));
        heading = heading + " " + &Align::Right.pad(&text, width.into());
    }
    put(buffer, area, (0, 1), &Align::Left.pad(&heading, area.width.into()), theme.heading());
    let height = usize::from(area.height.saturating_sub(2)).max(1);
    let selected = view.selected_index(&rows);
    // The list scrolls only as far as is necessary to show the selected row.
    let latest = rows.len().saturating_sub(height);
    let range = (selected + 1).saturating_sub(height)..=selected;
    view.top_row = view.top_row.clamp(*range.start(), *range.end()).min(latest);
    for (y, (at, row)) in (2..).zip(rows.iter().enumerate().skip(view.top_row).take(height)) {
        line(row, &layout, theme, buffer, area, y);
        if at == selected {
            let line = Rect { y: area.y + y, height: 1, ..area };
            buffer.set_style(line.intersection(buffer.area), theme.selected());
        }
    }
    if rows.is_empty() {
        let text = match view.filter.is_empty() {
            true => "no devices; create one with `blkq attach`",
            false => "no name contains the filter; Esc shows all devices",
        };
        put(buffer, area, (0, 2), text, theme.faint());
    }
}

fn title(view: &View, theme: Theme, buffer: &mut Buffer, area: Rect, rows: &[Row]) {
    let sum = |value: fn(&Row) -> Option<f64>| short(rows.iter().filter_map(value).sum());
    let devices = if rows.len() == 1 { "device" } else { "devices" };
    let text = format!(
        "blkq top: {} {devices}, {} IOPS, {} MB/s, every {}",
        rows.len(),
        sum(|row| row.iops),
        sum(|row| row.mb_per_s),
        view.interval
    );
    let mut x = put(buffer, area, (0, 0), &text, theme.title());
    if !view.filter.is_empty() {
        x = put(buffer, area, (x, 0), &format!(", names with \"{}\"", view.filter), theme.faint());
    }
    let stuck = rows.iter().filter(|row| is_stuck(row)).count();
    if stuck > 0 {
        put(buffer, area, (x, 0), &format!("  ! {stuck} stuck"), theme.alarm());
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

fn line(row: &Row, layout: &Layout, theme: Theme, buffer: &mut Buffer, area: Rect, y: u16) {
    let is_bad = is_stuck(row) || row.errors.unwrap_or(0) > 0;
    let style = if is_bad { theme.alarm() } else { Style::new() };
    let names = Rect { width: layout.name.min(area.width), ..area };
    put(buffer, names, (0, y), &row.name, style);
    let mut x = layout.name + 1;
    if let Some(error) = &row.error {
        put(buffer, area, (x, y), error, theme.alarm());
        return;
    }
    for (column, width) in layout.columns() {
        match column {
            None => bar(row, width, theme, buffer, area, (x, y)),
            Some(at) => {
                let cell = Align::Right.pad(&COLUMNS[at].cell(row), width.into());
                put(buffer, area, (x, y), &cell, style);
            }
        }
        x += width + 1;
    }
}

/// On a logarithmic scale: one symbol up to p50, another one from there to p99.
fn bar(row: &Row, width: u16, theme: Theme, buffer: &mut Buffer, area: Rect, (x, y): (u16, u16)) {
    let length = |us: Option<f64>| {
        let decades = us.map_or(BAR_DECADES.start, |us| us.max(1.0).log10());
        let part = (decades - BAR_DECADES.start) / (BAR_DECADES.end - BAR_DECADES.start);
        // Even the shortest latency gets one column.
        let least = u16::from(us.is_some());
        ((part * f64::from(width)).round() as u16).clamp(least, width)
    };
    let [half, whole] = [length(row.latency_p50_us), length(row.latency_p99_us)];
    let [(to_half, half_style), (to_whole, whole_style)] = theme.bar();
    for column in 0..whole {
        let (symbol, style) = if column < half { (to_half, half_style) } else { (to_whole, whole_style) };
        put(buffer, area, (x + column, y), symbol, style);
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use blkq_protocol::failure::Failure;
    use ratatui_core::style::Modifier;

    use super::super::keys::Key;
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
            bar(row, 14, PLAIN, &mut buffer, area, (0, 0));
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
