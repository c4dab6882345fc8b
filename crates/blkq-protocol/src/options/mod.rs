//! [`AttachOptions`]: the complete description of a device, as `blkq attach` parses it. All other commands
//! and the state file use it in the form of a [`Record`].

mod check;
mod declare;
pub mod headings;
mod json;
mod mechanisms;
mod record;
mod setting_groups;
mod syntax;
mod values;

use std::ffi::OsString;
use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use blkq::disk::{DEPTH_MAX, QUEUES_MAX};
use blkq::throttle::{LimitMode, WEIGHT_MAX};
use blkq::units::parse_bytes;
use blkq::{ClockMode, ErrorPolicy, SchedulerKind};
use blkq_drivers::DriverSpec;
use blkq_drivers::fault::FaultSpec;
use blkq_drivers::r#loop::{DirectIo, Dispatch};
use blkq_drivers::qcow2::{BackingFile, backing_files, link_elsewhere};
use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{ArgAction, Parser};
use serde::{Deserialize, Serialize};

use crate::failure::{Failure, Outcome};

use declare::attach_options;
pub use mechanisms::{Mechanism, Without, is_earlier_option};
pub use record::Record;
pub use setting_groups::{SettingGroups, with_write_access};
pub use syntax::Values;
pub use values::{
    Address, Backing, Copying, Export, Format, NO_GROUP, PartitionScan, SectorSize, Tls, image_text,
    parse_group_name, parse_listen, parse_new_group_name,
};
use values::{
    CLOCK, DIRECT_IO, DISPATCH, HANG_WARNING_DEFAULT, IMAGE_HELP, ON_ERROR, SCHEDULER, one_of,
    parse_ceph_user, parse_export_name, parse_hang_warning, parse_image, parse_mode,
};

const QUEUES: RangeInclusive<u16> = 1..=QUEUES_MAX as u16;
const DEPTH: RangeInclusive<u16> = 1..=DEPTH_MAX;
const CONNECTIONS: RangeInclusive<u16> = 1..=1000;
const HANDSHAKE_TIMEOUT_S: RangeInclusive<u16> = 1..=3600;

