//! The image of a device: its identity, its sizes, and the steps by which a device switches to another image, for
//! external snapshots and commits.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use blkq::{Driver, Error, ErrorKind};

use crate::errors::unsupported;
use crate::image_file::ImageFile;
use crate::r#loop::LoopDevice;
use crate::qcow2::{CommitSource, OverlayBase, Qcow2, Target};
use crate::rbd::{Rbd, RbdSpec};

/// The unit of `st_blocks` in stat(2), in bytes.
const BLOCK_BYTES: u64 = 512;

/// A device that was opened.
pub struct Opened {
    /// The driver of the device, for the block layer.
    pub driver: Arc<dyn Driver>,
    /// The image of the device; `None` for a driver without one, such as `ram`.
    pub image: Option<Arc<dyn Image>>,
}

impl Opened {
    /// Wraps the driver of a device that has an image.
    pub fn with_image<D: Driver + Image + 'static>(device: D) -> Opened {
        let device = Arc::new(device);
        Opened { driver: device.clone(), image: Some(device) }
    }

    /// Wraps the driver of a device that has no image.
    pub fn without_image(device: impl Driver + 'static) -> Opened {
        Opened { driver: Arc::new(device), image: None }
    }
}

impl From<Target> for Opened {
    fn from(target: Target) -> Opened {
        match target {
            Target::Raw(raw) => Opened::with_image(*raw),
            Target::Qcow2(qcow2) => Opened::with_image(*qcow2),
        }
    }
}

/// The identity of an image, which does not depend on its path.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ImageId {
    /// A file, or the node of a block device.
    File {
        /// The device number of the file system (`st_dev`).
        dev: u64,
        /// The inode number of the file (`st_ino`).
        ino: u64,
    },
    /// An image in a Ceph cluster.
    Rbd(RbdSpec),
}

/// The sizes of an image, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Usage {
    /// Size of the device that the image represents.
    pub virtual_bytes: u64,
    /// Space that is allocated for the image, without its backing files.
    pub allocated_bytes: u64,
    /// Length of the file, holes included.
    pub file_bytes: u64,
}

/// An image that a driver serves. Every method may block, so control threads call them, and never an engine.
pub trait Image: Send + Sync {
    /// The identity of the image. It stays the same for the life of the driver.
    fn identity(&self) -> ImageId;

    /// The current sizes of the image. Fails with the I/O error of the file, or the error of the cluster.
    fn usage(&self) -> Result<Usage, Error>;

    /// Makes all writes durable, and returns the image as the backing file of an overlay
    /// ([`Qcow2::over`]). The disk must be frozen.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the image cannot become a backing file, for example because only a part of it is
    /// served or it is read-only; [`ErrorKind::FaultInjection`] while faults are injected; the I/O errors of the files.
    fn overlay_base(&self) -> Result<OverlayBase, Error>;

    /// The image as the overlay of a block commit, which copies it into its backing file.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the image has no backing file, is read-only or contains internal snapshots, or if
    /// its backing file was deleted; [`ErrorKind::FaultInjection`] while faults are injected.
    fn commit_source(self: Arc<Self>) -> Result<CommitSource, Error>;

    /// Hands the image over to another driver of this process, which only reads it: closes the journal, and
    /// converts the lock to a reader's. The disk must already use the other driver.
    ///
    /// # Errors
    /// The errors of [`Image::overlay_base`], and the I/O error of flushing metadata, after which the lock is
    /// converted nevertheless.
    fn supersede(&self) -> Result<(), Error>;
}

impl Image for LoopDevice {
    fn identity(&self) -> ImageId {
        let (dev, ino) = LoopDevice::identity(self);
        ImageId::File { dev, ino }
    }

    fn usage(&self) -> Result<Usage, Error> {
        usage_of(&self.file(), self.limits().size_bytes())
    }

    fn overlay_base(&self) -> Result<OverlayBase, Error> {
        self.raw_image().map(OverlayBase::of_raw)
    }

    fn commit_source(self: Arc<Self>) -> Result<CommitSource, Error> {
        Err(no_backing_file(self.name()))
    }

    fn supersede(&self) -> Result<(), Error> {
        LoopDevice::supersede(self);
        Ok(())
    }
}

