//! Directories of dirty bitmaps that are damaged, or that others made.

use std::os::unix::fs::FileExt;

use super::*;
use crate::drivers::bitmaps;
use crate::drivers::qcow2::header::EXTENSION_BITMAPS;

const CLUSTER: usize = 65536;

/// An image of 8 MiB with data at its begin, of which QEMU has made these bitmaps.
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

    /// The cluster at `offset`.
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

    /// Where the header has the count of bitmaps, and then the bytes and the place of their directory.
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

    fn bitmap_directory(&self) -> u64 {
        self.number(self.extension() + 16)
    }
}

#[test]
fn many_bitmaps_that_are_none_take_little_memory() {
    if !has_qemu() {
        return;
    }
    let image = Image::new(&["b"]);
    image.file.set_len(1 << 30).unwrap();
    for (count, why) in [(43_690, "43690 bitmaps in"), (2_796_202, "their directory has 67108848 bytes")] {
        image.set_extension(count, u64::from(count) * 24, 512 << 20);
        let (found, warnings) = bitmaps::load(&open(&image.path)).unwrap();
        assert!(found.is_empty() && warnings.len() == 1 && warnings[0].contains(why), "{warnings:?}");
    }
}
