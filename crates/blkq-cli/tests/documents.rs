//! What the documents say of tests: each that they name is there.
#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::fs;
use std::path::{Path, PathBuf};

/// The documents, and the heading of the section that names tests.
const DOCUMENTS: [(&str, &str); 3] = [
    ("docs/durability.md", "# Durability"),
    ("docs/testing.md", "## What they found"),
    ("ARCHITECTURE.md", "## Contracts"),
];
/// Words joined by so many underscores are the name of a test.
const UNDERSCORES_MIN: usize = 3;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The text of every Rust and Python file below `path`.
fn sources(path: &Path, texts: &mut Vec<String>) {
    for entry in fs::read_dir(path).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, texts);
        } else if path.extension().is_some_and(|ending| ending == "rs" || ending == "py") {
            texts.push(fs::read_to_string(path).unwrap());
        }
    }
}

/// What stands between backticks, outside of blocks of code.
fn words(text: &str) -> Vec<&str> {
    text.split("```").step_by(2).flat_map(|prose| prose.split('`').skip(1).step_by(2)).collect()
}

fn is_test_name(word: &str) -> bool {
    word.matches('_').count() >= UNDERSCORES_MIN
        && word.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}

#[test]
fn the_tests_that_documents_name_are_there() {
    let mut texts = Vec::new();
    sources(&root().join("crates"), &mut texts);
    sources(&root().join("lab"), &mut texts);
    let crash = fs::read_to_string(root().join("lab/crash")).unwrap();
    let parts = crash.split_once("PARTS=(").unwrap().1.split_once(')').unwrap().0;
    let mut named = 0;
    for (document, heading) in DOCUMENTS {
        let text = fs::read_to_string(root().join(document)).unwrap();
        let section = text.split_once(heading).unwrap().1;
        let level = format!("\n{} ", heading.split(' ').next().unwrap());
        for word in words(section.split(&level).next().unwrap()) {
            let mut arguments = word.split(' ');
            let path = arguments.next().unwrap();
            if path.starts_with("lab/") || path.starts_with("crates/") {
                assert!(root().join(path).exists(), "{document}: there is no {path}");
            }
            let part = arguments.next().filter(|argument| !argument.starts_with("--"));
            if let ("lab/crash", Some(part)) = (path, part) {
                assert!(parts.split(' ').any(|known| known == part), "{document}: no part {part}");
                named += 1;
            }
            if is_test_name(word) {
                let (rust, python) = (format!("fn {word}("), format!("def {word}("));
                let there = texts.iter().any(|text| text.contains(&rust) || text.contains(&python));
                assert!(there, "{document}: there is no test {word}");
                named += 1;
            }
        }
    }
    assert!(named > 50, "only {named} names were found");
}
