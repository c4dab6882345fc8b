//! Suggests a known name for a mistyped one.

/// The optimal string alignment distance: the smallest number of letters to insert, remove, replace or exchange with
/// the next letter to turn one word into the other.
pub use strsim::osa_distance as distance;

/// Returns the name in `names` that is closest to `word`, if they differ in at most a third of the letters. Case,
/// hyphens and underscores are ignored: `readonly` and `read_only` equal `read-only`.
pub fn closest<S: AsRef<str>>(word: &str, names: impl IntoIterator<Item = S>) -> Option<S> {
    let plain = |text: &str| text.to_lowercase().replace(['-', '_'], "");
    let word = plain(word);
    let difference = |name: &S| {
        let name = plain(name.as_ref());
        let most = word.chars().count().max(name.chars().count()) / 3;
        Some(distance(&word, &name)).filter(|letters| *letters <= most)
    };
    let similar = names.into_iter().filter_map(|name| Some((difference(&name)?, name)));
    similar.min_by_key(|(letters, _)| *letters).map(|(_, name)| name)
}

/// Returns the end of a message about an unknown `word`: `; did you mean NAME?`, or nothing if no name is similar.
pub fn did_you_mean<S: AsRef<str>>(word: &str, names: impl IntoIterator<Item = S>) -> String {
    closest(word, names).map(|name| format!("; did you mean {}?", name.as_ref())).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_differ_in_few_letters_are_suggested() {
        let distances = [("kitten", "sitting", 3), ("", "ab", 2), ("ab", "ab", 0), ("glod", "gold", 1)];
        for (one, other, letters) in distances {
            assert_eq!(distance(one, other), letters, "{one}");
        }
        let names = ["read-only", "depth", "merge", "disk.img"];
        for (word, name) in [
            ("readonly", "read-only"),
            ("read_only", "read-only"),
            ("READ-ONLY", "read-only"),
            ("dept", "depth"),
            ("mrege", "merge"),
            ("disc.img", "disk.img"),
        ] {
            assert_eq!(closest(word, names), Some(name), "{word}");
        }
        for word in ["", "colour", "x"] {
            assert_eq!(did_you_mean(word, names), "", "{word}");
        }
        assert_eq!(did_you_mean("dept", names), "; did you mean depth?");
    }
}
