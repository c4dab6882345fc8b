//! `blkq ublk-owner`: prints the user who created a ublk device, for udev rules.

use blkq_export::ublk::{ControlDevice, Features};
use blkq_protocol::failure::{Failure, Outcome};

use crate::output::print;

#[derive(clap::Args, Debug)]
#[command(after_help = "\
Prints the user ID and the group ID of the process that created the device, or nothing if that was
root. packaging/udev/60-blkq-ublk.rules uses this command.

Examples:
  blkq ublk-owner ublkb0
      1000 1000")]
pub struct Args {
    /// The kernel's name of the device: ublkcN or ublkbN
    #[arg(value_parser = parse_kernel_name)]
    device: u32,
}

fn parse_kernel_name(name: &str) -> Result<u32, &'static str> {
    let number = name.strip_prefix("ublkc").or_else(|| name.strip_prefix("ublkb"));
    // A partition has the owner of its device.
    let number = number.map(|number| number.split_once('p').map_or(number, |(number, _)| number));
    number.and_then(|number| number.parse().ok()).ok_or("a device must be ublkcN or ublkbN, such as ublkb0")
}

/// Prints nothing if a privileged process created the device: then the node belongs to root.
pub fn run(args: Args) -> Outcome {
    let failure = |e: blkq::Error| Failure::from(e).during(format_args!("ublk-owner {}", args.device));
    let info = ControlDevice::open().and_then(|mut control| control.info(args.device)).map_err(failure)?;
    match info.filter(|info| info.flags & Features::UNPRIVILEGED_DEV.bits() != 0) {
        Some(info) => print(&format!("{} {}\n", info.owner_uid, info.owner_gid)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::parse_kernel_name;

    #[test]
    fn kernel_names_of_devices_and_partitions_are_parsed() {
        for (name, id) in [("ublkb0", 0), ("ublkc12", 12), ("ublkb3p1", 3)] {
            assert_eq!(parse_kernel_name(name), Ok(id));
        }
        for bad in ["", "ublkb", "ublkb-1", "sda", "/dev/ublkb0", "ublkbx"] {
            assert!(parse_kernel_name(bad).is_err(), "{bad:?}");
        }
    }
}
