//! Data shared between the owner of a queue and other threads: software queues, and the request gate.

pub mod gate;
pub(crate) mod software;
