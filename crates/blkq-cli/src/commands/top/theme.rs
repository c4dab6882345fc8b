//! How the view is drawn: the characters and colours, and text at a place.

use ratatui_core::buffer::Buffer;
use ratatui_core::layout::Rect;
use ratatui_core::style::{Color, Modifier, Style};

use crate::output::Align;

#[derive(Clone, Copy, Debug)]
pub struct Theme {
    /// The terminal displays characters beyond ASCII.
    pub unicode: bool,
    /// The terminal has 256 colours, and the user has not turned colours off.
    pub colour: bool,
}

pub const TITLE: Style = Style::new().add_modifier(Modifier::BOLD);
const HEADING: Style = Style::new().add_modifier(Modifier::REVERSED);
/// Colours of xterm's palette of 256, from few requests (blue) to many (red).
const HEAT: [u8; 8] = [24, 31, 37, 71, 142, 178, 208, 196];
const ASCII_LEVELS: [&str; 8] = [".", ":", "-", "=", "+", "*", "#", "@"];
const BLOCK_LEVELS: [&str; 8] = ["░", "░", "▒", "▒", "▓", "▓", "█", "█"];

impl Theme {
    /// The theme for TERM and COLORTERM, the locale, and NO_COLOR (https://no-color.org).
    pub fn of(variable: impl Fn(&str) -> Option<String>) -> Theme {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        // The first variable that is set determines the encoding (locale(7)).
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"].iter().find_map(|name| set(name)).unwrap_or_default();
        let locale = locale.to_ascii_lowercase();
        let many = set("TERM").is_some_and(|term| term.contains("256color") || term.contains("direct"));
        Theme {
            unicode: locale.contains("utf-8") || locale.contains("utf8"),
            colour: (many || set("COLORTERM").is_some()) && set("NO_COLOR").is_none(),
        }
    }

    fn coloured(self, colour: u8) -> Style {
        if self.colour { Style::new().fg(Color::Indexed(colour)) } else { Style::new() }
    }

    pub fn selected(self) -> Style {
        match self.colour {
            true => Style::new().bg(Color::Indexed(237)).add_modifier(Modifier::BOLD),
            false => HEADING,
        }
    }

    pub fn faint(self) -> Style {
        self.coloured(245)
    }

    pub fn alarm(self) -> Style {
        self.coloured(203).add_modifier(Modifier::BOLD)
    }

    /// For the part up to p50, and for the part from p50 to p99.
    pub fn bar(self) -> [(&'static str, Style); 2] {
        let [half, rest] = if self.unicode { ["█", "▒"] } else { ["#", "-"] };
        [(half, self.coloured(71)), (rest, self.coloured(178))]
    }

    /// `part` is the heat of the cell relative to the hottest one: above 0, at most 1.
    pub fn heat(self, part: f64) -> (&'static str, Style) {
        let level = ((part * HEAT.len() as f64).ceil() as usize).clamp(1, HEAT.len()) - 1;
        let symbol = if self.unicode { BLOCK_LEVELS[level] } else { ASCII_LEVELS[level] };
        (symbol, self.coloured(HEAT[level]))
    }

    /// Drawn for an interval without a sample.
    pub fn gap(self) -> &'static str {
        if self.unicode { "┆" } else { "|" }
    }

    pub fn rule(self) -> &'static str {
        if self.unicode { "│" } else { "|" }
    }
}

/// Rows of the screen, and the theme in which they are drawn.
pub struct Canvas<'a> {
    pub theme: Theme,
    buffer: &'a mut Buffer,
    pub area: Rect,
}

impl<'a> Canvas<'a> {
    pub fn new(theme: Theme, buffer: &'a mut Buffer) -> Canvas<'a> {
        Canvas { theme, area: buffer.area, buffer }
    }

    pub fn rows(&mut self, y: u16, height: u16) -> Canvas<'_> {
        let area = Rect { y: self.area.y + y, height, ..self.area };
        Canvas { theme: self.theme, buffer: self.buffer, area }
    }

    /// Cuts `text` at the right edge. Returns the column after the text.
    pub fn put(&mut self, (x, y): (u16, u16), text: &str, style: Style) -> u16 {
        let area = self.area.intersection(self.buffer.area);
        if y >= area.height || x >= area.width {
            return x;
        }
        self.buffer.set_stringn(area.x + x, area.y + y, text, usize::from(area.width - x), style).0 - area.x
    }

    pub fn put_heading(&mut self, y: u16, text: &str) {
        self.put((0, y), &Align::Left.pad(text, self.area.width.into()), HEADING);
    }

    pub fn select_row(&mut self, y: u16) {
        let row = Rect { y: self.area.y + y, height: 1, ..self.area };
        self.buffer.set_style(row.intersection(self.buffer.area), self.theme.selected());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_determines_colours_and_symbols() {
        let theme = |pairs: &[(&str, &str)]| {
            let theme = Theme::of(|name| {
                pairs.iter().find(|(it, _)| *it == name).map(|(_, value)| (*value).to_owned())
            });
            (theme.unicode, theme.colour)
        };
        assert_eq!(theme(&[]), (false, false));
        assert_eq!(theme(&[("LANG", "de_DE.UTF-8"), ("TERM", "xterm-256color")]), (true, true));
        assert_eq!(theme(&[("LANG", "C.utf8"), ("TERM", "tmux-256color"), ("NO_COLOR", "1")]), (true, false));
        assert_eq!(theme(&[("TERM", "xterm-256color"), ("NO_COLOR", "")]), (false, true));
        assert_eq!(theme(&[("LC_ALL", "C"), ("LANG", "C.UTF-8"), ("TERM", "vt100")]), (false, false));
    }

    #[test]
    fn without_colour_no_style_has_one() {
        let theme = Theme { unicode: true, colour: false };
        let mut styles = vec![TITLE, HEADING, theme.selected(), theme.faint(), theme.alarm()];
        styles.extend(theme.bar().map(|(_, style)| style));
        styles.extend((1..=8).map(|level| theme.heat(f64::from(level) / 8.0).1));
        assert!(styles.iter().all(|style| style.fg.is_none() && style.bg.is_none()));
    }
}
