//! Dirty bitmaps as commands and daemons exchange them.

use std::fmt::{self, Display, Formatter};

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
    /// It has no bit set, and gets those of writes from now on.
    Clear {
        /// Its name.
        name: String,
    },
    /// Writes set its bits from now on.
    Enable {
        /// Its name.
        name: String,
    },
    /// It stays as it is.
    Disable {
        /// Its name.
        name: String,
    },
    /// All that is dirty in some is dirty in another one, too.
    Merge {
        /// The names of those that stay as they are.
        from: Vec<String>,
        /// The name of the other one.
        into: String,
    },
}

impl Display for BitmapChange {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let (what, name) = match self {
            BitmapChange::Add { name, .. } => ("add", name),
            BitmapChange::Remove { name } => ("remove", name),
            BitmapChange::Clear { name } => ("clear", name),
            BitmapChange::Enable { name } => ("enable", name),
            BitmapChange::Disable { name } => ("disable", name),
            BitmapChange::Merge { into, .. } => ("merge into", into),
        };
        write!(f, "{what} {}", name.escape_debug())
    }
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
