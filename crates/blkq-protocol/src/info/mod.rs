//! Descriptions of a device: the reply to `show`, and the state file.

mod file_id;

use std::path::{Path, PathBuf};

use blkq::text::shell_word;
use blkq_drivers::DriverSpec;
use blkq_export::ublk::Identity;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use crate::failure::{Failure, Outcome};
use crate::options::{AttachOptions, Export, Record};

pub use file_id::{FileId, RecordedBacking};

/// Maximum size of [`OlderState`] as JSON. The rest of `NAME.json` then fits in a page with it.
const OLDER_BYTES_MAX: usize = 3 << 10;

/// A device, as the daemon describes it. Sizes are in bytes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DeviceInfo {
    pub name: String,
    pub pid: u32,
    #[serde(default)]
    pub uptime_seconds: u64,
    #[serde(default)]
    pub state_directory: PathBuf,
    /// The daemon's log, or `None` if the log is standard error.
    #[serde(default)]
    pub log: Option<PathBuf>,
    /// The block device and the URIs under which clients reach the device.
    pub exports: Vec<String>,
    pub clients: Vec<ClientInfo>,
    /// The image's path, or `rbd:POOL/IMAGE`, `null:SIZE`, `ram:SIZE`.
    pub image: String,
    /// The driver: `loop`, `rbd`, `null`, `ram`.
    pub driver: String,
    pub size: u64,
    pub sector_size: u32,
    pub physical_sector_size: u32,
    pub read_only: bool,
    #[serde(default)]
    pub autoclear: bool,
    /// Number of requests that are held after I/O errors, until `blkq resume`.
    #[serde(default)]
    pub held: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<CommitInfo>,
    /// Whether flushes complete without making data durable.
    #[serde(default)]
    pub unsafe_flush_ignore: bool,
    /// Whether the kernel was asked to scan for partitions.
    #[serde(default)]
    pub partscan: bool,
    #[serde(default)]
    pub sandbox: Confinement,
    pub direct_io: DirectIoInfo,
    /// Daemons of older versions do not send this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attach_options: Option<Record>,
    /// The operations that the device supports besides reading and writing.
    pub capabilities: Vec<String>,
    #[serde(with = "Typed::<false>")]
    pub settings: Vec<(String, String)>,
    #[serde(with = "Typed::<true>")]
    pub driver_facts: Vec<(String, String)>,
    pub warnings: Vec<String>,
}

impl DeviceInfo {
    pub fn image_path(&self) -> PathBuf {
        image_path(&self.image, self.attach_options.as_ref())
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CommitInfo {
    /// The backing file into which the overlay is committed.
    pub into: String,
    /// The process that requested the commit.
    pub by: String,
    /// Number of bytes copied, including zeroes.
    pub copied_bytes: u64,
    /// `copied_bytes` plus the number of bytes still to be copied, as far as known. Data that clients write
    /// meanwhile is copied again.
    pub total_bytes: u64,
}

/// The part of a device's state that its daemon writes (`NAME.json`). A compromised engine can write it, too,
/// so nothing in it may give the next daemon a privilege.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct DaemonState {
    pub pid: u32,
    /// The number of the served image in `NAME.options`.
    pub number: u64,
    pub exports: Vec<String>,
    /// The settings that were changed since the device was attached, in order.
    #[serde(with = "ordered")]
    pub settings: Vec<(String, String)>,
    /// Only written: with it, the file is a [`StateFile`] for versions that do not know `NAME.options`, so that their
    /// `blkq upgrade` can take over the device.
    #[serde(flatten)]
    pub older: Option<OlderState>,
}

/// How versions that do not know `NAME.options` find the device.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct OlderState {
    pub name: String,
    pub image: String,
    pub attach_options: Option<Record>,
    pub ublk: Option<BlockDevice>,
}

impl OlderState {
    /// `None` if it is long: a kill may cut the write of a file at a page, and this version must read the rest.
    pub fn if_short(self) -> Option<OlderState> {
        serde_json::to_vec(&self).is_ok_and(|text| text.len() <= OLDER_BYTES_MAX).then_some(self)
    }
}

/// The state of a device whose daemon does not run, for commands. Combined from [`DaemonState`] and
/// `NAME.options`, or read from the `NAME.json` of an older version, which contained everything.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StateFile {
    pub name: String,
    pub pid: u32,
    pub image: String,
    pub exports: Vec<String>,
    /// How the device was attached, unless [`BlockDevice::words`] says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attach_options: Option<Record>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ublk: Option<BlockDevice>,
    /// How the storage of the image identifies the daemon, if it keeps other writers away.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    #[serde(default, with = "ordered")]
    pub settings: Vec<(String, String)>,
    #[serde(skip)]
    pub number: Option<u64>,
    /// The file of the image, if it was recorded.
    #[serde(skip)]
    pub file: Option<FileId>,
    /// The backing files of the image, in order from the nearest, if they were recorded.
    #[serde(skip)]
    pub backing: Option<Vec<RecordedBacking>>,
}

