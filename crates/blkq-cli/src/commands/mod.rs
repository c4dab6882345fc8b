use std::process::ExitCode;

use blkq_protocol::daemon::Serve;
use blkq_protocol::failure::{Failure, Outcome};
use clap::{CommandFactory, Parser, Subcommand};

pub mod attach;
pub mod bitmap;
pub mod commit;
pub mod config;
pub mod daemon;
pub mod detach;
pub mod doctor;
pub mod features;
mod front_ends;
pub mod generate;
pub mod group;
pub mod list;
pub mod log;
pub mod losetup;
pub mod recover;
pub mod resize;
pub mod resume;
pub mod service;
pub mod set;
pub mod show;
mod signals;
pub mod snapshot;
pub mod stat;
pub mod top;
pub mod trace;
pub mod ublk_owner;
pub mod upgrade;

/// Serve disk images as block devices: to the kernel (ublk), to NBD clients and to virtual machines
#[derive(Parser, Debug)]
#[command(
    name = "blkq",
    version,
    max_term_width = 100,
    after_help = "\
Examples:
  blkq attach disk.img        serve an image; prints /dev/ublkb0, or an NBD URI
  blkq list                   list the devices
  blkq stat disk.img 1        print what a device does, every second
  blkq detach disk.img        flush the device and detach it

Environment:
  BLKQ_STATE_DIR      the state directory [default: /run/blkq for root, $XDG_RUNTIME_DIR/blkq for
                      other users]
  BLKQ_CONFIG_DIR     the directory of configuration files [default: /etc/blkq]

Files:
  /etc/blkq/NAME.toml  options of a device, for `blkq attach --config` and for the service blkq@NAME
  /etc/blkq/defaults   the default of `attach --export`, as export = \"nbd\"

Files in the state directory:
  NAME.control        socket for commands to the daemon
  NAME.nbd            NBD socket, unless --listen is given
  NAME.vhost          vhost-user socket, unless --vhost-socket is given
  NAME.log            log of the daemon; NAME.log.1 is the log of the previous daemon
  NAME.json           the device as it is served, with its settings, for `blkq recover`
  NAME.options        the options of the device, for `blkq recover`
  NAME.lock           locked while the daemon is running
  journals/           journals of qcow2 images, which are applied after their daemons were killed
  groups/GROUP        the limits and the members of a group

Exit status:
  0  success
  1  refused or failed; one line on standard error says what, why, and what to do
  2  wrong usage
  3  a daemon in the foreground handed its device to the next one, for `blkq upgrade`
  4  a daemon in the foreground detached its device, but the last flush failed, so data may be lost,
     or the dirty bitmaps could not be saved

See also: `blkq COMMAND --help`; nbd-client(8), nbdcopy(1), qemu-nbd(8), losetup(8), iostat(1)"
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand, Debug)]
pub enum Command {
    /// Serve an image as a block device
    Attach(Box<attach::Args>),
    /// List the devices
    List(list::Args),
    /// Show the settings, clients and warnings of devices
    Show(show::Args),
    /// Show I/O statistics of devices: totals, or one report per interval
    Stat(stat::Args),
    /// Show the activity of all devices, live
    Top(top::Args),
    /// Print the log of a device's daemon
    Log(log::Args),
    /// Trace each I/O of a device through the block layer
    Trace(trace::Args),
    /// Change settings of a device in use
    Set(set::Args),
    /// List, create, change and remove groups of devices that share rate limits
    #[command(subcommand)]
    Group(group::Command),
    /// Change the size of a device, or adopt the new size of its image
    Resize(resize::Args),
    /// Take an external snapshot: new writes go to a new qcow2 overlay
    Snapshot(snapshot::Args),
    /// List, add, clear, merge and remove dirty bitmaps, for incremental backups
    #[command(subcommand)]
    Bitmap(bitmap::Command),
    /// Merge the active overlay into its backing file and switch the device to it
    Commit(commit::Args),
    /// Reissue the requests that are held after I/O errors, or fail them
    Resume(resume::Args),
    /// Flush devices and detach them
    Detach(detach::Args),
    /// Measure what each mechanism gains on this machine, and compare blkq with other servers
    Bench(blkq_bench::Arguments),
    /// Start a new daemon for a device whose daemon was killed or crashed
    Recover(recover::Args),
    /// Hand a device in use to a new daemon of this program, without I/O errors
    Upgrade(upgrade::Args),
    /// Accept the command line of losetup(8)
    Losetup(Box<losetup::Args>),
    /// Check configuration files, or apply them to attached devices
    Config(config::Args),
    /// Check what this machine supports, and print the commands that enable the rest
    Doctor(doctor::Args),
    /// Serve a configured device in this process, for a service manager
    Service(service::Args),
    /// List the kernel features that blkq uses, and which of them are missing
    Features(features::Args),
    /// Serve a device, for the command that starts this process
    #[command(hide = true)]
    Daemon(daemon::Args),
    /// Print the user who created a ublk device, for udev
    #[command(hide = true)]
    UblkOwner(ublk_owner::Args),
    /// Order services after the mounts of their images, for systemd
    #[command(hide = true)]
    SystemdGenerator(config::GeneratorArgs),
    /// Write manual pages or shell completions
    Generate(generate::Args),
}

