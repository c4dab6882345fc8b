//! Clusters that are allocated and to which no table refers yet: those of writes in flight, and of new L2
//! tables. They leak if the process is killed, so the journal records them.

use std::collections::BTreeMap;
use std::ops::Range;

/// Numbers of clusters of the file, as ranges that do not overlap: each start is mapped to its end.
#[derive(Default)]
pub struct Unlinked(BTreeMap<u64, u64>);

impl Unlinked {
    pub fn insert(&mut self, clusters: Range<u64>) {
        if !clusters.is_empty() {
            self.0.insert(clusters.start, clusters.end);
        }
    }

    pub fn remove(&mut self, clusters: Range<u64>) {
        let overlaps = |(start, end): (&u64, &u64)| (*end > clusters.start).then_some((*start, *end));
        while let Some((start, end)) = self.0.range(..clusters.end).next_back().and_then(overlaps) {
            self.0.remove(&start);
            self.insert(start..clusters.start);
            self.insert(clusters.end..end);
        }
    }

    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> {
        self.0.iter().map(|(start, end)| *start..*end)
    }
}

#[cfg(test)]
#[cfg(not(model_check))]
mod tests {
    use super::*;

    #[test]
    fn removing_the_middle_of_a_range_keeps_the_rest() {
        let mut unlinked = Unlinked::default();
        [2..6, 6..7, 8..12, 20..30].into_iter().for_each(|range| unlinked.insert(range));
        unlinked.remove(4..10);
        unlinked.remove(24..25);
        unlinked.remove(12..20);
        assert_eq!(unlinked.ranges().collect::<Vec<_>>(), [2..4, 10..12, 20..24, 25..30]);
        unlinked.remove(0..100);
        assert_eq!(unlinked.ranges().count(), 0);
    }
}
