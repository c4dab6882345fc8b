//! The one description of a device: [`AttachOptions`], as `blkq attach` reads them. The daemon, the
//! state file, `recover`, `upgrade` and `show --json` have the same, by way of a [`Record`].

mod check;
mod json;
mod record;
mod values;

use std::ffi::OsString;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use blkq::disk::{DEPTH_MAX, QUEUES_MAX};
use blkq::drivers::DriverSpec;
use blkq::drivers::fault::FaultSpec;
use blkq::drivers::r#loop::{DirectIo, Dispatch};
use blkq::drivers::qcow2::link_elsewhere;
use blkq::throttle::{LimitMode, WEIGHT_MAX};
use blkq::units::parse_bytes;
use blkq::{ClockMode, ErrorPolicy};
use clap::builder::{OsStringValueParser, RangedI64ValueParser, TypedValueParser};
use clap::{ArgAction, Parser};
use serde::{Deserialize, Serialize};

use crate::access::parse_mode;
use crate::failure::{Failure, Outcome};
use crate::hangs;

pub use record::Record;
pub use values::{
    Address, Backing, Copying, Export, Format, PartitionScan, Scheduler, SectorSize, Tls, image_text,
    parse_group_name, parse_listen,
};
use values::{one_of, parse_ceph_user, parse_export_name, parse_image};

const QUEUES: RangeInclusive<u16> = 1..=QUEUES_MAX as u16;
const DEPTH: RangeInclusive<u16> = 1..=DEPTH_MAX;
const CONNECTIONS: RangeInclusive<u16> = 1..=1000;
const HANDSHAKE_TIMEOUT_S: RangeInclusive<u16> = 1..=3600;

/// Hidden options that are accepted and ignored, for one release after their removal.
pub const REMOVED: [&str; 1] = ["no-pacing"];

