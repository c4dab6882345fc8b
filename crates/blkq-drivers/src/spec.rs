//! Parses the name of an image or a driver, and opens the driver. [`open`] is the only list of drivers.
//! Also has the image of a device, and the steps by which a device switches to another image, for external snapshots and
//! commits.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use blkq::drivers::null::{Null, NullOptions};
use blkq::drivers::ram::Ram;
use blkq::units::parse_bytes;
use blkq::{Driver, Error, ErrorKind};

use crate::errors::{invalid, unsupported};
use crate::fault::Fault;
use crate::image_file::{ImageFile, check_write_access};
use crate::r#loop::LoopDevice;
use crate::options::{
    DriverOptions, ImageFormat, LOGICAL_BLOCK_SIZES, check_logical_block, refuse_file_options,
};
use crate::qcow2::{CommitSource, OverlayBase, Qcow2, Target};
use crate::rbd::{Rbd, RbdSpec};

/// The driver and the image of a device, parsed from text such as `disk.img` or `ram:1G`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DriverSpec {
    /// `null:SIZE`: a device that stores nothing. The size is in bytes.
    Null(u64),
    /// `ram:SIZE`: a device in memory. The size is in bytes.
    Ram(u64),
    /// `rbd:POOL[/NAMESPACE]/IMAGE[@SNAPSHOT]`: an image in a Ceph cluster.
    Rbd(RbdSpec),
    /// Any other text is the path of an image file. A file named `null:...` is written `./null:...`.
    Image(PathBuf),
}

impl FromStr for DriverSpec {
    type Err = Error;

    fn from_str(text: &str) -> Result<DriverSpec, Error> {
        match text.split_once(':') {
            Some(("null", size)) => Ok(DriverSpec::Null(parse_bytes(size)?)),
            Some(("ram", size)) => Ok(DriverSpec::Ram(parse_bytes(size)?)),
            Some(("rbd", name)) => Ok(DriverSpec::Rbd(name.parse()?)),
            _ if text.is_empty() => Err(invalid("the path of the image is empty")),
            _ => Ok(DriverSpec::Image(text.into())),
        }
    }
}

/// The name of the format whose magic the image at `path` contains, such as `qcow2` or `VHD`; `None` for raw
/// data. Fails if the image cannot be opened for reading.
pub fn detect_format(path: &Path) -> Result<Option<&'static str>, Error> {
    let image = ImageFile::open(path, true)?;
    Ok(image.detect_format(image.size()?))
}

/// Opens the driver that `spec` names. Afterwards [`Driver::warnings`](blkq::Driver::warnings) returns what
/// the user should know about how it was opened. Fails with the errors of the driver, each one line, and
/// [`ErrorKind::Invalid`] for an option that the driver does not have.
pub fn open(spec: &DriverSpec, options: &DriverOptions) -> Result<Opened, Error> {
    let opened = open_plain(spec, options)?;
    let driver = &opened.driver;
    if let Some(bytes) = options.device_bytes.filter(|bytes| driver.limits().size_bytes() > *bytes) {
        driver.resize(Some(bytes))?;
    }
    let Some(fault) = &options.fault else { return Ok(opened) };
    let driver = Arc::new(Fault::new(opened.driver, fault.clone())?);
    let has_image = opened.image.is_some() || matches!(spec, DriverSpec::Rbd(_));
    Ok(Opened { driver, image: has_image.then_some(Image::Faulty) })
}

/// Checks whether [`open`] with the same arguments could succeed after the process that uses the image has
/// released it. Nothing is written: the image is opened for reading only, and its journal is not opened.
/// Fails as [`open`] does, but never with [`ErrorKind::Busy`].
pub fn check(spec: &DriverSpec, options: &DriverOptions) -> Result<(), Error> {
    if let DriverSpec::Image(path) = spec
        && !options.read_only
    {
        check_write_access(path)?;
    }
    let options = DriverOptions { read_only: true, journals: None, predecessor: None, ..options.clone() };
    match open_plain(spec, &options) {
        Err(error) if error.kind() == ErrorKind::Busy => Ok(()),
        opened => opened.map(drop),
    }
}

/// Checks whether a device that was opened for reading may write to `range` of the image at `path`, in bytes, as
/// [`open`] does, apart from locks. A confined process cannot check this. An image that cannot be opened by that
/// path now is not checked. Fails with [`ErrorKind::Claimed`] or [`ErrorKind::Denied`].
pub fn check_writable(path: &Path, range: &Range<u64>) -> Result<(), Error> {
    let Ok(image) = ImageFile::open(path, true) else { return Ok(()) };
    image.check_writable()?;
    image.check_unclaimed(range, false).map_err(|error| error.with_hint("release it there first"))
}

