//! Prints tables as text with aligned columns.

use blkq::text::escaped;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Align {
    Left,
    Right,
}

impl Align {
    /// Adds spaces up to a width in characters.
    pub fn pad(self, text: &str, width: usize) -> String {
        match self {
            Align::Left => format!("{text:<width$}"),
            Align::Right => format!("{text:>width$}"),
        }
    }
}

/// Renders the rows as lines. Each column is as wide as its widest cell, and two spaces separate the columns.
pub fn render(align: impl AsRef<[Align]>, rows: &[impl AsRef<[String]>]) -> String {
    render_apart(2, align, rows)
}

/// Renders the rows as [`render`] does, with `gap` spaces between the columns. Control characters, which the
/// path of an image may contain, are escaped, so that each row stays on one line.
pub fn render_apart(gap: usize, align: impl AsRef<[Align]>, rows: &[impl AsRef<[String]>]) -> String {
    let rows = rows.iter().map(|row| row.as_ref().iter().map(|cell| escaped(cell)).collect());
    let rows: Vec<Vec<String>> = rows.collect();
    let width_of =
        |at: usize| rows.iter().filter_map(|row| row.get(at)).map(|cell| cell.chars().count()).max();
    let columns = align.as_ref().iter().enumerate();
    let columns: Vec<_> = columns.map(|(at, align)| (align, width_of(at).unwrap_or(0))).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&columns).map(|(cell, (align, width))| align.pad(cell, *width));
        format!("{}\n", cells.collect::<Vec<_>>().join(&" ".repeat(gap)).trim_end())
    };
    rows.iter().map(line).collect()
}

/// Renders the figures of several objects under their `heads`; empty if there are no rows. The first column contains
/// the names of the objects.
pub fn render_figures(heads: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let head = heads.iter().map(|head| (*head).to_owned()).collect();
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
    let mut align = vec![Align::Right; heads.len()];
    align[0] = Align::Left;
    if rows.len() > 1 { render(align, &rows) } else { String::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let rows = [["name", "size"], ["a", "1"], ["long-name", "1000"]].map(|row| row.map(str::to_owned));
        let text = render([Align::Left, Align::Right], &rows);
        assert_eq!(text, "name       size\na             1\nlong-name  1000\n");
        let rows = [["a\nb\x1b[31m".to_owned(), "1".to_owned()]];
        assert_eq!(render([Align::Left, Align::Right], &rows), "a\\x0ab\\x1b[31m  1\n");
    }
}