/// How a device is attached. [`AttachOptions::check`] has the rules between options.
#[derive(clap::Args, Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttachOptions {
    /// The image, or the device without one.
    #[arg(
        help = "An image file or block device; rbd:POOL[/NAMESPACE]/IMAGE[@SNAPSHOT] is in a Ceph cluster (docs/rbd.md); null:SIZE reads zeroes and forgets what is written, ram:SIZE keeps it in memory"
    )]
    #[arg(value_name = "IMAGE|rbd:POOL/IMAGE|null:SIZE|ram:SIZE", value_parser = OsStringValueParser::new().try_map(parse_image))]
    #[serde(with = "json")]
    pub image: DriverSpec,
    /// The name of the device [default: the image's file name, made unique]
    #[arg(long)]
    pub name: Option<String>,
    /// How to serve it; may be given several times [default: ublk where the kernel has it and
    /// the user may use it, else nbd; nbd with --listen]
    #[arg(long = "export", value_enum)]
    pub exports: Vec<Export>,
    /// Where NBD listens, unix:PATH or tcp:HOST:PORT; may be given several times
    /// [default: a socket in the state directory, or those that systemd hands over]
    #[arg(long = "listen", value_name = "ADDRESS", value_parser = parse_listen)]
    pub listen: Vec<Address>,
    /// Where vhost-user-blk listens for a virtual machine [default: NAME.vhost in the state
    /// directory]
    #[arg(long, value_name = "PATH")]
    #[serde(default, with = "json", skip_serializing_if = "Option::is_none")]
    pub vhost_socket: Option<PathBuf>,
    /// Pin the memory of a virtual machine for as long as it is connected, so that direct I/O need not
    /// do it for each request (vhost-user-blk). All of it is then taken, and the guest must not free it:
    /// no balloon, no free page reporting (docs/vhost-user.md)
    #[arg(long)]
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub register_memory: bool,
    /// The mode of the sockets of --listen unix:PATH and --vhost-socket, as of chmod: 660 for the
    /// members of the group, 666 for all users of this machine [default: 600, or 660 with
    /// --socket-group]
    #[arg(long, value_name = "MODE", value_parser = parse_mode)]
    #[serde(with = "json::octal")]
    pub socket_mode: Option<u32>,
    /// The group of the same sockets, such as that of libvirt's QEMU
    #[arg(long, value_name = "GROUP")]
    pub socket_group: Option<String>,
    /// Refuse writes
    #[arg(long)]
    pub read_only: bool,
    /// Share the bytes with others that have this option too, and attach what the kernel's loop driver has
    /// or what is mounted; file systems that do not know of each other destroy the data
    #[arg(long)]
    pub shared: bool,
    /// The image's format: without it its bytes are the device's, and one that has the magic of
    /// qcow2, VMDK, VHD, VHDX, VDI, QED, Parallels or LUKS is rejected (docs/qcow2.md)
    #[arg(long, value_enum)]
    pub format: Option<Format>,
    /// The backing files that a qcow2 image may name: another may have written their paths
    #[arg(long, value_enum, value_name = "WHICH", default_value = "own-directory")]
    #[serde(default, skip_serializing_if = "is_default")]
    pub backing_chain: Backing,
    /// The configuration of the Ceph cluster of rbd:POOL/IMAGE [default: where Ceph's programs find it,
    /// such as /etc/ceph/ceph.conf]
    #[arg(long, value_name = "FILE")]
    #[serde(default, with = "json", skip_serializing_if = "Option::is_none")]
    pub ceph_conf: Option<PathBuf>,
    /// The keyring of the user of the Ceph cluster [default: the one that $CEPH_KEYRING or the configuration
    /// names]
    #[arg(long, value_name = "FILE")]
    #[serde(default, with = "json", skip_serializing_if = "Option::is_none")]
    pub ceph_keyring: Option<PathBuf>,
    /// The user of the Ceph cluster, without its client. [default: admin]
    #[arg(long, value_name = "NAME", value_parser = parse_ceph_user)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ceph_user: Option<String>,
    /// Detach when the last client has disconnected. A block device's clients are mounts, and
    /// processes that write to it or have it open for a while
    #[arg(long)]
    pub autoclear: bool,
    /// Whether the kernel scans for partitions.
    #[command(flatten)]
    pub partscan: PartitionScan,
    /// Where in the image the device begins
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "0")]
    pub offset: u64,
    /// The device's size at most
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub size_limit: Option<u64>,
    /// The logical block; auto takes the smallest that works, and NBD alone serves every byte
    #[arg(long, value_enum, default_value = "auto")]
    pub sector_size: SectorSize,
    /// Bypass the page cache: on or an error, off, or auto where the file allows it
    #[arg(long, default_value = "auto", value_parser = one_of::<DirectIo>(&["on", "off", "auto"]))]
    #[serde(with = "json")]
    pub direct_io: DirectIo,
    /// How the file is read and written: serial is one request at a time, to compare with
    #[arg(long, default_value = "concurrent", value_parser = one_of::<Dispatch>(&["concurrent", "serial"]))]
    #[serde(with = "json")]
    pub dispatch: Dispatch,
    /// Hardware queues, each with a thread of its own
    #[arg(long, value_name = "N", default_value = "1", value_parser = in_range(QUEUES))]
    pub queues: u16,
    /// Requests in flight per queue
    #[arg(long, value_name = "N", default_value = "128", value_parser = in_range(DEPTH))]
    pub depth: u16,
    /// Threads for each queue of a ublk device, which share its tags, so that a client that runs on few
    /// processors may use several threads. More than 1 needs Linux 6.16; with --queues at most 64 in all
    #[arg(long, value_name = "N", default_value = "1", value_parser = in_range(QUEUES))]
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub threads_per_queue: u16,
    /// The one that copies the data of a ublk device between the kernel and the daemon: none, which
    /// needs Linux 6.16 and an image, or the kernel, or the daemon. auto takes the first that works
    #[arg(long, value_enum, default_value = "auto")]
    pub copy: Copying,
    /// The order in which requests reach the driver
    #[arg(long, value_enum, default_value = "none")]
    pub scheduler: Scheduler,
    /// Adjacent requests are joined.
    #[arg(long = "no-merge", action = ArgAction::SetFalse, help = "Do not join adjacent requests")]
    pub merge: bool,
    /// Tags are handed out in batches.
    #[arg(long = "no-batching", action = ArgAction::SetFalse, help = "Do not hand out tags in batches")]
    pub batching: bool,
    /// I/O reaches the kernel a few at a time.
    #[arg(long = "no-early-submission", action = ArgAction::SetFalse, help = "Submit the I/O of a batch all at once, not a few at a time")]
    #[serde(default = "on", skip_serializing_if = "is_on")]
    pub early_submission: bool,
    /// Requests are counted and timed.
    #[arg(long = "no-iostats", action = ArgAction::SetFalse, help = "Do not count and time requests")]
    pub iostats: bool,
    /// Ignored. Earlier versions had this option, and their command lines, configuration files and records are accepted.
    #[arg(long, hide = true)]
    #[serde(default, rename = "pacing", skip_serializing)]
    pub no_pacing: bool,
    /// Receiving waits for clients that are busy reading replies (NBD).
    #[arg(long = "no-receive-backoff", action = ArgAction::SetFalse, help = "Receive at once from NBD clients that are busy reading replies")]
    pub receive_backoff: bool,
    /// Large reads are done in parts (NBD).
    #[arg(long = "no-split-reads", action = ArgAction::SetFalse, help = "Do large reads of NBD clients in one part")]
    #[serde(default = "on", skip_serializing_if = "is_on")]
    pub split_reads: bool,
    /// Time stamps: one reading of the clock per batch, or one each
    #[arg(long, default_value = "cached", value_parser = one_of::<ClockMode>(&["cached", "precise"]))]
    #[serde(with = "json")]
    pub clock: ClockMode,
    /// Make things go wrong on purpose, for testing what uses the device (docs/fault.md)
    #[arg(long, value_name = "SPEC", value_parser = str::parse::<FaultSpec>)]
    #[serde(with = "json")]
    pub fault: Option<FaultSpec>,
    /// Limits of I/Os and bytes per second: KEY=RATE, ... with the keys iops, read-iops, write-iops, bps,
    /// read-bps, write-bps; burst=RATExLENGTH for the key before it; iops-size=BYTES; or auto: just under the
    /// device's own ceiling, which is searched (docs/limits.md)
    #[arg(long, value_name = "LIMITS", value_parser = str::parse::<LimitMode>, default_value = "none")]
    #[serde(default, with = "json", skip_serializing_if = "LimitMode::is_none")]
    pub limit: LimitMode,
    /// The group whose limits the device shares with others; `blkq group set` makes it
    #[arg(long, value_name = "NAME", value_parser = parse_group_name)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// The share that the device has of its group's limits, beside the weights of the others
    /// [default: 100]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(WEIGHT_MAX)))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
    /// Report the error of a request that fails, or hold it until `blkq resume`; hold-enospc
    /// holds those for which the image's file system has no room (docs/durability.md)
    #[arg(long, value_name = "POLICY", default_value = "report", value_parser = one_of::<ErrorPolicy>(&["report", "hold", "hold-enospc"]))]
    #[serde(default, with = "json", skip_serializing_if = "is_report")]
    pub on_error: ErrorPolicy,
    /// Answer flushes, and writes with FUA, before the data is safe: a crash of this machine destroys
    /// the image. For disks that are thrown away, such as those of a test machine
    #[arg(long)]
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unsafe_flush_ignore: bool,
    /// Report requests in flight for longer than so many seconds in the daemon's log, once each;
    /// 0 for never (docs/watching.md)
    #[arg(long, value_name = "SECONDS", default_value = hangs::DEFAULT, value_parser = hangs::parse)]
    #[serde(with = "json")]
    pub hang_warning: Duration,
    /// Serve metrics for Prometheus over HTTP at unix:PATH or tcp:HOST:PORT, which must be of
    /// this machine (docs/watching.md)
    #[arg(long, value_name = "ADDRESS", value_parser = parse_listen)]
    pub metrics: Option<Address>,
    /// NBD connections at a time [default: 64]
    #[arg(long, value_name = "N", value_parser = in_range(CONNECTIONS))]
    pub max_connections: Option<u16>,
    /// How long the handshake of an NBD client may take [default: 10]
    #[arg(long, value_name = "SECONDS", value_parser = in_range(HANDSHAKE_TIMEOUT_S))]
    pub handshake_timeout: Option<u16>,
    /// TLS for NBD: clients may use it, or must; a directory of certificates is needed [default:
    /// require with --tls-certificates, else off]
    #[arg(long, value_enum)]
    pub tls: Option<Tls>,
    /// The directory of server-cert.pem and server-key.pem; with ca-cert.pem, clients must have
    /// certificates that it signed
    #[arg(long, value_name = "DIR")]
    #[serde(with = "json")]
    pub tls_certificates: Option<PathBuf>,
    /// Let NBD without TLS, and --metrics, listen where other machines reach them: they can then
    /// read and change the device, or read its metrics
    #[arg(long)]
    pub insecure: bool,
    /// The daemon gives up privileges and system calls that it does not need.
    #[arg(long = "no-sandbox", action = ArgAction::SetFalse, help = "Keep all privileges, and do not filter system calls, to search for an error")]
    pub sandbox: bool,
    /// The name by which NBD clients ask for the device; those that name none get it too [default:
    /// the device's name]
    #[arg(long, value_name = "NAME", value_parser = parse_export_name)]
    pub export_name: Option<String>,
    /// Write the number of the daemon's process to a file when the device is usable; it is removed
    /// when the device is detached
    #[arg(long, value_name = "FILE")]
    #[serde(with = "json")]
    pub pid_file: Option<PathBuf>,
    /// Over NBD, serve whole sectors only, as losetup does
    #[arg(long, hide = true)]
    pub whole_sectors: bool,
}

