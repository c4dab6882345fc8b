//! Lists and finds devices, described by their daemons. Parses the addresses of a device that `attach` and `show` print.

use std::ffi::OsStr;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use blkq_protocol::control::{Request, ask_if_there, call, no_such_device};
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::info::{DeviceInfo, FileId, is_behind};
use blkq_protocol::options::Address;
use blkq_protocol::state::{Fate, Found, Remains, StateDir, check_name};
use clap::builder::{OsStringValueParser, TypedValueParser};
use clap_complete::engine::{ArgValueCandidates, CompletionCandidate};
use serde::Serialize;

use crate::config::{Configured, configured, files};
use crate::launch::unescape;

#[derive(Serialize, Debug)]
#[serde(untagged)]
pub enum Entry {
    /// The daemon described the device.
    Device(Box<DeviceInfo>),
    Remains(Box<Remains>),
    /// The device is configured but not attached.
    Configured(Box<Configured>),
    /// The daemon does not answer, or the configuration file is malformed. `error` does not begin with the name of the
    /// device.
    Silent {
        name: String,
        error: String,
    },
}

impl Entry {
    pub fn name(&self) -> &str {
        match self {
            Entry::Device(info) => &info.name,
            Entry::Remains(remains) => &remains.name,
            Entry::Configured(device) => &device.name,
            Entry::Silent { name, .. } => name,
        }
    }

    /// Why no daemon describes the device; `None` for a device that is not attached.
    pub fn failure(&self) -> Option<Failure> {
        match self {
            Entry::Device(_) | Entry::Configured(_) => None,
            Entry::Remains(remains) => Some(remains.failure()),
            Entry::Silent { name, error } => Some(Failure::new(format!("{name}: {error}"))),
        }
    }
}

/// All devices, sorted by name. Nothing is changed, and no lock is taken.
pub fn all(dir: &StateDir) -> Outcome<Vec<Entry>> {
    let entry = |name: String| {
        inspect(dir, &name).unwrap_or_else(|failure| {
            Some(Entry::Silent { error: failure.without_object(&name).to_owned(), name })
        })
    };
    Ok(dir.names()?.into_iter().filter_map(entry).collect())
}

/// The devices of the configuration files that are not among `entries`, sorted by name.
pub fn not_attached(entries: &[Entry]) -> Outcome<Vec<Entry>> {
    let entry = |path: PathBuf| match configured(&path) {
        Ok(device) => Entry::Configured(Box::new(device)),
        Err(failure) => {
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            Entry::Silent { name, error: failure.to_string() }
        }
    };
    let is_attached = |other: &Entry| entries.iter().any(|entry| entry.name() == other.name());
    Ok(files()?.into_iter().map(entry).filter(|entry| !is_attached(entry)).collect())
}

/// Describes the device `name`. Returns `None` if there is no such device.
pub fn inspect(dir: &StateDir, name: &str) -> Outcome<Option<Entry>> {
    if let Some(info) = call::<DeviceInfo>(dir, name, &Request::Show {})? {
        // Commands act on the device of this name, even if its daemon was taken over and reports another name.
        return Ok(Some(Entry::Device(Box::new(DeviceInfo { name: name.to_owned(), ..info }))));
    }
    Ok(match dir.inspect(name)? {
        Found::Nothing => None,
        Found::Busy(busy) => Some(Entry::Silent { name: name.to_owned(), error: busy }),
        Found::Remains(remains) => Some(Entry::Remains(remains)),
    })
}

/// The name of the device that `word` refers to: by its name, by a path of its image, or by an export (a URI,
/// `/dev/ublkb0`, `ublkb0`, or a link to the node). Returns `None` if there is no such device. Fails if
/// `word` is ambiguous: several devices have that image, or it is the name of one device and the image or the
/// node of another.
pub fn name_of(dir: &StateDir, word: impl AsRef<OsStr>) -> Outcome<Option<String>> {
    let bytes = word.as_ref();
    let target = Target::of(bytes);
    let name = bytes.to_str().filter(|name| check_name(name).is_ok());
    if let Some(word) = name.filter(|name| dir.file(name, ".lock").exists()) {
        let exists = target.file.is_some() || target.node.exists();
        let others = if exists && !target.is(dir, word) { target.devices(dir)? } else { Vec::new() };
        let Some(other) = others.first() else { return Ok(Some(word.to_owned())) };
        let (what, path) = match target.file {
            Some(_) => ("image", format!("./{word}")),
            None => ("node", format!("/dev/{word}")),
        };
        return Err(Failure::new(format!(
            "{word} is the name of a device, and the {what} of the device {other}; for the latter, use {path} or {other}"
        )));
    }
    let mut names = target.devices(dir)?;
    if names.len() > 1 {
        // A device that serves the image takes precedence over dead ones that served it.
        let is_dead =
            |name: &String| matches!(dir.inspect(name), Ok(Found::Remains(it)) if it.state == Fate::Dead);
        let (dead, live): (Vec<_>, Vec<_>) = names.into_iter().partition(is_dead);
        names = if live.is_empty() { dead } else { live };
    }
    if names.len() > 1 {
        let (word, names) = (bytes.display(), names.join(", "));
        return Err(Failure::new(format!("{word} is attached as {names}; use one of these names")));
    }
    Ok(names.pop())
}

