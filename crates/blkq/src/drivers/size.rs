//! Sizes in bytes, as people write them, and those of logical blocks.

use crate::error::{Error, ErrorKind};

/// A size in bytes: a number, then nothing; K, M, G, T, P or E, alone or with `iB`, for a power of
/// 1024; or KB, MB, GB, TB, PB or EB for a power of 1000. A fraction must come out whole. Upper
/// and lower case are the same.
///
/// # Errors
/// [`ErrorKind::Invalid`] for anything else, and above 8 EiB.
pub fn parse_bytes(text: &str) -> Result<u64, Error> {
    let invalid = |why: &str| Err(Error::new(ErrorKind::Invalid, format!("{text:?} {why}")));
    const RULE: &str = "is not a size: write a number, and K, M, G, T (or KiB, MiB, ...: powers of 1024), \
                        KB, MB, GB, TB (powers of 1000), or nothing for bytes";
    let unit_at = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(unit_at);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    if whole.is_empty() || fraction.is_empty() || fraction.contains('.') {
        return invalid(RULE);
    }
    let Some(unit) = unit_bytes(unit) else { return invalid(RULE) };
    // Digits of the fraction are so many powers of ten to divide by.
    let fraction = fraction.trim_end_matches('0');
    let scale = u32::try_from(fraction.len()).ok().and_then(|digits| 10u128.checked_pow(digits));
    let scaled = format!("{whole}{fraction}").parse::<u128>().ok().and_then(|n| n.checked_mul(unit));
    let Some((scaled, scale)) = scaled.zip(scale) else {
        return invalid("has too many digits; a device has at most 8 EiB");
    };
    if scaled % scale != 0 {
        return invalid("is not a whole number of bytes; choose one that is");
    }
    match u64::try_from(scaled / scale) {
        Ok(bytes) if bytes <= i64::MAX as u64 => Ok(bytes),
        _ => invalid("is more than 8 EiB, the most that the kernel can address; choose less"),
    }
}

/// The bytes of one `unit`.
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

/// The logical block sizes that a device may have, in bytes: those of the kernel's loop device on
/// pages of 4096 bytes.
pub const LOGICAL_BLOCK_SIZES: [u32; 4] = [512, 1024, 2048, 4096];

/// The size, if a logical block may have it.
pub(super) fn check_logical_block(bytes: u32) -> Result<u32, Error> {
    if LOGICAL_BLOCK_SIZES.contains(&bytes) {
        return Ok(bytes);
    }
    let message = format!("a sector has 512, 1024, 2048 or 4096 bytes, not {bytes}");
    Err(Error::new(ErrorKind::Invalid, message))
}

#[cfg(test)]
#[cfg(not(model_check))]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_understood_in_all_their_spellings() {
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
    fn what_is_no_size_is_rejected_with_the_rule() {
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
}
