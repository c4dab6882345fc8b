//! Sizes in bytes as they are printed: `4096`, `512K`, `10G`, with binary suffixes.

/// Suffixes and the power of two that each stands for.
const SUFFIXES: [(char, u32); 6] = [('K', 10), ('M', 20), ('G', 30), ('T', 40), ('P', 50), ('E', 60)];

/// `bytes` with the largest binary suffix of which it is a whole multiple, as
/// [`blkq::drivers::parse_bytes`] reads it back.
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
    use blkq::drivers::parse_bytes;

    use super::*;

    #[test]
    fn a_size_survives_the_way_out_and_back() {
        for bytes in [0, 1, 511, 512, 1024, 1536, 1 << 20, (1 << 20) + 512, 10 << 30, 3 << 40, 5 << 50] {
            assert_eq!(parse_bytes(&format_size(bytes)).unwrap(), bytes);
        }
        assert_eq!((format_size(10 << 30), format_size(7 << 60)), ("10G".to_owned(), "7E".to_owned()));
    }
}
