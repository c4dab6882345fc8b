//! The operations that the rings of a confined process may do.

use std::sync::OnceLock;

use crate::error::Error;

/// The operations that the rings of this process may do once it is set, for a confined process: the
/// operations of a ring are no system calls, and what filters those does not see them.
#[derive(Clone, Copy, Debug)]
pub struct Policy {
    /// The numbers (`opcode::X::CODE`) of those that a ring carries out; others fail with EACCES.
    pub operations: &'static [u8],
    /// Called on the thread of each engine when its ring is there: it makes no other.
    pub sealed: fn() -> Result<(), Error>,
}

static POLICY: OnceLock<Policy> = OnceLock::new();

/// Applies `policy` to all rings made from now on.
pub(super) fn set(policy: Policy) {
    // A second one would be the same one again, or come too late.
    let _ = POLICY.set(policy);
}

/// The policy of new rings.
pub(crate) fn policy() -> Option<&'static Policy> {
    POLICY.get()
}
