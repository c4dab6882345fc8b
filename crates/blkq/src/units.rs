//! Sizes and times in the notation that people use.

use crate::error::{Error, ErrorKind};

/// The suffixes of the powers of 1024.
const SUFFIXES: [&str; 7] = ["", "K", "M", "G", "T", "P", "E"];

/// Parses a size in bytes: a number, followed by nothing; or by K, M, G, T, P or E, alone or with `iB`, for a
/// power of 1024; or by KB, MB, GB, TB, PB or EB for a power of 1000. The number may have a fraction if the
/// result is whole. Upper and lower case are equal. Fails with [`ErrorKind::Invalid`] for any other text, and
/// for sizes above 8 EiB.
pub fn parse_bytes(text: &str) -> Result<u64, Error> {
    let invalid = |why: &str| Err(Error::new(ErrorKind::Invalid, format!("{text:?} {why}")));
    const RULE: &str = "is not a size: write a number and K, M, G, T (or KiB, MiB, ...: powers of 1024), \
                        KB, MB, GB, TB (powers of 1000), or nothing for bytes";
    let unit_at = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(unit_at);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    if whole.is_empty() || fraction.is_empty() || fraction.contains('.') {
        return invalid(RULE);
    }
    let Some(unit) = unit_bytes(unit) else { return invalid(RULE) };
    // Each digit of the fraction multiplies the divisor by ten.
    let fraction = fraction.trim_end_matches('0');
    let scale = u32::try_from(fraction.len()).ok().and_then(|digits| 10u128.checked_pow(digits));
    let scaled = format!("{whole}{fraction}").parse::<u128>().ok().and_then(|n| n.checked_mul(unit));
    let Some((scaled, scale)) = scaled.zip(scale) else {
        return invalid("has too many digits; a device has at most 8 EiB");
    };
    if scaled % scale != 0 {
        return invalid("is not a whole number of bytes; write the size in bytes");
    }
    match u64::try_from(scaled / scale) {
        Ok(bytes) if bytes <= i64::MAX as u64 => Ok(bytes),
        _ => invalid("is more than 8 EiB, the largest size that the kernel supports"),
    }
}

fn unit_bytes(unit: &str) -> Option<u128> {
    let mut letters = unit.chars();
    let Some(letter) = letters.next() else { return Some(1) };
    let power = "KMGTPE".find(letter.to_ascii_uppercase())? as u32 + 1;
    match letters.as_str().to_ascii_lowercase().as_str() {
        "" | "ib" => Some(1024u128.pow(power)),
        "b" => Some(1000u128.pow(power)),
        _ => None,
    }
}

/// Formats `bytes` with the largest binary suffix that divides it, in the notation of [`parse_bytes`].
pub fn format_bytes(bytes: u64) -> String {
    let power = if bytes == 0 { 0 } else { bytes.trailing_zeros() / 10 };
    format!("{}{}", bytes >> (10 * power), SUFFIXES[power as usize])
}

/// Parses a time and returns it in nanoseconds. The text is a number, which may have a fraction, followed by
/// `ns`, `us`, `ms` or `s`. Fails with [`ErrorKind::Invalid`] for any other text.
pub fn parse_duration_ns(text: &str) -> Result<u64, Error> {
    let is_digit = |c: char| c.is_ascii_digit() || c == '.';
    let (number, unit) = text.split_at(text.find(|c| !is_digit(c)).unwrap_or(text.len()));
    let unit_ns =
        [("ns", 1.0), ("us", 1e3), ("ms", 1e6), ("s", 1e9)].into_iter().find(|(name, _)| *name == unit);
    if let (Ok(number), Some((_, unit_ns))) = (number.parse::<f64>(), unit_ns) {
        return Ok((number * unit_ns).round() as u64);
    }
    let message = format!("{text:?} is not a time: write a number and ns, us, ms or s");
    Err(Error::new(ErrorKind::Invalid, message))
}

#[cfg(test)]
#[cfg(not(model_check))]
mod tests {
    use super::*;

    #[test]
    fn all_notations_of_sizes_are_parsed() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("4k", 4096),
            ("1K", 1024),
            ("3KiB", 3072),
            ("3kib", 3072),
            ("3KB", 3000),
            ("2M", 2 << 20),
            ("2MB", 2_000_000),
            ("1GiB", 1 << 30),
            ("10GB", 10_000_000_000),
            ("2TiB", 2 << 40),
            ("2TB", 2_000_000_000_000),
            ("1.5K", 1536),
            ("1.50K", 1536),
            ("0.5KiB", 512),
            ("1.44MB", 1_440_000),
            ("512.0", 512),
            ("0.0000019073486328125E", 1 << 41),
            ("7E", 7 << 60),
            ("9223372036854775807", i64::MAX as u64),
        ] {
            assert_eq!(parse_bytes(text).ok(), Some(bytes), "{text}");
        }
    }

    #[test]
    fn invalid_sizes_are_rejected_with_the_rule() {
        for (text, reason) in [
            ("", "is not a size"),
            ("K", "is not a size"),
            ("+1", "is not a size"),
            ("-1", "is not a size"),
            ("1Q", "is not a size"),
            ("1B", "is not a size"),
            ("1KI", "is not a size"),
            ("1 K", "is not a size"),
            ("0x10", "is not a size"),
            ("1é", "is not a size"),
            (".5K", "is not a size"),
            ("5.K", "is not a size"),
            ("1.2.3K", "is not a size"),
            ("1.5", "not a whole number of bytes"),
            ("1.3K", "not a whole number of bytes"),
            ("8E", "more than 8 EiB"),
            ("99999999T", "more than 8 EiB"),
            ("9223372036854775808", "more than 8 EiB"),
            (&"9".repeat(60), "too many digits"),
            (&format!("0.{}1", "0".repeat(60)), "too many digits"),
        ] {
            let message = parse_bytes(text).err().map(|error| error.to_string()).unwrap_or_default();
            assert!(message.contains(reason), "{text}: {message}");
        }
    }

    #[test]
    fn a_formatted_size_parses_to_the_same_size() {
        for bytes in [0, 1, 511, 512, 1024, 1536, 1 << 20, (1 << 20) + 512, 10 << 30, 3 << 40, 5 << 50] {
            assert_eq!(parse_bytes(&format_bytes(bytes)).unwrap(), bytes);
        }
        assert_eq!((format_bytes(10 << 30), format_bytes(7 << 60)), ("10G".to_owned(), "7E".to_owned()));
    }

    #[test]
    fn a_duration_has_a_number_and_a_unit() {
        for (text, ns) in
            [("7ns", 7), ("500us", 500_000), ("1.5ms", 1_500_000), ("0.5s", 500_000_000), ("0s", 0)]
        {
            assert_eq!(parse_duration_ns(text).ok(), Some(ns), "{text}");
        }
        for text in ["", "5", "s", ".s", "1.2.3s", "-1s", "1e3s", "1 s", "2h", "inf", "1S"] {
            assert!(parse_duration_ns(text).is_err(), "{text}");
        }
    }
}
