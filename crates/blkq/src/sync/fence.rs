//! A pair of fences, one of which costs nothing, for two sides of which one runs often and the other rarely.
//! The rare side lets the kernel run a fence on all threads of the process (membarrier(2)).

use rustix::thread::MembarrierCommand;

use super::atomic::{Ordering::SeqCst, fence};

/// Each side writes, then passes its fence, then reads what the other side wrote. At least one of the two
/// sides sees the other's write.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AsymmetricFence {
    /// The kernel runs fences for this process. Otherwise both sides execute a fence.
    expedited: bool,
}

impl AsymmetricFence {
    /// Registers the process for fences run by the kernel, if the kernel supports them, and checks that they
    /// work. A process may register repeatedly.
    pub fn new() -> AsymmetricFence {
        let expedited = membarrier(MembarrierCommand::RegisterPrivateExpedited)
            && membarrier(MembarrierCommand::PrivateExpedited);
        AsymmetricFence { expedited }
    }

    /// The fence of the side that runs often: only a compiler fence if the kernel runs the other one.
    #[inline]
    pub fn light(self) {
        if self.expedited {
            std::sync::atomic::compiler_fence(SeqCst);
        } else {
            fence(SeqCst);
        }
    }

    /// The fence of the side that runs rarely. Takes microseconds. Panics if a system call filter that was
    /// installed later refuses `membarrier`, because nothing can be stopped safely then.
    pub fn heavy(self) {
        fence(SeqCst);
        assert!(
            !self.expedited || membarrier(MembarrierCommand::PrivateExpedited),
            "a system call filter that was installed after the disk was built refuses membarrier"
        );
    }
}

fn membarrier(command: MembarrierCommand) -> bool {
    // Model checkers, simulation and Miri see only the fences of the language.
    !cfg!(any(model_check, simulation, miri)) && rustix::thread::membarrier(command).is_ok()
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::*};
    use std::time::{Duration, Instant};

    use super::*;
    use crate::layout::CachePadded;

    /// Enough for 100,000 rounds if both sides have a processor. On a busy machine there are far fewer.
    const TIME: Duration = Duration::from_millis(300);

    fn words() -> [CachePadded<AtomicU32>; 2] {
        [0; 2].map(|_| CachePadded::new(AtomicU32::new(0)))
    }

    /// Two sides write, pass their fences and read, many times at nearly the same moment.
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
                // Each side in turn is the later one, by a varying delay.
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
