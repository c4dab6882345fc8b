//! `blkq resume`: reissues the requests that a device holds after I/O errors, or fails them.

use blkq_protocol::control::{Request, ask};
use blkq_protocol::failure::Outcome;

use crate::devices::DeviceArg;
use crate::output::{print, quantity};

#[derive(clap::Args, Debug)]
#[command(after_help = "\
A device with --on-error hold or hold-enospc (an option of `blkq attach`, and a setting of
`blkq set`) holds requests that fail, and their clients wait. Free some space, or repair the storage
of the image, then resume. Prints the number of requests. Requests that fail again are held again;
`blkq show` prints their number.

Examples:
  blkq resume disk.img
      3 held requests reissued
  blkq resume disk.img --fail           # the clients get the errors")]
pub struct Args {
    #[command(flatten)]
    device: DeviceArg,
    /// Fail the held requests with their errors instead of reissuing them
    #[arg(long)]
    fail: bool,
}

pub fn run(args: Args) -> Outcome {
    let request = Request::Resume { fail: args.fail };
    let held: u64 = args.device.act("resume", |dir, name| ask(dir, name, &request))?;
    let what = if args.fail { "failed" } else { "reissued" };
    print(&format!("{} {what}\n", quantity(held, "held request")))
}
