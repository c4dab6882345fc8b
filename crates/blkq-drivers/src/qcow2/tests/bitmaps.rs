//! Bitmap directories that are damaged, or that other programs wrote.

use std::os::unix::fs::FileExt;

use blkq::bitmap::{Bitmap, BitmapState, BitmapStore};

use super::*;
use crate::qcow2::format::{AUTOCLEAR_AT, AUTOCLEAR_BITMAPS, EXTENSION_BITMAPS};

const CLUSTER: usize = 65536;

/// An image of 8 MiB, with data at its start and with bitmaps that QEMU created.
struct Image {
    directory: Directory,
    path: PathBuf,
    file: File,
}

impl Image {
    fn new(names: &[&str]) -> Image {
        let directory = Directory::new();
        std::fs::write(directory.0.join("data"), vec![1; 8 << 20]).unwrap();
        directory.qemu_img(&["convert", "-q", "-O", "qcow2", "data", "d"]);
        names.iter().for_each(|name| drop(directory.qemu_img(&["bitmap", "--add", "d", name])));
        let path = directory.0.join("d");
        let file = File::options().read(true).write(true).open(&path).unwrap();
        Image { directory, path, file }
    }

    fn cluster(&self, offset: u64) -> Vec<u8> {
        let mut cluster = vec![0; CLUSTER];
        self.file.read_exact_at(&mut cluster, offset).unwrap();
        cluster
    }

    fn number(&self, offset: u64) -> u64 {
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, offset).unwrap();
        u64::from_be_bytes(bytes)
    }

    fn set_number(&self, offset: u64, number: u64) {
        self.file.write_all_at(&number.to_be_bytes(), offset).unwrap();
    }

    /// Offset of the number of bitmaps in the header; the length and offset of their directory follow.
    fn extension(&self) -> u64 {
        let kind = EXTENSION_BITMAPS.to_be_bytes();
        self.cluster(0).windows(4).position(|bytes| bytes == kind).unwrap() as u64 + 8
    }

    fn set_extension(&self, count: u32, directory_bytes: u64, directory: u64) {
        let at = self.extension();
        self.file.write_all_at(&count.to_be_bytes(), at).unwrap();
        self.set_number(at + 8, directory_bytes);
        self.set_number(at + 16, directory);
    }

    /// Offsets of the L1 table, an L2 table, the refcount table and a refcount block.
    fn tables(&self) -> [u64; 4] {
        let (l1, refcounts) = (self.number(40), self.number(48));
        [l1, self.number(l1) & OFFSET, refcounts, self.number(refcounts)]
    }

    fn bitmap_directory(&self) -> u64 {
        self.number(self.extension() + 16)
    }
}

#[test]
fn many_invalid_bitmap_entries_take_little_memory() {
    if !has_qemu() {
        return;
    }
    let image = Image::new(&["b"]);
    image.file.set_len(1 << 30).unwrap();
    for (count, why) in [(43_690, "43690 bitmaps in"), (2_796_202, "their directory has 67108848 bytes")] {
        image.set_extension(count, u64::from(count) * 24, 512 << 20);
        let (found, warnings) = open(&image.path).bitmaps.load().unwrap();
        assert!(found.is_empty() && warnings.len() == 1 && warnings[0].contains(why), "{warnings:?}");
    }
}

/// With bits, the bitmap would take gibibytes.
// Contract: bounded-input
#[test]
fn a_bitmap_without_bits_gets_a_table_of_one_cluster() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    directory.qemu_img(&["create", "-q", "-f", "qcow2", "d", "512T"]);
    directory.qemu_img(&["bitmap", "--add", "-g", "2G", "d", "b"]);
    let path = directory.0.join("d");
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let image = Image { directory, path, file };
    let entry = image.bitmap_directory();
    // Marked as in use, with a bit for each 512 bytes.
    image.file.write_all_at(&1u32.to_be_bytes(), entry + 12).unwrap();
    image.file.write_all_at(&[9], entry + 17).unwrap();
    let before = image.file.metadata().unwrap().len();
    let (found, _) = open(&image.path).bitmaps.load().unwrap();
    assert_eq!((found[0].state(), found[0].granularity()), (BitmapState::Inconsistent, 512));
    let grown = image.file.metadata().unwrap().len() - before;
    assert!(grown < 8 << 20, "{grown} bytes");
}

