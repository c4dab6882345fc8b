//! A pair of fences of which one is free, for two sides of which one runs often and the other seldom:
//! for the second, the kernel runs a fence on all threads of the process (membarrier(2)).

use super::atomic::{Ordering::SeqCst, fence};

/// Each side writes, then passes its fence, then reads what the other wrote: at least one of the two
/// sees the other's write.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AsymmetricFence {
    /// The kernel runs fences for this process; else both sides run their own.
    expedited: bool,
}

impl AsymmetricFence {
    /// Asks the kernel to run fences for this process, if it can.
    pub fn new() -> AsymmetricFence {
        AsymmetricFence { expedited: register() }
    }

    /// The fence of the side that runs often.
    #[inline]
    pub fn light(self) {
        if self.expedited {
            std::sync::atomic::compiler_fence(SeqCst);
        } else {
            fence(SeqCst);
        }
    }

    /// The fence of the other side: microseconds.
    ///
    /// # Panics
    /// If a filter of system calls that came later refuses `membarrier`: nothing can be stopped safely then.
    pub fn heavy(self) {
        fence(SeqCst);
        assert!(!self.expedited || run(), "membarrier is refused since the disk was made");
    }
}

/// The checkers and the simulated world see the fences of the language only.
#[cfg(any(model_check, simulation, miri))]
fn register() -> bool {
    false
}

#[cfg(any(model_check, simulation, miri))]
fn run() -> bool {
    false
}

/// Registers the process, which may be repeated, and sees whether it can be used.
#[cfg(not(any(model_check, simulation, miri)))]
fn register() -> bool {
    membarrier(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) && run()
}

#[cfg(not(any(model_check, simulation, miri)))]
fn run() -> bool {
    membarrier(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED)
}

#[cfg(not(any(model_check, simulation, miri)))]
fn membarrier(command: libc::c_int) -> bool {
    const FLAGS: libc::c_uint = 0;
    const CPU: libc::c_int = 0;
    // SAFETY: it takes numbers only, and changes no memory.
    unsafe { libc::syscall(libc::SYS_membarrier, command, FLAGS, CPU) == 0 }
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::*};
    use std::time::{Duration, Instant};

    use super::*;
    use crate::layout::CachePadded;

    /// Enough for 100,000 rounds if both sides have a processor; on a busy machine it shows little.
    const TIME: Duration = Duration::from_millis(300);

    fn words() -> [CachePadded<AtomicU32>; 2] {
        [0; 2].map(|_| CachePadded::new(AtomicU32::new(0)))
    }

    /// Two sides write, pass their fences and read, many times at about the same moment.
    fn one_side_sees_the_other(fence: AsymmetricFence) {
        let (begun, written, missed) = (words(), words(), words());
        let (stop, begin) = (AtomicBool::new(false), Instant::now());
        let side = |own: usize, pass: &dyn Fn()| {
            let other = 1 - own;
            for round in 1.. {
                begun[own].store(round, SeqCst);
                while begun[other].load(SeqCst) < round {
                    if stop.load(SeqCst) {
                        return;
                    }
                    std::hint::spin_loop();
                }
                // Now the one and now the other is later, by more or less.
                let delay = if own as u32 == round % 2 { round / 2 % 16 } else { 0 };
                (0..delay).for_each(|_| std::hint::black_box(()));
                written[own].store(round, Relaxed);
                pass();
                if written[other].load(Relaxed) < round {
                    missed[own].store(round, SeqCst);
                    assert!(missed[other].load(SeqCst) != round, "neither side saw the other");
                }
                if begin.elapsed() > TIME {
                    return stop.store(true, SeqCst);
                }
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| side(1, &|| fence.light()));
            side(0, &|| fence.heavy());
        });
    }

    #[test]
    fn one_of_two_sides_sees_the_other_by_membarrier() {
        one_side_sees_the_other(AsymmetricFence::new());
    }

    #[test]
    fn one_of_two_sides_sees_the_other_by_plain_fences() {
        one_side_sees_the_other(AsymmetricFence { expedited: false });
    }
}
