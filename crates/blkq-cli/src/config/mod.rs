//! Configuration files: the options of one device each, in TOML, `/etc/blkq/NAME.toml`.
//!
//! A key is the long name of an option of `attach`, and `image`. Both are read by the same definition
//! ([`AttachOptions`]): a file is turned into the words of a command line.

mod fault;
mod words;

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use blkq::drivers::DriverSpec;
use clap::parser::ValueSource;
use clap::{Arg, Command, Id};
use serde::Serialize;

use crate::failure::{Failure, Outcome};
use crate::options::{AttachOptions, Format, image_text};
use crate::settings::SettingGroups;
use crate::state::check_name;
use words::Words;

pub use fault::Fault;

/// Names another directory than [`DIRECTORY`].
pub const DIRECTORY_VARIABLE: &str = "BLKQ_CONFIG_DIR";
/// The directory of the files.
pub const DIRECTORY: &str = "/etc/blkq";
const SUFFIX: &str = "toml";
/// More than all options take.
const BYTES_MAX: u64 = 64 << 10;

/// A file whose keys and values are understood, each for itself.
#[derive(Debug)]
pub struct ConfigFile {
    path: PathBuf,
    keys: Vec<Words>,
}

/// A configured device.
#[derive(Serialize, Debug)]
pub struct Configured {
    /// Its name.
    pub name: String,
    /// Always `configured`, where those of daemons that died have what they are.
    pub state: &'static str,
    /// The image, as the command line has it.
    pub image: String,
    /// The file.
    pub config: PathBuf,
}

impl ConfigFile {
    /// Reads `path`.
    ///
    /// # Errors
    /// All mistakes in single lines of it, in their order.
    pub fn read(path: &Path) -> Result<ConfigFile, Vec<Fault>> {
        let whole = |text: String| vec![Fault { line: 0, text }];
        let text = read_text(path).map_err(|e| whole(e.to_string()))?;
        let keys = words::parse(&text)?;
        let file = ConfigFile { path: path.to_owned(), keys };
        check_name(&file.name())
            .map_err(|rule| whole(format!("{:?} is no name of a device: {rule}", file.name())))?;
        Ok(file)
    }

    /// The name of the device: the file's own, unless it has the key.
    pub fn name(&self) -> String {
        let named = self.keys.iter().find(|key| key.key == "name").and_then(|key| key.value());
        named.unwrap_or_else(|| self.path.file_stem().unwrap_or_default().to_string_lossy().into_owned())
    }

    /// The keys that `blkq set` has too, with their values, of a device that has the groups `has`: for another one,
    /// attach takes what changes nothing.
    pub fn settings(&self, has: SettingGroups) -> Vec<(String, String)> {
        // A switch that is false has no word: it is off, or what it would switch off is on.
        let unset = self.keys.iter().filter(|key| key.words.is_empty()).filter_map(|key| {
            let (key, value) =
                key.key.strip_prefix("no-").map_or((key.key.as_str(), "off"), |key| (key, "on"));
            has.has(key).then(|| (key.to_owned(), value.to_owned()))
        });
        let setting = |word: &String| {
            let word = word.strip_prefix("--")?;
            let (key, value) = match (word.split_once('='), word.strip_prefix("no-")) {
                (Some(setting), _) => setting,
                (None, Some(key)) => (key, "off"),
                (None, None) => (word, "on"),
            };
            has.has(key).then(|| (key.to_owned(), value.to_owned()))
        };
        self.keys.iter().flat_map(|key| &key.words).filter_map(setting).chain(unset).collect()
    }

    fn has_image(&self) -> bool {
        self.keys.iter().any(|key| key.key == words::IMAGE)
    }

    fn no_image(&self) -> Fault {
        Fault { line: 0, text: "there is no image; add a line such as image = \"/srv/disk.img\"".into() }
    }

    /// The word for the name, if there is no key for it.
    fn implied_name(&self) -> Option<String> {
        let has_name = self.keys.iter().any(|key| key.key == "name");
        (!has_name).then(|| format!("--name={}", self.name()))
    }

