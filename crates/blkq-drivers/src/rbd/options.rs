//! How an image is to be opened.

use std::path::PathBuf;

use super::spec::RbdSpec;

/// How an image is to be opened.
#[derive(Clone, Debug)]
pub struct RbdOptions {
    /// The image.
    pub spec: RbdSpec,
    /// The cluster's configuration; `None`: where Ceph's programs find it, such as
    /// /etc/ceph/ceph.conf.
    pub conf: Option<PathBuf>,
    /// The keyring of Ceph's user; `None`: the one that the configuration has.
    pub keyring: Option<PathBuf>,
    /// The name of Ceph's user, without its `client.`; `None`: `admin`.
    pub user: Option<String>,
    /// Logical block in bytes, one of [`LOGICAL_BLOCK_SIZES`](crate::LOGICAL_BLOCK_SIZES); `None`: 512.
    pub logical_block_bytes: Option<u32>,
    /// Open it for reading only.
    pub read_only: bool,
    /// Leave the exclusive lock to clients that ask for it.
    pub shared: bool,
    /// Turn librbd's cache off: a write completes when the cluster has it, and is not lost with this process. The
    /// image's or pool's own settings in the cluster come before it.
    pub write_through: bool,
    /// The [`owner`](blkq::Driver::owner) of a process that served the image before and has exited: its lock is
    /// broken at once, and the cluster keeps what it may still have sent from the image.
    pub predecessor: Option<String>,
}

impl RbdOptions {
    /// The name of Ceph's user.
    pub(super) fn client(&self) -> String {
        format!("client.{}", self.user.as_deref().unwrap_or("admin"))
    }

    /// Whether it is never written to.
    pub(super) fn reads_only(&self) -> bool {
        self.read_only || self.spec.snapshot().is_some()
    }
}
