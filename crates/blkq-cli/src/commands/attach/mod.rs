//! `blkq attach`: makes an image usable, by way of a daemon of its own.

mod check;
mod run;
mod values;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use blkq::ClockMode;
use blkq::disk::{DEPTH_MAX, QUEUES_MAX};
use blkq::drivers::fault::FaultSpec;
use blkq::drivers::r#loop::{DirectIo, Dispatch};
use blkq::drivers::{DriverSpec, parse_bytes};
use clap::Parser;
use clap::builder::{OsStringValueParser, TypedValueParser};

use super::{Cli, detach};
use crate::access::parse_mode;
use crate::daemon::{Daemon, Parent};
use crate::failure::{Failure, Outcome};
use crate::info::DeviceInfo;
use crate::launch::{be_daemon, launch, report, warn};
use crate::state::StateDir;
use crate::{hangs, nooverlap, parent, print_json, systemd};

pub use values::{Address, Copying, Export, Format, Scheduler, SectorSize, Tls, image_text, parse_listen};
use values::{one_of, parse_copy, parse_export_name, parse_image};

/// Options of `attach`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "\
Returns when the device is usable and prints one line per export; a daemon of its own
serves it until `blkq detach`. Sizes take K, M, G, T or KiB, MiB, ... (powers of 1024), or KB, MB, ...
(powers of 1000), and fractions: 1.5G.

Examples:
  blkq attach disk.img
      /dev/ublkb0
  blkq attach disk.img --export nbd
      nbd+unix:///?socket=/run/blkq/disk.img.nbd
  blkq attach disk.img --read-only --listen tcp:127.0.0.1:10809
  blkq attach disk.img --listen unix:/run/disk.sock --socket-group libvirt-qemu
  blkq attach disk.img --direct-io on --queues 4 --name data
  blkq attach ram:1G --name scratch
  blkq attach disk.img --run 'nbdcopy $uri copy.img'
  blkq attach null:1T --foreground      ends with Ctrl-C")]
