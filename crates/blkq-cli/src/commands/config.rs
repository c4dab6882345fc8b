//! `blkq config`: checks configuration files, or applies them to attached devices.
//! `blkq systemd-generator`: orders the services of configured devices after the mounts that contain their
//! files. A systemd generator: see systemd.generator(7).

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use blkq_protocol::control::{Request, ask};
use blkq_protocol::daemon::Serve;
use blkq_protocol::failure::{Failure, Outcome, print_error};
use blkq_protocol::info::DeviceInfo;
use blkq_protocol::options::SettingGroups;
use blkq_protocol::state::StateDir;
use clap::ValueEnum;

use super::set::check_image_writable;
use crate::config::{ConfigFile, default_exports, files};
use crate::launch::{escape_instance, unescape_instance};
use crate::output::for_each;

#[derive(clap::Args, Debug)]
#[command(after_help = "\
A file describes one device, which is named after the file. Its keys are `image` and the long
options of `blkq attach` without the dashes. An option that has no value is true, and an option that
may be given several times is a list. Each mistake is reported on standard error, in one line
with its line number.

Examples:
  blkq config check
  blkq config check /etc/blkq/data.toml
  blkq config apply /etc/blkq/data.toml
  blkq attach --config /etc/blkq/data.toml")]
pub struct Args {
    /// The action to take
    action: Action,
    /// The configuration files [default: all *.toml files in /etc/blkq, and the file defaults there]
    files: Vec<PathBuf>,
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Action {
    /// Report the mistakes in the files, and what keeps `attach` from serving them on this machine
    Check,
    /// Set the settings of the attached devices to those in the files, as far as `blkq set` can change them,
    /// and read the certificates again
    Apply,
}

/// Applies the settings in the file to the attached device, which also reads its certificates again. If any
/// of this fails, nothing changes.
fn apply(path: &Path) -> Outcome {
    let file = ConfigFile::open(path)?;
    let options = file.attach_options().map_err(|fault| fault.failure(path))?;
    let (dir, name) = (StateDir::locate()?, file.name());
    let settings = file.settings(SettingGroups::new(&options));
    // The file of a writable device may contain `read-only = false`, which changes nothing then.
    let info: DeviceInfo = ask(&dir, &name, &Request::Show {})?;
    if info.read_only {
        check_image_writable(&dir, &name, &settings)
            .map_err(|e| e.during(format_args!("{name}: read-only=off")))?;
    }
    ask::<()>(&dir, &name, &Request::Apply { settings }).map_err(|e| e.during(&name))
}

/// Undoes systemd's escaping in the name of a file: the unit blkq@.service passes `/etc/blkq/%i.toml`, in
/// which the name of the device is escaped.
fn unescaped(path: &Path) -> PathBuf {
    let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
    let name = unescape_instance(name);
    if name.contains('/') { path.to_owned() } else { path.with_file_name(name) }
}

pub fn run<D: Serve>(args: Args) -> Outcome<ExitCode> {
    let are_all = args.files.is_empty();
    let files = if are_all { files()? } else { args.files };
    if args.action == Action::Apply {
        return for_each(&files, |path| apply(&unescaped(path)));
    }
    let mut failures: Vec<Failure> =
        are_all.then(default_exports).and_then(Result::err).into_iter().collect();
    for path in &files {
        failures.extend(ConfigFile::faults::<D>(path).iter().map(|fault| fault.failure(path)));
    }
    for_each(&failures, |failure| Err(failure.clone()))
}

/// systemd reads drop-ins in the order of their names: this one after those of most generators, and before
/// those of an administrator, which begin with higher numbers by convention.
const DROP_IN: &str = "50-blkq-mounts.conf";

#[derive(clap::Args, Debug)]
#[command(after_help = "\
systemd runs this command at boot and at each daemon-reload, through
system-generators/blkq-generator. Each service blkq@NAME is ordered after the mounts, including
network mounts, that contain the files named in /etc/blkq/NAME.toml, and stops before they are
unmounted.")]
pub struct GeneratorArgs {
    /// The directory to write to
    directory: PathBuf,
    /// The directories for units of higher and of lower priority, which are not used
    #[arg(num_args = 0..=2)]
    others: Vec<PathBuf>,
}

/// A file with a mistake is reported and skipped, so that it does not affect other devices. The service
/// of that device reports the mistake again.
pub fn generate(args: GeneratorArgs) -> Outcome {
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
