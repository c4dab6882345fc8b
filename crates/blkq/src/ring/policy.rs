use std::sync::OnceLock;

use crate::error::Error;

/// The operations that are permitted on the rings of a confined process. A system call filter does not see
/// operations of a ring, so the ring itself has to be restricted.
#[derive(Clone, Copy, Debug)]
pub struct Policy {
    /// The numbers (`opcode::X::CODE`) of the permitted operations. The kernel fails all others with EACCES.
    pub operations: &'static [u8],
    /// Called on the thread of each engine once its ring is set up. The engine sets up no other ring.
    pub sealed: fn() -> Result<(), Error>,
}

pub(super) static POLICY: OnceLock<Policy> = OnceLock::new();

pub(crate) fn policy() -> Option<&'static Policy> {
    POLICY.get()
}
