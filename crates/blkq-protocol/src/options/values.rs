use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use blkq::ErrorKind;
use blkq_drivers::DriverSpec;
use blkq_drivers::qcow2::BackingChain;
use blkq_export::ublk::CopyMode;
use clap::ValueEnum;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use serde::{Deserialize, Serialize};

use blkq::units::format_bytes;

use super::headings;

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Copying {
    /// none if it works, otherwise kernel
    Auto,
    /// No copy: the driver uses the kernel's pages. Needs Linux 6.16, root, and a raw image without --fault
    None,
    /// The kernel
    Kernel,
    /// The daemon. Needs Linux 6.5 and root
    User,
}

impl Copying {
    /// `None` lets the block layer choose the mode.
    pub fn mode(self) -> Option<CopyMode> {
        match self {
            Copying::Auto => None,
            Copying::None => Some(CopyMode::None),
            Copying::Kernel => Some(CopyMode::Kernel),
            Copying::User => Some(CopyMode::User),
        }
    }
}

/// `--partscan` and `--no-partscan`. Without either, the kernel's default applies.
#[derive(clap::Args, Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(from = "Option<bool>", into = "Option<bool>")]
pub struct PartitionScan {
    /// Scan the block device for partitions
    ///
    /// This is the default for ublk devices of root. The kernel of an NBD client decides for itself.
    #[arg(long = "partscan", help_heading = headings::EXPORTS)]
    pub wanted: bool,
    /// Keep the kernel from scanning the block device for partitions, now and on request
    #[arg(long = "no-partscan", conflicts_with = "wanted", help_heading = headings::EXPORTS)]
    pub refused: bool,
}

impl From<Option<bool>> for PartitionScan {
    fn from(on: Option<bool>) -> PartitionScan {
        PartitionScan { wanted: on == Some(true), refused: on == Some(false) }
    }
}

