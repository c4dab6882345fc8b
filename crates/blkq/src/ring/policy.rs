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

static POLICY: OnceLock<Policy> = OnceLock::new();

pub(super) fn set(policy: Policy) {
    // A second policy is either identical or too late, because rings may exist already. It is ignored.
    let _ = POLICY.set(policy);
}

pub(crate) fn policy() -> Option<&'static Policy> {
    POLICY.get()
}