/// A word of the user, interpreted as an image or an export.
struct Target<'a> {
    word: &'a OsStr,
    file: Option<FileId>,
    /// `/dev/WORD`, or the target of that link.
    node: PathBuf,
}

impl Target<'_> {
    fn of(word: &OsStr) -> Target<'_> {
        let node = Path::new("/dev").join(word);
        let node = node.canonicalize().unwrap_or(node);
        Target { word, file: FileId::of(word), node }
    }

    fn is(&self, dir: &StateDir, name: &str) -> bool {
        let is_at = |exports: &[String]| {
            exports.iter().any(|export| {
                OsStr::new(export) == self.word && is_recorded(dir, name, export)
                    || Path::new(export) == self.node
            })
        };
        match call::<DeviceInfo>(dir, name, &Request::Show {}) {
            Ok(Some(info)) => is_at(&info.exports) || is_behind(Path::new(self.word), &info),
            // If the daemon is dead or does not answer, use its state file.
            _ => dir.read_state(name).is_some_and(|state| {
                is_at(&state.exports) || self.file.is_some() && FileId::of(state.image_path()) == self.file
            }),
        }
    }

    fn devices(&self, dir: &StateDir) -> Outcome<Vec<String>> {
        let mut names = dir.names()?;
        names.retain(|name| self.is(dir, name));
        Ok(names)
    }
}

/// Whether the commands that attached the device recorded that it listens at `export`. True for exports that are not
/// addresses. A daemon that was taken over could claim the address of another device, as it writes the exports itself.
fn is_recorded(dir: &StateDir, name: &str, export: &str) -> bool {
    let Some(place) = Place::parse(export) else { return true };
    let recorded = |name: &str| dir.read_state(name)?.attach_options?.read().ok();
    let Some(options) = recorded(name) else { return false };
    // The state directory may have two paths.
    let is_same = |one: &Path, other: &Path| {
        one == other || FileId::of(one).is_some_and(|file| FileId::of(other) == Some(file))
    };
    let own = |suffix| dir.file(name, suffix);
    match &place {
        Place::VhostUser(path) => is_same(path, &options.vhost_socket.unwrap_or_else(|| own(".vhost"))),
        Place::Nbd { address: NbdAddress::Unix(path), .. } if options.listen.is_empty() => {
            is_same(path, &own(".nbd"))
        }
        Place::Nbd { address, .. } => options.listen.iter().any(|listen| match (listen, address) {
            (Address::Unix(path), NbdAddress::Unix(claimed)) => is_same(path, claimed),
            (Address::Tcp(host, 0), NbdAddress::Tcp(claimed_host, _)) => {
                // The kernel chose a free port, which is not that of another device.
                let has_recorded = |other: &String| {
                    let listen = recorded(other).map_or_else(Vec::new, |options| options.listen);
                    other != name && listen.iter().any(|listen| is_tcp(listen, address))
                };
                is_host(host, claimed_host) && dir.names().is_ok_and(|names| !names.iter().any(has_recorded))
            }
            _ => is_tcp(listen, address),
        }),
    }
}

/// Whether the server of an attach option can have the address `claimed`.
fn is_tcp(listen: &Address, claimed: &NbdAddress) -> bool {
    matches!((listen, claimed), (Address::Tcp(host, port), NbdAddress::Tcp(claimed_host, claimed_port))
        if port.to_string() == *claimed_port && is_host(host, claimed_host))
}

/// `claimed` is a numeric address. A `host` that is a name may have any address.
fn is_host(host: &str, claimed: &str) -> bool {
    host.parse::<IpAddr>().map_or(true, |host| claimed.parse() == Ok(host))
}

/// A word that refers to a device, as text. A word that is not UTF-8 can only be the path of an image; it is
/// replaced by the name of the device that has the image. Fails as [`name_of`].
pub fn word_of(word: &OsStr) -> Outcome<String> {
    let name = match word.to_str() {
        Some(text) => Some(text.to_owned()),
        None => name_of(&StateDir::locate()?, word)?,
    };
    Ok(name.unwrap_or_else(|| word.to_string_lossy().into_owned()))
}

