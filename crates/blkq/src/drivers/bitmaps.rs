//! Keeping the dirty bitmaps of a disk with its image: in a qcow2 image itself.

use std::any::Any;
use std::sync::Arc;

use crate::bitmap::Bitmap;
use crate::driver::Driver;
use crate::error::{Error, ErrorKind};

use super::fault::Fault;
use super::qcow2::Qcow2;

/// A driver that keeps bitmaps.
enum Keeper<'a> {
    Qcow2(&'a Qcow2),
}

fn keeper(driver: &dyn Driver) -> Option<Keeper<'_>> {
    let device = driver as &dyn Any;
    if let Some(fault) = device.downcast_ref::<Fault>() {
        return keeper(fault.inner());
    }
    device.downcast_ref::<Qcow2>().map(Keeper::Qcow2)
}

/// Loads the bitmaps that are kept with the image of `driver`, and marks them there as in use if it is to be
/// written to. To be called before a queue of it is opened. Returns them, and warnings, each one line.
///
/// # Errors
/// Those of the files.
pub fn load(driver: &dyn Driver) -> Result<(Vec<Bitmap>, Vec<String>), Error> {
    match keeper(driver) {
        Some(Keeper::Qcow2(qcow2)) => qcow2.load_bitmaps(),
        None => Ok((Vec::new(), Vec::new())),
    }
}

/// Checks whether bitmaps can be kept with the image of `driver`.
///
/// # Errors
/// [`ErrorKind::Unsupported`]: why not.
pub fn check(driver: &dyn Driver) -> Result<(), Error> {
    match keeper(driver) {
        Some(Keeper::Qcow2(qcow2)) => qcow2.check_bitmaps(),
        None => {
            let message =
                format!("a {} device has no place to keep bitmaps; use a qcow2 image", driver.name());
            Err(Error::new(ErrorKind::Unsupported, message))
        }
    }
}

/// Keeps `bitmaps` with the image of `driver`, in the place of those that it has. Nothing is written to the device
/// meanwhile, nor afterwards.
///
/// # Errors
/// Those of the files; bitmaps that were loaded are marked as in use there still.
pub fn store(driver: &dyn Driver, bitmaps: &[Arc<Bitmap>]) -> Result<(), Error> {
    match keeper(driver) {
        Some(Keeper::Qcow2(qcow2)) => qcow2.store_bitmaps(bitmaps),
        None => Ok(()),
    }
}
