//! `blkq resize`: changes the size of a device in use.

use blkq::units::{format_bytes, parse_bytes};
use blkq_protocol::control::{NewSize, Request, ask};
use blkq_protocol::failure::Outcome;
use blkq_protocol::state::StateDir;

use crate::commands::detach::check_unopened;
use crate::devices::DeviceArg;
use crate::output::print;

#[derive(clap::Args, Debug)]
#[command(after_help = "\
Prints the new size. NBD clients that are connected keep the size that they negotiated; clients that
connect later get the new one. A device can always grow. While clients are connected, or the block
device is mounted or open, it shrinks only with --force, and I/O beyond the new end then fails.

Examples:
  truncate -s 20G disk.img && blkq resize disk.img
  blkq resize disk.img 10G
  blkq resize disk.img +10G             # 10 GiB more than the device has")]
pub struct Args {
    #[command(flatten)]
    device: DeviceArg,
    /// The new size, or +SIZE to make the device larger by SIZE [default: the size that the image has now]
    #[arg(value_parser = parse_size, value_name = "[+]SIZE")]
    size: Option<NewSize>,
    /// Shrink the device even if clients are connected or the block device is in use
    #[arg(long)]
    force: bool,
}

pub fn run(args: Args) -> Outcome {
    let new = args.size.unwrap_or(NewSize::OfImage);
    let size = args.device.act("resize", |dir, name| resize(dir, name, new, args.force))?;
    print(&format!("{}\n", format_bytes(size)))
}

fn parse_size(text: &str) -> Result<NewSize, blkq::Error> {
    match text.strip_prefix('+') {
        Some(more) => parse_bytes(more).map(NewSize::LargerBy),
        None => parse_bytes(text).map(NewSize::Bytes),
    }
}

/// Returns the new size in bytes. Fails if the device would shrink while it is in use and `force` is false.
pub fn resize(dir: &StateDir, name: &str, new: NewSize, force: bool) -> Outcome<u64> {
    // The daemon is confined and does not see which processes have the block device open, so this command
    // checks that. The daemon only uses the result if the device would shrink.
    let user = match force {
        true => None,
        false => check_unopened(&ask(dir, name, &Request::Show {})?).err().map(|failure| failure.to_string()),
    };
    let (size, grow_by) = match new {
        NewSize::OfImage => (None, None),
        NewSize::Bytes(bytes) => (Some(bytes), None),
        NewSize::LargerBy(bytes) => (None, Some(bytes)),
    };
    ask(dir, name, &Request::Resize { size, grow_by, force, user })
}