/// The device on which a command acts.
#[derive(clap::Args, Debug)]
pub struct DeviceArg {
    /// The device, by its name, image, URI or node in /dev
    #[arg(value_parser = device_parser(), add = device_names(), value_name = "DEVICE")]
    pub word: String,
}

impl DeviceArg {
    /// The state directory, and the name of the device, which must exist.
    pub fn find(&self) -> Outcome<(StateDir, String)> {
        let dir = StateDir::locate()?;
        let name = named(&dir, &self.word)?;
        Ok((dir, name))
    }

    /// Calls `act` for the device, which must exist. Its failure is prefixed with `verb` and the word of the user.
    pub fn act<T>(&self, verb: &str, act: impl FnOnce(&StateDir, &str) -> Outcome<T>) -> Outcome<T> {
        let (dir, name) = self.find()?;
        act(&dir, &name).map_err(|e| e.during(format_args!("{verb} {}", self.word)))
    }
}

/// Completes the names of devices. Their daemons are not asked, because they may hang.
pub fn device_names() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let names = StateDir::locate().and_then(|dir| dir.names()).unwrap_or_default();
        names.into_iter().map(CompletionCandidate::new).collect()
    })
}

pub fn device_parser() -> impl TypedValueParser<Value = String> {
    OsStringValueParser::new().try_map(|word| word_of(&word))
}

/// As [`name_of`], for a device that must exist.
pub fn named(dir: &StateDir, word: &str) -> Outcome<String> {
    name_of(dir, word)?.ok_or_else(|| no_such_device(word))
}

/// Describes the device that `word` refers to. Fails as [`name_of`], and if the daemon does not answer or
/// died.
pub fn find(dir: &StateDir, word: &str) -> Outcome<Option<DeviceInfo>> {
    let Some(name) = name_of(dir, word)? else { return Ok(None) };
    let info = ask_if_there::<DeviceInfo>(dir, &name, &Request::Show {})?;
    Ok(info.map(|info| DeviceInfo { name, ..info }))
}

/// An address to which clients connect.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Place {
    Nbd {
        address: NbdAddress,
        tls: bool,
        /// The name of the export; empty for the default export.
        export: String,
    },
    /// The socket for the front end of a virtual machine.
    VhostUser(PathBuf),
}

/// The address of an NBD server: a unix socket, or host and port.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NbdAddress {
    Unix(PathBuf),
    Tcp(String, String),
}

impl Place {
    /// Parses an export of a device. Returns `None` for a block device and for sockets that another program passed.
    pub fn parse(export: &str) -> Option<Place> {
        if let Some(path) = export.strip_prefix("vhost-user:") {
            return Some(Place::VhostUser(path.into()));
        }
        let (scheme, rest) = export.split_once("://")?;
        let text = |escaped: &str| unescape(escaped, "%").into_string().ok();
        if let Some(unix) = scheme.strip_suffix("+unix") {
            let (export, path) = rest.strip_prefix('/')?.split_once("?socket=")?;
            let address = NbdAddress::Unix(unescape(path, "%").into());
            return Some(Place::Nbd { address, tls: is_tls(unix)?, export: text(export)? });
        }
        let (address, export) = rest.split_once('/').unwrap_or((rest, ""));
        let (host, port) = address.rsplit_once(':')?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let address = NbdAddress::Tcp(host.to_owned(), port.to_owned());
        Some(Place::Nbd { address, tls: is_tls(scheme)?, export: text(export)? })
    }
}

fn is_tls(scheme: &str) -> Option<bool> {
    match scheme {
        "nbd" => Some(false),
        "nbds" => Some(true),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exports_of_devices_are_places() {
        let unix = |path: &str| NbdAddress::Unix(path.into());
        let tcp = |host: &str| NbdAddress::Tcp(host.to_owned(), "10809".to_owned());
        let nbd = |address, tls, export: &str| Some(Place::Nbd { address, tls, export: export.to_owned() });
        for (export, place) in [
            ("nbd+unix:///?socket=/run/blkq/a%20b.nbd", nbd(unix("/run/blkq/a b.nbd"), false, "")),
            ("nbds+unix:///d%25?socket=/run/d.nbd", nbd(unix("/run/d.nbd"), true, "d%")),
            ("nbd://127.0.0.1:10809", nbd(tcp("127.0.0.1"), false, "")),
            ("nbds://[::1]:10809/disk", nbd(tcp("::1"), true, "disk")),
            ("vhost-user:/run/d.vhost", Some(Place::VhostUser("/run/d.vhost".into()))),
            ("/dev/ublkb0", None),
            ("nbd on an inherited socket", None),
            ("http://a:1/", None),
        ] {
            assert_eq!(Place::parse(export), place, "{export}");
        }
    }
}
