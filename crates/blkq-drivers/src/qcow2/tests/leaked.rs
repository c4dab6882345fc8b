//! Leaked clusters of images that were not closed and whose journals are lost, as after a power loss.
// Contract: bounded-input, data

use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use blkq::random::Random;

use super::kill::die;
use super::*;
use crate::qcow2::format::{AUTOCLEAR_AT, COPIED, L1_AT, REFCOUNT_TABLE_AT, TAG_AT};

const CLUSTER: u64 = 65536;

/// An image that was not closed.
struct Unclosed {
    directory: Directory,
    path: PathBuf,
    file: File,
}

impl Unclosed {
    /// Has a process open the image `d` of `directory`, and not close it.
    fn new(directory: Directory) -> Unclosed {
        let path = directory.0.join("d");
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let image = Unclosed { directory, path, file };
        die(&image.attach());
        image
    }

    /// With compressed clusters, two internal snapshots, a dirty bitmap and leaked clusters.
    fn with_everything() -> Unclosed {
        let directory = Directory::new();
        // Two clusters, compressed to 5/8 of their size: the file has a cluster with nothing but the end of the second.
        let data = pattern(128 << 10, 1).iter().map(|byte| byte & 0x1f).collect();
        std::fs::write(directory.0.join("data"), [vec![0; 2 << 20], data, vec![0; 1 << 20]].concat())
            .unwrap();
        directory.qemu_img(&["convert", "-c", "-O", "qcow2", "data", "d"]);
        directory.qemu_img(&["bitmap", "--add", "d", "dirty"]);
        for (name, write) in [("one", "write -P 1 0 1M"), ("two", "write -P 2 512k 1M")] {
            directory.qemu_io(&directory.0.join("d"), write);
            directory.qemu_img(&["snapshot", "-c", name, "d"]);
        }
        let image = Unclosed::new(directory);
        image.leak();
        image
    }

    /// Opens the image without the journals of earlier processes.
    fn attach(&self) -> Qcow2 {
        Qcow2::open(&self.options()).unwrap()
    }

    fn options(&self) -> DriverOptions {
        let journals = self.directory.0.join("journals");
        let _ = std::fs::remove_dir_all(&journals);
        DriverOptions { journals: Some(Journals::open(&journals).unwrap()), ..DriverOptions::new(&self.path) }
    }

    fn number(&self, offset: u64) -> u64 {
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, offset).unwrap();
        u64::from_be_bytes(bytes)
    }

    fn put(&self, offset: u64, bytes: &[u8]) {
        self.file.write_all_at(bytes, offset).unwrap();
    }

    /// The offset in the file of the refcount of a cluster.
    fn refcount_at(&self, cluster: u64) -> u64 {
        self.number(self.number(REFCOUNT_TABLE_AT as u64)) + cluster * 2
    }

    /// Allocates clusters in the file and beyond its end.
    fn leak(&self) {
        let end = self.file.metadata().unwrap().len().div_ceil(CLUSTER);
        self.file.set_len((end + 2) * CLUSTER).unwrap();
        for (cluster, refcount) in [(end, 1), (end + 1, 7), (end + 3, 1), (end + 100, 1)] {
            self.put(self.refcount_at(cluster), &[0, refcount]);
        }
    }

    fn content(&self) -> Vec<u8> {
        std::fs::read(&self.path).unwrap()
    }

    /// Whether the file is unchanged, apart from the tag.
    fn is_as(&self, old: &[u8]) -> bool {
        let mut now = self.content();
        now[TAG_AT..][..4].copy_from_slice(&old[TAG_AT..][..4]);
        now == old
    }

    /// The content of the image and of its snapshots, as QEMU reads it.
    fn read_by_qemu(&self) -> [Vec<u8>; 3] {
        [&[][..], &["-l", "snapshot.name=one"], &["-l", "snapshot.name=two"]].map(|snapshot| {
            self.directory.qemu_img(&[&["convert", "-O", "raw"], snapshot, &["d", "raw"]].concat());
            std::fs::read(self.directory.0.join("raw")).unwrap()
        })
    }
}

