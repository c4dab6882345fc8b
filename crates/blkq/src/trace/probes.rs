//! USDT probes of provider `blkq`, for bpftrace(8), perf(1), SystemTap and gdb(1). Each probe is a `nop`
//! instruction, and a note in the binary (section `.note.stapsdt`) with its address and arguments.
//!
//! Each probe has a semaphore, which the kernel or the tool increments while a tool is attached. A queue
//! checks the semaphores when it wakes and once in many plugs, and takes the code path with probes only if
//! one is set.

use probe::probe_lazy;

use super::event::{EventKind, NO_TAG, TraceEvent};
use crate::tags::Tag;

/// Defines a probe. A second copy of this library, which `blkq bench layout` compares with in the same
/// program, uses another provider name: if two probes have the same name, tools increment only one semaphore,
/// possibly the one that is never checked.
#[cfg(not(shared_layout))]
macro_rules! probe_of_blkq {
    ($($probe:tt)*) => { probe_lazy!(blkq, $($probe)*) };
}
#[cfg(shared_layout)]
macro_rules! probe_of_blkq {
    ($($probe:tt)*) => { probe_lazy!(blkq_shared_layout, $($probe)*) };
}

/// The probe `$name` for an event, with the arguments place, operation, sector, bytes, and any others.
macro_rules! probe_io {
    ($name:ident, $probes:expr, $event:ident $(, $argument:expr)*) => {
        probe_of_blkq!(
            $name,
            $probes.place_of($event),
            match $event {
                Some(event) => event.operation as u8,
                None => return true,
            },
            $event.map_or(0, |event| event.sector.0),
            $event.map_or(0, |event| event.bytes)
            $(, $argument)*
        )
    };
}

/// The probes of one queue. A probe has at most six arguments, which is the limit of bpftrace. The first one
/// is always the place: the number of the disk in bits 32 and up, of the hardware queue in bits 16 to 31, and
/// the tag in bits 0 to 15.
#[derive(Clone, Copy)]
pub(crate) struct Probes {
    /// The place of the queue, without a tag.
    place: u64,
}

impl Probes {
    /// The probes of queue `queue` of disk number `disk`, if a tool is attached to one of them.
    pub fn attached(disk: u32, queue: usize) -> Option<Probes> {
        let probes = Probes { place: u64::from(disk) << 32 | (queue as u64 & 0xffff) << 16 };
        let attached = probes.submit(None)
            || probes.merge(None)
            || probes.issue(None)
            || probes.complete(None, 0)
            || probes.flush(None);
        attached.then_some(probes)
    }

    /// Fires the probe for the event, if there is one. `start_ns` is when the request started; 0: unknown.
    pub fn fire(&self, event: &TraceEvent, start_ns: u64) {
        match event.kind {
            EventKind::Queue => self.submit(Some(event)),
            EventKind::BackMerge | EventKind::FrontMerge => self.merge(Some(event)),
            EventKind::Issue => self.issue(Some(event)),
            EventKind::Complete => self.complete(Some(event), start_ns),
            // The other kinds concern the plug, the scheduler or parts of a bio.
            _ => false,
        };
    }

    // Each probe occurs once in the source, so that it has one semaphore. Its arguments are evaluated only
    // while a tool is attached. Called without an event, the function returns whether a tool is attached, and
    // does not reach the probe.

    #[inline(never)]
    fn submit(&self, event: Option<&TraceEvent>) -> bool {
        probe_io!(submit, self, event)
    }

    #[inline(never)]
    fn merge(&self, event: Option<&TraceEvent>) -> bool {
        probe_io!(merge, self, event)
    }

    #[inline(never)]
    fn issue(&self, event: Option<&TraceEvent>) -> bool {
        probe_io!(issue, self, event)
    }

    #[inline(never)]
    fn complete(&self, event: Option<&TraceEvent>, start_ns: u64) -> bool {
        probe_io!(
            complete,
            self,
            event,
            event.map_or(0, |event| latency_ns(event, start_ns)),
            event.and_then(|event| event.status).map_or(0, |status| status.errno())
        )
    }

    fn place_of(&self, event: Option<&TraceEvent>) -> u64 {
        let tag = event.and_then(|event| event.tag).map_or(NO_TAG, |tag| tag.0);
        self.place | u64::from(tag)
    }

    /// Fires the probe for the start of a driver's flush: its tag, and the number of bios that it serves.
    #[inline(never)]
    pub fn flush(&self, begun: Option<(Tag, usize)>) -> bool {
        probe_of_blkq!(
            flush,
            match begun {
                Some((tag, _)) => self.place | u64::from(tag.0),
                None => return true,
            },
            begun.map_or(0, |(_, served)| served)
        )
    }
}

/// The latency of a request in nanoseconds; 0 if its start is unknown.
fn latency_ns(event: &TraceEvent, start_ns: u64) -> u64 {
    if start_ns == 0 { 0 } else { event.time_ns.saturating_sub(start_ns) }
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use super::*;

    /// Name, number of arguments and presence of a semaphore of each probe in this test program.
    fn notes() -> Vec<(String, usize, bool)> {
        let program = std::fs::read("/proc/self/exe").expect("this program");
        let mut notes = Vec::new();
        let mut rest = &program[..];
        // A note consists of the lengths of owner and description, the type 3, the owner, and three addresses
        // followed by text.
        while let Some(at) = rest.windows(8).position(|bytes| bytes == b"stapsdt\0") {
            let (place, semaphore) = (&rest[at + 8..at + 16], &rest[at + 24..at + 32]);
            let text: Vec<&[u8]> = rest[at + 32..].splitn(4, |byte| *byte == 0).take(3).collect();
            if let [b"blkq", name, arguments] = text[..] {
                assert_ne!(place, [0; 8], "a place");
                let has_semaphore = semaphore != [0; 8];
                let arguments = String::from_utf8_lossy(arguments).split_whitespace().count();
                notes.push((String::from_utf8_lossy(name).into_owned(), arguments, has_semaphore));
            }
            rest = &rest[at + 8..];
        }
        notes.sort();
        notes.dedup();
        notes
    }

    #[test]
    #[cfg(target_pointer_width = "64")]
    fn each_probe_has_its_note_and_its_semaphore() {
        let names = ["complete", "flush", "issue", "merge", "submit"];
        let counts = [6, 2, 4, 4, 4];
        let wanted: Vec<_> =
            names.iter().zip(counts).map(|(name, count)| (name.to_string(), count, true)).collect();
        assert!(Probes::attached(0, 0).is_none());
        assert_eq!(notes(), wanted);
    }
}
