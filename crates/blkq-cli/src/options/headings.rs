//! The headings of `blkq attach --help`, one per task for which a user looks for an option.

/// The image and how its file is opened.
pub const IMAGE: &str = "Image";
/// How clients reach the device.
pub const EXPORTS: &str = "Exports";
/// Permissions of clients, and of the daemon.
pub const ACCESS: &str = "Access";
/// Queues, threads and mechanisms.
pub const PERFORMANCE: &str = "Performance";
/// Rate limits.
pub const LIMITS: &str = "Limits";
/// The connection to a Ceph cluster.
pub const CEPH: &str = "Ceph";
/// The daemon and its supervision.
pub const SERVICE: &str = "Service";