impl Image for Qcow2 {
    fn identity(&self) -> ImageId {
        let (dev, ino) = Qcow2::identity(self);
        ImageId::File { dev, ino }
    }

    fn usage(&self) -> Result<Usage, Error> {
        usage_of(self.file(), self.limits().size_bytes())
    }

    fn overlay_base(&self) -> Result<OverlayBase, Error> {
        Qcow2::overlay_base(self)
    }

    fn commit_source(self: Arc<Self>) -> Result<CommitSource, Error> {
        CommitSource::new(self)
    }

    fn supersede(&self) -> Result<(), Error> {
        Qcow2::supersede(self)
    }
}

impl Image for Rbd {
    fn identity(&self) -> ImageId {
        ImageId::Rbd(self.spec().clone())
    }

    fn usage(&self) -> Result<Usage, Error> {
        let (file_bytes, allocated_bytes) = self.sizes()?;
        Ok(Usage { virtual_bytes: self.limits().size_bytes(), allocated_bytes, file_bytes })
    }

    fn overlay_base(&self) -> Result<OverlayBase, Error> {
        Err(no_overlay(self.name()))
    }

    fn commit_source(self: Arc<Self>) -> Result<CommitSource, Error> {
        Err(no_backing_file(self.name()))
    }

    fn supersede(&self) -> Result<(), Error> {
        Err(no_overlay(self.name()))
    }
}

/// The image of a device in which faults are injected. The fault driver cannot exchange the driver that it wraps, so the
/// device cannot switch to another image.
pub(crate) struct FaultImage(pub(crate) Arc<dyn Image>);

impl FaultImage {
    fn refusal(&self) -> Error {
        Error::new(
            ErrorKind::FaultInjection,
            "faults are injected into the device, so it cannot switch to another image",
        )
    }
}

impl Image for FaultImage {
    fn identity(&self) -> ImageId {
        self.0.identity()
    }

    fn usage(&self) -> Result<Usage, Error> {
        self.0.usage()
    }

    fn overlay_base(&self) -> Result<OverlayBase, Error> {
        Err(self.refusal())
    }

    fn commit_source(self: Arc<Self>) -> Result<CommitSource, Error> {
        Err(self.refusal())
    }

    fn supersede(&self) -> Result<(), Error> {
        Err(self.refusal())
    }
}

/// The error for a device of the driver `driver` whose image cannot become a backing file.
pub fn no_overlay(driver: &str) -> Error {
    unsupported(format!("a {driver} device cannot be the backing file of an image"))
}

/// The error for a commit of a device of the driver `driver`, which has no backing file.
pub fn no_backing_file(driver: &str) -> Error {
    unsupported(format!("a {driver} device has no backing file"))
}

fn usage_of(file: &ImageFile, virtual_bytes: u64) -> Result<Usage, Error> {
    let file_bytes = file.size()?;
    let metadata = file.metadata().map_err(|e| file.failed("inspect", e))?;
    // `st_blocks` of a block device is 0. All of its space counts as allocated.
    let allocated_bytes = match metadata.is_file() {
        true => metadata.blocks() * BLOCK_BYTES,
        false => file_bytes,
    };
    Ok(Usage { virtual_bytes, allocated_bytes, file_bytes })
}

#[cfg(test)]
#[cfg(not(model_check))]
mod tests {
    use std::fs::File;

    use blkq::drivers::ram::Ram;

    use super::*;
    use crate::r#loop::LoopOptions;
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
    fn an_image_reports_its_identity_and_its_sizes() {
        let path = image("usage");
        let raw: Arc<dyn Image> = Arc::new(LoopDevice::open(&LoopOptions::new(&path)).unwrap());
        let metadata = std::fs::metadata(&path).unwrap();
        assert_eq!(raw.identity(), ImageId::File { dev: metadata.dev(), ino: metadata.ino() });
        let usage = raw.usage().unwrap();
        assert_eq!((usage.virtual_bytes, usage.file_bytes), (2 << 20, 2 << 20));
        assert!((1 << 20..2 << 20).contains(&usage.allocated_bytes), "{usage:?}");
        assert_eq!(kind(raw.commit_source()), Some(ErrorKind::Unsupported));
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
        assert_eq!(image.usage().unwrap().file_bytes, 2 << 20);
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