pub struct Args {
    /// An image file or block device; null:SIZE reads zeroes and forgets what is written,
    /// ram:SIZE keeps it in memory
    #[arg(value_name = "IMAGE|null:SIZE|ram:SIZE", value_parser = OsStringValueParser::new().try_map(parse_image))]
    pub image: DriverSpec,
    /// What to call the device [default: the image's file name, made unique]
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
    /// Who may connect to the sockets of --listen unix:PATH, as of chmod: 660 for the members of
    /// the group, 666 for all users of this machine [default: 600, or 660 with --socket-group]
    #[arg(long, value_name = "MODE", value_parser = parse_mode)]
    pub socket_mode: Option<u32>,
    /// The group of the sockets of --listen unix:PATH, such as that of libvirt's QEMU
    #[arg(long, value_name = "GROUP")]
    pub socket_group: Option<String>,
    /// Refuse writes
    #[arg(long)]
    pub read_only: bool,
    /// Let others attach the same bytes who say so too, and attach what the kernel's loop driver has
    /// or what is mounted; file systems that do not know of each other destroy the data
    #[arg(long)]
    pub shared: bool,
    /// Serve the image's bytes as they are: without it, one that has the magic of qcow2, VMDK, VHD,
    /// VHDX, VDI, QED, Parallels or LUKS is refused
    #[arg(long, value_enum)]
    pub format: Option<Format>,
    /// If these bytes of the image are attached already, reuse that device and print where it
    /// is; if others that overlap them are, refuse. Of several at once, one attaches
    #[arg(long, conflicts_with_all = ["shared", "foreground"])]
    pub nooverlap: bool,
    /// Detach when the last client has gone, after the first one came. A block device's are those
    /// who mount it, write to it, or have it open for a while
    #[arg(long)]
    pub autoclear: bool,
    /// Have the kernel look for partitions on the device's node in /dev, as it does anyhow for
    /// ublk devices of root; over NBD the client's kernel does
    #[arg(long)]
    pub partscan: bool,
    /// Keep the kernel from looking for partitions, now and later
    #[arg(long, conflicts_with = "partscan")]
    pub no_partscan: bool,
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
    pub direct_io: DirectIo,
    /// How the file is read and written: serial is one request at a time, to compare with
    #[arg(long, default_value = "concurrent", value_parser = one_of::<Dispatch>(&["concurrent", "serial"]))]
    pub dispatch: Dispatch,
    /// Hardware queues, each with a thread of its own
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u16).range(1..=QUEUES_MAX as i64))]
    pub queues: u16,
    /// Requests in flight per queue
    #[arg(long, value_name = "N", default_value = "128", value_parser = clap::value_parser!(u16).range(1..=i64::from(DEPTH_MAX)))]
    pub depth: u16,
    /// Who copies the data of a ublk device between the kernel and the daemon: nobody, which
    /// needs Linux 6.16 and an image, or the kernel, or the daemon. auto takes the first that works
    #[arg(long, default_value = "auto", value_parser = parse_copy())]
    pub copy: Copying,
    /// The order in which requests reach the driver
    #[arg(long, value_enum, default_value = "none")]
    pub scheduler: Scheduler,
    /// Do not join adjacent requests
    #[arg(long)]
    pub no_merge: bool,
    /// Do not hand out tags in batches
    #[arg(long)]
    pub no_batching: bool,
    /// Do not count and time requests
    #[arg(long)]
    pub no_iostats: bool,
    /// Give a device that completes its work in bursts all of it at once (NBD)
    #[arg(long)]
    pub no_pacing: bool,
    /// Receive at once from NBD clients that are busy reading replies
    #[arg(long)]
    pub no_receive_backoff: bool,
    /// Time stamps: one reading of the clock per batch, or one each
    #[arg(long, default_value = "cached", value_parser = one_of::<ClockMode>(&["cached", "precise"]))]
    pub clock: ClockMode,
    /// Make things go wrong on purpose, for testing what uses the device (docs/fault.md)
    #[arg(long, value_name = "SPEC", value_parser = str::parse::<FaultSpec>)]
    pub fault: Option<FaultSpec>,
    /// Report requests in flight for longer than so many seconds in the daemon's log, once each;
    /// 0 for never (docs/watching.md)
    #[arg(long, value_name = "SECONDS", default_value = hangs::DEFAULT, value_parser = hangs::parse)]
    pub hang_warning: Duration,
    /// Serve metrics for Prometheus over HTTP at unix:PATH or tcp:HOST:PORT, which must be of
    /// this machine (docs/watching.md)
    #[arg(long, value_name = "ADDRESS", value_parser = parse_listen)]
    pub metrics: Option<Address>,
    /// NBD connections at a time [default: 64]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub max_connections: Option<u16>,
    /// How long an NBD client may take to say what it wants [default: 10]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u16).range(1..=3600))]
    pub handshake_timeout: Option<u16>,
    /// TLS for NBD: clients may use it, or must; a directory of certificates is needed [default:
    /// require with --tls-certificates, else off]
    #[arg(long, value_enum)]
    pub tls: Option<Tls>,
    /// The directory of server-cert.pem and server-key.pem; with ca-cert.pem, clients must have
    /// certificates that it signed
    #[arg(long, value_name = "DIR")]
    pub tls_certificates: Option<PathBuf>,
    /// Let NBD without TLS, and --metrics, listen where other machines reach them: whoever does can
    /// read and change the device, or read its metrics
    #[arg(long)]
    pub insecure: bool,
    /// Keep all privileges, and do not filter system calls, to look for an error
    #[arg(long)]
    pub no_sandbox: bool,
    /// The name by which NBD clients ask for the device; those that name none get it too [default:
    /// the device's name]
    #[arg(long, value_name = "NAME", value_parser = parse_export_name)]
    pub export_name: Option<String>,
    /// Run CMD in a shell, with $uri (and $unixsocket or $port, $nbd, $exportname, $tls, as nbdkit has
    /// them), $device (the node in /dev) and $name in its environment; detach when it has exited,
    /// and exit with its code. Without --export, over NBD
    #[arg(long, value_name = "CMD", conflicts_with_all = ["foreground", "json", "nooverlap", "exit_with_parent"])]
    pub run: Option<String>,
    /// Write the number of the daemon's process to a file when the device is usable; it is removed
    /// when the device is detached
    #[arg(long, value_name = "FILE")]
    pub pid_file: Option<PathBuf>,
    /// Serve it in this process, until SIGINT or SIGTERM
    #[arg(long)]
    pub foreground: bool,
    /// As --foreground, and detach when the process that started this one exits
    #[arg(long)]
    pub exit_with_parent: bool,
    /// Print one JSON object, as `blkq show --json`, in place of the exports
    #[arg(long)]
    pub json: bool,
    /// Over NBD, serve whole sectors only, as losetup does
    #[arg(long, hide = true)]
    pub whole_sectors: bool,
    /// Be the daemon: report on standard output, then let go of it
    #[arg(long, hide = true)]
    pub daemon: bool,
}

impl Args {
    /// The name of the device if none is given, before it is made unique.
    pub fn default_name(&self) -> String {
        match &self.image {
            DriverSpec::Image(path) => path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            DriverSpec::Null(_) => "null".to_owned(),
            DriverSpec::Ram(_) => "ram".to_owned(),
        }
    }