attach_options! {
/// How a device is attached. [`AttachOptions::check`] has the rules between options.
///
/// The fields are in the order of the headings in `blkq attach --help`, and of the options under each
/// heading. An option of the command itself (`Args` of `attach`) with a small `display_order` precedes them.
#[derive(clap::Args, Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttachOptions {
    /// The image, or the device without one.
    #[arg(value_name = "IMAGE", value_parser = OsStringValueParser::new().try_map(parse_image))]
    #[arg(
        help = "An image to serve: PATH, ram:SIZE, null:SIZE or rbd:POOL[/NAMESPACE]/IMAGE[@SNAPSHOT]",
        long_help = IMAGE_HELP
    )]
    #[serde(with = "json")]
    pub image: DriverSpec,

    /// Set the format of the image
    ///
    /// Without this option the image is raw, and an image with the magic number of qcow2, VMDK, VHD, VHDX, VDI, QED,
    /// Parallels or LUKS is refused (docs/qcow2.md).
    #[arg(long, value_enum, help_heading = headings::IMAGE)]
    pub format: Option<Format>,
    /// Choose which backing files a qcow2 image may name
    ///
    /// The image contains these names, and its author has chosen them.
    #[arg(long, value_enum, value_name = "WHICH", default_value = "own-directory", help_heading = headings::IMAGE)]
    #[serde(default, skip_serializing_if = "is_default")]
    pub backing_chain: Backing,
    /// Begin the device at this offset in the image (raw images only)
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "0", help_heading = headings::IMAGE)]
    pub offset: u64,
    /// Serve only this many bytes of the image (raw images only) [default: up to its end]
    ///
    /// The bytes must be within the image.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, help_heading = headings::IMAGE)]
    pub size_limit: Option<u64>,
    /// Set the logical block size
    ///
    /// With `auto`, NBD clients may access single bytes, unless the device also has an export of another kind. In all
    /// other cases they must access whole blocks.
    #[arg(long, value_enum, value_name = "SIZE", default_value = "auto", help_heading = headings::IMAGE)]
    pub sector_size: SectorSize,
    /// Bypass the page cache
    #[arg(long, value_name = "MODE", default_value = "auto", value_parser = one_of::<DirectIo>(DIRECT_IO), help_heading = headings::IMAGE)]
    #[serde(with = "json")]
    pub direct_io: DirectIo => "direct-io" DirectIo(DirectIo) for Images by Disk as syntax::DIRECT_IO,
    /// Complete flushes and FUA writes without making data durable
    ///
    /// A crash of this machine or a power loss then destroys the image. Use it for disks that may be lost, such as
    /// those of test machines.
    #[arg(long, help_heading = headings::IMAGE)]
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unsafe_flush_ignore: bool,
    /// Inject faults into the I/O of the device, to test the programs that use it (docs/fault.md)
    #[arg(long, value_name = "SPEC", value_parser = str::parse::<FaultSpec>, help_heading = headings::IMAGE)]
    #[serde(with = "json")]
    pub fault: Option<FaultSpec> => "fault" Fault(FaultSpec) for Faults by Disk as syntax::FAULT,

    /// Choose how to serve the device; may be given several times
    ///
    /// By default, the device is a ublk device if the kernel and your privileges allow it, and is exported over NBD
    /// otherwise. It is exported over NBD if --listen is given, or if systemd passes sockets. The key `export` of the
    /// file /etc/blkq/defaults sets another default (docs/service.md).
    #[arg(long = "export", value_enum, value_name = "EXPORT", help_heading = headings::EXPORTS)]
    pub exports: Vec<Export>,
    /// Listen for NBD at unix:PATH or tcp:HOST:PORT; may be given several times [default: the sockets passed by
    /// systemd, or else NAME.nbd in the state directory]
    ///
    /// A TCP address that other machines can reach needs `--tls require` (the default with --tls-certificates) or
    /// --insecure.
    #[arg(long = "listen", value_name = "ADDRESS", value_parser = parse_listen, help_heading = headings::EXPORTS)]
    pub listen: Vec<Address>,
    /// Set the NBD export name [default: the name of the device]
    ///
    /// Clients that ask for no name get the device, too.
    #[arg(long, value_name = "NAME", value_parser = parse_export_name, help_heading = headings::EXPORTS)]
    pub export_name: Option<String>,
    /// Limit the number of NBD connections [default: 64]
    #[arg(long, value_name = "N", value_parser = in_range(CONNECTIONS), help_heading = headings::EXPORTS)]
    pub max_connections: Option<u16>,
    /// Limit the time of an NBD handshake [default: 10]
    #[arg(long, value_name = "SECONDS", value_parser = in_range(HANDSHAKE_TIMEOUT_S), help_heading = headings::EXPORTS)]
    pub handshake_timeout: Option<u16>,
    /// Listen for the virtual machine at this path [default: NAME.vhost in the state directory]
    #[arg(long, value_name = "PATH", help_heading = headings::EXPORTS)]
    #[serde(default, with = "json", skip_serializing_if = "Option::is_none")]
    pub vhost_socket: Option<PathBuf>,
    /// Whether the kernel scans for partitions.
    #[command(flatten)]
    pub partscan: PartitionScan,

    /// Open the image read-only and refuse writes
    #[arg(long, help_heading = headings::ACCESS, display_order = 0)]
    pub read_only: bool => "read-only" ReadOnly(bool) for All by Disk as syntax::SWITCH,
    /// Allow others to use the same bytes of the image at the same time
    ///
    /// The other devices need this option, too. This option also permits an image that is mounted or used by the
    /// kernel's loop driver. A file system that is mounted twice is destroyed, unless it is a cluster file system. An
    /// RBD image is opened without its exclusive lock.
    #[arg(long, help_heading = headings::ACCESS, display_order = 1)]
    pub shared: bool,
    /// Set the permissions of the sockets of --listen unix:PATH and --vhost-socket, as for chmod(1): 660 for the group,
    /// 666 for all users [default: 600, or 660 with --socket-group]
    #[arg(long, value_name = "MODE", value_parser = parse_mode, help_heading = headings::ACCESS)]
    #[serde(with = "json")]
    pub socket_mode: Option<u32>,
    /// Set the group of the sockets of --listen unix:PATH and --vhost-socket
    #[arg(long, value_name = "GROUP", help_heading = headings::ACCESS)]
    pub socket_group: Option<String>,
    /// Serve NBD with TLS, using server-cert.pem and server-key.pem in DIR
    ///
    /// If DIR also contains ca-cert.pem, clients need a certificate signed by that authority (docs/nbd.md).
    #[arg(long, value_name = "DIR", help_heading = headings::ACCESS)]
    #[serde(with = "json")]
    pub tls_certificates: Option<PathBuf>,
    /// Choose whether NBD clients must use TLS [default: require if --tls-certificates is given, otherwise off]
    #[arg(long, value_enum, value_name = "MODE", help_heading = headings::ACCESS)]
    pub tls: Option<Tls>,
    /// Allow other machines to reach NBD without TLS, and --metrics
    ///
    /// They can then read and change the device, or read its metrics.
    #[arg(long, help_heading = headings::ACCESS)]
    pub insecure: bool,
    /// Keep all privileges of the daemon and do not filter its system calls, for debugging
    #[arg(long = "no-sandbox", action = ArgAction::SetFalse, help_heading = headings::ACCESS)]
    pub sandbox: bool,

    /// Set the number of hardware queues, each with its own thread
    #[arg(long, value_name = "N", default_value = "1", value_parser = in_range(QUEUES), help_heading = headings::PERFORMANCE)]
    pub queues: u16,
    /// Set the number of requests in flight per queue
    #[arg(long, value_name = "N", default_value = "128", value_parser = in_range(DEPTH), help_heading = headings::PERFORMANCE)]
    pub depth: u16 => "depth" Depth(u16) for All by Disk as syntax::DEPTH,
    /// Set the number of threads per queue of a ublk device
    ///
    /// The threads share the tags of their queue, so that a client on few processors can use several threads. More
    /// than 1 needs Linux 6.16. At most 64 threads for all --queues.
    #[arg(long, value_name = "N", default_value = "1", value_parser = in_range(QUEUES), help_heading = headings::PERFORMANCE)]
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub threads_per_queue: u16,
    /// Choose the order in which requests reach the driver
    #[arg(long, default_value = "none", value_parser = one_of::<SchedulerKind>(SCHEDULER), help_heading = headings::PERFORMANCE)]
    #[serde(with = "json")]
    pub scheduler: SchedulerKind => "scheduler" Scheduler(SchedulerKind) for All by Disk as syntax::SCHEDULER,
    /// Choose how the image file is accessed
    #[arg(long, value_name = "MODE", default_value = "concurrent", value_parser = one_of::<Dispatch>(DISPATCH), help_heading = headings::PERFORMANCE)]
    #[serde(with = "json")]
    pub dispatch: Dispatch => "dispatch" Dispatch(Dispatch) for Images by Disk as syntax::DISPATCH,
    /// Choose who copies the data of a ublk device between the kernel and the daemon
    #[arg(long, value_enum, value_name = "MODE", default_value = "auto", help_heading = headings::PERFORMANCE)]
    pub copy: Copying,
    /// Pin the memory of a virtual machine, so that direct I/O need not pin it for each request
    ///
    /// All of its memory is allocated when the machine connects. The guest must not free memory: use no balloon and
    /// no free page reporting (docs/vhost-user.md).
    #[arg(long, help_heading = headings::PERFORMANCE)]
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub register_memory: bool,
    /// Choose how often the clock is read for time stamps
    #[arg(long, value_name = "MODE", default_value = "cached", value_parser = one_of::<ClockMode>(CLOCK), help_heading = headings::PERFORMANCE)]
    #[serde(with = "json")]
    pub clock: ClockMode => "clock" Clock(ClockMode) for All by Disk as syntax::CLOCK,
    /// Do not merge adjacent requests
    #[arg(long = "no-merge", action = ArgAction::SetFalse, help_heading = headings::PERFORMANCE)]
    pub merge: bool => "merge" Merge(bool) for All by Disk as syntax::SWITCH,
    /// Let threads that wait for a full device submit one request per wake-up, not up to 32
    #[arg(long = "no-batching", action = ArgAction::SetFalse, help_heading = headings::PERFORMANCE)]
    pub batching: bool => "batching" Batching(bool) for All by Disk as syntax::SWITCH,
    /// Do not count and time requests
    #[arg(long = "no-iostats", action = ArgAction::SetFalse, help_heading = headings::PERFORMANCE)]
    pub iostats: bool => "iostats" Iostats(bool) for All by Disk as syntax::SWITCH,
    #[command(flatten)]
    #[serde(skip)]
    pub without: Without => "without" Without(Without) for All by Daemon as syntax::WITHOUT,

    /// Limit the rate of I/Os or bytes: KEY=RATE,... or auto
    ///
    /// The keys are iops, read-iops, write-iops, bps, read-bps and write-bps. burst=RATExLENGTH belongs to the key
    /// before it. With iops-size=BYTES, a larger I/O counts as several. With auto, the ceiling of the device is
    /// searched, and the limit is kept just below it (docs/limits.md).
    #[arg(long, value_name = "LIMITS", value_parser = str::parse::<LimitMode>, default_value = "none", help_heading = headings::LIMITS)]
    #[serde(default, with = "json", skip_serializing_if = "LimitMode::is_none")]
    pub limit: LimitMode => "limit" Limit(LimitMode) for All by Daemon as syntax::LIMIT,
    /// Share the limits of this group; create it with `blkq group set`
    #[arg(long, value_name = "NAME", value_parser = parse_new_group_name, help_heading = headings::LIMITS)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String> => "group" Group(Option<String>) for All by Daemon as syntax::GROUP,
    /// Set the weight of the device in its group, relative to the other members [default: 100]
    #[arg(long, value_name = "N", value_parser = in_range(1..=WEIGHT_MAX), help_heading = headings::LIMITS)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32> => "weight" Weight(u32) for Groups by Disk as syntax::WEIGHT,

    /// Read the configuration of the cluster from FILE [default: as other Ceph clients, such as /etc/ceph/ceph.conf]
    #[arg(long, value_name = "FILE", help_heading = headings::CEPH)]
    #[serde(default, with = "json", skip_serializing_if = "Option::is_none")]
    pub ceph_conf: Option<PathBuf>,
    /// Connect as this user; omit the prefix `client.` [default: admin]
    #[arg(long, value_name = "NAME", value_parser = parse_ceph_user, help_heading = headings::CEPH)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ceph_user: Option<String>,
    /// Read the keyring of the user from FILE [default: $CEPH_KEYRING, or as configured]
    #[arg(long, value_name = "FILE", help_heading = headings::CEPH)]
    #[serde(default, with = "json", skip_serializing_if = "Option::is_none")]
    pub ceph_keyring: Option<PathBuf>,

    /// Name the device [default: the file name of the image, made unique]
    #[arg(long, help_heading = headings::SERVICE, display_order = 0)]
    pub name: Option<String>,
    /// Detach when the last client has disconnected
    ///
    /// The clients of a block device are its mounts, and the processes that write to it or keep it open for a while.
    #[arg(long, help_heading = headings::SERVICE)]
    pub autoclear: bool => "autoclear" Autoclear(bool) for All by Daemon as syntax::SWITCH,
    /// Choose what happens to a request that fails
    ///
    /// Errors that are the request's own fault, and errors of flushes, are always reported (docs/durability.md).
    #[arg(long, value_name = "POLICY", default_value = "report", value_parser = one_of::<ErrorPolicy>(ON_ERROR), help_heading = headings::SERVICE)]
    #[serde(default, with = "json", skip_serializing_if = "is_default")]
    pub on_error: ErrorPolicy => "on-error" OnError(ErrorPolicy) for All by Disk as syntax::ON_ERROR,
    /// Log requests that are in flight for longer than SECONDS; 0 turns this off
    ///
    /// Each request is logged once, with its state (docs/watching.md).
    #[arg(long, value_name = "SECONDS", default_value = HANG_WARNING_DEFAULT, value_parser = parse_hang_warning, help_heading = headings::SERVICE)]
    #[serde(with = "json")]
    pub hang_warning: Duration => "hang-warning" HangWarning(Duration) for All by Daemon as syntax::HANG_WARNING,
    /// Serve metrics for Prometheus over HTTP at unix:PATH or tcp:HOST:PORT
    ///
    /// An address that other machines can reach needs --insecure (docs/watching.md).
    #[arg(long, value_name = "ADDRESS", value_parser = parse_listen, help_heading = headings::SERVICE)]
    pub metrics: Option<Address>,
    /// Write the process ID of the daemon to FILE when the device is ready
    ///
    /// FILE is removed at detach.
    #[arg(long, value_name = "FILE", help_heading = headings::SERVICE)]
    #[serde(with = "json")]
    pub pid_file: Option<PathBuf>,
    /// Over NBD, serve whole sectors only, as losetup does
    #[arg(long, hide = true)]
    pub whole_sectors: bool,
}
}

