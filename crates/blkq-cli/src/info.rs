//! The description of a device: the answer to `show`, and the state file.

use std::path::PathBuf;

use blkq_drivers::DriverSpec;
use blkq_export::ublk::Identity;
use serde::{Deserialize, Serialize};

use crate::confine::Confinement;
use crate::failure::Outcome;
use crate::file_id::FileId;
use crate::options::{AttachOptions, Export, Record};

/// A device. Sizes in bytes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DeviceInfo {
    /// Its name.
    pub name: String,
    /// Its daemon's process.
    pub pid: u32,
    /// For how long that has served it.
    #[serde(default)]
    pub uptime_seconds: u64,
    /// Where its files are.
    #[serde(default)]
    pub state_directory: PathBuf,
    /// Its daemon's log; `None` if that is standard error.
    #[serde(default)]
    pub log: Option<PathBuf>,
    /// Where clients find it: URIs.
    pub exports: Vec<String>,
    /// The clients that are connected now.
    pub clients: Vec<ClientInfo>,
    /// The image's path, or `rbd:POOL/IMAGE`, `null:SIZE`, `ram:SIZE`.
    pub image: String,
    /// The driver: `loop`, `rbd`, `null`, `ram`.
    pub driver: String,
    /// Size of the device.
    pub size: u64,
    /// Logical block.
    pub sector_size: u32,
    /// Physical block.
    pub physical_sector_size: u32,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether it detaches with its last client.
    #[serde(default)]
    pub autoclear: bool,
    /// Requests that are held after errors, until `blkq resume`.
    #[serde(default)]
    pub held: u64,
    /// The block commit that is under way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<CommitInfo>,
    /// Whether flushes are answered without making anything durable.
    #[serde(default)]
    pub unsafe_flush_ignore: bool,
    /// Whether the kernel was asked to scan for partitions.
    #[serde(default)]
    pub partscan: bool,
    /// The privileges that its daemon has dropped.
    #[serde(default)]
    pub sandbox: Confinement,
    /// How the backing file is read and written.
    pub direct_io: DirectIoInfo,
    /// How it was attached. A daemon of an older version does not send it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attach_options: Option<Record>,
    /// The operations of the device besides reading and writing.
    pub capabilities: Vec<String>,
    /// How it is set, in order.
    #[serde(with = "typed::settings")]
    pub settings: Vec<(String, String)>,
    /// Facts of the driver, in order.
    #[serde(with = "typed::facts")]
    pub driver_facts: Vec<(String, String)>,
    /// Warnings for the user.
    pub warnings: Vec<String>,
}

/// A block commit that is under way.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CommitInfo {
    /// The image behind, which gets what the device's own has.
    pub into: String,
    /// The process that has it made.
    pub by: String,
    /// Bytes that were copied, zeroes included.
    pub copied_bytes: u64,
    /// These, and those that are to be copied as far as that is known: what clients write meanwhile is copied again.
    pub total_bytes: u64,
}

/// The part of a device's state that its daemon writes (`NAME.json`), and which an engine that was taken over can write,
/// too: nothing here may give the next daemon a right.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DaemonState {
    /// Its process.
    pub pid: u32,
    /// The number of the image that it serves, of those in `NAME.options`.
    pub image: u64,
    /// Where clients find the device.
    pub exports: Vec<String>,
    /// The daemon as the image's backing store knows it, if that keeps other writers away.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// The settings changed since it was attached, in order.
    #[serde(default, with = "ordered")]
    pub settings: Vec<(String, String)>,
}

/// The state of a device, for a command that finds its files without a daemon: of [`DaemonState`] and `NAME.options`, or
/// the `NAME.json` of a program that wrote all of it there.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StateFile {
    /// Its name.
    pub name: String,
    /// Its daemon's process.
    pub pid: u32,
    /// The image's path, or `null:SIZE`, `ram:SIZE`.
    pub image: String,
    /// Where clients find it.
    pub exports: Vec<String>,
    /// How it was attached, unless [`BlockDevice::words`] has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attach_options: Option<Record>,
    /// The kernel's block device, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ublk: Option<BlockDevice>,
    /// The daemon as the image's backing store knows it, if that keeps other writers away.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// The settings changed since it was attached, in order.
    #[serde(default, with = "ordered")]
    pub settings: Vec<(String, String)>,
    /// The number of the image in `NAME.options`.
    #[serde(skip)]
    pub number: Option<u64>,
    /// The file of the image, if that is recorded.
    #[serde(skip)]
    pub file: Option<FileId>,
}

impl StateFile {
    /// Whether the next daemon can know how the device was attached.
    pub fn has_options(&self) -> bool {
        self.attach_options.is_some() || self.ublk.as_ref().is_some_and(|ublk| !ublk.words.is_empty())
    }

