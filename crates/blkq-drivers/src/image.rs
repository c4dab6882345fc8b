//! The image of a device, and the steps by which a device switches to another image, for external snapshots and commits.

use std::sync::Arc;

use blkq::{Driver, Error, ErrorKind};

use crate::errors::unsupported;
use crate::qcow2::{CommitSource, OverlayBase, Target};

/// A device that was opened.
pub struct Opened {
    /// The driver of the device, for the block layer.
    pub driver: Arc<dyn Driver>,
    /// The image of the device; `None` for a driver that cannot switch to another image, such as `ram`.
    pub image: Option<Image>,
}

impl Opened {
    /// Wraps the driver of a device without an [`Image`].
    pub fn without_image(device: impl Driver + 'static) -> Opened {
        Opened { driver: Arc::new(device), image: None }
    }
}

impl From<Target> for Opened {
    fn from(target: Target) -> Opened {
        let driver: Arc<dyn Driver> = match &target {
            Target::Raw(raw) => raw.clone(),
            Target::Qcow2(qcow2) => qcow2.clone(),
        };
        Opened { driver, image: Some(Image::Served(target)) }
    }
}

/// An image that a driver serves. Every method may block, so control threads call them, and never an engine.
#[derive(Clone)]
pub enum Image {
    /// A raw or qcow2 image.
    Served(Target),
    /// An image in which faults are injected. The fault driver cannot exchange the driver that it wraps, so the device
    /// cannot switch to another image.
    Faulty,
}

impl Image {
    /// Makes all writes durable, and returns the image as the backing file of an overlay
    /// ([`Qcow2::over`](crate::qcow2::Qcow2::over)). The disk must be frozen.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the image cannot become a backing file, for example because only a part of it is
    /// served or it is read-only; [`ErrorKind::FaultInjection`] while faults are injected; the I/O errors of the files.
    pub fn overlay_base(&self) -> Result<OverlayBase, Error> {
        match self {
            Image::Served(Target::Raw(raw)) => raw.raw_image().map(OverlayBase::of_raw),
            Image::Served(Target::Qcow2(qcow2)) => qcow2.overlay_base(),
            Image::Faulty => Err(faulty()),
        }
    }

    /// The image as the overlay of a block commit, which copies it into its backing file.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the image has no backing file, is read-only or contains internal snapshots, or if
    /// its backing file was deleted; [`ErrorKind::FaultInjection`] while faults are injected.
    pub fn commit_source(&self) -> Result<CommitSource, Error> {
        match self {
            Image::Served(Target::Raw(raw)) => Err(no_backing_file(raw.name())),
            Image::Served(Target::Qcow2(qcow2)) => CommitSource::new(qcow2.clone()),
            Image::Faulty => Err(faulty()),
        }
    }

    /// Hands the image over to another driver of this process, which only reads it: closes the journal, and
    /// converts the lock to a reader's. The disk must already use the other driver.
    ///
    /// # Errors
    /// The errors of [`Image::overlay_base`], and the I/O error of flushing metadata, after which the lock is
    /// converted nevertheless.
    pub fn supersede(&self) -> Result<(), Error> {
        match self {
            Image::Served(Target::Raw(raw)) => raw.supersede(),
            Image::Served(Target::Qcow2(qcow2)) => qcow2.supersede()?,
            Image::Faulty => return Err(faulty()),
        }
        Ok(())
    }
}

fn faulty() -> Error {
    Error::new(
        ErrorKind::FaultInjection,
        "faults are injected into the device, so it cannot switch to another image",
    )
}

/// The error for a device of the driver `driver` whose image cannot become a backing file.
pub fn no_overlay(driver: &str) -> Error {
    unsupported(format!("a {driver} device cannot be the backing file of an image"))
}

/// The error for a commit of a device of the driver `driver`, which has no backing file.
pub fn no_backing_file(driver: &str) -> Error {
    unsupported(format!("a {driver} device has no backing file"))
}

#[cfg(test)]
#[cfg(not(model_check))]
mod tests {
    use std::fs::File;

    use blkq::drivers::ram::Ram;

    use super::*;
    use crate::r#loop::LoopDevice;
    use crate::{DriverOptions, DriverSpec, ImageFormat, open};

    fn kind<T>(result: Result<T, Error>) -> Option<ErrorKind> {
        result.err().map(|error| error.kind())
    }

    fn image(name: &str) -> std::path::PathBuf {
        let path = std::env::temp_dir().join(format!("blkq-image-{name}-{}", std::process::id()));
        std::fs::write(&path, vec![1; 1 << 20]).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(2 << 20).unwrap();
        path
    }

    #[test]
    fn a_raw_image_has_no_backing_file() {
        let path = image("raw");
        let opened =
            Opened::from(Target::Raw(Arc::new(LoopDevice::open(&DriverOptions::new(&path)).unwrap())));
        assert_eq!(kind(opened.image.unwrap().commit_source()), Some(ErrorKind::Unsupported));
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_device_with_faults_keeps_its_image() {
        let path = image("fault");
        let spec = DriverSpec::Image(path.clone());
        let fault = Some("none".parse().unwrap());
        let options = DriverOptions { format: ImageFormat::Raw, fault, ..DriverOptions::default() };
        let opened = open(&spec, &options).unwrap();
        let image = opened.image.unwrap();
        assert!(opened.driver.bitmap_store().is_some());
        let refused = Some(ErrorKind::FaultInjection);
        assert_eq!(kind(image.overlay_base()), refused);
        assert_eq!(kind(image.supersede()), refused);
        assert_eq!(kind(image.commit_source()), refused);
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_device_in_memory_has_no_image() {
        let opened = Opened::without_image(Ram::new(1 << 20, 512, false).unwrap());
        assert!(opened.image.is_none() && opened.driver.bitmap_store().is_none());
    }
}
