//! Helpers for HTML: escaping, base64, tables.

pub fn escape(text: &str) -> String {
    let entities = [('&', "&amp;"), ('<', "&lt;"), ('>', "&gt;"), ('"', "&quot;"), ('\'', "&#39;")];
    let text = text.replace(char::is_control, " ");
    entities.into_iter().fold(text, |text, (letter, entity)| text.replace(letter, entity))
}

/// `bytes` as base64 (RFC 4648, section 4).
pub fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let mut bytes = [0; 4];
        bytes[1..=chunk.len()].copy_from_slice(chunk);
        let word = u32::from_be_bytes(bytes);
        for digit in 0..4 {
            let value = DIGITS[(word >> (18 - 6 * digit)) as usize & 63];
            text.push(if digit > chunk.len() { '=' } else { char::from(value) });
        }
    }
    text
}

/// Formats rows as an HTML table. The first row is the heading. Cells are HTML. The first column is aligned to the
/// left, the others to the right.
pub fn table(rows: &[Vec<String>]) -> String {
    let Some((heading, body)) = rows.split_first() else { return String::new() };
    let head: String = heading.iter().map(|cell| format!("<th scope=\"col\">{cell}</th>")).collect();
    let row = |row: &Vec<String>| {
        let cells: String = row[1..].iter().map(|cell| format!("<td>{cell}</td>")).collect();
        format!("<tr><th scope=\"row\">{}</th>{cells}</tr>\n", row[0])
    };
    let body: String = body.iter().map(row).collect();
    format!(
        "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"table\">\
         <table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_characters_are_escaped() {
        assert_eq!(escape("<a href=\"x\" id='y'>&\n"), "&lt;a href=&quot;x&quot; id=&#39;y&#39;&gt;&amp; ");
    }

    #[test]
    fn base64_matches_the_test_vectors_of_the_rfc() {
        let encoded = ["", "f", "fo", "foo", "foob", "fooba", "foobar"].map(|text| base64(text.as_bytes()));
        assert_eq!(encoded, ["", "Zg==", "Zm8=", "Zm9v", "Zm9vYg==", "Zm9vYmE=", "Zm9vYmFy"]);
    }
}
