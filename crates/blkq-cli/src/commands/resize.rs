//! `blkq resize`: changes the size of a device in use.

use blkq::units::parse_bytes;

use crate::commands::detach::check_unopened;
use crate::completion;
use crate::control::{Request, ask};
use crate::devices::{device_parser, named};
use crate::failure::Outcome;
use crate::print;
use crate::state::StateDir;
use blkq::units::format_bytes;

#[derive(clap::Args, Debug)]
#[command(after_help = "\
Prints the new size. NBD clients that are connected keep the size that they negotiated; clients that
connect later get the new one. A device can always grow. While clients are connected, or the block
device is mounted or open, it shrinks only with --force, and I/O beyond the new end then fails.

Examples:
  truncate -s 20G disk.img && blkq resize disk.img
  blkq resize disk.img 10G")]
pub struct Args {
    /// The device, by its name, image, URI or node in /dev
    #[arg(value_parser = device_parser(), add = completion::devices(), value_name = "DEVICE")]
    name: String,
    /// The new size [default: the size that the image has now]
    #[arg(value_parser = parse_bytes)]
    size: Option<u64>,
    /// Shrink the device even if clients are connected or the block device is in use
    #[arg(long)]
    force: bool,
}

impl Args {
    /// Changes the size, and prints the new size.
    pub fn run(self) -> Outcome {
        let dir = StateDir::locate()?;
        let name = named(&dir, &self.name)?;
        let size = resize(&dir, &name, self.size, self.force)
            .map_err(|e| e.during(format_args!("resize {}", self.name)))?;
        print(&format!("{}\n", format_bytes(size)))
    }
}

/// Changes the size of the device `name` to `size` bytes; `None` means the present size of its image. Returns
/// the new size in bytes.
///
/// # Errors
///
/// Fails if the image does not allow this size, or if the device would shrink while it is in use and `force`
/// is false.
pub fn resize(dir: &StateDir, name: &str, size: Option<u64>, force: bool) -> Outcome<u64> {
    // The daemon is confined and does not see which processes have the block device open, so this command
    // checks that. The daemon only uses the result if the device would shrink.
    let user = if force {
        None
    } else {
        check_unopened(&ask(dir, name, &Request::Show {})?).err().map(|failure| failure.to_string())
    };
    ask(dir, name, &Request::Resize { size, force, user })
}