impl Command {
    /// Fails with a failure that names what was refused or failed, the reason, and a hint.
    pub fn run<D: Serve>(self) -> Outcome<ExitCode> {
        let done = |()| ExitCode::SUCCESS;
        match self {
            Command::Attach(args) => attach::run::<D>(*args),
            Command::List(args) => list::run(args).map(done),
            Command::Show(args) => show::run(args),
            Command::Stat(args) => stat::run(args),
            Command::Top(args) => top::run(&args),
            Command::Log(args) => log::run(args).map(done),
            Command::Trace(args) => trace::run(args).map(done),
            Command::Set(args) => set::run(args),
            Command::Group(args) => group::run(args).map(done),
            Command::Resize(args) => resize::run(args).map(done),
            Command::Snapshot(args) => snapshot::run(args),
            Command::Bitmap(args) => bitmap::run(args).map(done),
            Command::Commit(args) => commit::run(args).map(done),
            Command::Resume(args) => resume::run(args).map(done),
            Command::Detach(args) => detach::run(args),
            Command::Bench(args) => {
                blkq_bench::run(&args).map(done).map_err(|e| Failure::new(e.to_string()).during("bench"))
            }
            Command::Recover(args) => recover::run(args),
            Command::Upgrade(args) => upgrade::run::<D>(args).map(done),
            Command::Losetup(args) => losetup::run(*args),
            Command::Config(args) => config::run::<D>(args),
            Command::Doctor(args) => doctor::run(args),
            Command::Service(args) => service::run::<D>(args),
            Command::Features(args) => features::run::<D>(args).map(done),
            Command::Daemon(args) => daemon::run::<D>(args),
            Command::UblkOwner(args) => ublk_owner::run(args).map(done),
            Command::SystemdGenerator(args) => config::generate(args).map(done),
            Command::Generate(args) => generate::run(args, Cli::command()).map(done),
        }
    }
}

#[cfg(test)]
mod tests {
    use blkq_protocol::options::Row;

    use super::*;

    const COMMAND_PAGE: &str = include_str!("../../../../docs/command.md");
    /// The `max_term_width` of the command, in columns. Clap wraps longer lines.
    const WIDTH: usize = 100;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn no_line_after_the_options_is_too_wide() {
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
    fn the_page_lists_all_settings_with_their_values() {
        let row = |row: &Row| {
            let devices = if row.scope.text().is_empty() { "all" } else { row.scope.text() };
            format!("| {:<18} | {:<26} | {devices:<29} |\n", format!("`{}`", row.name), row.values.text())
        };
        let rows: String = Row::sorted_by_name().into_iter().map(row).collect();
        assert!(COMMAND_PAGE.contains(&format!("|\n{rows}\n")), "docs/command.md must contain this:\n{rows}");
    }

    #[test]
    fn the_page_lists_all_commands_and_options_of_attach() {
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