/// A setting of `blkq set`, with the facts that all of its uses share.
#[derive(Debug)]
pub struct Row {
    pub key: Key,
    pub name: &'static str,
    pub scope: Scope,
    pub implementer: Implementer,
    /// The values, for the help text.
    pub values: Values,
    /// Reads a value. The error lists the valid values.
    pub read: fn(&str) -> Outcome<Setting>,
}

/// The devices that have a setting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scope {
    All,
    Images,
    /// Devices that were attached with --fault.
    Faults,
    Groups,
}

impl Scope {
    /// Describes the devices for the help text; empty for all devices.
    pub fn text(self) -> &'static str {
        match self {
            Scope::All => "",
            Scope::Images => "devices of image files",
            Scope::Faults => "devices attached with --fault",
            Scope::Groups => "devices in a group",
        }
    }
}

/// Decides how the next daemon restores a saved setting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Implementer {
    /// The disk, whose setting is changed before it is used. An option of `attach` may do more, for example `--depth`
    /// sets the largest depth as well.
    Disk,
    /// The daemon, which starts as if the option of `attach` had this value.
    Daemon,
}

impl Row {
    pub fn find(name: &str) -> Option<&'static Row> {
        ROWS.iter().find(|row| row.name == name)
    }

    pub fn sorted_by_name() -> Vec<&'static Row> {
        let mut rows: Vec<&Row> = ROWS.iter().collect();
        rows.sort_unstable_by_key(|row| row.name);
        rows
    }
}

