//! Several words that change together, as a seqlock: the sequence number before them is odd during a change.
//! Other processes may write anything into the memory. The worst result is a set of words that does not
//! belong to one change.

use crate::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
    fence,
};

/// How often a reader that meets a change tries again immediately.
const READ_TRIES: usize = 4;

/// `N` words and their sequence number.
#[repr(C)]
pub(super) struct SequencedWords<const N: usize> {
    sequence: AtomicU64,
    words: [AtomicU64; N],
}

impl<const N: usize> Default for SequencedWords<N> {
    fn default() -> SequencedWords<N> {
        SequencedWords { sequence: AtomicU64::new(0), words: std::array::from_fn(|_| AtomicU64::new(0)) }
    }
}

impl<const N: usize> SequencedWords<N> {
    /// The number of the last change. Odd during a change, or if a change was interrupted.
    pub fn sequence(&self) -> u64 {
        self.sequence.load(Relaxed)
    }

    /// The words, and the number of their change. `None` while they change.
    pub fn read(&self) -> Option<(u64, [u64; N])> {
        for _ in 0..READ_TRIES {
            // This acquire pairs with the release at the end of `write`. The fence below keeps the second
            // load of the sequence after the loads of the words.
            let before = self.sequence.load(Acquire);
            let mut words = [0; N];
            words.iter_mut().zip(&self.words).for_each(|(word, shared)| *word = shared.load(Relaxed));
            fence(Acquire);
            if before.is_multiple_of(2) && self.sequence.load(Relaxed) == before {
                return Some((before, words));
            }
        }
        None
    }

    /// Changes the words, also if an earlier change was interrupted. `also` runs before readers see the
    /// change. There must be one caller at a time.
    pub fn write(&self, words: &[u64; N], also: impl FnOnce()) {
        let odd = self.sequence.load(Relaxed) | 1;
        self.sequence.store(odd, Relaxed);
        // Keeps the stores of the words after the store of the odd number.
        fence(Release);
        self.words.iter().zip(words).for_each(|(shared, word)| shared.store(*word, Relaxed));
        also();
        self.sequence.store(odd.wrapping_add(1), Release);
    }

    /// Sets the words regardless of an unfinished change. The sequence becomes `number`, rounded up to an
    /// even value. For words that no reader uses yet.
    pub fn reset(&self, words: &[u64; N], number: u64) {
        self.words.iter().zip(words).for_each(|(shared, word)| shared.store(*word, Relaxed));
        self.sequence.store(number.wrapping_add(1) & !1, Release);
    }
}
