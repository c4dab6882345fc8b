//! `blkq list`: the devices that there are.

use serde::Serialize;

use crate::control::{Called, Request, call, died};
use crate::failure::Outcome;
use crate::info::{DeviceInfo, StateFile};
use crate::size::format_size;
use crate::state::{Dead, StateDir};
use crate::table::{Align, render};
use crate::{complain, print, print_json};

/// Options of `list`.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Devices whose daemon was killed are cleared away, and named on stderr; but a kernel's block
device outlives its daemon: it stays listed, with the mode `orphan`, for `blkq recover` or
`blkq detach`.

Examples:
  blkq list
  blkq list --json | jq -r '.[].name'")]
pub struct Args {
    /// One JSON array of objects as `show --json` prints them; those of daemons that do
    /// not answer have "name" and "error" only, and orphans "image" and "exports" besides
    #[arg(long)]
    json: bool,
}

/// A line of the list.
#[derive(Serialize)]
#[serde(untagged)]
enum Entry {
    Device(Box<DeviceInfo>),
    Orphan { name: String, image: String, exports: Vec<String>, error: String },
    Silent { name: String, error: String },
}

impl Args {
    /// Prints the list.
    ///
    /// # Errors
    /// If the state directory cannot be read.
    pub fn run(self) -> Outcome {
        let dir = StateDir::locate()?;
        let mut entries = Vec::new();
        for name in dir.names()? {
            match call(&dir, &name, &Request::Show {}) {
                Ok(Called::Answered(info)) => entries.push(Entry::Device(info)),
                Ok(Called::Nobody) => match dir.clear_dead(&name) {
                    Ok(Dead::Cleared(last_words)) => complain(&died(&name, &last_words)),
                    Ok(Dead::Orphan(orphan)) => {
                        let error = orphan.refusal().to_string();
                        let StateFile { name, image, exports, .. } = orphan.state.clone();
                        entries.push(Entry::Orphan { name, image, exports, error });
                    }
                    // Either it has just gone, or its daemon is just starting or ending.
                    Ok(Dead::No) if dir.file(&name, ".lock").exists() => {
                        let error = "starting or ending".to_owned();
                        entries.push(Entry::Silent { name, error });
                    }
                    Ok(Dead::No) => {}
                    Err(failure) => complain(&failure),
                },
                Err(failure) => entries.push(Entry::Silent { name, error: failure.to_string() }),
            }
        }
        if self.json { print_json(&entries) } else { print(&table(&entries)) }
    }
}

fn table(entries: &[Entry]) -> String {
    if entries.is_empty() {
        return String::new();
    }
    let mut rows = vec![["NAME", "SIZE", "MODE", "DIRECT", "CLIENTS", "IMAGE", "EXPORT"].map(str::to_owned)];
    for entry in entries {
        match entry {
            Entry::Device(info) => rows.push([
                info.name.clone(),
                format_size(info.size),
                if info.read_only { "ro" } else { "rw" }.to_owned(),
                info.direct_io.effective.clone(),
                info.clients.len().to_string(),
                info.image.clone(),
                info.exports.join(" "),
            ]),
            Entry::Orphan { name, image, exports, .. } => {
                let [size, direct, clients] = ["-"; 3].map(str::to_owned);
                let (mode, exports) = ("orphan".to_owned(), exports.join(" "));
                rows.push([name.clone(), size, mode, direct, clients, image.clone(), exports]);
            }
            Entry::Silent { name, error } => {
                let [size, mode, direct, clients, image] = ["-"; 5].map(str::to_owned);
                rows.push([name.clone(), size, mode, direct, clients, image, format!("({error})")]);
            }
        }
    }
    use Align::{Left, Right};
    render([Left, Right, Left, Left, Right, Left, Left], &rows)
}
