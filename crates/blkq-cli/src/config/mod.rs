//! Configuration files: `/etc/blkq/NAME.toml` contains the options of one device, in TOML.
//!
//! The keys are `image` and the long names of the options of `attach`. A file is converted to the words of a
//! command line (`words`), so that files and command lines are parsed by the same definition,
//! [`AttachOptions`].

mod words;

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use blkq::text::shell_word;
use blkq_drivers::DriverSpec;
use blkq_protocol::daemon::{Obstacle, Serve};
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::options::{
    AttachOptions, Export, Format, Key, SettingGroups, image_text, is_earlier_option,
};
use blkq_protocol::state::check_name;
use blkq_protocol::system::if_exists;
use clap::parser::ValueSource;
use clap::{Arg, Command, Id};
use serde::Serialize;

use crate::launch::is_activated;

use words::{Parsed, Words};

pub use words::Fault;

/// The environment variable that replaces [`DIRECTORY`].
pub const DIRECTORY_VARIABLE: &str = "BLKQ_CONFIG_DIR";
pub const DIRECTORY: &str = "/etc/blkq";
const SUFFIX: &str = "toml";
/// The file with defaults for all devices, and its only key: the option of `attach` whose default it sets.
const DEFAULTS_FILE: &str = "defaults";
const DEFAULTS_KEY: &str = "export";
/// The largest file that is read. All options together need much less.
const BYTES_MAX: u64 = 64 << 10;

/// A file in which each key and its value are valid. The rules between keys have not been checked yet.
#[derive(Debug)]
pub struct ConfigFile {
    path: PathBuf,
    keys: Vec<Words>,
}

/// A configured device, as `blkq list --configured --json` prints it.
#[derive(Serialize, Debug)]
pub struct Configured {
    pub name: String,
    /// Always `configured`. Devices whose daemons have died have the same key with another value.
    pub state: &'static str,
    /// The image, in the words of the command line.
    pub image: String,
    pub config: PathBuf,
}

impl ConfigFile {
    /// As [`ConfigFile::read`]. Fails with the first mistake, and a hint if there are more.
    pub fn open(path: &Path) -> Outcome<ConfigFile> {
        ConfigFile::read(path).map_err(|faults| {
            let (first, count) = (faults[0].failure(path), faults.len());
            let check = format!("`blkq config check {}` reports all {count} mistakes", shell_word(path));
            if count == 1 { first } else { Failure::new(format!("{first}; {check}")) }
        })
    }

    /// The error lists all mistakes that concern single lines, in the order of the lines.
    pub fn read(path: &Path) -> Result<ConfigFile, Vec<Fault>> {
        let text = read_text(path).map_err(|e| vec![Fault::of_file(e.to_string())])?;
        let file = ConfigFile { path: path.to_owned(), keys: words::parse(&text).all()? };
        file.check_name().map_err(|fault| vec![fault])?;
        Ok(file)
    }

    fn check_name(&self) -> Result<(), Fault> {
        let name = self.name();
        check_name(&name)
            .map_err(|rule| Fault::of_file(format!("{name:?} is not a valid device name: {rule}")))
    }

    /// The name of the device: the value of the key `name`, or else the name of the file without its suffix.
    pub fn name(&self) -> String {
        let named = self.find("name").and_then(Words::value);
        named.unwrap_or_else(|| self.path.file_stem().unwrap_or_default().to_string_lossy().into_owned())
    }

    /// The keys that `blkq set` can change, with their values, for a device that has the settings of
    /// `groups`. The other keys are left out, because `blkq set` refuses a setting that the device does not
    /// have. The group is left out, too: it may have been changed live, an older daemon cannot change it, and
    /// one setting that is refused would keep all others from being applied.
    pub fn settings(&self, groups: SettingGroups) -> Vec<(String, String)> {
        let setting = |key: &Words| {
            let inverse = key.key.strip_prefix("no-");
            let name = inverse.unwrap_or(&key.key);
            // A key with the value false has no words. `autoclear = false` means autoclear=off, `no-merge =
            // false` means merge=on.
            let is_on = key.words.is_empty() == inverse.is_some();
            let value = key.value().unwrap_or_else(|| if is_on { "on" } else { "off" }.to_owned());
            let is_setting = groups.has(name) || is_earlier_option(&key.key);
            (name != Key::Group.row().name && is_setting).then(|| (name.to_owned(), value))
        };
        self.keys.iter().filter_map(setting).collect()
    }

