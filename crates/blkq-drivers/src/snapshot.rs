//! External snapshots: a new image over the one of a driver, which stays as it is from then on.

use std::any::Any;
use std::fs::File;
use std::path::Path;

use blkq::{Driver, Error, ErrorKind};

use super::r#loop::LoopDevice;
use super::qcow2::{Below, Journals, Qcow2};

/// Makes `file`, which is empty, open for reading and writing, and at the absolute `path`, a qcow2 image over that of
/// `driver`, whose disk is frozen. All that was written so far is durable when this returns, and so is the new image,
/// but for its name; what completes from then on survives this process in one of `journals`. The driver that is
/// returned is to take the other's place ([`Exchange::replace`](blkq::disk::Exchange::replace)), or to be dropped:
/// until then nothing has changed.
///
/// # Errors
/// One line: what is wrong, why, and the cure. [`ErrorKind::Unsupported`] for a device without an image of its
/// own, or of a part of one, or that is read-only; those of the files.
pub fn prepare(
    driver: &dyn Driver,
    file: File,
    path: &Path,
    journals: Option<&Journals>,
) -> Result<Box<dyn Driver>, Error> {
    let device = driver as &dyn Any;
    let below = if let Some(raw) = device.downcast_ref::<LoopDevice>() {
        Below::of_raw(raw.raw_image()?)
    } else if let Some(qcow2) = device.downcast_ref::<Qcow2>() {
        qcow2.below()?
    } else {
        let message = format!("a {} device has no image that another could have behind it", driver.name());
        return Err(Error::new(ErrorKind::Unsupported, message));
    };
    Ok(Box::new(Qcow2::over(below, file, path, journals)?))
}

/// Has a driver that was replaced by that of [`prepare`] leave its image to it, which reads it only.
pub fn supersede(driver: &dyn Driver) {
    let device = driver as &dyn Any;
    if let Some(raw) = device.downcast_ref::<LoopDevice>() {
        raw.supersede();
    } else if let Some(qcow2) = device.downcast_ref::<Qcow2>() {
        qcow2.supersede();
    }
}
