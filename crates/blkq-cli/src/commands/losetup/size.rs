//! Sizes as util-linux writes them.

/// A size in bytes: digits, then nothing, or one of K, M, G, T, P, E with `iB` or nothing
/// for a power of 1024, with `B` for a power of 1000.
///
/// # Errors
/// For anything else, and above 8 EiB.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let (digits, suffix) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let power = |letter: char| "KMGTPE".find(letter.to_ascii_uppercase()).map(|at| at as u32 + 1);
    let mut letters = suffix.chars();
    let unit = match (letters.next(), letters.as_str()) {
        (None, _) => Some(1),
        (Some(letter), "" | "iB") => power(letter).and_then(|power| 1024u64.checked_pow(power)),
        (Some(letter), "B") => power(letter).and_then(|power| 1000u64.checked_pow(power)),
        _ => None,
    };
    let bytes = unit.zip(digits.parse::<u64>().ok()).and_then(|(unit, number)| number.checked_mul(unit));
    bytes.filter(|bytes| *bytes <= i64::MAX as u64).ok_or_else(|| {
        format!("{text:?} is not a size of at most 8 EiB: write digits and K, KiB (1024), KB (1000), M, ...")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_original() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("1K", 1024),
            ("1k", 1024),
            ("3KiB", 3072),
            ("3KB", 3000),
            ("2M", 2 << 20),
            ("2MB", 2_000_000),
            ("7E", 7 << 60),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for bad in ["", "K", "+1", "-1", "1.5K", "1KI", "1Kib", "1X", "1B", "8E", "1Z", "1 K", "0x10", "1é"]
        {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }
}
