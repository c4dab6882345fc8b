//! Sizes in bytes as people write them: `4096`, `512K`, `10G`, with binary suffixes.

/// Suffixes and the power of two that each stands for.
const SUFFIXES: [(char, u32); 4] = [('K', 10), ('M', 20), ('G', 30), ('T', 40)];

/// The bytes that `text` stands for: digits, then at most one of K, M, G, T (powers of
/// 1024, either case). At most `i64::MAX`, the largest offset of a file.
///
/// # Errors
/// The rule that `text` breaks.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let rule = "a size is digits and at most one of K, M, G, T, such as 4096, 512K or 10G";
    let (digits, shift) = match text.chars().last() {
        Some(last) if !last.is_ascii_digit() => {
            let suffix = SUFFIXES.iter().find(|(letter, _)| *letter == last.to_ascii_uppercase());
            let (_, shift) = suffix.ok_or(rule)?;
            (&text[..text.len() - 1], *shift)
        }
        _ => (text, 0),
    };
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(rule.to_owned());
    }
    let number: Option<u64> = digits.parse().ok();
    number
        .and_then(|n| n.checked_mul(1 << shift))
        .filter(|bytes| *bytes <= i64::MAX as u64)
        .ok_or_else(|| "a size is below 8 EiB".to_owned())
}

/// `bytes` with the largest binary suffix of which it is a whole multiple, as
/// [`parse_size`] reads it back.
pub fn format_size(bytes: u64) -> String {
    for (letter, shift) in SUFFIXES.iter().rev() {
        if bytes != 0 && bytes.trailing_zeros() >= *shift {
            return format!("{}{letter}", bytes >> shift);
        }
    }
    bytes.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suffixes_are_binary_and_of_either_case() {
        assert_eq!(parse_size("0"), Ok(0));
        assert_eq!(parse_size("512"), Ok(512));
        assert_eq!(parse_size("4K"), Ok(4096));
        assert_eq!(parse_size("4k"), Ok(4096));
        assert_eq!(parse_size("3M"), Ok(3 << 20));
        assert_eq!(parse_size("10G"), Ok(10 << 30));
        assert_eq!(parse_size("2T"), Ok(2 << 40));
    }

    #[test]
    fn what_is_not_a_size_is_refused() {
        for text in ["", "K", "-1", "+1", "1.5G", "1KB", "0x10", " 1", "1 ", "1é", "9999999T"] {
            assert!(parse_size(text).is_err(), "{text:?}");
        }
        for text in ["18446744073709551616", "9223372036854775808", "8388608T"] {
            assert!(parse_size(text).is_err(), "{text:?}");
        }
        assert_eq!(parse_size("9223372036854775807"), Ok(i64::MAX as u64));
    }

    #[test]
    fn a_size_survives_the_way_out_and_back() {
        for bytes in [0, 1, 511, 512, 1024, 1536, 1 << 20, (1 << 20) + 512, 10 << 30, 3 << 40, 5 << 50] {
            assert_eq!(parse_size(&format_size(bytes)), Ok(bytes));
        }
        assert_eq!(format_size(10 << 30), "10G");
    }
}