    fn check_has_image(&self) -> Result<(), Fault> {
        let missing = || "the key image is missing; add a line such as image = \"/srv/disk.img\"".to_owned();
        self.find(words::IMAGE).map(|_| ()).ok_or_else(|| self.fault(missing()))
    }

    /// The option --name with the name of the file, if the file has no key `name`.
    fn implied_name(&self) -> Option<String> {
        self.find("name").is_none().then(|| format!("--name={}", self.name()))
    }

    /// Checks the rules between the options, and the rules for services.
    pub fn options(&self) -> Result<AttachOptions, Fault> {
        let mut options = self.attach_options()?;
        self.faults_of_service(&mut options).into_iter().next().map_or(Ok(options), Err)
    }

    /// Checks the rules between the options.
    pub fn attach_options(&self) -> Result<AttachOptions, Fault> {
        let options = self.unchecked_options()?;
        options.check().map(|()| options).map_err(|failure| self.fault(failure.to_string()))
    }

    fn unchecked_options(&self) -> Result<AttachOptions, Fault> {
        self.check_has_image()?;
        let words = self.keys.iter().flat_map(|key| key.words.iter().cloned());
        words::options(self.implied_name().into_iter().chain(words)).map_err(|text| self.fault(text))
    }

    /// A mistake in the first option that `text` names, or in the file as a whole.
    fn fault(&self, text: String) -> Fault {
        Fault { line: self.line_of(&text), text }
    }

    /// Returns all mistakes in the file at `path`, in the order of the lines: invalid keys and values, violated rules
    /// between options and for services, and reasons for which `attach` would refuse the device on this machine.
    pub fn faults<D: Serve>(path: &Path) -> Vec<Fault> {
        let text = match read_text(path) {
            Ok(text) => text,
            Err(e) => return vec![Fault::of_file(e.to_string())],
        };
        let Parsed { keys, mut faults, faulty } = words::parse(&text);
        if keys.is_empty() && !faults.is_empty() {
            return faults;
        }
        let file = ConfigFile { path: path.to_owned(), keys };
        // A mistake that names an invalid key may only be a consequence of the invalid key.
        let meant: Vec<String> = faulty.iter().filter_map(|key| words::similar_to(key)).collect();
        let follows = |text: &str| {
            let mut keys = faulty.iter().chain(&meant);
            keys.any(|key| {
                text.contains(&format!("--{key}"))
                    || text.strip_prefix(key.as_str()).is_some_and(|rest| rest.starts_with([':', ' ']))
            })
        };
        match file.check_name().and_then(|()| file.unchecked_options()) {
            Ok(options) => {
                faults.extend(file.faults_together::<D>(options).into_iter().filter(|it| !follows(&it.text)))
            }
            Err(_) if faulty.iter().chain(&meant).any(|key| key == words::IMAGE) => {}
            Err(fault) => faults.push(fault),
        }
        faults.sort_by_key(|fault| fault.line);
        faults
    }

    /// Returns the mistakes in options that are each valid.
    fn faults_together<D: Serve>(&self, mut options: AttachOptions) -> Vec<Fault> {
        let mistakes = options.mistakes();
        let mut faults: Vec<_> = mistakes.iter().map(|mistake| self.fault(mistake.to_string())).collect();
        faults.extend(self.faults_of_service(&mut options));
        // A relative path is already reported, and would be another file for a service.
        let relative = options.paths_mut().into_iter().filter(|(_, path)| path.is_relative());
        let relative: Vec<&str> = relative.map(|(key, _)| key).collect();
        for Obstacle { option, failure } in D::obstacles(&options) {
            if !relative.contains(&option) {
                let line = self.find(option).map_or(0, |key| key.line);
                faults.push(Fault { line, text: format!("{option}: {failure}") });
            }
        }
        faults
    }