impl Key {
    pub fn row(self) -> &'static Row {
        &ROWS[self as usize]
    }
}

impl Setting {
    pub fn name(&self) -> &'static str {
        self.key().row().name
    }

    pub fn to_text(&self) -> (String, String) {
        (self.name().to_owned(), self.value())
    }
}

impl AttachOptions {
    pub fn new(image: DriverSpec) -> AttachOptions {
        #[derive(Parser)]
        struct Line {
            #[command(flatten)]
            options: AttachOptions,
        }
        // All options have defaults.
        AttachOptions { image, ..Line::parse_from(["attach", "image"]).options }
    }

    pub fn default_name(&self) -> String {
        match &self.image {
            DriverSpec::Image(path) => path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            DriverSpec::Rbd(spec) => match &spec.snapshot {
                Some(snapshot) => format!("{}@{snapshot}", spec.image),
                None => spec.image.clone(),
            },
            DriverSpec::Null(_) => "null".to_owned(),
            DriverSpec::Ram(_) => "ram".to_owned(),
        }
    }

    pub fn is_qcow2(&self) -> bool {
        self.format == Some(Format::Qcow2)
    }

    /// The backing files of the image, in order from the nearest.
    pub fn backing_files(&self) -> Vec<BackingFile> {
        match &self.image {
            DriverSpec::Image(image) if self.is_qcow2() => backing_files(image, self.backing_chain.into()),
            _ => Vec::new(),
        }
    }

