//! The journal, which keeps completed writes if the process is killed: its file, its records, and the clusters that
//! its records show as leaked. Names `format` only.

mod file;
pub(super) mod leaks;

pub(super) use file::{
    CHANGES_MAX, CLUSTERS_MAX, Journal, Left, Record, check_base, find, find_ignored, lacking,
};
