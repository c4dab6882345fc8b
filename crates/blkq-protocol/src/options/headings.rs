//! The headings of `blkq attach --help`, one per task for which a user looks for an option.

pub const IMAGE: &str = "Image";
pub const EXPORTS: &str = "Exports";
pub const ACCESS: &str = "Access";
pub const PERFORMANCE: &str = "Performance";
pub const LIMITS: &str = "Limits";
pub const CEPH: &str = "Ceph";
pub const SERVICE: &str = "Service";