    pub fn failed(&self, failure: Failure) -> Failure {
        failure.during(format_args!("attach {}", image_text(&self.image)))
    }

    /// Relative paths are relative to `directory`. The path of the image is resolved, unless it is a link to
    /// a qcow2 image in another directory. Fails if a path is empty.
    pub fn absolute(mut self, directory: &Path) -> Outcome<AttachOptions> {
        let is_qcow2 = self.is_qcow2();
        for (key, path) in self.paths_mut() {
            *path = std::path::absolute(directory.join(&*path))
                .map_err(|e| Failure::new(format!("{}: {e}", path.display())))?;
            if key == IMAGE {
                // The names of backing files may be relative to the directory of the link.
                let link = link_elsewhere(path).filter(|_| is_qcow2);
                *path = link.or_else(|| path.canonicalize().ok()).unwrap_or_else(|| path.clone());
            }
        }
        Ok(self)
    }

    /// The options after a commit into `base`. The logical block size of the device does not change. Fails if
    /// the device cannot be attached to `base` with these options.
    pub fn committed_into(self, base: &Path, qcow2: bool, sector_bytes: u32) -> Outcome<AttachOptions> {
        let options = AttachOptions {
            image: DriverSpec::Image(base.to_owned()),
            format: Some(if qcow2 { Format::Qcow2 } else { Format::Raw }),
            // A raw image has no backing file.
            backing_chain: if qcow2 { self.backing_chain } else { Backing::OwnDirectory },
            sector_size: self.sector_size.keep(sector_bytes),
            ..self
        };
        options.check().map(|()| options)
    }

