//! A mistake in a configuration file.

use std::path::Path;

use crate::failure::Failure;

/// A mistake in a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fault {
    /// Counted from 1; 0: it is of no line.
    pub line: usize,
    /// The mistake, in one line.
    pub text: String,
}

impl Fault {
    /// As the user reads it, of the file `path`.
    pub fn failure(&self, path: &Path) -> Failure {
        match self.line {
            0 => Failure::new(format!("{}: {}", path.display(), self.text)),
            line => Failure::new(format!("{}:{line}: {}", path.display(), self.text)),
        }
    }
}
