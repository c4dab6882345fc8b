//! `blkq resize`: changes the size of a device in use.

use blkq::drivers::parse_bytes;

use crate::completion;
use crate::control::{Request, ask};
use crate::devices::named;
use crate::failure::Outcome;
use crate::print;
use crate::size::format_size;
use crate::state::StateDir;

/// Options of `resize`.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Prints the new size. NBD clients that are connected keep the size that they were told;
those that connect later see the new one.

Examples:
  truncate -s 20G disk.img && blkq resize disk.img
  blkq resize disk.img 10G")]
pub struct Args {
    /// The device: its name, its image, its URI or its node in /dev
    #[arg(add = completion::devices(), value_name = "DEVICE")]
    name: String,
    /// The new size; without it, what the image now has
    #[arg(value_parser = parse_bytes)]
    size: Option<u64>,
}

impl Args {
    /// Changes the size and prints it.
    ///
    /// # Errors
    /// If the device cannot have that size.
    pub fn run(self) -> Outcome {
        let dir = StateDir::locate()?;
        let request = Request::Resize { size: self.size };
        let name = named(&dir, &self.name)?;
        let size: u64 =
            ask(&dir, &name, &request).map_err(|e| e.during(format_args!("resize {}", self.name)))?;
        print(&format!("{}\n", format_size(size)))
    }
}
