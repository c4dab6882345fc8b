//! The io_uring of a thread: set-up with fallbacks for older kernels, probing, registered files and buffers,
//! and a submission queue that never reports that it is full.

#[cfg(not(model_check))]
pub(crate) mod buffers;
#[cfg(not(model_check))]
mod memory;
mod policy;
mod registrar;
#[cfg(simulation)]
mod simulated;
pub(crate) mod token;
#[cfg(model_check)]
mod twin;
#[cfg(not(any(simulation, loom, shuttle)))]
mod uring;
#[cfg(not(model_check))]
mod watch;

use io_uring::opcode;

use crate::error::Error;

pub use policy::Policy;
pub(crate) use policy::policy;
pub use registrar::Registrar;
#[cfg(simulation)]
pub(crate) use simulated::Ring;
pub use token::{Cqe, FileSlot, RingCounters, Token};
#[cfg(model_check)]
pub(crate) use twin::Ring;
#[cfg(not(any(simulation, loom, shuttle)))]
pub(crate) use uring::Ring;

/// Applies `policy` to all rings set up from now on. Only the first call of a process takes effect.
pub fn set_policy(policy: Policy) {
    #[cfg(not(any(simulation, loom, shuttle)))]
    uring::read_limits();
    policy::set(policy);
}

/// The largest number of bytes that can be registered together: 1 GiB (io_uring/rsrc.c,
/// `io_buffer_validate`).
pub const REGISTERED_MEMORY_MAX_BYTES: u64 = 1 << 30;

/// Queries which operations the rings of an engine support. Fails with
/// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) on kernels before 6.1 or where io_uring is
/// forbidden.
pub fn probe() -> Result<RingProbe, Error> {
    Ring::new(8).map(RingProbe)
}

/// The operations that this kernel's rings support.
pub struct RingProbe(Ring);

impl RingProbe {
    /// Whether the kernel supports the operation with number `code` (`opcode::X::CODE`).
    pub fn supports(&self, code: u8) -> bool {
        self.0.supports(code)
    }
}

/// The operations that every blkq engine uses, with their names, for probing.
pub const ENGINE_OPERATIONS: [(&str, u8); 3] = [
    ("IORING_OP_READ", opcode::Read::CODE),
    ("IORING_OP_POLL_ADD", opcode::PollAdd::CODE),
    ("IORING_OP_ASYNC_CANCEL", opcode::AsyncCancel::CODE),
];
