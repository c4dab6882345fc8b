//! `blkq attach`: serves an image as a block device. Each device has its own daemon.

pub mod create;
mod nooverlap;
mod run;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use blkq::units::parse_bytes;
use blkq_drivers::DriverSpec;
use blkq_protocol::daemon::{Parent, Serve, Start};
use blkq_protocol::failure::{Failure, Outcome, print_error};
use blkq_protocol::info::DeviceInfo;
use blkq_protocol::options::{AttachOptions, Export, Format, headings};
use blkq_protocol::state::StateDir;
use clap::{ArgAction, Args as _, Command, FromArgMatches};

use crate::commands::detach::detach;
use crate::config::with_defaults;
use crate::launch::{Program, exit_with_parent, is_activated, report, take_listeners};
use crate::output::{print_json, warn};
use crate::usage::first_line;

use create::{FileGuard, create_image, create_overlay, overlay_options};

/// The options of the device, and those of the command itself.
///
/// `create` and `overlay` precede [`AttachOptions`], so that the first heading is that of the image. A small
/// `display_order` places an option before those of its heading that have none.
#[derive(clap::Args, Debug)]
#[command(
    disable_help_flag = true,
    after_help = "\
Prints one line per export when the device is ready: the node in /dev, or a URI. A daemon serves the
device until `blkq detach`.

Sizes are bytes, or have a unit: K, M, G, T and KiB, MiB, ... are powers of 1024, KB, MB, ... are
powers of 1000. Fractions are allowed: 1.5G.

Examples:
  blkq attach disk.img
      /dev/ublkb0
  blkq attach new.img --create 10G
  blkq attach disk.img --export nbd
      nbd+unix:///?socket=/run/blkq/disk.img.nbd
  blkq attach disk.img --read-only --listen tcp:127.0.0.1:10809
  blkq attach disk.img --listen unix:/run/disk.sock --socket-group libvirt-qemu
  blkq attach disk.img --direct-io on --queues 4 --name data
  blkq attach vm.qcow2 --format qcow2
  blkq attach base.img --overlay clone.qcow2
  blkq attach ram:1G --name scratch
  blkq attach disk.img --run 'nbdcopy $uri copy.img'
  blkq attach null:1T --foreground      # stop with Ctrl-C
  blkq attach --config /etc/blkq/data.toml"
)]
pub struct Args {
    /// Create the image first, as a sparse file of SIZE bytes
    ///
    /// Only its owner may access the file (mode 600). An existing file is never overwritten. The new file is
    /// removed again if the device cannot be attached.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, conflicts_with_all = ["read_only", "nooverlap"], help_heading = headings::IMAGE)]
    create: Option<u64>,
    /// Create FILE as a qcow2 overlay of the image, and attach FILE
    ///
    /// The image stays as it is, and becomes the backing file of FILE. --format is the format of the image.
    /// An existing file is never overwritten. FILE is removed again if the device cannot be attached
    /// (docs/qcow2.md).
    #[arg(long, value_name = "FILE", conflicts_with_all = ["create", "read_only", "shared", "nooverlap"], help_heading = headings::IMAGE)]
    overlay: Option<PathBuf>,
    #[command(flatten)]
    options: AttachOptions,
    /// Reuse the device that already serves these bytes of the image, if there is one
    ///
    /// Its exports are printed. The attach fails if another device serves some of these bytes, but not the same
    /// range. If several such commands run at the same time, only one attaches a device.
    #[arg(long, conflicts_with_all = ["shared", "foreground"], help_heading = headings::ACCESS, display_order = 2)]
    nooverlap: bool,
    /// Read the image, and options that are not given here, from a TOML file
    ///
    /// The device is named after the file, unless --name is given (docs/service.md).
    #[arg(long, value_name = "FILE", help_heading = headings::SERVICE, display_order = 1)]
    config: Option<PathBuf>,
    /// Run CMD while the device is attached, then detach and exit with its exit code
    ///
    /// CMD runs in a shell. Its environment has $uri, $unixsocket or $port, $nbd, $exportname and $tls as for
    /// `nbdkit --run`, and also $name and $device (the node in /dev). The device is exported over NBD unless
    /// --export is given.
    #[arg(long, value_name = "CMD", conflicts_with_all = ["foreground", "json", "nooverlap", "exit_with_parent"], help_heading = headings::SERVICE, display_order = 2)]
    run: Option<String>,
    /// Serve in this process, until SIGINT or SIGTERM
    #[arg(long, help_heading = headings::SERVICE, display_order = 3)]
    foreground: bool,
    /// Serve in this process, and detach when the parent process exits
    #[arg(long, help_heading = headings::SERVICE, display_order = 4)]
    exit_with_parent: bool,
    /// Print the device as one JSON object, as `blkq show --json` does, instead of its exports
    #[arg(long, help_heading = headings::SERVICE)]
    json: bool,
    /// Print help. Defined here, so that its heading is the last one.
    #[arg(
        long, short, action = ArgAction::Help, help_heading = "Options",
        help = "Print help (see more with '--help')", long_help = "Print help (see a summary with '-h')"
    )]
    help: Option<bool>,
}

