//! Prints tables as text with aligned columns.

use blkq::text::escaped;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Align {
    Left,
    Right,
}

/// Renders the rows as lines. Each column is as wide as its widest cell, and two spaces separate the columns.
pub fn render(align: impl AsRef<[Align]>, rows: &[impl AsRef<[String]>]) -> String {
    render_apart(2, align, rows)
}

/// Renders the rows as [`render`] does, with `gap` spaces between the columns. Control characters, which the
/// path of an image may contain, are escaped, so that each row stays on one line.
pub fn render_apart(gap: usize, align: impl AsRef<[Align]>, rows: &[impl AsRef<[String]>]) -> String {
    let align = align.as_ref();
    let row = |row: &dyn AsRef<[String]>| row.as_ref().iter().map(|cell| escaped(cell)).collect::<Vec<_>>();
    let rows: Vec<Vec<String>> = rows.iter().map(|cells| row(cells)).collect();
    let mut widths = vec![0; align.len()];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    let mut text = String::new();
    for row in &rows {
        let mut line = String::new();
        for ((cell, width), align) in row.iter().zip(&widths).zip(align) {
            match align {
                Align::Left => line.push_str(&format!("{cell:<width$}{:gap$}", "")),
                Align::Right => line.push_str(&format!("{cell:>width$}{:gap$}", "")),
            }
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
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