    /// The options whose meaning depends on the directory in which a service is started, or on the content of the
    /// image.
    fn faults_of_service(&self, options: &mut AttachOptions) -> Vec<Fault> {
        let mut faults = Vec::new();
        let fault = |key: &str, text: String| Fault { line: self.line_of(&format!("--{key}")), text };
        let stem = self.path.file_stem().unwrap_or_default();
        if OsStr::new(&self.name()) != stem {
            let text = format!(
                "the name {} differs from the name of the file, {}, which services use; rename the file, or omit name",
                self.name(),
                stem.display()
            );
            faults.push(fault("name", text));
        }
        if options.format == Some(Format::Auto) {
            let text = "format must be raw or qcow2, not auto, so that a service always opens the image the same way";
            faults.push(fault("format", text.to_owned()));
        }
        let relative = options.paths_mut().into_iter().filter(|(_, path)| path.is_relative());
        faults.extend(relative.map(|(key, path)| {
            let path = path.display();
            fault(key, format!("{key}: the path {path} must be absolute, because services run in /"))
        }));
        faults
    }

    /// The line of the first option that `text` names, as `--KEY`; 0 if there is none.
    fn line_of(&self, text: &str) -> usize {
        let options = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'));
        let mut names = options.filter_map(|word| word.strip_prefix("--"));
        names.find_map(|name| self.find(name)).map_or(0, |key| key.line)
    }

    fn find(&self, name: &str) -> Option<&Words> {
        self.keys.iter().find(|key| key.key == name)
    }
}

