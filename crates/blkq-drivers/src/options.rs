//! The options of the drivers.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blkq::{Error, ErrorKind, enumeration};

use crate::errors::invalid;
use crate::fault::FaultSpec;

/// The options of all drivers. [`open`](crate::open) rejects an option that the chosen driver does not have.
#[derive(Clone, Debug, Default)]
pub struct DriverOptions {
    /// The image: a regular file or a block device. [`open`](crate::open) takes it from the
    /// [`DriverSpec`](crate::DriverSpec) instead.
    pub path: PathBuf,
    /// Offset of the device in the image, in bytes.
    pub offset: u64,
    /// Size of the device in bytes; `None`: up to the end of the image.
    pub size_limit: Option<u64>,
    /// Logical block size in bytes, one of [`LOGICAL_BLOCK_SIZES`]. `None`: the driver chooses it: 512, or more if the
    /// image is a block device with larger blocks or [`DirectIo::On`] requires it.
    pub logical_block_bytes: Option<u32>,
    /// Serve the bytes at the end of a raw image in a regular file, or of the part that is served, that do not fill a
    /// logical block: the device has [`QueueLimits::padding_bytes`](blkq::QueueLimits::padding_bytes). Without this
    /// option these bytes are not served.
    pub partial_block: bool,
    /// Whether I/O bypasses the page cache.
    pub direct_io: DirectIo,
    /// How requests are submitted to the file.
    pub dispatch: Dispatch,
    /// Refuse writes, and open the image for reading only. Drivers without an image ignore this; use
    /// [`DiskBuilder::read_only`](blkq::DiskBuilder::read_only) for them.
    pub read_only: bool,
    /// Share the bytes with other processes that set this option too, and do not check whether the kernel uses
    /// them. A qcow2 image must be read-only then.
    pub shared: bool,
    /// Complete a write only when it survives a kill of this process, if the driver supports that. For exports whose
    /// clients continue with the next process and do not notice that this one was killed. An RBD image has no cache of
    /// librbd then, unless a setting of the image or the pool in the cluster enables it.
    pub write_through: bool,
    /// The size of a device that is in use, in bytes. If the image is larger by now, the device keeps this size, because
    /// its clients do not know the new one.
    pub device_bytes: Option<u64>,
    /// The format of the image.
    pub format: ImageFormat,
    /// The backing files that a qcow2 image may name.
    pub backing_chain: BackingChain,
    /// The directory of the journals, with which completed writes to a qcow2 image survive a kill of this process.
    /// `None`: writes that were not flushed are lost with the process, and an image whose journal may contain writes is
    /// opened read-only at most.
    pub journals: Option<Arc<Journals>>,
    /// The configuration file of the Ceph cluster; `None`: the file that librados finds, such as /etc/ceph/ceph.conf.
    pub ceph_conf: Option<PathBuf>,
    /// The keyring of the Ceph user; `None`: the keyring that the configuration names.
    pub ceph_keyring: Option<PathBuf>,
    /// The name of the Ceph user, without `client.`; `None`: `admin`.
    pub ceph_user: Option<String>,
    /// The [`owner`](blkq::Driver::owner) of a process that served the same image before and has exited. Its lock is
    /// broken immediately, and the cluster rejects requests of it that are still on the way.
    pub predecessor: Option<String>,
    /// The faults to inject; `None`: the device is not wrapped by the fault driver.
    pub fault: Option<FaultSpec>,
}

impl DriverOptions {
    /// The whole image at `path`, for reading and writing, with the default of every option.
    pub fn new(path: impl Into<PathBuf>) -> DriverOptions {
        DriverOptions { path: path.into(), ..DriverOptions::default() }
    }
}

/// Rejects the options that `driver` does not have: an image whose file offsets differ from those of the device has
/// no window, and a driver without a file no direct I/O either.
pub(crate) fn refuse_file_options(
    driver: &str,
    has_file: bool,
    options: &DriverOptions,
) -> Result<(), Error> {
    let refused = [
        ("an offset", options.offset != 0),
        ("a size limit", options.size_limit.is_some()),
        ("direct I/O", !has_file && options.direct_io == DirectIo::On),
        ("serial dispatch", options.dispatch == Dispatch::Serial),
    ];
    let Some((option, _)) = refused.iter().find(|(_, given)| *given) else { return Ok(()) };
    Err(invalid(match has_file {
        true => format!("{option} is for raw images, not {driver}; omit it"),
        false => format!("{option} is for image files, and {driver} has no file; omit it"),
    }))
}