impl StateFile {
    pub fn image_path(&self) -> PathBuf {
        image_path(&self.image, self.attach_options.as_ref())
    }

    /// Checks that the next daemon would open the image that the device has used, with its backing files. Clients
    /// that continue with another file would write the data that they have cached to it. The header of the image
    /// may name another backing file because the last daemon was taken over. `options` are those of the next
    /// daemon, and `is_open` says whether a daemon still has the files open. Passes what was not recorded, and
    /// paths without a file.
    pub fn check_image(&self, options: &AttachOptions, is_open: bool) -> Outcome {
        let DriverSpec::Image(path) = &options.image else { return Ok(()) };
        let name = &self.name;
        let accept =
            format!(", or, if both have the same contents, run `blkq recover --allow-replaced {name}`");
        let or_accept = if is_open { "" } else { &accept };
        let image = [self.file, FileId::of(path)];
        if let [Some(before), Some(now)] = image
            && (before.is_replaced(path, now, is_open)
                || now != before && FileId::of(self.image_path()) == Some(before))
        {
            return Err(Failure::new(format!(
                "another file is at {} now, and clients of the device would write their cached data to it; move the \
                 image back, or run `blkq detach {name}` and attach the new file{or_accept}",
                path.display()
            )));
        }
        let Some(recorded) = &self.backing else { return Ok(()) };
        let found = options.backing_files();
        let mut overlay: &Path = path;
        for (at, now) in found.iter().enumerate() {
            let Some(before) = recorded.get(at).filter(|before| before.is_at(now, is_open, image)) else {
                return Err(Failure::new(format!(
                    "{} is not the file that was the backing file of {}; move that file back, or run `blkq detach {name}` \
                     and attach the image again{or_accept}",
                    now.path.display(),
                    overlay.display()
                )));
            };
            if before.qcow2 != now.qcow2 {
                let (shown, of) = (shell_word(&now.path), shell_word(overlay));
                let format = if before.qcow2 { "qcow2" } else { "raw" };
                return Err(Failure::new(format!(
                    "{} names another format for its backing file than before; run `qemu-img rebase -u -b {shown} -F \
                     {format} {of}`, or run `blkq detach {}`",
                    overlay.display(),
                    self.name
                )));
            }
            overlay = &now.path;
        }
        Ok(())
    }

    /// Whether the device is the disk of a virtual machine that the next daemon can serve. False if this program does
    /// not understand the attach options.
    pub fn is_guest(&self) -> bool {
        matches!(self.guest_options(), Ok(Some(_)))
    }

    /// Whether the options for the next daemon are known.
    pub fn has_options(&self) -> bool {
        self.attach_options.is_some() || self.ublk.as_ref().is_some_and(|ublk| !ublk.words.is_empty())
    }

    /// The attach options of a device that another daemon can serve again after a kill: the device is not a
    /// block device, and its data is not in the memory of the daemon. Fails if this program does not
    /// understand an option.
    pub fn recoverable_options(&self) -> Outcome<Option<AttachOptions>> {
        let (None, Some(record)) = (&self.ublk, &self.attach_options) else { return Ok(None) };
        let mut options = record.read()?;
        options.name = Some(self.name.clone());
        // The clients know the address that was chosen for the device.
        if options.exports.is_empty() {
            options.exports.push(Export::Nbd);
        }
        Ok((!matches!(options.image, DriverSpec::Ram(_))).then_some(options))
    }

