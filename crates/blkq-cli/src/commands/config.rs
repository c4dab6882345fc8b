//! `blkq config`: checks configuration files, or applies them to attached devices.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use blkq_protocol::control::{Request, ask};
use blkq_protocol::daemon::Serve;
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::info::DeviceInfo;
use blkq_protocol::options::SettingGroups;
use blkq_protocol::state::StateDir;
use clap::ValueEnum;

use super::set::check_image_writable;
use crate::config::{ConfigFile, default_exports, files};
use crate::launch::systemd::unescape_instance;
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
