//! The options of the drivers.

use std::path::PathBuf;
use std::sync::Arc;

use crate::fault::FaultSpec;
use crate::format::ImageFormat;
use crate::image_file::DirectIo;
use crate::r#loop::Dispatch;
use crate::qcow2::{BackingChain, Journals};

/// The options of all drivers. An option that the chosen driver does not have is an error.
#[derive(Clone, Debug, Default)]
pub struct DriverOptions {
    /// Offset of the device in the image, in bytes.
    pub offset: u64,
    /// Size of the device in bytes; `None`: up to the end of the image.
    pub size_limit: Option<u64>,
    /// Logical block size in bytes, one of [`LOGICAL_BLOCK_SIZES`](crate::LOGICAL_BLOCK_SIZES); `None`: the driver
    /// chooses it.
    pub logical_block_bytes: Option<u32>,
    /// Serve the end of a raw image that does not fill a logical block. Without this option it is not served.
    pub partial_block: bool,
    /// Whether I/O bypasses the page cache.
    pub direct_io: DirectIo,
    /// How requests are submitted to the file.
    pub dispatch: Dispatch,
    /// Open the image for reading only. Drivers without an image ignore this; use
    /// [`DiskBuilder::read_only`](blkq::DiskBuilder::read_only) for them.
    pub read_only: bool,
    /// Allow other processes to use the same bytes of the image.
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
    /// The backing files that a qcow2 image may have.
    pub backing_chain: BackingChain,
    /// The directory of the journals, with which completed writes to a qcow2 image survive a kill of this process
    /// ([`Qcow2Options::journals`](crate::qcow2::Qcow2Options::journals)).
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
