//! Words that change together: a sequence before them is odd while they do (a seqlock). Any process may write
//! anything there: the worst is words that are not those of one change.

use crate::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
    fence,
};

/// How often a reader that meets a change tries again at once.
const READ_TRIES: usize = 4;

/// `N` words and their sequence.
#[repr(C)]
pub(super) struct SequencedWords<const N: usize> {
    sequence: AtomicU64,
    words: [AtomicU64; N],
}

impl<const N: usize> SequencedWords<N> {
    /// All zeroes.
    pub fn new() -> SequencedWords<N> {
        SequencedWords { sequence: AtomicU64::new(0), words: std::array::from_fn(|_| AtomicU64::new(0)) }
    }

    /// The number of the last change; odd while there is one, or if one was interrupted.
    #[inline]
    pub fn sequence(&self) -> u64 {
        self.sequence.load(Relaxed)
    }

    /// The words, and the number of their change; `None` while they change.
    pub fn read(&self) -> Option<(u64, [u64; N])> {
        for _ in 0..READ_TRIES {
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

    /// Changes the words, also where a change was interrupted, and then does `also` before a reader sees
    /// the change; one caller at a time.
    pub fn write(&self, words: &[u64; N], also: impl FnOnce()) {
        let odd = self.sequence.load(Relaxed) | 1;
        self.sequence.store(odd, Relaxed);
        fence(Release);
        self.words.iter().zip(words).for_each(|(shared, word)| shared.store(*word, Relaxed));
        also();
        self.sequence.store(odd.wrapping_add(1), Release);
    }

    /// Has these words, whatever there was; `number` is the sequence, rounded up to be even. For words that nobody
    /// reads yet.
    pub fn reset(&self, words: &[u64; N], number: u64) {
        self.words.iter().zip(words).for_each(|(shared, word)| shared.store(*word, Relaxed));
        self.sequence.store(number.wrapping_add(1) & !1, Release);
    }
}