    /// How the device was attached, if it is served to a virtual machine and is no block device: its front end
    /// connects to the next daemon by itself, and has the requests in flight.
    ///
    /// # Errors
    /// The option that this program does not understand.
    pub fn guest_options(&self) -> Outcome<Option<AttachOptions>> {
        let (None, Some(record)) = (&self.ublk, &self.attach_options) else { return Ok(None) };
        let mut options = record.read()?;
        options.name = Some(self.name.clone());
        // Memory is lost with the daemon.
        let is_kept = !matches!(options.image, DriverSpec::Ram(_));
        Ok((is_kept && options.exports.contains(&Export::VhostUserBlk)).then_some(options))
    }
}

/// The kernel's block device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BlockDevice {
    /// The number N of `/dev/ublkbN`; `u32::MAX` until it is made.
    pub id: u32,
    /// It differs from that of another device of that number.
    pub cookie: u64,
    /// How it was attached, in the format before [`StateFile::attach_options`]: the words of `blkq
    /// attach`. Empty since, not omitted: a program that knows only them refuses to take the device
    /// over, and without them would not know that there is one.
    #[serde(default)]
    pub words: Vec<String>,
    /// The directory in which relative paths among these begin.
    #[serde(default)]
    pub directory: PathBuf,
}

impl BlockDevice {
    /// The device `identity`.
    pub fn new(identity: Identity) -> BlockDevice {
        let Identity { id, cookie } = identity;
        BlockDevice { id, cookie, words: Vec::new(), directory: PathBuf::new() }
    }

    /// Its identity.
    pub fn identity(&self) -> Identity {
        Identity { id: self.id, cookie: self.cookie }
    }
}

/// Direct I/O: asked for and got.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct DirectIoInfo {
    /// `on`, `off` or `auto`.
    pub requested: String,
    /// `on` or `off`.
    pub effective: String,
    /// Why it is off, or what it demands.
    pub reason: String,
}

/// A connection.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ClientInfo {
    /// Process and user, or address and port.
    pub peer: String,
    /// For how long it has been there.
    pub seconds: u64,
    /// Requests received.
    pub requests: u64,
    /// Of these, those answered with an error.
    pub errors: u64,
    /// Content sent.
    pub read_bytes: u64,
    /// Content received.
    pub written_bytes: u64,
    /// Requests not yet answered.
    pub in_flight: u64,
}

/// Pairs of name and value as a JSON object that keeps their order.
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

    /// An object whose values `text` turns into text.
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

/// The same, numbers and switches as JSON's numbers and booleans. A daemon of an older version
/// sends all as strings.
mod typed {
    use serde_json::Value;

    /// `text` as a value; `switch` are the words for true and false.
    fn value(text: &str, switch: [&str; 2]) -> Value {
        let is_number = text.starts_with(|c: char| c.is_ascii_digit())
            && text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
        match text {
            text if text == switch[0] => true.into(),
            text if text == switch[1] => false.into(),
            text if is_number => serde_json::from_str(text).unwrap_or_else(|_| text.into()),
            text => text.into(),
        }
    }

    fn text(value: Value, switch: [&str; 2]) -> String {
        match value {
            Value::Bool(on) => switch[usize::from(!on)].to_owned(),
            Value::String(text) => text,
            value => value.to_string(),
        }
    }

    macro_rules! pairs {
        ($name:ident, $switch:expr) => {
            pub mod $name {
                use super::super::ordered::{Pairs, object};
                use super::{text, value};

                pub fn serialize<S: serde::Serializer>(
                    pairs: &Pairs,
                    serializer: S,
                ) -> Result<S::Ok, S::Error> {
                    serializer.collect_map(pairs.iter().map(|(name, text)| (name, value(text, $switch))))
                }

                pub fn deserialize<'de, D: serde::Deserializer<'de>>(
                    deserializer: D,
                ) -> Result<Pairs, D::Error> {
                    object(deserializer, |value| text(value, $switch))
                }
            }
        };
    }

    // As `blkq set` takes them, and as drivers describe themselves.
    pairs!(settings, ["on", "off"]);
    pairs!(facts, ["true", "false"]);
}

impl DeviceInfo {
    /// The path of the image, also if it is not UTF-8.
    pub fn image_path(&self) -> PathBuf {
        image_path(&self.image, self.attach_options.as_ref())
    }
}

impl StateFile {
    /// The path of the image, also if it is not UTF-8.
    pub fn image_path(&self) -> PathBuf {
        image_path(&self.image, self.attach_options.as_ref())
    }
}

/// The path that `text` shows. Where text cannot have all of its bytes, the options with which it was attached do.
fn image_path(text: &str, options: Option<&Record>) -> PathBuf {
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
            #[serde(with = "typed::settings")]
            settings: Vec<(String, String)>,
            #[serde(with = "typed::facts")]
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
}
