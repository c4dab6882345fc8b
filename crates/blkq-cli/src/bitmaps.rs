//! Dirty bitmaps as commands and daemons exchange them.

use serde::{Deserialize, Serialize};

/// A change of the dirty bitmaps, at one moment.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum BitmapChange {
    /// A bitmap of the writes from now on.
    Add {
        /// Its name.
        name: String,
        /// The bytes that one bit stands for.
        granularity: u64,
    },
    /// There is no such bitmap any more.
    Remove {
        /// Its name.
        name: String,
    },
    /// From now on it has the writes from now on.
    Clear {
        /// Its name.
        name: String,
    },
}

/// A dirty bitmap. Sizes in bytes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BitmapInfo {
    /// Its name.
    pub name: String,
    /// The part of the device that one bit stands for.
    pub granularity: u64,
    /// The parts that were written to since it was added or cleared; `None` of an inconsistent one.
    pub dirty: Option<u64>,
    /// `recording`; `disabled`, which stays as it is; `inconsistent`, in which writes may be missing.
    pub state: String,
}
