//! Which words have cache lines of their own: those that one thread writes while others use
//! theirs. `blkq bench layout` measures what that is worth against the same sources built
//! with `cfg(shared_layout)`, where nothing is padded.

use std::collections::BTreeMap;

#[cfg(not(shared_layout))]
pub use crossbeam_utils::CachePadded;

/// Bytes that processors take from each other at once. (Padding is to twice that where
/// they fetch lines in pairs.)
pub const LINE_BYTES: usize = 64;

/// The unpadded form of what other builds pad.
#[cfg(shared_layout)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[repr(transparent)]
pub struct CachePadded<T>(T);

#[cfg(shared_layout)]
impl<T> CachePadded<T> {
    /// The value, unpadded.
    pub const fn new(value: T) -> CachePadded<T> {
        CachePadded(value)
    }
}

#[cfg(shared_layout)]
impl<T> std::ops::Deref for CachePadded<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

#[cfg(shared_layout)]
impl<T> std::ops::DerefMut for CachePadded<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

#[cfg(not(shared_layout))]
const _: () =
    assert!(align_of::<CachePadded<u32>>() >= LINE_BYTES && size_of::<CachePadded<u32>>() >= LINE_BYTES);
#[cfg(shared_layout)]
const _: () = assert!(align_of::<CachePadded<u32>>() == 4 && size_of::<CachePadded<u32>>() == 4);

/// The threads that write a word while I/O runs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Writer {
    /// Nobody: settings and limits, which every thread reads.
    Nobody,
    /// The owner of that queue.
    Owner(usize),
    /// The submitters that share a software queue: of which queue, and which.
    Submitter(usize, usize),
    /// Submitters and owners alike: a word that they share, by its number.
    Everybody(usize),
}

/// Part of a structure on the data path, where it lies in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HotField {
    /// Its name.
    pub name: &'static str,
    /// The threads that write it.
    pub writer: Writer,
    /// Its address.
    pub address: usize,
    /// Its size in bytes.
    pub bytes: usize,
}

impl HotField {
    /// The field called `name` of a structure, where it lies in memory.
    pub fn of<T>(name: &'static str, writer: Writer, field: &T) -> HotField {
        HotField { name, writer, address: std::ptr::from_ref(field).addr(), bytes: size_of::<T>() }
    }
}

/// The fields of each cache line that has some of different writers: there the processors
/// of threads that have nothing to do with each other wait for each other. Fields that
/// nobody writes may lie together, but with no other.
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
        assert_eq!(lines(&[field(mine, 0, 129), field(yours, 127, 2)]), 2, "a field over lines");
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
