//! `blkq systemd-generator`: orders the services of configured devices after the mounts that contain their
//! files. A systemd generator: see systemd.generator(7).

use std::fs;
use std::path::{Path, PathBuf};

use blkq_protocol::failure::{Failure, Outcome, print_error};

use crate::config::{ConfigFile, files};
use crate::launch::systemd::escape_instance;

/// systemd reads drop-ins in the order of their names: this one after those of most generators, and before
/// those of an administrator, which begin with higher numbers by convention.
const DROP_IN: &str = "50-blkq-mounts.conf";

#[derive(clap::Args, Debug)]
#[command(after_help = "\
systemd runs this command at boot and at each daemon-reload, through
system-generators/blkq-generator. Each service blkq@NAME is ordered after the mounts, including
network mounts, that contain the files named in /etc/blkq/NAME.toml, and stops before they are
unmounted.")]
pub struct Args {
    /// The directory to write to
    directory: PathBuf,
    /// The directories for units of higher and of lower priority, which are not used
    #[arg(num_args = 0..=2)]
    others: Vec<PathBuf>,
}

/// A file with a mistake is reported and skipped, so that it does not affect other devices. The service
/// of that device reports the mistake again.
pub fn run(args: Args) -> Outcome {
    let failures = files()?.into_iter().filter_map(|path| write_drop_in(&path, &args.directory).err());
    failures.for_each(|failure| print_error(&failure));
    Ok(())
}

fn write_drop_in(path: &Path, directory: &Path) -> Outcome {
    let file = ConfigFile::open(path)?;
    let mut options = file.options().map_err(|fault| fault.failure(path))?;
    let name = file.name();
    let paths: Vec<String> = options.paths_mut().into_iter().filter_map(|(_, path)| quoted(path)).collect();
    if paths.is_empty() {
        return Ok(());
    }
    // In a unit file, `%` would begin a specifier.
    let source = path.display().to_string().replace('%', "%%").replace(char::is_control, "?");
    let text = format!("[Unit]\nSourcePath={source}\nRequiresMountsFor={}\n", paths.join(" "));
    let unit = directory.join(format!("blkq@{}.service.d", escape_instance(&name)));
    let written = fs::create_dir_all(&unit).and_then(|()| fs::write(unit.join(DROP_IN), text));
    written.map_err(|e| Failure::new(format!("{}: {e}", unit.display())))
}

/// `None` if a unit file cannot contain `path`: it is not UTF-8, or has control characters.
fn quoted(path: &Path) -> Option<String> {
    let text = path.to_str().filter(|text| !text.contains(char::is_control))?;
    Some(format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"").replace('%', "%%")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_quoted_for_unit_files() {
        let word = |path: &str| quoted(Path::new(path));
        assert_eq!(word("/srv/a b.img").as_deref(), Some(r#""/srv/a b.img""#));
        assert_eq!(word(r#"/srv/50%\"x""#).as_deref(), Some(r#""/srv/50%%\\\"x\"""#));
        assert_eq!(word("/srv/a\nWants=b"), None);
    }
}
