//! The image or memory behind a device: how its driver is opened, and why it is not.

use std::time::{Duration, Instant};

use blkq::drivers::{self, DriverOptions, DriverSpec};
use blkq::{Driver, ErrorKind};

use crate::elsewhere;
use crate::failure::{Failure, Outcome};
use crate::options::{AttachOptions, Export, Format, image_text};
use crate::state::Claim;

/// Opens the driver. An image in use is tried for a moment: the kernel lets go of the
/// files of a daemon that was killed only some time after the process has exited.
pub(super) fn open_driver(
    options: &AttachOptions,
    ublk: bool,
    wait: Duration,
) -> Result<Box<dyn Driver>, blkq::Error> {
    let until = Instant::now() + wait;
    loop {
        match drivers::open(&options.image, &driver_options(options, ublk)) {
            // Others also open a block device for a moment to learn whether it is in use.
            Err(error)
                if matches!(error.kind(), ErrorKind::Busy | ErrorKind::Claimed) && Instant::now() < until =>
            {
                std::thread::sleep(Duration::from_millis(10));
            }
            opened => return opened,
        }
    }
}

/// Why the image was not opened, with the cure.
pub(super) fn refusal(error: blkq::Error, options: &AttachOptions, claim: &Claim) -> Failure {
    let cure = match error.kind() {
        ErrorKind::Busy => {
            let place = match &options.image {
                DriverSpec::Image(path) => {
                    elsewhere::describe(claim.dir(), path, options.offset, options.size_limit)
                }
                _ => None,
            };
            let place = place.map(|place| format!(" {place}")).unwrap_or_default();
            format!("{place}; detach it there first, or attach with --shared on both sides")
        }
        ErrorKind::Claimed => "; release it there first, or attach with --shared: file systems that do not \
             know of each other destroy the data"
            .to_owned(),
        ErrorKind::Format => "; convert it with `qemu-img convert -O raw`, or attach with --format raw to \
             serve its bytes as they are"
            .to_owned(),
        _ => return error.into(),
    };
    Failure::new(format!("{error}{cure}"))
}

/// Has a disk opened at the size that its block device has now.
pub(super) fn keep_size(options: &mut AttachOptions, bytes: u64) {
    match &mut options.image {
        DriverSpec::Image(_) => options.size_limit = options.size_limit.map(|_| bytes),
        DriverSpec::Null(size) | DriverSpec::Ram(size) => *size = bytes,
    }
}

pub(super) fn driver_options(options: &AttachOptions, ublk: bool) -> DriverOptions {
    DriverOptions {
        offset: options.offset,
        size_limit: options.size_limit,
        logical_block_bytes: options.sector_size.bytes(),
        partial_block: serves_bytes(options, ublk),
        direct_io: options.direct_io,
        dispatch: options.dispatch,
        read_only: options.read_only,
        shared: options.shared,
        raw: options.format == Some(Format::Raw),
        fault: options.fault.clone(),
    }
}

/// Whether clients may begin and end in the middle of a block: where a sector size is asked for they
/// may not, and where something else than NBD writes too they would undo its writes.
pub(super) fn serves_bytes(options: &AttachOptions, ublk: bool) -> bool {
    let only_nbd = !ublk && options.exports.iter().all(|export| *export == Export::Nbd);
    only_nbd && options.sector_size.bytes().is_none() && !options.whole_sectors
}

/// The options as another process understands them, wherever it runs.
pub(super) fn absolute(options: &AttachOptions) -> Outcome<AttachOptions> {
    // Where this process has no directory any more, there are no relative paths.
    options.clone().absolute(&std::env::current_dir().unwrap_or_default())
}

/// The image as another process finds it.
pub(super) fn image_name(image: &DriverSpec) -> String {
    match image {
        DriverSpec::Image(path) => path.canonicalize().unwrap_or_else(|_| path.clone()).display().to_string(),
        _ => image_text(image),
    }
}
