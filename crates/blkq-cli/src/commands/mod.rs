//! The command line: one file per subcommand.

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

use crate::failure::Outcome;

pub mod attach;
pub mod bench;
pub mod bitmap;
mod bitmap_file;
pub mod commit;
pub mod config;
pub mod daemon;
pub mod detach;
pub mod doctor;
pub mod features;
pub mod generate;
pub mod group;
pub mod list;
pub mod losetup;
mod recorded_image;
pub mod recover;
pub mod resize;
pub mod resume;
pub mod service;
pub mod set;
pub mod show;
pub mod snapshot;
pub mod stat;
pub mod systemd_generator;
pub mod top;
pub mod trace;
pub mod ublk_owner;
pub mod upgrade;

/// The multi-queue block layer in user space: serves image files as fast block devices.
#[derive(Parser, Debug)]
#[command(
    name = "blkq",
    version,
    max_term_width = 100,
    after_help = "\
Examples:
  blkq attach disk.img                 serve an image; prints /dev/ublkb0, or an NBD URI
  blkq list                            what is attached
  blkq stat disk.img 1                 what it is doing, every second
  blkq detach disk.img                 flush it and detach it

Environment:
  BLKQ_STATE_DIR     the state directory
  BLKQ_CONFIG_DIR    the directory of configuration files
  XDG_RUNTIME_DIR    it is blkq in there for other users than root

Files:
  /etc/blkq/NAME.toml  the options of a device, for `blkq attach --config` and service blkq@NAME
  /run/blkq          the state directory of root, which `blkq show NAME` names; it has
  NAME.log           the daemon's log; NAME.log.1 the one before
  NAME.json          what is kept for `blkq recover`
  NAME.nbd           the NBD socket, unless --listen gives its place
  NAME.vhost         the socket for virtual machines, unless --vhost-socket gives its place
  NAME.control       the socket on which the daemon takes commands
  NAME.lock          locked as long as the daemon lives
  journals/          what qcow2 images lack if their daemon is killed
  groups/GROUP       the limits that a group's devices share

Exit status:
  0  done
  1  refused or failed; one line on stderr has what, why, and the cure
  2  wrong usage
  3  a daemon in the foreground left its device to the next one, as `upgrade` asked
  4  a daemon in the foreground detached, but its last flush failed, so data may be lost, or its
     dirty bitmaps could not be kept

See also: `blkq COMMAND --help`; nbd-client(8), nbdcopy(1), qemu-nbd(8), losetup(8), iostat(1)"
)]
pub struct Cli {
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Serve an image as a block device
    Attach(Box<attach::Args>),
    /// List the devices
    List(list::Args),
    /// Show all about devices
    Show(show::Args),
    /// Print what devices did, or are doing
    Stat(stat::Args),
    /// Watch what all devices do, on the terminal
    Top(top::Args),
    /// Follow each I/O of a device through the block layer
    Trace(trace::Args),
    /// Change settings of a device while it is in use
    Set(set::Args),
    /// List, make and change groups of devices that share limits
    Group(group::Args),
    /// Change the size of a device, or take over that of its image
    Resize(resize::Args),
    /// Keep a device as it is now, and go on in a new image
    Snapshot(snapshot::Args),
    /// List, add, clear and remove dirty bitmaps of a device, for incremental backups
    Bitmap(bitmap::Args),
    /// Bring what a device's image has into the one behind it, and go on in that
    Commit(commit::Args),
    /// Reissue the requests that a device holds after errors, or fail them
    Resume(resume::Args),
    /// Flush a device and detach it
    Detach(detach::Args),
    /// Measure what each idea is worth on this machine, and blkq beside its peers
    Bench(bench::Args),
    /// Serve a block device or a virtual machine's disk again after its daemon died
    Recover(recover::Args),
    /// Hand a block device in use to a new daemon, of this program
    Upgrade(upgrade::Args),
    /// The command line of losetup(8), for scripts and habits that have it
    Losetup(Box<losetup::Args>),
    /// Check the configuration files of devices, or apply them
    Config(config::Args),
    /// Check what this machine can do, with the command that changes it
    Doctor(doctor::Args),
    /// Serve a configured device, for a service manager
    Service(service::Args),
    /// Print what this kernel offers and what is missing
    Features(features::Args),
    /// Serve a device, for the command that starts this process
    #[command(hide = true)]
    Daemon(daemon::Args),
    /// Print the user that made a ublk device, for udev
    #[command(hide = true)]
    UblkOwner(ublk_owner::Args),
    /// Order services after the mounts of their images, for systemd
    #[command(hide = true)]
    SystemdGenerator(systemd_generator::Args),
    /// Write manual pages or shell completions into a directory
    Generate(generate::Args),
}