    /// Each path comes with the long name of its option.
    pub fn paths_mut(&mut self) -> Vec<(&'static str, &mut PathBuf)> {
        let mut paths = Vec::new();
        if let DriverSpec::Image(path) = &mut self.image {
            paths.push((IMAGE, path));
        }
        let listen = self.listen.iter_mut().map(|address| ("listen", address));
        let metrics = self.metrics.iter_mut().map(|address| ("metrics", address));
        for (key, address) in listen.chain(metrics) {
            if let Address::Unix(path) = address {
                paths.push((key, path));
            }
        }
        let files = [
            ("tls-certificates", &mut self.tls_certificates),
            ("pid-file", &mut self.pid_file),
            ("vhost-socket", &mut self.vhost_socket),
            ("ceph-conf", &mut self.ceph_conf),
            ("ceph-keyring", &mut self.ceph_keyring),
        ];
        paths.extend(files.into_iter().filter_map(|(key, path)| path.as_mut().map(|path| (key, path))));
        paths
    }
}

/// Stands in for the long name of the image, which is a positional argument.
const IMAGE: &str = "image";

/// Sets the configuration and keyring that Ceph's client library would choose, unless the options name them:
/// the next daemon may have another environment. `variable` returns environment variables of this process.
pub fn find_ceph_files(options: &mut AttachOptions, variable: impl Fn(&str) -> Option<OsString>) {
    if !matches!(options.image, DriverSpec::Rbd(_)) {
        return;
    }
    let named = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if options.ceph_conf.is_none() {
        let of_user = named("HOME").map(|home| home.join(".ceph/ceph.conf"));
        let usual = || [Some("/etc/ceph/ceph.conf".into()), of_user].into_iter().flatten();
        options.ceph_conf = named("CEPH_CONF").or_else(|| usual().find(|path| path.is_file()));
    }
    options.ceph_keyring = options.ceph_keyring.take().or_else(|| named("CEPH_KEYRING"));
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

fn one() -> u16 {
    1
}

fn is_one(number: &u16) -> bool {
    *number == 1
}

/// Unlike clap's own parser, this one names the range for a text that is not a number, too.
fn in_range<T>(range: RangeInclusive<T>) -> impl TypedValueParser<Value = T>
where
    T: FromStr + PartialOrd + Display + Clone + Send + Sync + 'static,
{
    move |text: &str| match text.parse::<T>() {
        Ok(number) if range.contains(&number) => Ok(number),
        _ => Err(format!("must be a number from {} to {}", range.start(), range.end())),
    }
}

#[cfg(test)]
mod tests;