/// A bitmap that has bits may be stored as one without bits while it is in use, so its table may be of full
/// size.
#[test]
fn a_bitmap_without_bits_keeps_a_table_of_any_size() {
    if !has_qemu() {
        return;
    }
    let image = Image::new(&["a", "b"]);
    let device = open(&image.path);
    let bitmaps: Vec<_> = device.bitmaps.load().unwrap().0.into_iter().map(Arc::new).collect();
    device.bitmaps.store(&bitmaps).unwrap();
    drop(device);
    let directory = image.bitmap_directory();
    let table = image.number(directory);
    image.set_number(table, 0);
    // A table of two clusters, in use.
    image.set_number(directory + 8, 2 << 32 | 1);
    let (found, _) = open(&image.path).bitmaps.load().unwrap();
    assert_eq!((found.len(), found[0].state()), (2, BitmapState::Inconsistent));
    assert_eq!(
        (image.bitmap_directory(), image.number(directory)),
        (directory, table),
        "they have their places"
    );
}

#[test]
fn a_directory_that_overlaps_a_table_is_not_written() {
    if !has_qemu() {
        return;
    }
    let image = Image::new(&["b"]);
    for table in image.tables() {
        // An entry without a name, which is invalid.
        image.set_extension(1, 24, table);
        image.file.write_all_at(&AUTOCLEAR_BITMAPS.to_be_bytes(), AUTOCLEAR_AT as u64).unwrap();
        let before = image.cluster(table);
        let warnings = open(&image.path).bitmaps.load().unwrap().1;
        assert!(warnings[0].contains("are damaged"), "{table}: {warnings:?}");
        assert!(image.cluster(table) == before, "{table}");
    }
}

#[test]
fn bits_that_overlap_a_table_do_not_change_it() {
    if !has_qemu() {
        return;
    }
    let tables = Image::new(&[]).tables();
    for number in 0..tables.len() {
        let image = Image::new(&["a", "b"]);
        let table = image.tables()[number];
        let directory = image.bitmap_directory();
        // The tables of both bitmaps. Each names one cluster.
        for entry in [directory, directory + 32] {
            image.set_number(image.number(entry), table);
        }
        let before = image.cluster(table);
        let device = open(&image.path);
        let found = device.bitmaps.load().unwrap().0;
        assert_eq!(found.len(), 2);
        let found: Vec<Arc<Bitmap>> = found.into_iter().map(Arc::new).collect();
        device.bitmaps.store(&found).unwrap();
        device.flush_all_metadata().unwrap();
        drop(device);
        assert!(image.cluster(table)[..64] == before[..64], "table {number}");
        image.directory.check(&image.path);
    }
}

// Contract: bitmaps
#[test]
fn bitmap_clusters_are_adopted_in_qemus_order_too() {
    if !has_qemu() {
        return;
    }
    let image = Image::new(&["b", "a"]);
    for dirty in [0, 65536] {
        let device = open(&image.path);
        let loaded = device.bitmaps.load().unwrap().0;
        let mut found: Vec<Arc<Bitmap>> = loaded.into_iter().map(Arc::new).collect();
        let reserved = image.bitmap_directory();
        found.sort_by(|one, other| one.name().cmp(other.name()));
        assert_eq!((found[0].dirty_bytes(), found[1].dirty_bytes()), (dirty, 0));
        found[0].mark(0..4096);
        device.bitmaps.store(&found).unwrap();
        device.flush_all_metadata().unwrap();
        assert_eq!(image.bitmap_directory(), reserved);
    }
    image.directory.check(&image.path);
}

// Contract: bitmaps
#[test]
fn no_bitmap_replaces_an_unknown_one_of_the_same_name() {
    if !has_qemu() {
        return;
    }
    let image = Image::new(&["b"]);
    // Sets a flag that blkq does not know.
    let flags = image.bitmap_directory() + 12;
    image.file.write_all_at(&[0x80], flags).unwrap();
    let device = open(&image.path);
    assert!(device.bitmaps.load().unwrap().0.is_empty());
    let bitmap = |name| Arc::new(Bitmap::new(name, 65536, 8 << 20, BitmapState::Recording).unwrap());
    let refused = device.bitmaps.reserve(&[bitmap("a"), bitmap("b")]).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
    assert!(refused.to_string().contains("remove the bitmap with `qemu-img bitmap`"), "{refused}");
    device.bitmaps.reserve(&[bitmap("a")]).unwrap();
    device.bitmaps.store(&[bitmap("a")]).unwrap();
    let directory = image.cluster(image.bitmap_directory());
    assert_eq!((directory[12], directory[24], directory[32 + 24]), (0x80, b'b', b'a'));
}