    /// The attach options of a device that is served to a virtual machine and is not a block device. Such a
    /// device can be recovered: the front end reconnects to the next daemon, and has the record of the
    /// requests in flight. Fails if this program does not understand an option.
    pub fn guest_options(&self) -> Outcome<Option<AttachOptions>> {
        let options = self.recoverable_options()?;
        Ok(options.filter(|options| options.exports.contains(&Export::VhostUserBlk)))
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BlockDevice {
    /// The number N of `/dev/ublkbN`, or `u32::MAX` before the kernel has assigned it.
    pub id: u32,
    /// Distinguishes the device from others that have had the same number.
    pub cookie: u64,
    /// How the device was attached, in the format that preceded [`StateFile::attach_options`]: the words of
    /// `blkq attach`. Empty in files of this version, but present: an older program that finds it empty
    /// refuses to take over the device, and one that does not find it would ignore the block device.
    #[serde(default)]
    pub words: Vec<String>,
    /// The directory to which relative paths in `words` are relative.
    #[serde(default)]
    pub directory: PathBuf,
}

impl BlockDevice {
    pub fn new(identity: Identity) -> BlockDevice {
        let Identity { id, cookie } = identity;
        BlockDevice { id, cookie, words: Vec::new(), directory: PathBuf::new() }
    }

    pub fn identity(&self) -> Identity {
        Identity { id: self.id, cookie: self.cookie }
    }
}

/// The privileges that the daemon still has; the default is a daemon without a sandbox.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Confinement {
    /// The remaining capabilities: `none`, or their names.
    pub capabilities: String,
    /// Whether no_new_privs is set (prctl(2)): an executed program could not gain privileges.
    pub no_new_privileges: bool,
    /// 0 if the kernel does not support Landlock.
    pub landlock_abi: u32,
    /// A seccomp filter is installed.
    pub seccomp: bool,
}

impl Confinement {
    pub fn describe(&self) -> String {
        let Confinement { capabilities, no_new_privileges, landlock_abi, seccomp } = self;
        if *self == Confinement::default() {
            return "off (--no-sandbox)".to_owned();
        }
        let landlock = match landlock_abi {
            0 => "no Landlock (this kernel has none)".to_owned(),
            abi => format!("Landlock ABI {abi}"),
        };
        let privileges = if *no_new_privileges { "no new privileges" } else { "new privileges" };
        let seccomp = if *seccomp { "seccomp" } else { "no seccomp (this kernel has none)" };
        format!("capabilities: {capabilities}; {privileges}; {landlock}; {seccomp}")
    }
}

/// Direct I/O, as requested (`on`, `off` or `auto`) and as in effect (`on` or `off`).
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct DirectIoInfo {
    pub requested: String,
    pub effective: String,
    /// Why direct I/O is off, or which alignment it requires.
    pub reason: String,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ClientInfo {
    /// Process and user, or address and port.
    pub peer: String,
    /// How long the client has been connected.
    pub seconds: u64,
    pub requests: u64,
    pub errors: u64,
    pub read_bytes: u64,
    pub written_bytes: u64,
    pub in_flight: u64,
}

/// A range of bytes of a file, as the options request it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Window {
    pub offset: u64,
    /// The maximum length in bytes, or `None` for the rest of the file.
    pub size_limit: Option<u64>,
}

impl Window {
    pub fn of(options: &AttachOptions) -> Window {
        Window { offset: options.offset, size_limit: options.size_limit }
    }

    /// Whether the two ranges have a byte in common if the file is long enough.
    pub fn overlaps(self, other: Window) -> bool {
        let end = |window: Window| window.offset.saturating_add(window.size_limit.unwrap_or(u64::MAX));
        self.offset < end(other) && other.offset < end(self)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Backing {
    pub file: FileId,
    pub window: Window,
}

impl Backing {
    pub fn of(info: &DeviceInfo) -> Option<Backing> {
        let fact = |name: &str| fact(info, name);
        let (major, minor) = fact("backing-device")?.split_once(':')?;
        let device = (major.parse().ok()?, minor.parse().ok()?);
        let file = FileId { device, inode: fact("backing-inode")?.parse().ok()?, node: None };
        let window =
            Window { offset: fact("offset")?.parse().ok()?, size_limit: fact("size-limit")?.parse().ok() };
        Some(Backing { file, window })
    }
}

/// Compares the files, or the names if there is no file at `path`.
pub fn is_behind(path: &Path, info: &DeviceInfo) -> bool {
    Backing::of(info).is_some_and(|backing| match FileId::of(path) {
        Some(file) => backing.file == file,
        None => std::path::absolute(path).is_ok_and(|path| path == info.image_path()),
    })
}

/// The current path of the image, followed by ` (deleted)` if the file was removed. For other images, their
/// spec.
pub fn shown_path(info: &DeviceInfo) -> String {
    fact(info, "backing-file").unwrap_or(&info.image).to_owned()
}

pub fn fact<'a>(info: &'a DeviceInfo, name: &str) -> Option<&'a str> {
    let found = info.driver_facts.iter().find(|(key, _)| key == name)?;
    Some(found.1.as_str())
}

/// Serializes pairs of name and value as a JSON object that keeps their order.
pub(crate) mod ordered {
    use std::fmt;
    use std::marker::PhantomData;

    use serde::de::{MapAccess, Visitor};
    use serde::{Deserialize, Deserializer, Serializer};

    pub type Pairs = Vec<(String, String)>;