/// The text of a configuration file. Opening a FIFO or a device must not block this process, and is refused.
fn read_text(path: &Path) -> io::Result<String> {
    let file = fs::File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    let other = |text: String| Err(io::Error::other(text));
    if !file.metadata()?.is_file() {
        return other("not a regular file".to_owned());
    }
    let mut bytes = Vec::new();
    file.take(BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > BYTES_MAX {
        return other(format!("the file is larger than {} KiB", BYTES_MAX >> 10));
    }
    String::from_utf8(bytes).or_else(|_| other("the file is not valid UTF-8".to_owned()))
}

pub fn directory() -> PathBuf {
    std::env::var_os(DIRECTORY_VARIABLE).filter(|dir| !dir.is_empty()).map_or(DIRECTORY.into(), Into::into)
}

/// The paths of the files in the directory, sorted; empty if the directory does not exist.
pub fn files() -> Outcome<Vec<PathBuf>> {
    let dir = directory();
    let failed = |e: io::Error| Failure::new(format!("cannot read the directory {}: {e}", dir.display()));
    let entries = if_exists(fs::read_dir(&dir)).map_err(failed)?.into_iter().flatten();
    let paths = entries.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>();
    let mut paths = paths.map_err(failed)?;
    paths.retain(|path| path.extension() == Some(OsStr::new(SUFFIX)));
    paths.sort();
    Ok(paths)
}

/// The device of the file at `path`. Fails with the first mistake in the file.
pub fn configured(path: &Path) -> Outcome<Configured> {
    let file = ConfigFile::read(path).map_err(|faults| faults[0].failure(path))?;
    let image = image_text(&file.options().map_err(|fault| fault.failure(path))?.image);
    Ok(Configured { name: file.name(), state: "configured", image, config: path.to_owned() })
}

/// The path of the configuration file of the device `name`. The file need not exist.
pub fn path_of(name: &str) -> PathBuf {
    directory().join(format!("{name}.{SUFFIX}"))
}

/// The options in the configuration file of the device `name`, or the first mistake in the file.
pub fn named(name: &str) -> Outcome<AttachOptions> {
    let path = path_of(name);
    ConfigFile::open(&path)?.options().map_err(|fault| fault.failure(&path))
}

/// Whether there is a configuration file of the device `name`, which names the file at the resolved path `image`.
pub fn names_image(name: &str, image: &Path) -> Outcome<bool> {
    let is_image = |path: &Path| path.canonicalize().is_ok_and(|path| path == image);
    Ok(is_configured(name) && matches!(named(name)?.image, DriverSpec::Image(ref path) if is_image(path)))
}

pub fn is_configured(name: &str) -> bool {
    !is_missing(&path_of(name))
}

/// `Path::exists` would return false for a file that this user may not inspect.
fn is_missing(path: &Path) -> bool {
    fs::symlink_metadata(path).is_err_and(|e| e.kind() == io::ErrorKind::NotFound)
}

/// The default exports; none if there is no file.
pub fn default_exports() -> Outcome<Vec<Export>> {
    let path = directory().join(DEFAULTS_FILE);
    if is_missing(&path) {
        return Ok(Vec::new());
    }
    let failed = |text: String| Failure::new(format!("{}: {text}", path.display()));
    let text = read_text(&path).map_err(|e| failed(e.to_string()))?;
    let keys = words::parse(&text).all().map_err(|faults| faults[0].failure(&path))?;
    if let Some(Words { key, line, .. }) = keys.iter().find(|key| key.key != DEFAULTS_KEY) {
        return Err(failed(format!("line {line}: {key}: the only key of this file is {DEFAULTS_KEY}")));
    }
    let image = [words::ANY_IMAGE.to_owned()];
    let given = keys.into_iter().flat_map(|key| key.words);
    words::options(image.into_iter().chain(given)).map(|options| options.exports).map_err(failed)
}

/// Adds the default exports to options that have no exports, unless systemd passes sockets or another option
/// excludes the default exports.
pub fn with_defaults(options: AttachOptions) -> Outcome<AttachOptions> {
    if !options.exports.is_empty() || is_activated() {
        return Ok(options);
    }
    let with = AttachOptions { exports: default_exports()?, ..options.clone() };
    Ok(if with.check().is_ok() { with } else { options })
}

/// Inserts the words of the configuration file of `attach --config` in front of the other words of the
/// command line. The command line has priority: an option of the file is left out if the command line
/// contains the same option, or one that conflicts with it.
pub fn expand(words: Vec<OsString>, command: impl FnOnce() -> Command) -> Outcome<Vec<OsString>> {
    if words.get(1).is_none_or(|word| word != "attach") {
        return Ok(words);
    }
    let optional = |attach: Command| attach.mut_arg(words::IMAGE, |image| image.required(false));
    let mut command = command().mut_subcommand("attach", optional);
    // A mistake in the command line is reported later, when all words are parsed.
    let Ok(matches) = command.try_get_matches_from_mut(&words) else { return Ok(words) };
    let (Some((_, given)), Some(attach)) = (matches.subcommand(), command.find_subcommand("attach")) else {
        return Ok(words);
    };
    let Some(path) = given.get_one::<PathBuf>("config") else { return Ok(words) };
    let file = ConfigFile::open(path).map_err(|e| e.during("attach"))?;
    if !given.contains_id(words::IMAGE) {
        file.check_has_image().map_err(|fault| fault.failure(path).during("attach"))?;
    }
    let is_given = |id: &Id| given.value_source(id.as_str()) == Some(ValueSource::CommandLine);
    let excludes = |one: &Arg, other: &Arg| attach.get_arg_conflicts_with(one).contains(&other);
    let is_overridden = |id: &Id| {
        let of_file = attach.get_arguments().find(|argument| argument.get_id() == id);
        let mut of_line = attach.get_arguments().filter(|other| is_given(other.get_id()));
        let overrides = |key: &Arg| of_line.any(|other| excludes(other, key) || excludes(key, other));
        is_given(id) || of_file.is_some_and(overrides)
    };
    let name = file.implied_name().filter(|_| !is_given(&Id::from("name")));
    let keys = file.keys.iter().filter(|key| !is_overridden(&key.id));
    let of_file = name.into_iter().chain(keys.flat_map(|key| key.words.iter().cloned()));
    Ok(words[..2].iter().cloned().chain(of_file.map(Into::into)).chain(words[2..].iter().cloned()).collect())
}

#[cfg(test)]
mod tests;
