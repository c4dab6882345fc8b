//! Submitters on threads that own no queue.

pub mod gate;
pub(crate) mod kick;
pub(crate) mod pending;
pub(crate) mod software;
pub(crate) mod submitter;
