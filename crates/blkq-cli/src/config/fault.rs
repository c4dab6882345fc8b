use std::path::Path;

use blkq_protocol::failure::Failure;

/// A mistake in a configuration file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fault {
    /// The line of the mistake, counted from 1. 0 if the mistake concerns the file as a whole.
    pub line: usize,
    pub text: String,
}

impl Fault {
    /// The message for the user, with the path of the file and the line in front.
    pub fn failure(&self, path: &Path) -> Failure {
        match self.line {
            0 => Failure::new(format!("{}: {}", path.display(), self.text)),
            line => Failure::new(format!("{}:{line}: {}", path.display(), self.text)),
        }
    }
}
