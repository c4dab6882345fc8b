//! `blkq generate`: manual pages and shell completions, made from the command line's
//! own definition.

use std::path::PathBuf;

use clap::{CommandFactory, ValueEnum};
use clap_complete::Shell;

use super::Cli;
use crate::failure::{Failure, Outcome};

/// Options of `generate`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// What to write
    kind: Kind,
    /// An existing directory to write into
    dir: PathBuf,
}

/// What can be generated.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// blkq.1 and one page per subcommand
    Man,
    /// For bash, elvish, fish, powershell and zsh
    Completions,
}

impl Args {
    /// Writes the files.
    ///
    /// # Errors
    /// If the directory cannot be written.
    pub fn run(self) -> Outcome {
        let refuse = |e: std::io::Error| Failure::new(format!("generate into {}: {e}", self.dir.display()));
        match self.kind {
            Kind::Man => clap_mangen::generate_to(Cli::command(), &self.dir).map_err(refuse),
            Kind::Completions => Shell::value_variants().iter().try_for_each(|shell| {
                clap_complete::generate_to(*shell, &mut Cli::command(), "blkq", &self.dir)
                    .map(|_| ())
                    .map_err(refuse)
            }),
        }
    }
}