impl AttachOptions {
    /// Those of `image` if no option is given.
    pub fn new(image: DriverSpec) -> AttachOptions {
        #[derive(Parser)]
        struct Line {
            #[command(flatten)]
            options: AttachOptions,
        }
        // All options have defaults.
        AttachOptions { image, ..Line::parse_from(["attach", "image"]).options }
    }

    /// The name of the device if none is given, before it is made unique.
    pub fn default_name(&self) -> String {
        match &self.image {
            DriverSpec::Image(path) => path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            DriverSpec::Rbd(spec) => match spec.snapshot() {
                Some(snapshot) => format!("{}@{snapshot}", spec.image()),
                None => spec.image().to_owned(),
            },
            DriverSpec::Null(_) => "null".to_owned(),
            DriverSpec::Ram(_) => "ram".to_owned(),
        }
    }

    /// A failure of attaching the image.
    pub fn failed(&self, failure: Failure) -> Failure {
        failure.during(format_args!("attach {}", image_text(&self.image)))
    }

    /// The same options with absolute paths, of which the relative ones begin in `directory`, and the
    /// real path of the image, or that of a link to a qcow2 image in another directory.
    ///
    /// # Errors
    /// If a path is empty.
    pub fn absolute(mut self, directory: &Path) -> Outcome<AttachOptions> {
        let is_qcow2 = self.format == Some(Format::Qcow2);
        for (key, path) in self.paths_mut() {
            *path = std::path::absolute(directory.join(&*path))
                .map_err(|e| Failure::new(format!("{}: {e}", path.display())))?;
            if key == IMAGE {
                // A qcow2 image may find its backing file from the directory of the link.
                let link = link_elsewhere(path).filter(|_| is_qcow2);
                *path = link.or_else(|| path.canonicalize().ok()).unwrap_or_else(|| path.clone());
            }
        }
        Ok(self)
    }

