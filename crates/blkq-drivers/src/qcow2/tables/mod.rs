//! The tables of an image in memory. The L1 table and the refcount table are complete; of L2 tables and refcount
//! blocks only slices are cached. Changes are recorded in the journal. Names `format` and `journal`.

pub(super) mod cache;
pub(super) mod state;