fn open_plain(spec: &DriverSpec, options: &DriverOptions) -> Result<Opened, Error> {
    match spec {
        DriverSpec::Null(bytes) => {
            let block = memory_block("null", *bytes, options)?;
            let mut null = NullOptions::new(*bytes);
            let limits = &mut null.limits;
            (limits.logical_block_bytes, limits.physical_block_bytes) = (block, block);
            limits.discard_granularity = block;
            Ok(Opened::without_image(Null::new(null)?))
        }
        DriverSpec::Ram(bytes) => {
            Ok(Opened::without_image(Ram::new(*bytes, memory_block("ram", *bytes, options)?, false)?))
        }
        DriverSpec::Rbd(spec) => {
            refuse_file_options("rbd", false, options)?;
            Ok(Opened::without_image(Rbd::open(spec, options)?))
        }
        DriverSpec::Image(path) => {
            let options = DriverOptions { path: path.clone(), ..options.clone() };
            if options.format != ImageFormat::Qcow2 {
                return Ok(Target::Raw(Arc::new(LoopDevice::open(&options)?)).into());
            }
            Ok(Target::Qcow2(Arc::new(Qcow2::open(&options)?)).into())
        }
    }
}

/// The logical block size of a device of `bytes` bytes without a file, which the size must be a multiple of.
fn memory_block(driver: &str, bytes: u64, options: &DriverOptions) -> Result<u32, Error> {
    refuse_file_options(driver, false, options)?;
    let block = check_logical_block(options.logical_block_bytes.unwrap_or(LOGICAL_BLOCK_SIZES[0]))?;
    let below = bytes - bytes % u64::from(block);
    if bytes != 0 && bytes == below {
        return Ok(block);
    }
    Err(invalid(format!(
        "the size must be a multiple of the sector size {block} and more than 0, not {bytes}; choose a multiple, such as {}",
        below.max(u64::from(block))
    )))
}

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
    use crate::r#loop::{DirectIo, Dispatch, LoopDevice};
    use crate::{DriverOptions, DriverSpec, ImageFormat, open};

    #[test]
    fn specs_and_sizes_parse() {
        assert_eq!("null:1G".parse::<DriverSpec>().unwrap(), DriverSpec::Null(1 << 30));
        assert_eq!("ram:512".parse::<DriverSpec>().unwrap(), DriverSpec::Ram(512));
        assert_eq!("./null:1G".parse::<DriverSpec>().unwrap(), DriverSpec::Image("./null:1G".into()));
        assert_eq!("a:b".parse::<DriverSpec>().unwrap(), DriverSpec::Image("a:b".into()));
        assert_eq!("rbd:p/i".parse::<DriverSpec>().unwrap(), DriverSpec::Rbd("p/i".parse().unwrap()));
        for bad in [
            "rbd:",
            "rbd:i",
            "null:",
            "null:+1",
            "null:-1",
            "ram:1X",
            "ram:99999999T",
            "ram:K",
            "null:1é",
            "",
        ] {
            assert!(bad.parse::<DriverSpec>().is_err(), "{bad}");
        }
    }

    #[test]
    fn each_driver_opens_and_rejects_options_it_does_not_have() {
        let options =
            DriverOptions { logical_block_bytes: Some(4096), read_only: true, ..Default::default() };
        for spec in [DriverSpec::Null(1 << 20), DriverSpec::Ram(1 << 20)] {
            let opened = open(&spec, &options).unwrap();
            let limits = opened.driver.limits();
            assert_eq!((limits.logical_block_bytes, limits.read_only), (4096, false));
            limits.validate().unwrap();
            for options in [
                DriverOptions { offset: 512, ..Default::default() },
                DriverOptions { size_limit: Some(512), ..Default::default() },
                DriverOptions { direct_io: DirectIo::On, ..Default::default() },
                DriverOptions { dispatch: Dispatch::Serial, ..Default::default() },
                DriverOptions { logical_block_bytes: Some(1000), ..Default::default() },
            ] {
                assert_eq!(open(&spec, &options).err().unwrap().kind(), ErrorKind::Invalid);
            }
        }
        assert!(open(&DriverSpec::Ram(1000), &DriverOptions::default()).is_err());
        let window = DriverOptions { offset: 512, ..DriverOptions::new("/nonexistent/image") };
        assert_eq!(kind(Qcow2::open(&window)), Some(ErrorKind::Invalid));
        assert!(open(&DriverSpec::Image("/nonexistent/image".into()), &options).is_err());
    }

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
