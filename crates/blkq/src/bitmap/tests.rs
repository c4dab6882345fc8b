use proptest::prelude::*;

use super::*;

fn bitmap(granularity: u64, size: u64) -> Bitmap {
    Bitmap::new("b", granularity, size, BitmapState::Recording).unwrap()
}

fn dirty(bitmap: &Bitmap) -> Vec<Range<u64>> {
    let mut at = 0;
    let run = |extent: DirtyExtent| {
        at += extent.length;
        extent.dirty.then_some(at - extent.length..at)
    };
    bitmap.extents(0..bitmap.size(), usize::MAX).into_iter().filter_map(run).collect()
}

proptest! {
    #[test]
    fn bits_are_those_of_a_list_of_granules(
        size in 1u64..1 << 20,
        shift in 9u32..13,
        writes in proptest::collection::vec((0u64..1 << 20, 1u64..200_000), 0..20),
        resized in 1u64..1 << 20,
    ) {
        let granularity = 1 << shift;
        let bitmap = bitmap(granularity, size);
        let mut model = vec![false; size.div_ceil(granularity) as usize];
        for (start, length) in &writes {
            let range = *start % size..(*start % size + length).min(size);
            model[(range.start >> shift) as usize..range.end.div_ceil(granularity) as usize].fill(true);
            // As writes are, the range is padded to whole sectors.
            bitmap.mark(range.start..range.end.next_multiple_of(512));
        }
        let check = |bitmap: &Bitmap, model: &[bool]| {
            let size = bitmap.size();
            let mut expected: Vec<Range<u64>> = Vec::new();
            for (at, _) in model.iter().enumerate().filter(|(_, dirty)| **dirty) {
                let granule = (at as u64) << shift..(((at as u64) + 1) << shift).min(size);
                match expected.last_mut() {
                    Some(last) if last.end == granule.start => last.end = granule.end,
                    _ => expected.push(granule),
                }
            }
            assert_eq!(dirty(bitmap), expected);
            assert_eq!(bitmap.dirty_bytes(), expected.iter().map(|run| run.end - run.start).sum::<u64>());
        };
        check(&bitmap, &model);
        let mut copy = self::bitmap(granularity, size);
        for (at, part) in bitmap.to_bytes().chunks(16).enumerate() {
            copy.load(at as u64 * 16, part);
        }
        check(&copy, &model);
        let other = bitmap.resized(resized).unwrap();
        model.resize(resized.div_ceil(granularity) as usize, true);
        if resized > size {
            model[(size >> shift) as usize] = true;
        }
        check(&other, &model);
        let cleared = bitmap.cleared().unwrap();
        assert_eq!(dirty(&cleared), []);
        assert!(other.id() == bitmap.id() && cleared.id() != bitmap.id());
    }
}

proptest! {
    #[test]
    fn a_merged_bitmap_has_the_granules_of_both(
        size in 1u64..1 << 20,
        shifts in (9u32..13, 9u32..13),
        writes in proptest::collection::vec((0u64..1 << 20, 1u64..20_000, any::<bool>()), 0..20),
    ) {
        let (into, from) = (bitmap(1 << shifts.0, size), bitmap(1 << shifts.1, size));
        for (start, length, is_into) in &writes {
            let range = *start % size..(*start % size + length).min(size);
            if *is_into { into.mark(range) } else { from.mark(range) }
        }
        let (before, unchanged) = (dirty(&into), dirty(&from));
        into.merge(&from);
        let is_in = |runs: &[Range<u64>], part: &Range<u64>| {
            runs.iter().any(|run| run.start < part.end && part.start < run.end)
        };
        for start in (0..size).step_by(1 << shifts.0) {
            let granule = start..(start + (1 << shifts.0)).min(size);
            let expected = is_in(&before, &granule) || is_in(&unchanged, &granule);
            prop_assert_eq!(is_in(&dirty(&into), &granule), expected, "at {}", start);
        }
        prop_assert_eq!(dirty(&from), unchanged);
    }
}

#[test]
fn invalid_bitmaps_are_rejected() {
    let error = |name: &str, granularity, size| {
        let made = Bitmap::new(name, granularity, size, BitmapState::Recording);
        made.err().map(|e| e.to_string()).unwrap_or_default()
    };
    assert_eq!(error(&"n".repeat(NAME_MAX_BYTES), GRANULARITY_MAX, 1 << 59), "");
    assert!(error("", 512, 1).contains("empty"));
    assert!(error(&"n".repeat(NAME_MAX_BYTES + 1), 512, 1).contains("1023"));
    assert!(error("a\nb", 512, 1).contains("control"));
    for granularity in [0, 256, 1000, 4 << 30] {
        assert!(error("b", granularity, 1).contains("power of two"), "{granularity}");
    }
    assert!(error("b", 512, 1 << 50).contains("memory"));
}

#[test]
fn a_set_has_each_name_once_and_a_bound() {
    let set = BitmapSet::default();
    let add = |name: &str, size, state| set.add(Bitmap::new(name, 512, size, state).unwrap());
    add("b", 512, BitmapState::Disabled).unwrap();
    assert!(set.recording().is_empty());
    add("a", 512, BitmapState::Recording).unwrap();
    assert!(set.recording().len() == 1);
    assert_eq!(set.list().iter().map(|bitmap| bitmap.name()).collect::<Vec<_>>(), ["a", "b"]);
    assert!(add("a", 512, BitmapState::Disabled).unwrap_err().to_string().contains("already"));
    let most = MEMORY_MAX_BYTES * 8 * 512;
    assert!(
        add("c", most, BitmapState::Disabled).unwrap_err().to_string().contains("all bitmaps of the disk")
    );
    // Each bitmap alone is within the limit, and both together are not.
    let refused = set.check_size(most / 2 + 4096 * 512).unwrap_err().to_string();
    assert!(refused.ends_with("remove some first: a, b"), "{refused}");
    set.check_size(most / 2).unwrap();
    set.resize(most * 2);
    let states: Vec<_> = set.list().iter().map(|bitmap| bitmap.state()).collect();
    assert!(states == [BitmapState::Inconsistent; 2] && set.recording().is_empty());
    assert!(set.remove("a") && set.remove("b"));
    for number in 0..BITMAPS_MAX {
        add(&number.to_string(), 512, BitmapState::Recording).unwrap();
    }
    assert!(add("more", 512, BitmapState::Recording).unwrap_err().to_string().contains("already has 64"));
    assert!(set.remove("3") && !set.remove("3"));
}