fn leaked(device: &Qcow2) -> Option<String> {
    device.warnings().into_iter().find(|warning| warning.contains("stay allocated"))
}

#[test]
fn leaked_clusters_are_freed_and_all_others_are_kept() {
    if !has_qemu() {
        return;
    }
    let image = Unclosed::with_everything();
    let before = image.read_by_qemu();
    let device = image.attach();
    assert_eq!(leaked(&device), None);
    assert!(device.warnings().iter().any(|warning| warning.ends_with(" clusters that leaked were freed")));
    drop(device);
    image.directory.check(&image.path);
    assert!(image.read_by_qemu() == before);
    assert!(image.directory.qemu_img(&["info", "d"]).contains("name: dirty"));
}

#[test]
fn refcounts_that_contradict_the_tables_stay_unchanged() {
    if !has_qemu() {
        return;
    }
    let image = Unclosed::with_everything();
    let whole = image.content();
    let l1 = image.number(40);
    let l2 = image.number(l1) & !COPIED;
    let (snapshot, refcount_table) = (image.number(64), image.number(REFCOUNT_TABLE_AT as u64));
    let bitmaps = whole.windows(4).position(|bytes| bytes == 0x2385_2875_u32.to_be_bytes()).unwrap() as u64;
    let of = |number: u64| number.to_be_bytes().to_vec();
    for (at, bytes, why) in [
        (l2, of(COPIED | 1 << 40), "is not in the file"),
        (l2, of(1 << 62 | 1 << 40), "is not in the file"),
        (l2, of(0x200), "is invalid"),
        (l1, of(0x200), "is invalid"),
        (l2, of(image.number(l2 + 8)), "is too low"),
        (l1, of(l1), "is too low"),
        (image.refcount_at(l2 / CLUSTER), vec![0, 0], "is too low"),
        (image.refcount_at(0), vec![0, 0], "is too low"),
        // The L2 tables of the image and of both snapshots refer to this cluster.
        (image.refcount_at(image.number(l2) / CLUSTER), vec![0, 2], "is too low"),
        (refcount_table, of(0), "is too low"),
        (refcount_table, of(whole.len() as u64), "is too low"),
        (snapshot, of(l1), "overlaps"),
        (snapshot, of(1 << 50), "is not in the file"),
        (snapshot + 8, vec![0xff; 4], "too large"),
        (snapshot + 36, vec![0, 0, 4, 0], "of an unknown kind"),
        (image.number(bitmaps + 24) + 12, vec![0x80], "of an unknown kind"),
        (AUTOCLEAR_AT as u64, vec![0x80], "unknown autoclear feature"),
        (112, vec![1, 2, 3, 4], "extension 0x1020304 is unknown"),
    ] {
        std::fs::write(&image.path, &whole).unwrap();
        // A hole of one cluster.
        image.file.set_len(whole.len() as u64 + CLUSTER).unwrap();
        image.put(at, &bytes);
        let old = image.content();
        let opened = Qcow2::open(&image.options());
        // A cluster in use that is free for the allocator would be overwritten.
        assert_eq!(opened.is_err(), why == "is too low", "{at}: {why}");
        let text = match &opened {
            Ok(device) => leaked(device).unwrap_or_else(|| panic!("{at} {why}: no warning")),
            Err(error) => {
                assert!(error.to_string().ends_with("or open it read-only"), "{error}");
                error.to_string()
            }
        };
        assert!(text.contains(why), "{at}: {text}");
        assert!(image.is_as(&old), "{at}: {why}");
        opened.iter().for_each(die);
    }
}

/// Words of tables with values that are valid elsewhere, or not at all.
#[test]
fn an_image_with_arbitrary_tables_is_refused_or_opened() {
    if !has_qemu() {
        return;
    }
    let image = Unclosed::with_everything();
    let whole = image.content();
    let l1 = image.number(40);
    let tables =
        [0, l1, image.number(l1) & !COPIED, image.number(64), image.number(48), image.refcount_at(0)];
    let mut opened = 0;
    for seed in 0..100 {
        let mut random = Random::new(seed);
        std::fs::write(&image.path, &whole).unwrap();
        for _ in 0..=random.below(3) {
            let at = tables[random.below(6) as usize] + random.below(16) * 8;
            let cluster = random.below(100) * CLUSTER;
            let high = [0, COPIED, 1 << 62, 0xff << 54, u64::MAX << 32][random.below(5) as usize];
            image.put(at, &(cluster | high | random.below(2)).to_be_bytes());
        }
        let device = Qcow2::open(&image.options());
        opened += u32::from(device.is_ok());
        device.iter().for_each(die);
    }
    assert!(opened > 50, "{opened}");
}