impl From<PartitionScan> for Option<bool> {
    fn from(scan: PartitionScan) -> Option<bool> {
        (scan.wanted || scan.refused).then_some(scan.wanted)
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Address {
    #[serde(with = "super::json")]
    Unix(PathBuf),
    /// The host is a name or an address.
    Tcp(String, u16),
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Export {
    /// Network block device, over a unix socket or TCP (docs/nbd.md)
    Nbd,
    /// Block device of this kernel, /dev/ublkbN (docs/ublk.md)
    Ublk,
    /// Disk of a virtual machine (docs/vhost-user.md)
    VhostUserBlk,
}

/// `--format`. Without it, an image with the magic number of another format than raw is refused.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// The bytes of the image are those of the device, whatever they begin with
    Raw,
    /// QEMU's format, with backing files
    Qcow2,
    /// qcow2 if the image has its magic number, raw if it has none; prints which
    Auto,
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Backing {
    /// Files in the directory of the image that names them, or below it
    #[default]
    OwnDirectory,
    /// All files that you may read
    Allow,
}

impl From<Backing> for BackingChain {
    fn from(admitted: Backing) -> BackingChain {
        match admitted {
            Backing::OwnDirectory => BackingChain::OwnDirectory,
            Backing::Allow => BackingChain::Allow,
        }
    }
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Tls {
    /// TLS is not offered
    Off,
    /// Clients may use TLS
    On,
    /// Clients must use TLS
    Require,
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u32)]
pub enum SectorSize {
    /// 512 bytes
    #[value(name = "512")]
    #[serde(rename = "512")]
    Bytes512 = 512,
    /// 1024 bytes
    #[value(name = "1024")]
    #[serde(rename = "1024")]
    Bytes1024 = 1024,
    /// 2048 bytes
    #[value(name = "2048")]
    #[serde(rename = "2048")]
    Bytes2048 = 2048,
    /// 4096 bytes
    #[value(name = "4096")]
    #[serde(rename = "4096")]
    Bytes4096 = 4096,
    /// The smallest size that works
    Auto = 0,
}

impl SectorSize {
    pub fn of(bytes: u64) -> Option<SectorSize> {
        let mut sizes = SectorSize::value_variants().iter();
        sizes.find(|size| size.bytes().map(u64::from) == Some(bytes)).copied()
    }

    /// The option for another image of the same device, whose sector size must stay `bytes`. With `auto` the
    /// size would become 512 if the image allows that.
    pub fn keep(self, bytes: u32) -> SectorSize {
        let same = if bytes == 512 { None } else { SectorSize::of(bytes.into()) };
        same.unwrap_or(self)
    }

    /// `None` if the driver chooses the size.
    pub fn bytes(self) -> Option<u32> {
        Some(self as u32).filter(|bytes| *bytes != 0)
    }
}

/// A value of an option, with its description in the help.
pub type Described = (&'static str, &'static str);

pub(super) const DIRECT_IO: &[Described] = &[
    ("on", "Always; the attach fails if the image does not allow it"),
    ("off", "Never"),
    ("auto", "If the image allows it; otherwise the attach prints why not"),
];
pub(super) const DISPATCH: &[Described] = &[
    ("concurrent", "Many requests at the same time"),
    ("serial", "One request at a time, for comparison (raw images only)"),
];
pub(super) const CLOCK: &[Described] = &[("cached", "Once per batch"), ("precise", "Once per time stamp")];
pub(super) const ON_ERROR: &[Described] = &[
    ("report", "The client gets the error"),
    ("hold", "The request is held, and its client waits, until `blkq resume`"),
    ("hold-enospc", "As hold, but only if the file system of the image has no space"),
];

pub(super) const SCHEDULER: &[Described] = &[
    ("none", "The order of submission"),
    ("mq-deadline", "The order of positions, with a deadline for each request"),
    ("kyber", "A share for each kind of request, so that latencies stay near their targets"),
];

/// The default of `--hang-warning`, in seconds.
pub(super) const HANG_WARNING_DEFAULT: &str = "30";
const HANG_WARNING_SECONDS_MIN: f64 = 0.1;
const HANG_WARNING_SECONDS_MAX: f64 = 86_400.0;

/// The value of `blkq set group=` for a device that is in no group.
pub const NO_GROUP: &str = "none";

/// The indentation keeps each kind on a line of its own in the manual page.
pub(super) const IMAGE_HELP: &str = "\
The image to serve:

  PATH        an image file, or a block device
  ram:SIZE    a RAM disk, which is freed at detach
  null:SIZE   a device that reads zeroes and discards writes, for measurements
  rbd:POOL[/NAMESPACE]/IMAGE[@SNAPSHOT]
              an image in a Ceph cluster (docs/rbd.md)";

/// Accepts one of `values`, and converts it by the parser of the block layer.
pub(super) fn one_of<T>(values: &[Described]) -> impl TypedValueParser<Value = T> + use<T>
where
    T: std::str::FromStr<Err = blkq::Error> + Clone + Send + Sync + 'static,
{
    let values = values.iter().map(|(name, help)| PossibleValue::new(*name).help(*help));
    PossibleValuesParser::new(values).try_map(|name| name.parse::<T>())
}

pub(super) fn parse_image(text: OsString) -> Result<DriverSpec, blkq::Error> {
    let spec = match text.into_string() {
        Ok(text) => text.parse()?,
        Err(path) => DriverSpec::Image(path.into()),
    };
    match spec {
        DriverSpec::Null(0) | DriverSpec::Ram(0) => {
            Err(blkq::Error::new(ErrorKind::Invalid, "the size of a device must be greater than 0"))
        }
        spec => Ok(spec),
    }
}

/// Fails with the rule that `text` breaks.
pub fn parse_listen(text: &str) -> Result<Address, String> {
    let rule = || "use unix:PATH or tcp:HOST:PORT, for example tcp:127.0.0.1:10809 or tcp:[::1]:10809";
    match text.split_once(':') {
        // Any local user could connect to an abstract socket, and no NBD client supports them.
        Some(("unix", path)) if path.starts_with('@') => Err(format!(
            "{path} would be an abstract socket, to which all users can connect; use a path, for example ./{path}"
        )),
        Some(("unix", path)) if !path.is_empty() => Ok(Address::Unix(PathBuf::from(path))),
        Some(("tcp", rest)) => {
            let (host, port) =
                rest.rsplit_once(':').ok_or_else(|| format!("{rest:?} has no port; {}", rule()))?;
            let host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
                Some(host) => host,
                // Colons without brackets: the end of the address would be ambiguous.
                None if host.contains(':') => {
                    return Err(format!(
                        "an IPv6 address must be in brackets, tcp:[ADDRESS]:PORT, not {rest:?}"
                    ));
                }
                None => host,
            };
            if host.is_empty() {
                return Err(format!("the host is missing; {}", rule()));
            }
            let port = port
                .parse()
                .map_err(|_| format!("the port must be 0 (any free port) to 65535, not {port:?}"))?;
            Ok(Address::Tcp(host.to_owned(), port))
        }
        _ => Err(rule().to_owned()),
    }
}

/// The image as a user writes it on the command line.
pub fn image_text(image: &DriverSpec) -> String {
    match image {
        DriverSpec::Image(path) => path.display().to_string(),
        DriverSpec::Rbd(spec) => format!("rbd:{spec}"),
        DriverSpec::Null(bytes) => format!("null:{}", format_bytes(*bytes)),
        DriverSpec::Ram(bytes) => format!("ram:{}", format_bytes(*bytes)),
    }
}

/// The name of a Ceph user, without its type. Fails with the rule that `text` breaks.
pub fn parse_ceph_user(text: &str) -> Result<String, String> {
    match text {
        "" => Err("the name is empty".to_owned()),
        _ if text.contains('\0') => Err("the name contains a zero byte".to_owned()),
        _ if text.starts_with("client.") => Err("omit the prefix client.".to_owned()),
        _ => Ok(text.to_owned()),
    }
}

/// As [`parse_group_name`], for a device that joins a group, or for a new group. `blkq set` uses the name
/// `none` for no group; older versions had groups of that name.
pub fn parse_new_group_name(text: &str) -> Result<String, String> {
    match text {
        NO_GROUP => Err("a group cannot have the name none".to_owned()),
        _ => parse_group_name(text),
    }
}

/// ASCII letters, digits and `. _ -`, beginning with a letter or a digit. Fails with the rule that is broken.
pub fn parse_group_name(text: &str) -> Result<String, String> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let is_name = text.chars().all(allowed) && text.starts_with(|c: char| c.is_ascii_alphanumeric());
    let rule =
        "a group name has 1 to 64 ASCII letters, digits and . _ -, and begins with a letter or a digit";
    checked(text, is_name && text.len() <= 64, rule)
}

fn checked(text: &str, is_valid: bool, rule: &str) -> Result<String, String> {
    if is_valid { Ok(text.to_owned()) } else { Err(rule.to_owned()) }
}

/// Fails with the rule that `text` breaks.
pub fn parse_export_name(text: &str) -> Result<String, String> {
    // The maximum length of a string in the NBD protocol is 4096 bytes.
    checked(text, (1..=4096).contains(&text.len()), "an export name has 1 to 4096 bytes")
}

/// Parses a mode in octal digits, as for chmod(1). The error is the rule that `text` breaks.
pub(super) fn parse_mode(text: &str) -> Result<u32, String> {
    let is_octal = (3..=4).contains(&text.len()) && text.bytes().all(|byte| (b'0'..=b'7').contains(&byte));
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| is_octal && *mode <= 0o777);
    mode.ok_or_else(|| "a mode has three octal digits, for example 660".to_owned())
}

