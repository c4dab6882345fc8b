//! The driver's words of a request: how far the call is that does it.

/// The progress of a call, kept in the driver's words of its first request.
#[derive(Clone, Copy)]
pub(super) struct Progress {
    /// Bytes transferred.
    pub done: u64,
    /// Attempts in a row that came to nothing.
    pub attempts: u64,
}

/// Words of a request: bytes done; attempts, and above them the next request of the same
/// call, plus one.
pub(super) const NEXT_SHIFT: u32 = 32;

impl Progress {
    pub fn load(words: &[u64; 2]) -> Progress {
        Progress { done: words[0], attempts: words[1] & ((1 << NEXT_SHIFT) - 1) }
    }

    pub fn store(self, words: &mut [u64; 2]) {
        *words = [self.done, words[1] >> NEXT_SHIFT << NEXT_SHIFT | self.attempts];
    }
}
