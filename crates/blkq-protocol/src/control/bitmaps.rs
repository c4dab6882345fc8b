//! Dirty bitmaps, as commands and daemons exchange them.

use std::fmt::{self, Display, Formatter};

use serde::{Deserialize, Serialize};

/// An atomic change of the dirty bitmaps. The granularity is the number of bytes per bit. A disabled bitmap stops
/// recording writes; its bits stay. A merge sets the bits of several bitmaps in another one, too.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum BitmapChange {
    Add { name: String, granularity: u64 },
    Remove { name: String },
    Clear { name: String },
    Enable { name: String },
    Disable { name: String },
    Merge { from: Vec<String>, into: String },
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

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BitmapInfo {
    pub name: String,
    pub granularity: u64,
    /// Number of dirty bytes; `None` if the bitmap is inconsistent.
    pub dirty: Option<u64>,
    /// `recording`, `disabled` (writes are not recorded) or `inconsistent` (recorded writes may be missing).
    pub state: String,
}