/// Parses a value of `--hang-warning`: seconds, or 0 for no warnings. The error is the rule that the value
/// breaks.
pub(super) fn parse_hang_warning(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(0.0) => Ok(Duration::ZERO),
        Ok(seconds) if (HANG_WARNING_SECONDS_MIN..=HANG_WARNING_SECONDS_MAX).contains(&seconds) => {
            Ok(Duration::from_secs_f64(seconds))
        }
        _ => Err(format!(
            "must be {HANG_WARNING_SECONDS_MIN} to {HANG_WARNING_SECONDS_MAX} seconds, or 0 for no warnings"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_and_drivers_are_distinguished() {
        let parse = |text: &str| parse_image(text.into()).ok();
        assert_eq!(parse("null:1G"), Some(DriverSpec::Null(1 << 30)));
        assert_eq!(parse("./null:1G"), Some(DriverSpec::Image("./null:1G".into())));
        assert_eq!(parse("rbd:p/i@s"), Some(DriverSpec::Rbd("p/i@s".parse().unwrap())));
        assert_eq!(parse("./rbd:p/i"), Some(DriverSpec::Image("./rbd:p/i".into())));
        for bad in ["", "null:", "ram:0", "ram:1X", "rbd:", "rbd:i"] {
            assert_eq!(parse(bad), None, "{bad:?}");
        }
        assert_eq!(image_text(&DriverSpec::Ram(4096)), "ram:4K");
        assert_eq!(image_text(&DriverSpec::Rbd("p/n/i".parse().unwrap())), "rbd:p/n/i");
    }

    #[test]
    fn addresses_are_unambiguous() {
        assert_eq!(parse_listen("unix:/a:b"), Ok(Address::Unix("/a:b".into())));
        assert_eq!(parse_listen("tcp:localhost:0"), Ok(Address::Tcp("localhost".into(), 0)));
        assert_eq!(parse_listen("tcp:[::1]:10809"), Ok(Address::Tcp("::1".into(), 10809)));
        for bad in [
            "",
            "unix:",
            "tcp:",
            "tcp:10809",
            "tcp::10809",
            "tcp:a:b",
            "tcp:::1:10809",
            "tcp:[]:1",
            "tcp:a:65536",
            "/a",
            "unix:@name",
        ] {
            assert!(parse_listen(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn modes_are_octal() {
        assert_eq!((parse_mode("660"), parse_mode("0666")), (Ok(0o660), Ok(0o666)));
        for bad in ["", "6", "66", "888", "1777", "7777", "-660", "+660", "rw", "06600"] {
            assert!(parse_mode(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn hang_warnings_are_seconds() {
        assert_eq!(parse_hang_warning("0"), Ok(Duration::ZERO));
        for bad in ["", "-1", "x", "0.01", "inf", "NaN", "1e9"] {
            assert!(parse_hang_warning(bad).is_err(), "{bad:?}");
        }
    }
}
