//! The keys of `blkq set`.

/// Of every device.
pub const OF_DEVICES: [&str; 11] = [
    "autoclear",
    "batching",
    "clock",
    "depth",
    "hang-warning",
    "iostats",
    "merge",
    "pacing",
    "read-only",
    "receive-backoff",
    "scheduler",
];
/// Of devices with an image.
pub const OF_IMAGES: [&str; 2] = ["direct-io", "dispatch"];
/// Of devices with injected faults.
pub const OF_FAULTS: [&str; 1] = ["fault"];