    /// The options of the device, checked together, and for a service.
    ///
    /// # Errors
    /// The mistake.
    pub fn options(&self) -> Result<AttachOptions, Fault> {
        self.attach_options().and_then(|options| self.check_for_service(options))
    }

    /// The options of the device, checked together.
    ///
    /// # Errors
    /// The mistake.
    pub fn attach_options(&self) -> Result<AttachOptions, Fault> {
        if !self.has_image() {
            return Err(self.no_image());
        }
        let words = self.keys.iter().flat_map(|key| key.words.iter().cloned());
        let all = self.implied_name().into_iter().chain(words);
        let options = words::options(all).and_then(|options| match options.check() {
            Ok(()) => Ok(options),
            Err(failure) => Err(failure.to_string()),
        });
        options.map_err(|text| Fault { line: self.line_of(&text), text })
    }

    /// Rejects what would depend on how a service is started, or on what is in its image.
    fn check_for_service(&self, mut options: AttachOptions) -> Result<AttachOptions, Fault> {
        let fault = |key: &str, text: String| Fault { line: self.line_of(&format!("--{key}")), text };
        let stem = self.path.file_stem().unwrap_or_default();
        if OsStr::new(&self.name()) != stem {
            let text = format!(
                "the name {} is not {}, that of the file, by which services know the device; rename the file",
                self.name(),
                stem.display()
            );
            return Err(fault("name", text));
        }
        if options.format == Some(Format::Auto) {
            let text = "format: raw or qcow2 here: a service must open the same each time".to_owned();
            return Err(fault("format", text));
        }
        let relative = options.paths_mut().into_iter().find(|(_, path)| path.is_relative());
        let relative = relative.map(|(key, path)| {
            fault(key, format!("{key}: {}: paths are absolute here, as services run in /", path.display()))
        });
        relative.map_or(Ok(options), Err)
    }

    /// The line of the first option that is named in a mistake.
    fn line_of(&self, text: &str) -> usize {
        let options = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'));
        let mut names = options.filter_map(|word| word.strip_prefix("--"));
        let line = |name: &str| self.keys.iter().find(|key| key.key == name).map(|key| key.line);
        names.find_map(line).unwrap_or(0)
    }
}

