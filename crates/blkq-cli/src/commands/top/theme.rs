//! How a view is drawn on this terminal: with which characters, and in which colours.

use ratatui_core::style::{Color, Modifier, Style};

/// Characters and colours.
#[derive(Clone, Copy, Debug)]
pub struct Theme {
    /// Whether the terminal shows characters beyond ASCII.
    pub unicode: bool,
    /// Whether it shows colours, and they are wanted.
    pub colour: bool,
}

/// From few to many: red is hot.
const HEAT: [u8; 8] = [24, 31, 37, 71, 142, 178, 208, 196];
const ASCII_LEVELS: [&str; 8] = [".", ":", "-", "=", "+", "*", "#", "@"];
const BLOCK_LEVELS: [&str; 8] = ["░", "░", "▒", "▒", "▓", "▓", "█", "█"];

impl Theme {
    /// The theme for the terminal that the environment describes: its type, its character set, and whether colours are
    /// wanted (https://no-color.org).
    pub fn of(variable: impl Fn(&str) -> Option<String>) -> Theme {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        // The first of them that is set counts, as in locale(7).
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

    /// The line at the top.
    pub fn title(self) -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }

    /// Headings of columns.
    pub fn heading(self) -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }

    /// The row that keys act on.
    pub fn selected(self) -> Style {
        if self.colour {
            Style::new().bg(Color::Indexed(237)).add_modifier(Modifier::BOLD)
        } else {
            Style::new().add_modifier(Modifier::REVERSED)
        }
    }

    /// Words of less importance.
    pub fn faint(self) -> Style {
        self.coloured(245)
    }

    /// Something is wrong.
    pub fn alarm(self) -> Style {
        self.coloured(203).add_modifier(Modifier::BOLD)
    }

    /// The part of a latency bar up to p50, and that from there to p99.
    pub fn bar(self) -> [(&'static str, Style); 2] {
        let [half, rest] = if self.unicode { ["█", "▒"] } else { ["#", "-"] };
        [(half, self.coloured(71)), (rest, self.coloured(178))]
    }

    /// A cell of a heat map for `part` (more than 0, up to 1) of the most.
    pub fn heat(self, part: f64) -> (&'static str, Style) {
        let level = ((part * HEAT.len() as f64).ceil() as usize).clamp(1, HEAT.len()) - 1;
        let symbol = if self.unicode { BLOCK_LEVELS[level] } else { ASCII_LEVELS[level] };
        (symbol, self.coloured(HEAT[level]))
    }

    /// A cell of a heat map where no sample was.
    pub fn gap(self) -> &'static str {
        if self.unicode { "┆" } else { "|" }
    }

    /// Between label and map.
    pub fn rule(self) -> &'static str {
        if self.unicode { "│" } else { "|" }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_decides_on_colours_and_characters() {
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
        let mut styles = vec![theme.title(), theme.heading(), theme.selected(), theme.faint(), theme.alarm()];
        styles.extend(theme.bar().map(|(_, style)| style));
        styles.extend((1..=8).map(|level| theme.heat(f64::from(level) / 8.0).1));
        assert!(styles.iter().all(|style| style.fg.is_none() && style.bg.is_none()));
    }
}
