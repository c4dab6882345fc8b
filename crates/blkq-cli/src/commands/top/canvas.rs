use ratatui_core::buffer::Buffer;
use ratatui_core::layout::Rect;
use ratatui_core::style::Style;

use crate::output::table::Align;

/// Cuts `text` at the right edge of `area`. Returns the column after the text.
pub fn put(buffer: &mut Buffer, area: Rect, (x, y): (u16, u16), text: &str, style: Style) -> u16 {
    let area = area.intersection(buffer.area);
    if y >= area.height || x >= area.width {
        return x;
    }
    let width = usize::from(area.width - x);
    buffer.set_stringn(area.x + x, area.y + y, text, width, style).0 - area.x
}

pub fn aligned(text: &str, width: u16, align: Align) -> String {
    let width = usize::from(width);
    match align {
        Align::Left => format!("{text:<width$}"),
        Align::Right => format!("{text:>width$}"),
    }
}