    /// Those of the device when its overlay is committed into the backing file at `base`, with logical blocks as before.
    ///
    /// # Errors
    /// If the device cannot be attached to that.
    pub fn committed_into(self, base: &Path, qcow2: bool, sector_bytes: u32) -> Outcome<AttachOptions> {
        let options = AttachOptions {
            image: DriverSpec::Image(base.to_owned()),
            format: Some(if qcow2 { Format::Qcow2 } else { Format::Raw }),
            // A raw image names no other.
            backing_chain: if qcow2 { self.backing_chain } else { Backing::OwnDirectory },
            sector_size: self.sector_size.keep(sector_bytes),
            ..self
        };
        options.check().map(|()| options)
    }

    /// All paths, each with the long name of its option.
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

/// The name of the image, which has no long one.
const IMAGE: &str = "image";

/// The configuration and keyring that Ceph's client would take, where none are given: the next daemon of the device may
/// have another environment, of which `variable` has that of this one.
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

/// The default of a switch.
fn on() -> bool {
    true
}

fn is_report(policy: &ErrorPolicy) -> bool {
    *policy == ErrorPolicy::Report
}

fn is_on(switch: &bool) -> bool {
    *switch
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

fn in_range(range: RangeInclusive<u16>) -> RangedI64ValueParser<u16> {
    clap::value_parser!(u16).range(i64::from(*range.start())..=i64::from(*range.end()))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The options that `words` make.
    pub fn options(words: &[&str]) -> AttachOptions {
        #[derive(Parser)]
        struct Line {
            #[command(flatten)]
            options: AttachOptions,
        }
        Line::parse_from([&["attach"], words].concat()).options
    }

    #[test]
    fn the_files_of_ceph_are_found_as_its_client_finds_them() {
        let home = std::env::temp_dir().join(format!("blkq-ceph-home-{}", std::process::id()));
        std::fs::create_dir_all(home.join(".ceph")).unwrap();
        let of_user = home.join(".ceph/ceph.conf");
        std::fs::write(&of_user, "").unwrap();
        let found = |words: &[&str], environment: &[(&str, &str)]| {
            let mut options = options(words);
            find_ceph_files(&mut options, |name| {
                environment.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into())
            });
            (options.ceph_conf, options.ceph_keyring)
        };
        let path = |path: &str| Some(PathBuf::from(path));
        let named = [("CEPH_CONF", "/c"), ("CEPH_KEYRING", "/k"), ("HOME", home.to_str().unwrap())];
        assert_eq!(found(&["rbd:p/i"], &named), (path("/c"), path("/k")));
        let given = ["rbd:p/i", "--ceph-conf=/o", "--ceph-keyring=/r"];
        assert_eq!(found(&given, &named), (path("/o"), path("/r")));
        let usual = Path::new("/etc/ceph/ceph.conf");
        let expected = if usual.is_file() { usual.to_owned() } else { of_user };
        assert_eq!(found(&["rbd:p/i"], &named[2..]), (Some(expected), None));
        assert_eq!(found(&["d.img"], &named), (None, None));
        std::fs::remove_dir_all(home).unwrap();
    }

    #[test]
    fn relative_paths_begin_in_the_directory() {
        let words = ["d.img", "--listen=unix:./s", "--listen=tcp:h:1", "--metrics=unix:m", "--pid-file=/p"];
        let words = [&words[..], &["--tls-certificates=../tls"]].concat();
        let absolute = options(&words).absolute(Path::new("/nowhere")).unwrap();
        assert_eq!(absolute.image, DriverSpec::Image("/nowhere/d.img".into()));
        let unix = |path: &str| Address::Unix(path.into());
        assert_eq!(absolute.listen, [unix("/nowhere/s"), Address::Tcp("h".into(), 1)]);
        assert_eq!(
            (absolute.metrics.clone(), absolute.pid_file.clone()),
            (Some(unix("/nowhere/m")), Some("/p".into()))
        );
        assert_eq!(absolute.tls_certificates, Some("/nowhere/../tls".into()));
    }
}
