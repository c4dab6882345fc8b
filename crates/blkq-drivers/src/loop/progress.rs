//! The layout of the two words that the driver has in each request.

/// The progress of a call, stored in the words of its first request.
#[derive(Clone, Copy)]
pub(super) struct Progress {
    /// Bytes that were transferred.
    pub done: u64,
    /// Consecutive attempts without progress.
    pub attempts: u64,
}

/// The first word is `done`. The second word has the attempts below this bit, and above it one more than the tag
/// of the next request of the same call, or 0 for the last request.
pub(super) const NEXT_SHIFT: u32 = 32;

impl Progress {
    pub fn load(words: &[u64; 2]) -> Progress {
        Progress { done: words[0], attempts: words[1] & ((1 << NEXT_SHIFT) - 1) }
    }

    pub fn store(self, words: &mut [u64; 2]) {
        *words = [self.done, words[1] >> NEXT_SHIFT << NEXT_SHIFT | self.attempts];
    }
}