pub fn run<D: Serve>(args: Args) -> Outcome<ExitCode> {
    let failed = |e| args.options.failed(e);
    let options = args.options().and_then(with_defaults).and_then(find_format).map_err(failed)?;
    let is_activated = is_activated();
    let conflict = match (args.nooverlap, &args.run) {
        (true, _) => Some("--nooverlap may reuse a device that does not serve"),
        (_, Some(_)) => Some("--run starts a daemon, which does not get"),
        _ => None,
    };
    if let Some(conflict) = conflict.filter(|_| is_activated) {
        return Err(failed(Failure::new(format!("{conflict} the sockets passed by systemd; omit it"))));
    }
    // The sockets are the descriptors from 3 on (sd_listen_fds(3)). They must be taken before this
    // process opens files.
    let inherited = take_listeners().map_err(failed)?;
    let created = match (args.create, &args.overlay) {
        (Some(bytes), _) => Some(create_image(&args.options.image, bytes)),
        (None, Some(file)) => Some(create_overlay(&args.options, file)),
        (None, None) => None,
    };
    let created = created.transpose().map_err(failed)?;
    // A service manager supervises the process that it passes sockets to, so this process must serve
    // them.
    if args.foreground || args.exit_with_parent || is_activated {
        let parent = if args.exit_with_parent { exit_with_parent() } else { Ok(()) };
        let start = |()| D::start(Start::New(&options), inherited, &mut Parent::none());
        let daemon = parent.and_then(start).map_err(failed)?;
        created.into_iter().for_each(FileGuard::keep);
        return reported(daemon, |info| args.report(info)).map(D::run).map_err(failed);
    }
    if let Some(command) = &args.run {
        let launched = Program::This.launch_attach(&options, true).map_err(failed)?;
        created.into_iter().for_each(FileGuard::keep);
        warn(&launched.info.name, &launched.info.warnings);
        return run::run(&options, command, launched);
    }
    let attached = attach(&options, args.nooverlap)?;
    created.into_iter().for_each(FileGuard::keep);
    attached.report(|info| args.report(info)).map(|()| ExitCode::SUCCESS).map_err(failed)
}

impl Args {
    /// Parses the words after `attach` on a command line. Fails with the first mistake, in one line.
    pub fn options_from_words(words: &[OsString]) -> Outcome<AttachOptions> {
        let command = Args::augment_args(Command::new("attach").no_binary_name(true));
        let args = command.try_get_matches_from(words).and_then(|words| Args::from_arg_matches(&words));
        args.map_err(|error| Failure::new(first_line(&error)))?.options()
    }

    /// The checked options of the device; with --overlay, those for the overlay.
    pub fn options(&self) -> Outcome<AttachOptions> {
        let mut options = self.options.clone();
        // The command of --run uses $uri, which a block device does not have.
        if self.run.is_some() && options.exports.is_empty() {
            options.exports.push(Export::Nbd);
        }
        match &self.overlay {
            Some(file) => overlay_options(&options, file),
            None => options.check().map(|()| options),
        }
    }

    fn report(&self, info: &DeviceInfo) -> Outcome {
        // The program that passed the sockets owns the standard output of this process and knows the addresses.
        if !self.json && !is_activated() {
            return report(info);
        }
        warn(&info.name, &info.warnings);
        if self.json { print_json(info) } else { Ok(()) }
    }
}

/// A device that `attach` has attached, or has found with --nooverlap.
#[derive(Debug)]
pub struct Attached {
    pub info: DeviceInfo,
    /// This command has attached the device; otherwise it was attached before.
    is_new: bool,
}

impl Attached {
    /// Reports the device to the user with `print`. If that fails, a new device is detached again, because
    /// the user does not know where it is.
    pub fn report(&self, print: impl FnOnce(&DeviceInfo) -> Outcome) -> Outcome {
        print(&self.info).map_err(|failure| {
            let detach = || StateDir::locate().and_then(|dir| detach(&dir, &self.info.name, true));
            match self.is_new.then(detach) {
                None => failure,
                Some(Ok(_)) => not_reported(failure),
                Some(Err(not_detached)) => Failure::new(format!("{failure}; {not_detached}")),
            }
        })
    }
}

/// Reports the device of a daemon in this process to the user with `report`, or detaches the device.
pub fn reported<D: Serve>(daemon: D, report: impl FnOnce(&DeviceInfo) -> Outcome) -> Outcome<D> {
    if let Err(failure) = daemon.info().and_then(|info| report(&info)) {
        daemon.give_up();
        return Err(not_reported(failure));
    }
    Ok(daemon)
}

fn not_reported(failure: Failure) -> Failure {
    Failure::new(format!("{failure}; the device was detached again"))
}

/// With `nooverlap`, returns the device that already serves these bytes of the image, if there is one.
pub fn attach(options: &AttachOptions, nooverlap: bool) -> Outcome<Attached> {
    let start = || Program::This.launch_attach(options, false).map(|launched| launched.info);
    let attached = match nooverlap {
        true => nooverlap::attach(options, start),
        false => start().map(|info| Attached { info, is_new: true }),
    };
    attached.map_err(|e| options.failed(e))
}

/// Replaces `--format auto` by the detected format. The result is recorded with the device: a client that
/// writes a raw image could later give it another format's magic number.
fn find_format(mut options: AttachOptions) -> Outcome<AttachOptions> {
    let (DriverSpec::Image(path), Some(Format::Auto)) = (&options.image, options.format) else {
        return Ok(options);
    };
    let (format, name) = match blkq_drivers::detect_format(path)? {
        None => (Some(Format::Raw), "raw"),
        Some("qcow2") => (Some(Format::Qcow2), "qcow2"),
        // The check below rejects an image without a format by its name.
        Some(other) => (None, other),
    };
    if format.is_some() {
        print_error(&Failure::new(format!("{} is served as {name}", path.display())));
    }
    options.format = format;
    options.check().map(|()| options)
}