impl Command {
    /// Runs the subcommand, and returns the exit code of the process.
    ///
    /// # Errors
    /// One line: what was refused or failed, why, and the cure.
    pub fn run(self) -> Outcome<ExitCode> {
        let done = |()| ExitCode::SUCCESS;
        match self {
            Command::Attach(args) => args.run(),
            Command::List(args) => args.run().map(done),
            Command::Show(args) => args.run(),
            Command::Stat(args) => args.run(Cli::command),
            Command::Top(args) => args.run(),
            Command::Trace(args) => args.run(),
            Command::Set(args) => args.run().map(done),
            Command::Group(args) => args.run().map(done),
            Command::Resize(args) => args.run().map(done),
            Command::Snapshot(args) => args.run().map(done),
            Command::Bitmap(args) => args.run().map(done),
            Command::Commit(args) => args.run().map(done),
            Command::Resume(args) => args.run().map(done),
            Command::Detach(args) => args.run(),
            Command::Bench(args) => bench::run(&args).map(done),
            Command::Recover(args) => args.run(),
            Command::Upgrade(args) => args.run(),
            Command::Losetup(args) => args.run(Cli::command),
            Command::Config(args) => args.run(),
            Command::Doctor(args) => args.run(),
            Command::Service(args) => args.run(),
            Command::Features(args) => args.run().map(done),
            Command::Daemon(args) => args.run(),
            Command::UblkOwner(args) => args.run().map(done),
            Command::SystemdGenerator(args) => args.run().map(done),
            Command::Generate(args) => args.run(Cli::command()).map(done),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMAND_PAGE: &str = include_str!("../../../../docs/command.md");
    /// Columns of `max_term_width`: longer lines are wrapped.
    const WIDTH: usize = 100;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn no_line_behind_the_options_is_wrapped_again() {
        let mut command = Cli::command();
        command.build();
        let mut wide = Vec::new();
        for one in std::iter::once(&command).chain(command.get_subcommands()) {
            let text = one.get_after_help().map(ToString::to_string).unwrap_or_default();
            let lines = text.lines().filter(|line| line.chars().count() > WIDTH);
            wide.extend(lines.map(|line| format!("{}: {line}", one.get_name())));
        }
        assert!(wide.is_empty(), "{wide:#?}");
    }

    #[test]
    fn the_page_has_every_command_and_option_of_attach() {
        let command = Cli::command();
        for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
            let name = sub.get_name();
            assert!(
                COMMAND_PAGE.contains(&format!("`{name}`")) || COMMAND_PAGE.contains(&format!("`{name} ")),
                "{name}"
            );
        }
        let (_, table) = COMMAND_PAGE.split_once("## Options of `attach`").expect("a heading of the page");
        let attach = command.find_subcommand("attach").expect("a subcommand");
        let options = attach.get_arguments().filter(|option| !option.is_hide_set());
        let missing: Vec<&str> = options
            .filter_map(clap::Arg::get_long)
            .filter(|long| !["help", "version"].contains(long))
            .filter(|long| !table.contains(&format!("`--{long}`")) && !table.contains(&format!("`--{long} ")))
            .collect();
        assert!(missing.is_empty(), "docs/command.md has no row for {missing:?}");
    }
}
