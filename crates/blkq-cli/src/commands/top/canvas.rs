//! Writes text into a part of a buffer.

use ratatui_core::buffer::Buffer;
use ratatui_core::layout::Rect;
use ratatui_core::style::Style;

use crate::table::Align;

/// Writes `text` at `(x, y)` of `area`, cut at the right edge. Returns the column after the text.
pub fn put(buffer: &mut Buffer, area: Rect, (x, y): (u16, u16), text: &str, style: Style) -> u16 {
    let area = area.intersection(buffer.area);
    if y >= area.height || x >= area.width {
        return x;
    }
    let width = usize::from(area.width - x);
    buffer.set_stringn(area.x + x, area.y + y, text, width, style).0 - area.x
}

/// Pads `text` to `width` columns.
pub fn aligned(text: &str, width: u16, align: Align) -> String {
    let width = usize::from(width);
    match align {
        Align::Left => format!("{text:<width$}"),
        Align::Right => format!("{text:>width$}"),
    }
}