    pub fn serialize<S: Serializer>(pairs: &Pairs, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(pairs.iter().map(|(name, value)| (name, value)))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Pairs, D::Error> {
        object(deserializer, |value: String| value)
    }

    /// Deserializes an object, and converts its values with `text`.
    pub fn object<'de, D: Deserializer<'de>, V: Deserialize<'de>>(
        deserializer: D,
        text: impl Fn(V) -> String,
    ) -> Result<Pairs, D::Error> {
        struct Object<F, V>(F, PhantomData<V>);
        impl<'de, V: Deserialize<'de>, F: Fn(V) -> String> Visitor<'de> for Object<F, V> {
            type Value = Pairs;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of names and values")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Pairs, A::Error> {
                let mut pairs = Vec::new();
                while let Some((name, value)) = object.next_entry()? {
                    pairs.push((name, self.0(value)));
                }
                Ok(pairs)
            }
        }
        deserializer.deserialize_map(Object(text, PhantomData))
    }
}

/// As [`ordered`], but writes numbers and switches as JSON numbers and booleans. `WORDS` has the words for true and
/// false: those of `blkq set`, or those with which drivers describe themselves. Daemons of older versions send strings.
struct Typed<const FACTS: bool>;

impl<const FACTS: bool> Typed<FACTS> {
    const WORDS: [&'static str; 2] = if FACTS { ["true", "false"] } else { ["on", "off"] };

    fn value(text: &str) -> Value {
        let is_number = text.starts_with(|c: char| c.is_ascii_digit())
            && text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
        match text {
            text if text == Self::WORDS[0] => true.into(),
            text if text == Self::WORDS[1] => false.into(),
            text if is_number => serde_json::from_str(text).unwrap_or_else(|_| text.into()),
            text => text.into(),
        }
    }

    fn serialize<S: Serializer>(pairs: &ordered::Pairs, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(pairs.iter().map(|(name, text)| (name, Self::value(text))))
    }

    fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ordered::Pairs, D::Error> {
        ordered::object(deserializer, |value| match value {
            Value::Bool(on) => Self::WORDS[usize::from(!on)].to_owned(),
            Value::String(text) => text,
            value => value.to_string(),
        })
    }
}

/// The path that `text` shows. If the path is not UTF-8, it is taken from the options, which have all its
/// bytes.
pub(crate) fn image_path(text: &str, options: Option<&Record>) -> PathBuf {
    let options = options.filter(|_| text.contains(char::REPLACEMENT_CHARACTER)).map(Record::read);
    match options {
        Some(Ok(AttachOptions { image: DriverSpec::Image(path), .. })) => path,
        _ => PathBuf::from(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_switches_keep_their_type_and_value_in_json() {
        #[derive(Serialize, Deserialize, PartialEq, Debug)]
        struct Device {
            #[serde(with = "Typed::<false>")]
            settings: Vec<(String, String)>,
            #[serde(with = "Typed::<true>")]
            facts: Vec<(String, String)>,
        }
        let pairs = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
        };
        let device = Device {
            settings: pairs(&[("merge", "on"), ("depth", "128"), ("warning", "0.5"), ("a", "none")]),
            facts: pairs(&[("failed", "false"), ("mean", "1.0"), ("node", "8:1"), ("c", "007"), ("d", "1.")]),
        };
        let text = serde_json::to_string(&device).unwrap();
        assert_eq!(
            text,
            r#"{"settings":{"merge":true,"depth":128,"warning":0.5,"a":"none"},"facts":{"failed":false,"mean":1.0,"node":"8:1","c":"007","d":"1."}}"#
        );
        assert_eq!(serde_json::from_str::<Device>(&text).unwrap(), device);
        let older = r#"{"settings":{"merge":"on","depth":"128"},"facts":{}}"#;
        let older: Device = serde_json::from_str(older).unwrap();
        assert_eq!(older.settings, device.settings[..2]);
    }

    #[test]
    fn a_state_file_without_settings_is_understood() {
        let text = r#"{"name":"d","pid":7,"image":"/d.img","exports":["/dev/ublkb3"],
            "ublk":{"id":3,"cookie":9,"words":["d.img"],"directory":"/"}}"#;
        let state: StateFile = serde_json::from_str(text).unwrap();
        assert_eq!(state.ublk.map(|ublk| ublk.identity()), Some(Identity { id: 3, cookie: 9 }));
        assert!(state.settings.is_empty());
    }
    #[test]
    fn windows_overlap_where_they_share_a_byte() {
        let window = |offset, size_limit| Window { offset, size_limit };
        for (a, b, expected) in [
            (window(0, None), window(0, None), true),
            (window(0, None), window(1 << 40, Some(1)), true),
            (window(0, Some(512)), window(512, None), false),
            (window(0, Some(513)), window(512, None), true),
            (window(512, Some(512)), window(0, Some(4096)), true),
            (window(u64::MAX, None), window(0, Some(u64::MAX)), false),
        ] {
            assert_eq!((a.overlaps(b), b.overlaps(a)), (expected, expected), "{a:?} {b:?}");
        }
    }
}
