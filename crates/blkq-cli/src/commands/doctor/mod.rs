//! `blkq doctor`: what this machine can do, and the command that changes it.

mod checks;
mod finding;

use std::path::PathBuf;
use std::process::ExitCode;

use serde::Serialize;

use crate::failure::{EXIT_FAILED, Outcome};
use crate::table::{Align, render};
use crate::{print, print_json};

use checks::{kernel_release, run_all};
use finding::{Finding, State};

/// Options of `doctor`.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Prints a line for each part of the machine that blkq uses: `ok`, `limited` (works, with
restrictions) or `missing`, and below it the command that enables the rest. Nothing is changed. The
exit status is 0 if images can be served over NBD to other programs of this machine and the
certificates, if given, can be used.

Examples:
  blkq doctor
  blkq doctor --tls-certificates /etc/blkq/tls
  blkq doctor --json | jq -r '.checks[] | select(.state != \"ok\") | .cure'")]
pub struct Args {
    /// Check also the certificates in DIR, as for `blkq attach --tls-certificates`
    #[arg(long, value_name = "DIR")]
    tls_certificates: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// The output of `--json`.
#[derive(Serialize)]
struct Page {
    version: &'static str,
    kernel: String,
    /// Whether images can be served.
    works: bool,
    checks: Vec<Finding>,
}

impl Page {
    fn new(checks: Vec<Finding>) -> Page {
        let works = !checks.iter().any(|check| check.needed && check.is_missing());
        Page { version: env!("CARGO_PKG_VERSION"), kernel: kernel_release(), works, checks }
    }

    /// Whether a part is missing for which the user asked.
    fn lacks_asked(&self) -> bool {
        self.checks.iter().any(|check| check.asked && check.is_missing())
    }

    fn text(&self) -> String {
        let mut rows = Vec::new();
        for Finding { name, state, found, cure, .. } in &self.checks {
            rows.push([(*name).to_owned(), state.name().to_owned(), found.clone()]);
            rows.extend(cure.iter().map(|cure| [String::new(), String::new(), format!("cure: {cure}")]));
        }
        let all_ok = self.checks.iter().all(|check| check.state == State::Ok);
        let verdict = match (self.works, self.lacks_asked(), all_ok) {
            (true, false, true) => "All of blkq works here.",
            (true, false, false) => "Images can be served over NBD. What is not marked ok above is optional.",
            (true, true, _) => "Images can be served over NBD, but not with these certificates.",
            (false, ..) => "Images cannot be served here: see what is missing above.",
        };
        let Page { version, kernel, .. } = self;
        format!("blkq {version} on Linux {kernel}\n\n{}\n{verdict}\n", render([Align::Left; 3], &rows))
    }
}

impl Args {
    /// Prints the page.
    ///
    /// # Errors
    /// If it cannot be printed.
    pub fn run(self) -> Outcome<ExitCode> {
        let page = Page::new(run_all(self.tls_certificates.as_deref()));
        if self.json {
            print_json(&page)?;
        } else {
            print(&page.text())?;
        }
        Ok(if page.works && !page.lacks_asked() { ExitCode::SUCCESS } else { ExitCode::from(EXIT_FAILED) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_works_unless_a_needed_part_is_missing() {
        let parts = [
            Finding::ok("a", "there").needed(),
            Finding::limited("b", "less", "raise it").needed(),
            Finding::missing("c", "not there", "install it"),
        ];
        let page = Page::new(parts.to_vec());
        assert!(page.works && page.text().contains("served over NBD"), "{}", page.text());
        let lines: Vec<String> =
            page.text().lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(
            lines[2..7],
            ["a ok there", "b limited less", "cure: raise it", "c missing not there", "cure: install it"]
        );
        assert!(Page::new(vec![Finding::ok("a", "there")]).text().ends_with("All of blkq works here.\n"));
        let page = Page::new(vec![Finding::missing("TLS", "not there", "make it").asked()]);
        assert!(page.works && page.lacks_asked() && page.text().contains("but not with these certificates"));
        let page = Page::new(vec![Finding::missing("c", "not there", "install it").needed()]);
        assert!(!page.works && page.text().contains("cannot be served"));
    }
}