/// The logical block sizes that a device may have, in bytes. The kernel's loop driver allows the same ones on machines
/// with pages of 4096 bytes.
pub const LOGICAL_BLOCK_SIZES: [u32; 4] = [512, 1024, 2048, 4096];

pub(crate) fn check_logical_block(bytes: u32) -> Result<u32, Error> {
    if LOGICAL_BLOCK_SIZES.contains(&bytes) {
        return Ok(bytes);
    }
    Err(invalid(format!("the sector size must be 512, 1024, 2048 or 4096, not {bytes}")))
}

enumeration! {
    /// Whether I/O bypasses the page cache.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    #[non_exhaustive]
    pub enum DirectIo {
        /// Use direct I/O, or fail to open the image.
        On => "on",
        /// Use the page cache.
        Off => "off",
        /// Use direct I/O if the image supports it with the requested sector size.
        #[default]
        Auto => "auto",
    }

    /// The name in settings.
    pub const fn name(self) -> &'static str;
    parse |text| -> Error { invalid(format!("direct-io is on, off or auto, not {text:?}")) }
}

enumeration! {
    /// How requests are submitted to the file.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    #[non_exhaustive]
    pub enum Dispatch {
        /// Immediately. Only buffered writes take turns, because the kernel admits one writer of a file at a time.
        #[default]
        Concurrent => "concurrent",
        /// One at a time, in order, as the kernel's loop driver did before it had hardware queues.
        Serial => "serial",
    }

    /// The name in settings.
    pub const fn name(self) -> &'static str;
    parse |text| -> Error { invalid(format!("dispatch is concurrent or serial, not {text:?}")) }
}

/// How to interpret the bytes of an image file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ImageFormat {
    /// As raw data, unless the image has the magic of another format, which is an error.
    #[default]
    Checked,
    /// As raw data, even if the image has the magic of another format.
    Raw,
    /// As a qcow2 image, QEMU's format.
    Qcow2,
}

/// The backing files that an image may name. The name is data in the image and may come from an untrusted
/// author, so it must not open arbitrary files.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum BackingChain {
    /// Only files in the directory of the image that names them, or below. A path that leads out of this
    /// directory, for example through a symbolic link, is refused.
    #[default]
    OwnDirectory,
    /// All files that the process may read.
    Allow,
}

/// The directory with the journals of images.
#[derive(Debug)]
pub struct Journals {
    pub(crate) directory: PathBuf,
    /// A journal of an earlier boot is void, because the machine was restarted.
    pub(crate) boot: (u64, u64),
    /// The user ID that must own the journals.
    pub(crate) user: u32,
}

impl Journals {
    /// Opens the directory, and creates it if it does not exist. It should be on tmpfs.
    ///
    /// # Errors
    /// The system's error if it cannot be created or the kernel's `boot_id` cannot be read.
    pub fn open(directory: &Path) -> Result<Arc<Journals>, Error> {
        let failed = |e| Error::system(format!("cannot create the directory {}", directory.display()), e);
        match DirBuilder::new().mode(0o700).create(directory) {
            // `create` applies the umask of the process, which may remove permissions.
            Ok(()) => fs::set_permissions(directory, Permissions::from_mode(0o700)).map_err(failed)?,
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && directory.is_dir() => {}
            Err(e) => return Err(failed(e)),
        }
        let path = "/proc/sys/kernel/random/boot_id";
        let text = fs::read_to_string(path).map_err(|e| Error::system(format!("cannot read {path}"), e))?;
        let id = u128::from_str_radix(&text.trim().replace('-', ""), 16)
            .map_err(|_| Error::new(ErrorKind::System, format!("{path} does not contain a UUID")))?;
        let user = rustix::process::geteuid().as_raw();
        Ok(Arc::new(Journals { directory: directory.to_owned(), boot: ((id >> 64) as u64, id as u64), user }))
    }

    /// The path of the directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }
}
