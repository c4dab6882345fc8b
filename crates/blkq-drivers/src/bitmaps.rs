//! Keeping the dirty bitmaps of a disk with its image: in a qcow2 image itself, beside a raw one.

use std::any::Any;
use std::fs::File;
use std::sync::Arc;

use crate::bitmap::Bitmap;
use crate::driver::Driver;
use crate::error::{Error, ErrorKind};

use super::fault::Fault;
use super::r#loop::LoopDevice;
use super::qcow2::Qcow2;

/// A driver that keeps bitmaps.
enum Keeper<'a> {
    Loop(&'a LoopDevice),
    Qcow2(&'a Qcow2),
}

fn keeper(driver: &dyn Driver) -> Option<Keeper<'_>> {
    let device = driver as &dyn Any;
    if let Some(fault) = device.downcast_ref::<Fault>() {
        return keeper(fault.inner());
    }
    let raw = device.downcast_ref::<LoopDevice>().map(Keeper::Loop);
    raw.or_else(|| device.downcast_ref::<Qcow2>().map(Keeper::Qcow2))
}

/// Loads the bitmaps that are kept with the image of `driver`, and marks them there as in use if it is to be
/// written to. To be called before a queue of it is opened. Returns them, and warnings, each one line.
///
/// # Errors
/// Those of the files.
pub fn load(driver: &dyn Driver) -> Result<(Vec<Bitmap>, Vec<String>), Error> {
    match keeper(driver) {
        Some(Keeper::Loop(raw)) => raw.load_bitmaps(),
        Some(Keeper::Qcow2(qcow2)) => qcow2.load_bitmaps(),
        None => Ok((Vec::new(), Vec::new())),
    }
}

/// Checks whether bitmaps can be kept with the image of `driver`.
///
/// # Errors
/// [`ErrorKind::Unsupported`]: why not; [`ErrorKind::NotFound`] if they can, once it has a file for them
/// ([`set_file`]).
pub fn check(driver: &dyn Driver) -> Result<(), Error> {
    match keeper(driver) {
        Some(Keeper::Loop(raw)) => raw.check_bitmaps(),
        Some(Keeper::Qcow2(qcow2)) => qcow2.check_bitmaps(),
        None => {
            let message =
                format!("a {} device has no place for bitmaps: it has no image in a file", driver.name());
            Err(Error::new(ErrorKind::Unsupported, message))
        }
    }
}

/// Has the bitmaps of the raw image of `driver` kept in `file`, which is new and open for reading and writing: the
/// image's path with `.bitmaps` behind it, where they are found when it is opened next. One that has a file keeps
/// that.
///
/// # Errors
/// As [`check`], and if the file is not a new one.
pub fn set_file(driver: &dyn Driver, file: File) -> Result<(), Error> {
    match keeper(driver) {
        Some(Keeper::Loop(raw)) => raw.set_bitmap_file(file),
        _ => check(driver),
    }
}

/// Has the image of `driver` name `bitmaps`, and no others, as in use, durably, with room for their bits: if this
/// process is killed they are inconsistent, and [`store`] does not fail for a file system that is full. To be called
/// whenever a bitmap is added, removed or gets another size, and with a driver that is to take the place of that which
/// keeps them. No queue does I/O meanwhile. Does nothing where [`check`] fails.
///
/// # Errors
/// [`ErrorKind::Unsupported`] if the image has a bitmap of such a name that is not known here; those of the files,
/// such as one that has no room. The image names those that it named then.
pub fn reserve(driver: &dyn Driver, bitmaps: &[Arc<Bitmap>]) -> Result<(), Error> {
    match keeper(driver) {
        Some(Keeper::Loop(raw)) => raw.reserve_bitmaps(bitmaps),
        Some(Keeper::Qcow2(qcow2)) => qcow2.reserve_bitmaps(bitmaps),
        None => Ok(()),
    }
}

/// Keeps `bitmaps` with the image of `driver`, in the place of those that it has. Nothing is written to the device
/// meanwhile, nor afterwards.
///
/// # Errors
/// Those of the files; bitmaps that were loaded are marked as in use there still.
pub fn store(driver: &dyn Driver, bitmaps: &[Arc<Bitmap>]) -> Result<(), Error> {
    match keeper(driver) {
        Some(Keeper::Loop(raw)) => raw.store_bitmaps(bitmaps),
        Some(Keeper::Qcow2(qcow2)) => qcow2.store_bitmaps(bitmaps),
        None => Ok(()),
    }
}
