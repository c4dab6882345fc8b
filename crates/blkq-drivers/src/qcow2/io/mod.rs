//! The data path: operations on the files as futures, the tasks that wait for them, and the queue that runs the tasks.
//! `flush_metadata` writes tables back, in an order that survives a power loss. Names `format`, `journal` and `tables`.

pub(super) mod allocate;
pub(super) mod blocking_reader;
pub(super) mod env;
pub(super) mod flush_metadata;
pub(super) mod grow;
pub(super) mod inflate;
pub(super) mod operations;
pub(super) mod queue;
pub(super) mod read;
pub(super) mod write;
pub(super) mod zero;
