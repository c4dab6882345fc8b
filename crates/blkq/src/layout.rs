//! Padding to cache lines, for data that one thread writes while other threads use adjacent data. `blkq bench
//! layout` measures the benefit by comparison with the same sources built with `cfg(shared_layout)`, in which
//! nothing is padded.

use std::collections::BTreeMap;

/// The size of a cache line in bytes, the unit that processors transfer between caches.
pub const LINE_BYTES: usize = 64;

/// Pads a value to two cache lines, because some processors fetch lines in pairs.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[cfg_attr(not(shared_layout), repr(align(128)))]
#[cfg_attr(shared_layout, repr(transparent))]
pub struct CachePadded<T>(T);

impl<T> CachePadded<T> {
    /// Wraps a value.
    pub const fn new(value: T) -> CachePadded<T> {
        CachePadded(value)
    }
}

impl<T> std::ops::Deref for CachePadded<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

const _: () = assert!(align_of::<CachePadded<u32>>() == if cfg!(shared_layout) { 4 } else { 2 * LINE_BYTES });

/// The threads that write a field while I/O runs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Writer {
    /// No thread: all threads read the field, such as a setting or a limit.
    Nobody,
    /// The owner of the queue with this number.
    Owner(usize),
    /// The submitters of a software queue: the number of the hardware queue, and that of its software queue.
    Submitter(usize, usize),
    /// Any submitter or owner. Each such word has its own number, because two of them must not share a line.
    Everybody(usize),
}

/// A field on the data path, with its location in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HotField {
    /// The name of the field.
    pub name: &'static str,
    /// The threads that write the field.
    pub writer: Writer,
    /// The address of the field.
    pub address: usize,
    /// The size of the field in bytes.
    pub bytes: usize,
}

impl HotField {
    /// Describes `field` at its current address.
    pub fn of<T>(name: &'static str, writer: Writer, field: &T) -> HotField {
        HotField { name, writer, address: std::ptr::from_ref(field).addr(), bytes: size_of::<T>() }
    }
}

/// The fields of each cache line that contains fields of different writers. There, processors of otherwise
/// independent threads wait for each other. Fields that no thread writes may share a line, but only with each
/// other.
pub fn contended_lines(fields: &[HotField]) -> Vec<Vec<HotField>> {
    let mut lines: BTreeMap<usize, Vec<HotField>> = BTreeMap::new();
    for field in fields {
        let last = field.address + field.bytes.max(1) - 1;
        for line in field.address / LINE_BYTES..=last / LINE_BYTES {
            lines.entry(line).or_default().push(*field);
        }
    }
    let contended = |line: &Vec<HotField>| line.iter().any(|field| field.writer != line[0].writer);
    lines.into_values().filter(contended).collect()
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use super::*;
    use crate::Disk;
    use crate::drivers::ram::Ram;

    fn field(writer: Writer, address: usize, bytes: usize) -> HotField {
        HotField { name: "", writer, address, bytes }
    }

    #[test]
    fn a_line_is_contended_by_different_writers() {
        let lines = |fields: &[HotField]| contended_lines(fields).len();
        let (mine, yours) = (Writer::Owner(0), Writer::Owner(1));
        assert_eq!(lines(&[field(mine, 0, 8), field(mine, 8, 8), field(yours, 64, 8)]), 0);
        assert_eq!(lines(&[field(mine, 0, 8), field(yours, 56, 8)]), 1);
        assert_eq!(lines(&[field(Writer::Nobody, 0, 8), field(Writer::Nobody, 8, 8)]), 0);
        assert_eq!(lines(&[field(Writer::Nobody, 100, 8), field(mine, 64, 8)]), 1);
        assert_eq!(lines(&[field(mine, 0, 129), field(yours, 127, 2)]), 2, "a field that spans lines");
    }

    #[test]
    fn no_line_of_a_disk_is_contended() {
        for (queues, shared) in [(1, false), (4, false), (4, true)] {
            let disk = Disk::builder(Box::new(Ram::new(1 << 20, 512, false).unwrap()));
            let disk = disk.queues(queues).shared_tags(shared).depth(1024).build().unwrap();
            let fields = disk.hot_fields();
            let owned = |queue| fields.iter().filter(|field| field.writer == Writer::Owner(queue)).count();
            assert!((0..queues).all(|queue| owned(queue) >= 2), "{fields:?}");
            assert_eq!(fields.iter().any(|field| field.name == "tags"), shared);
            assert_eq!(contended_lines(&fields), Vec::<Vec<HotField>>::new());
        }
    }
}
