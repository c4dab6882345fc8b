use std::path::PathBuf;

use super::spec::RbdSpec;

/// The options with which an image is opened.
#[derive(Clone, Debug)]
pub struct RbdOptions {
    /// The name of the image.
    pub spec: RbdSpec,
    /// The cluster's configuration file; `None`: the one that librados finds, such as /etc/ceph/ceph.conf.
    pub conf: Option<PathBuf>,
    /// The keyring of the Ceph user; `None`: the keyring that the configuration names.
    pub keyring: Option<PathBuf>,
    /// The name of the Ceph user, without `client.`; `None`: `admin`.
    pub user: Option<String>,
    /// Logical block size in bytes, one of [`LOGICAL_BLOCK_SIZES`](crate::LOGICAL_BLOCK_SIZES); `None`: 512.
    pub logical_block_bytes: Option<u32>,
    /// Open the image for reading only.
    pub read_only: bool,
    /// Do not take the exclusive lock for this client alone, so that it passes between clients that need it.
    pub shared: bool,
    /// Disable librbd's cache: a write completes when the cluster has stored it, so a kill of this process does not lose
    /// it. A setting of the image or the pool in the cluster takes precedence.
    pub write_through: bool,
    /// The [`owner`](blkq::Driver::owner) of a process that served the image before and has exited. Its lock is broken
    /// immediately, and the cluster rejects requests of it that are still on the way.
    pub predecessor: Option<String>,
}

impl RbdOptions {
    /// The name of the Ceph user with `client.`, as librados requires it.
    pub(super) fn client(&self) -> String {
        format!("client.{}", self.user.as_deref().unwrap_or("admin"))
    }

    /// Whether the image is never written to: by option, or because it is a snapshot.
    pub(super) fn reads_only(&self) -> bool {
        self.read_only || self.spec.snapshot.is_some()
    }
}
