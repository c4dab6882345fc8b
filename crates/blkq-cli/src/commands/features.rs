//! `blkq features`: lists the kernel features that blkq uses, and whether this kernel has them.

use blkq::ring;
use blkq_export::ublk::{self, ControlDevice};
use blkq_protocol::daemon::Serve;
use blkq_protocol::failure::Outcome;
use blkq_protocol::system::{has_seccomp, landlock_abi};
use serde::Serialize;

use super::doctor::kernel_release;
use crate::output::{Align, print, print_json, render};

#[derive(clap::Args, Debug)]
#[command(after_help = "\
Prints each feature, whether the kernel has it, and what blkq uses it for.

Examples:
  blkq features | grep missing")]
pub struct Args {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// The features of ublk that blkq uses: flag, name and purpose.
const UBLK_FEATURES: [(ublk::Features, &str, &str); 9] = [
    (ublk::Features::USER_RECOVERY, "UBLK_F_USER_RECOVERY", "devices outlive their daemon"),
    (ublk::Features::USER_RECOVERY_REISSUE, "UBLK_F_USER_RECOVERY_REISSUE", "recovery without I/O errors"),
    (ublk::Features::UNPRIVILEGED_DEV, "UBLK_F_UNPRIVILEGED_DEV", "devices of users other than root"),
    (ublk::Features::USER_COPY, "UBLK_F_USER_COPY", "data copied by the daemon"),
    (ublk::Features::AUTO_BUF_REG, "UBLK_F_AUTO_BUF_REG", "zero copy"),
    (ublk::Features::PER_IO_DAEMON, "UBLK_F_PER_IO_DAEMON", "several threads per queue"),
    (ublk::Features::QUIESCE, "UBLK_F_QUIESCE", "upgrade without reissued requests"),
    (ublk::Features::UPDATE_SIZE, "UBLK_F_UPDATE_SIZE", "resizing a device in use"),
    (ublk::Features::SAFE_STOP_DEV, "UBLK_F_SAFE_STOP_DEV", "refusing to detach an open device"),
];

#[derive(Serialize)]
struct Feature {
    name: &'static str,
    available: bool,
    /// Why blkq uses the feature and, if known, why the feature is missing.
    purpose: String,
}

#[derive(Serialize)]
struct Features {
    kernel: String,
    features: Vec<Feature>,
}

fn probe<D: Serve>() -> Features {
    let mut features = Vec::new();
    let mut add = |name, available, purpose: String| features.push(Feature { name, available, purpose });
    match ring::probe() {
        Ok(probe) => {
            add("io_uring", true, "everything".into());
            for (name, code, purpose) in D::OPERATIONS {
                add(name, probe(*code), (*purpose).into());
            }
        }
        Err(e) => add("io_uring", false, format!("everything: {e}")),
    }
    let confined = "daemons can open only the files of their devices";
    match landlock_abi() {
        0 => add("Landlock", false, format!("{confined}: add landlock to the kernel parameter lsm")),
        abi => add("Landlock", true, format!("{confined} (ABI {abi})")),
    }
    add("seccomp", has_seccomp(), "daemons can make only the system calls that they need".into());
    match ControlDevice::open().and_then(|mut control| control.features()) {
        Ok(has) => {
            add("ublk", true, "kernel block devices".into());
            for (feature, name, purpose) in UBLK_FEATURES {
                add(name, has.contains(feature), purpose.into());
            }
        }
        Err(e) => add("ublk", false, format!("kernel block devices: {e}")),
    }
    Features { kernel: kernel_release(), features }
}

pub fn run<D: Serve>(args: Args) -> Outcome {
    let probed = probe::<D>();
    if args.json {
        return print_json(&probed);
    }
    let Features { kernel, features } = probed;
    let mut rows = vec![["kernel".into(), kernel, String::new()]];
    rows.extend(features.into_iter().map(|Feature { name, available, purpose }| {
        [name.to_owned(), if available { "yes" } else { "missing" }.to_owned(), purpose]
    }));
    print(&render([Align::Left; 3], &rows))
}
