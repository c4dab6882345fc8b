//! Shared between threads that own no queue and its owner: software queues, and the request gate.

pub mod gate;
pub(crate) mod pending;
pub(crate) mod software;