/// The text of a file. A pipe or a device in its place is none, and must not block.
fn read_text(path: &Path) -> io::Result<String> {
    let file = fs::File::from(rustix::fs::open(
        path,
        rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    )?);
    let other = |text: String| Err(io::Error::other(text));
    if !file.metadata()?.is_file() {
        return other("it is no regular file".to_owned());
    }
    let mut bytes = Vec::new();
    file.take(BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > BYTES_MAX {
        return other(format!("it has more than {BYTES_MAX} bytes"));
    }
    String::from_utf8(bytes).or_else(|_| other("it is not UTF-8".to_owned()))
}

/// The directory of the files.
pub fn directory() -> PathBuf {
    std::env::var_os(DIRECTORY_VARIABLE).filter(|dir| !dir.is_empty()).map_or(DIRECTORY.into(), Into::into)
}

/// The files of the directory, by name; none if there is no directory.
///
/// # Errors
/// If it cannot be read.
pub fn files() -> Outcome<Vec<PathBuf>> {
    let dir = directory();
    let failed = |e: io::Error| Failure::new(format!("{}: {e}", dir.display()));
    let entries = match fs::read_dir(&dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let mut paths = entries
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<Vec<_>, _>>()
        .map_err(failed)?;
    paths.retain(|path| path.extension() == Some(OsStr::new(SUFFIX)));
    paths.sort();
    Ok(paths)
}

/// The devices of the directory: each, or the first mistake in its file.
///
/// # Errors
/// As [`files`].
pub fn configured() -> Outcome<Vec<(PathBuf, Outcome<Configured>)>> {
    let device = |path: &Path| {
        let file =
            ConfigFile::read(path).map_err(|faults| faults.first().map(|fault| fault.failure(path)))?;
        let options = file.options().map_err(|fault| Some(fault.failure(path)))?;
        let image = image_text(&options.image);
        Ok(Configured { name: file.name(), state: "configured", image, config: path.to_owned() })
    };
    let unknown = || Failure::new("it is not understood");
    let outcome = |path: PathBuf| {
        let outcome = device(&path).map_err(|failure: Option<Failure>| failure.unwrap_or_else(unknown));
        (path, outcome)
    };
    Ok(files()?.into_iter().map(outcome).collect())
}

/// The file of the device `name`, whether it is there or not.
pub fn path_of(name: &str) -> PathBuf {
    directory().join(format!("{name}.{SUFFIX}"))
}

/// The options that the file `NAME.toml` of the directory has.
///
/// # Errors
/// The first mistake in it.
pub fn named(name: &str) -> Outcome<AttachOptions> {
    let path = path_of(name);
    let file = ConfigFile::read(&path).map_err(|faults| first(&faults, &path))?;
    file.options().map_err(|fault| fault.failure(&path))
}

/// The image file that `NAME.toml` of the directory names; `None` if there is no such file, or it names none.
///
/// # Errors
/// The first mistake in it.
pub fn image_of(name: &str) -> Outcome<Option<PathBuf>> {
    // Not `exists()`, to which a file that may not be inspected does not exist.
    if fs::symlink_metadata(path_of(name)).is_err_and(|e| e.kind() == io::ErrorKind::NotFound) {
        return Ok(None);
    }
    match named(name)?.image {
        DriverSpec::Image(image) => Ok(Some(image)),
        _ => Ok(None),
    }
}

/// The first of several mistakes.
pub fn first(faults: &[Fault], path: &Path) -> Failure {
    let more = if faults.len() > 1 { "; blkq config check reports all" } else { "" };
    let first = faults.first().map_or_else(String::new, |fault| fault.failure(path).to_string());
    Failure::new(format!("{first}{more}"))
}

/// The words of the command line with those of the file that `attach --config` names before them, but
/// for options that the command line has itself, or that exclude one which it has.
///
/// # Errors
/// If the file is not understood.
pub fn expand(words: Vec<OsString>, command: impl FnOnce() -> Command) -> Outcome<Vec<OsString>> {
    if words.get(1).is_none_or(|word| word != "attach") {
        return Ok(words);
    }
    let optional = |attach: Command| attach.mut_arg(words::IMAGE, |image| image.required(false));
    let mut command = command().mut_subcommand("attach", optional);
    // The parser of the whole reports its mistakes.
    let Ok(matches) = command.try_get_matches_from_mut(&words) else { return Ok(words) };
    let (Some((_, given)), Some(attach)) = (matches.subcommand(), command.find_subcommand("attach")) else {
        return Ok(words);
    };
    let Some(path) = given.get_one::<PathBuf>("config") else { return Ok(words) };
    let file = ConfigFile::read(path).map_err(|faults| first(&faults, path).during("attach"))?;
    if !given.contains_id(words::IMAGE) && !file.has_image() {
        return Err(file.no_image().failure(path).during("attach"));
    }
    let is_given = |id: &Id| given.value_source(id.as_str()) == Some(ValueSource::CommandLine);
    let argument = |id: &Id| attach.get_arguments().find(|argument| argument.get_id() == id);
    let excludes =
        |one: &Arg, id: &Id| attach.get_arg_conflicts_with(one).iter().any(|other| other.get_id() == id);
    let is_overridden = |id: &Id| {
        let of_line = attach.get_arguments().filter(|other| is_given(other.get_id()));
        is_given(id)
            || of_line.into_iter().any(|other| {
                excludes(other, id) || argument(id).is_some_and(|argument| excludes(argument, other.get_id()))
            })
    };
    let mut all = words[..2].to_vec();
    if !is_given(&Id::from("name")) {
        all.extend(file.implied_name().map(OsString::from));
    }
    for key in file.keys.iter().filter(|key| !is_overridden(&key.id)) {
        all.extend(key.words.iter().map(Into::into));
    }
    all.extend_from_slice(&words[2..]);
    Ok(all)
}

#[cfg(test)]
mod tests;
