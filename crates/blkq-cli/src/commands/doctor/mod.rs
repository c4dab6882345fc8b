//! `blkq doctor`: checks what this machine supports, and prints the commands that enable the rest.

mod checks;

use std::path::PathBuf;
use std::process::ExitCode;

use blkq_protocol::failure::Outcome;
use serde::Serialize;

use crate::output::{Align, exit_code, print, print_json, render};

use checks::{Finding, State, kernel_release, run_all};

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

#[derive(Serialize)]
struct Page {
    version: &'static str,
    kernel: String,
    /// No part is missing that serving images needs.
    works: bool,
    checks: Vec<Finding>,
}

impl Page {
    fn new(checks: Vec<Finding>) -> Page {
        let works = !checks.iter().any(|check| check.needed && check.state == State::Missing);
        Page { version: env!("CARGO_PKG_VERSION"), kernel: kernel_release(), works, checks }
    }

    fn lacks_asked(&self) -> bool {
        self.checks.iter().any(|check| check.asked && check.state == State::Missing)
    }

    fn text(&self) -> String {
        let mut rows = Vec::new();
        for Finding { name, state, found, hint, .. } in &self.checks {
            rows.push([(*name).to_owned(), state.name().to_owned(), found.clone()]);
            rows.extend(hint.iter().map(|hint| [String::new(), String::new(), format!("hint: {hint}")]));
        }
        let all_ok = self.checks.iter().all(|check| check.state == State::Ok);
        let verdict = match (self.works, self.lacks_asked(), all_ok) {
            (true, false, true) => "This machine supports everything that blkq uses.",
            (true, false, false) => {
                "Images can be served over NBD. Everything not marked \"ok\" above is optional."
            }
            (true, true, _) => "Images can be served over NBD, but not with these certificates.",
            (false, ..) => "Images cannot be served on this machine. See the lines marked \"missing\" above.",
        };
        let Page { version, kernel, .. } = self;
        format!("blkq {version} on Linux {kernel}\n\n{}\n{verdict}\n", render([Align::Left; 3], &rows))
    }
}

impl Args {
    pub fn run(self) -> Outcome<ExitCode> {
        let page = Page::new(run_all(self.tls_certificates.as_deref()));
        let printed = if self.json { print_json(&page) } else { print(&page.text()) };
        printed.map(|()| exit_code(!page.works || page.lacks_asked()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_works_unless_a_needed_part_is_missing() {
        let parts = [
            Finding { name: "a", needed: true, ..Finding::ok("available") },
            Finding { name: "b", needed: true, ..Finding::limited("less", "raise it") },
            Finding { name: "c", ..Finding::missing("not found", "install it") },
        ];
        let page = Page::new(parts.to_vec());
        assert!(page.works && page.text().contains("served over NBD"), "{}", page.text());
        let lines: Vec<String> =
            page.text().lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(
            lines[2..7],
            ["a ok available", "b limited less", "hint: raise it", "c missing not found", "hint: install it"]
        );
        let all_ok = Page::new(vec![Finding { name: "a", ..Finding::ok("available") }]).text();
        assert!(all_ok.ends_with("This machine supports everything that blkq uses.\n"), "{all_ok}");
        let page =
            Page::new(vec![Finding { name: "TLS", asked: true, ..Finding::missing("not found", "make it") }]);
        assert!(page.works && page.lacks_asked() && page.text().contains("but not with these certificates"));
        let page = Page::new(vec![Finding {
            name: "c",
            needed: true,
            ..Finding::missing("not found", "install it")
        }]);
        assert!(!page.works && page.text().contains("cannot be served"));
    }
}