#[test]
fn an_l2_table_that_is_named_four_million_times_is_read_once() {
    if !has_qemu() {
        return;
    }
    const CLUSTER: u64 = 2 << 20;
    let directory = Directory::new();
    directory.image("d", "cluster_size=2M", MIB);
    directory.qemu_io(&directory.0.join("d"), "write -P 1 0 1M");
    let image = Unclosed::new(directory);
    let entry = image.number(image.number(40));
    let end = image.file.metadata().unwrap().len().div_ceil(CLUSTER);
    image.put(end * CLUSTER, &entry.to_be_bytes().repeat(4 << 20));
    image.put(L1_AT as u64, &[&(4_u32 << 20).to_be_bytes()[..], &(end * CLUSTER).to_be_bytes()].concat());
    // The old table has leaked, and those that are named so often have enough references.
    image.put(image.refcount_at(0), &[0xff; 2 * 64]);
    let leaked_at = image.refcount_at(40);
    let begin = Instant::now();
    let device = image.attach();
    assert!(begin.elapsed() < Duration::from_secs(15), "{:?}", begin.elapsed());
    assert_eq!((leaked(&device), image.number(leaked_at)), (None, 0));
    die(&device);
}

#[test]
fn tables_in_holes_are_not_read() {
    if !has_qemu() {
        return;
    }
    const CLUSTER: u64 = 2 << 20;
    const TABLES: u64 = 20_000;
    let directory = Directory::new();
    directory.image("d", "cluster_size=2M", MIB);
    let image = Unclosed::new(directory);
    let end = image.file.metadata().unwrap().len().div_ceil(CLUSTER);
    // 40 GB of L2 tables.
    image.file.set_len((end + 1 + TABLES) * CLUSTER).unwrap();
    let tables: Vec<u8> =
        (0..TABLES).flat_map(|number| (((end + 1 + number) * CLUSTER) | COPIED).to_be_bytes()).collect();
    image.put(end * CLUSTER, &tables);
    let field = [&(TABLES as u32).to_be_bytes()[..], &(end * CLUSTER).to_be_bytes()].concat();
    image.put(L1_AT as u64, &field);
    image.put(image.refcount_at(0), &[0, 1].repeat((end + 1 + TABLES) as usize));
    let begin = Instant::now();
    let device = image.attach();
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    assert_eq!(leaked(&device), None);
    die(&device);
}

#[test]
fn only_an_unclosed_image_is_searched_and_only_for_writing() {
    if !has_qemu() {
        return;
    }
    let image = Unclosed::with_everything();
    image.directory.qemu_img(&["create", "-q", "-f", "qcow2", "-b", "d", "-F", "qcow2", "top"]);
    let unclosed = image.content();
    let as_base = DriverOptions { path: image.directory.0.join("top"), ..image.options() };
    let read_only = DriverOptions { read_only: true, ..image.options() };
    for options in [as_base, read_only] {
        drop(Qcow2::open(&options).unwrap());
        assert!(image.content() == unclosed);
    }
    // Clients of a device that is recovered wait for it.
    let in_use = DriverOptions { device_bytes: Some(4 * MIB), ..image.options() };
    die(&Qcow2::open(&in_use).unwrap());
    assert!(image.is_as(&unclosed));
    let mut closed = unclosed.clone();
    closed[TAG_AT..][..4].fill(0);
    for (content, is_searched) in [(closed, false), (unclosed, true)] {
        std::fs::write(&image.path, &content).unwrap();
        let device = image.attach();
        assert_eq!(image.is_as(&content), !is_searched);
        die(&device);
    }
}