    /// The options that `words` after `attach` make.
    ///
    /// # Errors
    /// What is wrong with them, in one line.
    pub fn from_words(words: &[OsString]) -> Outcome<Args> {
        let line = ["blkq", "attach"].map(OsString::from).into_iter().chain(words.iter().cloned());
        match Cli::try_parse_from(line) {
            Ok(Cli { command: super::Command::Attach(args) }) => Ok(*args),
            Ok(_) => Err(Failure::new("attach: not its words")),
            Err(error) => {
                let text = error.to_string();
                let line = text.lines().next().unwrap_or_default();
                Err(Failure::new(line.strip_prefix("error: ").unwrap_or(line)))
            }
        }
    }

    /// Attaches: starts the daemon and waits until it is ready, or is it.
    ///
    /// # Errors
    /// Why the device could not be attached.
    pub fn run(self) -> Outcome<ExitCode> {
        self.check().map_err(|e| self.failed(e))?;
        if self.nooverlap && systemd::is_activated() {
            let why = "--nooverlap may find another daemon's device, and the sockets of systemd are served here; leave it away";
            return Err(self.failed(Failure::new(why)));
        }
        if self.run.is_some() && systemd::is_activated() {
            let why = "--run starts a daemon, and the sockets of systemd are served here; leave it out";
            return Err(self.failed(Failure::new(why)));
        }
        // Who hands over sockets watches the process that it hands them to.
        if self.foreground || self.exit_with_parent || self.daemon || systemd::is_activated() {
            return self.serve();
        }
        if let Some(command) = &self.run {
            let launched = launch("attach", std::env::args_os().skip(2))?;
            warn(&launched.info);
            return run::run(&self, command, launched);
        }
        // The same words after `attach` are what the daemon is to read.
        let attached = self.attach(&std::env::args_os().skip(2).collect::<Vec<_>>())?;
        attached.report(|info| self.report(info)).map_err(|e| self.failed(e))?;
        Ok(ExitCode::SUCCESS)
    }

    /// Attaches by a daemon that reads `words`, those that made these options, and waits
    /// until it is ready; or finds the device that `--nooverlap` asks for.
    ///
    /// # Errors
    /// Why the device could not be attached.
    pub fn attach(&self, words: &[OsString]) -> Outcome<Attached> {
        let start = || launch("attach", words.iter().cloned()).map(|launched| launched.info);
        if self.nooverlap {
            // What the daemon refuses is worded as a failed attach already.
            return nooverlap::attach(self, start);
        }
        Ok(Attached { info: start()?, is_new: true })
    }

    /// A failure of attaching the image.
    pub fn failed(&self, failure: Failure) -> Failure {
        failure.during(format_args!("attach {}", image_text(&self.image)))
    }

    /// Prints what the user needs to know of the new device.
    fn report(&self, info: &DeviceInfo) -> Outcome {
        if self.json {
            warn(info);
            return print_json(info);
        }
        if systemd::is_activated() {
            // Standard output is that of the program which has the sockets, and knows where they are.
            warn(info);
            return Ok(());
        }
        report(info)
    }

    /// Serves the device in this process until it is ended.
    fn serve(self) -> Outcome<ExitCode> {
        if self.exit_with_parent || self.daemon && self.run.is_some() {
            parent::exit_with_it().map_err(|e| self.failed(e))?;
        }
        let start = |parent: &mut Parent| Daemon::start(&self, parent).map_err(|e| self.failed(e));
        if self.daemon {
            return be_daemon(start);
        }
        let daemon = start(&mut Parent::none())?;
        if let Err(failure) = daemon.info().and_then(|info| self.report(&info)) {
            daemon.give_up();
            return Err(self.failed(not_reported(failure)));
        }
        Ok(daemon.run())
    }
}

/// A device that is attached.
#[derive(Debug)]
pub struct Attached {
    /// What is known about it.
    pub info: DeviceInfo,
    /// It was not there before.
    pub is_new: bool,
}

impl Attached {
    /// Reports it to the user by `print`. A new one that nobody hears of is detached again.
    ///
    /// # Errors
    /// If it cannot be printed.
    pub fn report(&self, print: impl FnOnce(&DeviceInfo) -> Outcome) -> Outcome {
        print(&self.info).map_err(|failure| {
            if !self.is_new {
                return failure;
            }
            match StateDir::locate().and_then(|dir| detach::end(&dir, &self.info.name, true)) {
                Ok(_) => not_reported(failure),
                Err(stays) => Failure::new(format!("{failure}; and {stays}")),
            }
        })
    }
}

fn not_reported(failure: Failure) -> Failure {
    Failure::new(format!("{failure}; the device is detached again"))
}

/// The words that this process was started with after `attach`, for a later daemon of the same
/// device; `None` if one is not text.
pub fn own_words() -> Option<Vec<String>> {
    let hidden = |word: &String| word != "--daemon";
    let words = std::env::args_os().skip(2).map(|word| word.into_string().ok());
    words.collect::<Option<Vec<String>>>().map(|words| words.into_iter().filter(hidden).collect())
}
