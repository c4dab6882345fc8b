//! Block commits during writes, checked against a model of the device, with kills and power losses in
//! between.

use std::fs::File;

use blkq::IoBuffer;
use blkq::bitmap::{Bitmap, BitmapState};
use blkq::random::Random;

use super::super::jobs::block_commit::{BaseFiles, BlockCommit, CommitSource, open_base};
use super::*;
use crate::Opened;
use crate::r#loop::tests::FullDisk;
use crate::r#loop::{DriverOptions, LoopDevice};

const SECTOR: usize = 512;
const PLAIN: BioFlags = BioFlags::empty();
/// Size of the device in bytes, not a multiple of the cluster size.
const SIZE: usize = (1 << 20) + 9 * 4096;

/// A model of the device: each sector is filled with copies of one number.
struct Model {
    now: Vec<u32>,
    /// For each sector the numbers that it may have after a kill or a power loss.
    allowed: Vec<Vec<u32>>,
    next: u32,
}

impl Model {
    fn new(now: Vec<u32>) -> Model {
        Model { allowed: now.iter().map(|number| vec![*number]).collect(), now, next: 1 << 20 }
    }

    fn set(&mut self, sector: usize, number: u32) {
        self.now[sector] = number;
        self.allowed[sector].push(number);
    }

    fn flushed(&mut self) {
        for (allowed, now) in self.allowed.iter_mut().zip(&self.now) {
            *allowed = vec![*now];
        }
    }
}

fn content_of(numbers: &[u32]) -> IoBuffer {
    let mut buffer = IoBuffer::zeroed(numbers.len() * SECTOR);
    for (sector, number) in buffer.chunks_exact_mut(SECTOR).zip(numbers) {
        sector.chunks_exact_mut(4).for_each(|word| word.copy_from_slice(&number.to_ne_bytes()));
    }
    buffer
}

fn numbers_of(bytes: &[u8]) -> Vec<u32> {
    let number = |sector: &[u8]| {
        let first = [sector[0], sector[1], sector[2], sector[3]];
        assert!(sector.chunks(4).all(|word| word == first), "a sector is torn");
        u32::from_ne_bytes(first)
    };
    bytes.chunks(SECTOR).map(number).collect()
}

struct Life<'a> {
    directory: &'a Directory,
    base_format: &'a str,
    random: Random,
    model: Model,
    harness: Option<Harness>,
    what: String,
}

impl Life<'_> {
    fn flush(&mut self) {
        let h = self.harness.as_mut().unwrap();
        let tag = h.bare(Operation::Flush, PLAIN, 0, 0);
        assert_eq!(h.run(tag).0, Ok(()), "{}", self.what);
        self.model.flushed();
        // From now on a power loss must not change these sectors.
        std::fs::copy(self.directory.0.join("top"), self.directory.0.join("flushed")).unwrap();
    }

    /// Submits a few requests that do not overlap, and runs `meanwhile` while they are in flight.
    fn write(&mut self, meanwhile: impl FnOnce(&mut Random)) {
        let sectors = SIZE / SECTOR;
        let (mut tags, mut discarded) = (Vec::new(), Vec::new());
        let h = self.harness.as_mut().unwrap();
        for part in 0..4 {
            let room = sectors / 4;
            let longest = [2, 16, 192][self.random.below(3) as usize];
            let length = self.random.below(longest) as usize + 1;
            let first = part * room + self.random.below((room - length) as u64) as usize;
            let (offset, bytes) = ((first * SECTOR) as u64, (length * SECTOR) as u64);
            let range = first..first + length;
            let tag = match self.random.below(8) {
                operation @ 0..2 => {
                    range.clone().for_each(|sector| self.model.allowed[sector].push(0));
                    discarded.push(range);
                    let operation = [Operation::WriteZeroes, Operation::Discard][operation as usize];
                    h.bare(operation, PLAIN, offset, bytes)
                }
                _ => {
                    let numbers: Vec<u32> = range.clone().map(|at| self.model.next + at as u32).collect();
                    self.model.next += sectors as u32;
                    range.zip(&numbers).for_each(|(sector, number)| self.model.set(sector, *number));
                    h.write(offset, vec![content_of(&numbers)])
                }
            };
            h.start(&[tag]);
            tags.push(tag);
        }
        meanwhile(&mut self.random);
        tags.into_iter().for_each(|tag| assert_eq!(h.wait(tag).0, Ok(()), "{}", self.what));
        for range in discarded {
            let read = numbers_of(&h.read_back((range.start * SECTOR) as u64, range.len() * SECTOR));
            range.zip(read).for_each(|(sector, number)| {
                assert!(self.model.allowed[sector].contains(&number));
                self.model.now[sector] = number;
            });
        }
    }

    /// Checks a copy of the image `top` as QEMU reads it over a copy of its backing file.
    fn verify(&self, top: &str, exact: bool) {
        let directory = self.directory;
        std::fs::create_dir_all(directory.0.join("lost")).unwrap();
        for (from, to) in [(top, "lost/top"), ("base", "lost/base")] {
            std::fs::copy(directory.0.join(from), directory.0.join(to)).unwrap();
        }
        directory.qemu_img(&["convert", "-f", "qcow2", "-O", "raw", "lost/top", "lost/raw"]);
        let found = numbers_of(&std::fs::read(directory.0.join("lost/raw")).unwrap());
        for (sector, number) in found.iter().enumerate() {
            let allowed = if exact { &self.model.now[sector..=sector] } else { &self.model.allowed[sector] };
            assert!(
                allowed.contains(number),
                "{}, {top}: {sector} has {number}, not of {allowed:?}",
                self.what
            );
        }
    }

    fn check_bitmaps(&self) {
        for image in ["top", "base"] {
            let info = self.directory.qemu_img(&["info", "-U", image]);
            let bitmaps = info.matches("granularity:").count();
            assert_eq!(bitmaps, info.matches("in-use").count(), "{}, {image}: {info}", self.what);
        }
        if let Ok(file) = std::fs::read(self.directory.0.join("base.bitmaps")) {
            // The newer of two slots.
            let slots = [0, 72 << 10].map(|at| &file[at..at + 24]);
            let last =
                slots.into_iter().max_by_key(|slot| u64::from_le_bytes(slot[16..].try_into().unwrap()));
            assert_eq!(last.unwrap()[12] & 1, 1, "{}: bitmaps not marked as in use", self.what);
        }
    }

    /// Checks the images that a kill of the process and a power loss would leave at this moment.
    fn lose(&self) {
        self.check_bitmaps();
        self.verify("top", false);
        self.verify("flushed", false);
        if self.base_format == "qcow2" {
            let check = ["check", "-f", "qcow2", "lost/base"];
            let output =
                Command::new("qemu-img").args(check).current_dir(&self.directory.0).output().unwrap();
            // Exit code 3: clusters to which nothing refers.
            assert!(matches!(output.status.code(), Some(0 | 3)), "{}: {output:?}", self.what);
        }
    }

    fn read_all(&mut self) {
        let h = self.harness.as_mut().unwrap();
        let mut found = Vec::new();
        for at in (0..SIZE).step_by(256 << 10) {
            found.extend(h.read_back(at as u64, (SIZE - at).min(256 << 10)));
        }
        assert!(numbers_of(&found) == self.model.now, "{}", self.what);
    }
}

fn base_files(directory: &Directory) -> BaseFiles {
    let opened = open_base(&directory.0.join("top"), BackingChain::OwnDirectory).unwrap();
    let mut options = File::options();
    let bitmaps = options.read(true).write(true).open(directory.0.join("base.bitmaps"));
    BaseFiles { bitmaps: bitmaps.ok().filter(|_| opened.has_bitmap_file), ..opened.files }
}

/// Bitmaps as after a snapshot, in both images. One was removed since, and one has recorded more writes.
fn add_bitmaps(directory: &Directory, base: &dyn Driver, size: u64) {
    let base = base.bitmap_store().unwrap();
    if matches!(base.check(), Err(error) if error.kind() == ErrorKind::NotFound) {
        let file =
            File::options().read(true).write(true).create_new(true).open(directory.0.join("base.bitmaps"));
        base.set_file(file.unwrap()).unwrap();
    }
    base.load().unwrap();
    let bitmap = |name| Arc::new(Bitmap::new(name, 4096, size, BitmapState::Recording).unwrap());
    base.store(&[bitmap("both"), bitmap("removed")]).unwrap();
}

fn base_flushes(commit: &BlockCommit) -> u64 {
    match &commit.target {
        Some(Target::Qcow2(qcow2)) => locked(&qcow2.shared.state).flushes,
        _ => 0,
    }
}

fn begin(device: &Arc<Qcow2>, files: BaseFiles) -> BlockCommit {
    CommitSource::new(device.clone()).unwrap().begin(files, None).unwrap()
}

fn not_cancelled() -> Result<(), Error> {
    Ok(())
}

fn live(top_kind: &str, base_format: &str, base_kind: &str, seed: u64) {
    let directory = Directory::new();
    let mut random = Random::new(seed);
    let base_content: Vec<u32> = (0..SIZE / SECTOR).map(|sector| sector as u32 + 1).collect();
    // Some bases are shorter than the device.
    let length = if random.below(2) == 0 { SIZE } else { SIZE / 2 / 4096 * 4096 };
    std::fs::write(directory.0.join("raw"), &content_of(&base_content)[..length]).unwrap();
    match base_format {
        "qcow2" => {
            let name = ["convert", "-f", "raw", "-O", "qcow2", "-o", base_kind, "raw", "base"];
            directory.qemu_img(&name)
        }
        _ => directory.qemu_img(&["convert", "-f", "raw", "-O", "raw", "raw", "base"]),
    };
    let size = SIZE.to_string();
    let create =
        ["create", "-q", "-f", "qcow2", "-o", top_kind, "-b", "base", "-F", base_format, "top", &size];
    directory.qemu_img(&create);
    let has_bitmaps = !format!("{top_kind}{base_kind}").contains("compat=0.10");
    if has_bitmaps {
        let options = DriverOptions::new(directory.0.join("base"));
        let base: Box<dyn Driver> = match base_format {
            "qcow2" => Box::new(Qcow2::open(&options).unwrap()),
            _ => Box::new(LoopDevice::open(&DriverOptions::new(directory.0.join("base"))).unwrap()),
        };
        add_bitmaps(&directory, &*base, length as u64);
        directory.qemu_img(&["bitmap", "--add", "top", "both"]);
    }
    let mut now = base_content;
    now[length / SECTOR..].fill(0);
    let mut life = Life {
        directory: &directory,
        base_format,
        random,
        model: Model::new(now),
        harness: None,
        what: format!("{top_kind} over {base_format} {base_kind}, seed {seed}"),
    };
    let device = Arc::new(open(&directory.0.join("top")));
    device.bitmap_store().unwrap().load().unwrap();
    life.harness = Some(Harness::open(&*device).unwrap());
    life.flush();
    let mut given_up = false;
    for round in 0..3 {
        (0..life.random.below(6)).for_each(|_| life.write(|_| {}));
        let both = base_files(&directory);
        let mut commit = begin(&device, both);
        let stop_at = if round < 2 { life.random.below(24) } else { u64::MAX };
        let mut steps = 0;
        for _ in 0..life.random.below(3) + 1 {
            let flushed = |life: &mut Life<'_>| {
                life.flush();
                Ok::<_, Error>(())
            };
            while commit.find(&not_cancelled, || flushed(&mut life)).unwrap() {
                while steps < stop_at && commit.copy().unwrap() {
                    steps += 1;
                    if life.random.below(6) == 0 {
                        life.write(|random| {
                            (0..random.below(3)).for_each(|_| _ = commit.copy().unwrap());
                        });
                    }
                    if life.random.below(40) == 0 {
                        life.lose();
                    }
                }
                if steps >= stop_at {
                    break;
                }
            }
            life.write(|_| {});
            let (copied, total) = commit.progress();
            assert!(copied <= total);
            if steps >= stop_at {
                break;
            }
            commit.next_pass(&not_cancelled).unwrap();
        }
        if round < 2 && life.random.below(2) == 0 {
            drop(commit);
            given_up = true;
        } else {
            let fails = round < 2;
            // The disk thaws once more before the pivot.
            let left = std::cell::Cell::new(life.random.below(4));
            let few = || Ok::<_, Error>(left.replace(left.get().saturating_sub(1)) > 0);
            if !commit.catch_up(&few).unwrap() {
                life.write(|_| {});
            }
            let kept = commit.finish(|| {
                // After a kill at this point, the device may be opened with either image.
                life.verify("top", true);
                let compare = ["compare", "-f", "qcow2", "-F", base_format, "lost/top", "lost/base"];
                life.directory.qemu_img(&compare);
                if fails { Err(Error::new(ErrorKind::System, "no space")) } else { Ok(()) }
            });
            if !fails {
                commit.free();
                life.harness = None;
                drop(device);
                let base = Opened::from(kept.unwrap()).driver;
                life.harness = Some(Harness::open(&*base).unwrap());
                life.read_all();
                life.write(|_| {});
                life.read_all();
                life.harness = None;
                if has_bitmaps {
                    life.check_bitmaps();
                    let both = Bitmap::new("both", 4096, SIZE as u64, BitmapState::Recording).unwrap();
                    both.mark(8192..16384);
                    base.bitmap_store().unwrap().store(&[Arc::new(both)]).unwrap();
                }
                drop(base);
                assert!(!directory.qemu_img(&["info", "top"]).contains("bitmaps"));
                if has_bitmaps && base_format == "qcow2" {
                    let info = directory.qemu_img(&["info", "base"]);
                    assert!(info.contains("name: both") && !info.contains("in-use"), "{info}");
                    assert!(!info.contains("name: removed"), "{info}");
                }
                directory.check(&directory.0.join("top"));
                // The emptied image reads as the base, including later writes to it.
                life.verify("top", true);
                let map = directory.qemu_img(&["map", "--output=json", "-f", "qcow2", "top"]);
                assert!(!map.contains("\"depth\": 0"), "{map}");
                if base_format == "qcow2" {
                    if given_up {
                        // Such images may have clusters to which nothing refers.
                        let repair = ["check", "-q", "-f", "qcow2", "-r", "leaks", "base"];
                        directory.qemu_img(&repair);
                    }
                    directory.check(&directory.0.join("base"));
                }
                return;
            }
            assert_eq!(kept.err().unwrap().to_string(), "no space");
            given_up = true;
        }
        // The device continues with its overlay.
        life.read_all();
        life.write(|_| {});
        life.flush();
        life.lose();
    }
}

// Contract: live-changes, durability, bitmaps
#[test]
fn a_block_commit_keeps_each_write_at_any_instant() {
    let kinds = [
        ("cluster_size=64k", "raw", ""),
        ("cluster_size=512", "raw", ""),
        ("cluster_size=4k", "qcow2", "cluster_size=64k"),
        ("cluster_size=64k", "qcow2", "cluster_size=4k"),
        ("compat=0.10,cluster_size=4k", "raw", ""),
        ("cluster_size=2M", "qcow2", "compat=0.10,cluster_size=512"),
    ];
    each_kind(2, &kinds, |(top, format, base), seed| live(top, format, base, seed));
}

// Contract: durability
#[test]
fn a_block_commit_syncs_data_that_changed_no_table() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    std::fs::write(directory.0.join("raw"), vec![1; MIB as usize]).unwrap();
    directory.qemu_img(&["convert", "-f", "raw", "-O", "qcow2", "raw", "base"]);
    directory.qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", "qcow2", "top"]);
    let device = Arc::new(open(&directory.0.join("top")));
    let mut h = Harness::open(&*device).unwrap();
    let tags = [h.write(4096, vec![pattern(4096, 7)]), h.bare(Operation::Flush, PLAIN, 0, 0)];
    tags.into_iter().for_each(|tag| assert_eq!(h.run(tag).0, Ok(())));
    let mut commit = begin(&device, base_files(&directory));
    assert!(commit.find(&not_cancelled, || Ok::<_, Error>(())).unwrap());
    while commit.copy().unwrap() {}
    // Each copy is durable, although the data was written in place and changed no table.
    let before = base_flushes(&commit);
    commit.next_pass(&not_cancelled).unwrap();
    assert!(base_flushes(&commit) > before, "nothing was synced");
}

// Contract: complete
#[test]
fn a_block_commit_of_a_truncated_image_fails() {
    if !has_qemu() {
        return;
    }
    // The file is truncated: before the second half of the data, or before the L2 table, which is not in
    // memory.
    for left in [(5 << 16) + MIB / 2, 4 << 16] {
        let directory = Directory::new();
        std::fs::write(directory.0.join("base"), vec![1; MIB as usize]).unwrap();
        directory.qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "top"]);
        let path = directory.0.join("top");
        directory.qemu_io(&path, "write -P 2 0 1M");
        let device = Arc::new(open(&path));
        let mut commit = begin(&device, base_files(&directory));
        File::options().write(true).open(&path).unwrap().set_len(left).unwrap();
        let mut copy_all = || -> Result<(), Error> {
            while commit.find(&not_cancelled, || Ok::<_, Error>(()))? {
                while commit.copy()? {}
            }
            Ok(())
        };
        assert!(copy_all().is_err(), "{left}");
        let base = std::fs::read(directory.0.join("base")).unwrap();
        assert!(!base.contains(&0), "{left}: zeroes were copied");
    }
}

#[test]
fn a_block_commit_into_a_truncated_base_is_refused() {
    if !has_qemu() {
        return;
    }
    for format in ["raw", "qcow2"] {
        let directory = Directory::new();
        let base = directory.0.join("base");
        if format == "raw" {
            std::fs::write(&base, vec![1; MIB as usize]).unwrap();
        } else {
            directory.qemu_io(&directory.image("base", "cluster_size=64k", MIB), "write -P 1 0 1M");
        }
        directory.qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", format, "top"]);
        let device = Arc::new(open(&directory.0.join("top")));
        let bytes = std::fs::metadata(&base).unwrap().len();
        File::options().write(true).open(&base).unwrap().set_len(bytes - MIB / 2).unwrap();
        let refused = CommitSource::new(device).unwrap().begin(base_files(&directory), None);
        assert_eq!(refused.err().unwrap().kind(), ErrorKind::Mismatch, "{format}");
        assert_eq!(std::fs::metadata(&base).unwrap().len(), bytes - MIB / 2, "it is not extended");
    }
}

// Contract: live-changes
#[test]
fn a_block_commit_keeps_the_rest_of_compressed_clusters() {
    if !has_qemu() {
        return;
    }
    for finishes in [false, true] {
        let directory = Directory::new();
        let numbers: Vec<u32> = (0..(MIB as usize / SECTOR) as u32).map(|sector| sector / 64 + 1).collect();
        std::fs::write(directory.0.join("raw"), &content_of(&numbers)[..]).unwrap();
        directory.qemu_img(&["convert", "-c", "-f", "raw", "-O", "qcow2", "raw", "base"]);
        let create = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", "-b", "base", "-F", "qcow2"];
        directory.qemu_img(&[&create[..], &["top"]].concat());
        let device = Arc::new(open(&directory.0.join("top")));
        let mut h = Harness::open(&*device).unwrap();
        // From here on, the tables of the base are in memory.
        let mut expected = h.read_back(0, MIB as usize);
        for at in (0..MIB).step_by(64 << 10) {
            let tag = h.write(at, vec![pattern(4096, 7)]);
            assert_eq!(h.run(tag).0, Ok(()));
            expected[at as usize..][..4096].copy_from_slice(&pattern(4096, 7));
        }
        let flush = h.bare(Operation::Flush, PLAIN, 0, 0);
        assert_eq!(h.run(flush).0, Ok(()));
        let mut commit = begin(&device, base_files(&directory));
        while commit.find(&not_cancelled, || Ok::<_, Error>(())).unwrap() {
            while commit.copy().unwrap() {}
        }
        commit.next_pass(&not_cancelled).unwrap();
        commit.next_pass(&not_cancelled).unwrap();
        assert!(h.read_back(0, MIB as usize) == expected, "while it is copied");
        if finishes {
            let base = commit.finish(|| Ok::<_, Error>(())).unwrap();
            commit.free();
            drop((h, device));
            let base = Opened::from(base).driver;
            assert!(Harness::open(&*base).unwrap().read_back(0, MIB as usize) == expected);
            drop(base);
            directory.check(&directory.0.join("base"));
        } else {
            drop(commit);
            assert!(h.read_back(0, MIB as usize) == expected, "after the cancellation");
        }
    }
}

/// The kernel reports a write-back error once to each open file description. The syncs of the commit share one,
/// and the queue of the base has another.
// Contract: durability
#[test]
fn a_block_commit_reports_data_that_cannot_be_written_back() {
    if !has_qemu() {
        return;
    }
    let (directory, disk) = (Directory::new(), FullDisk::new());
    let base = disk.image();
    directory.qemu_img(&["create", "-q", "-f", "qcow2", "-b", base.to_str().unwrap(), "-F", "raw", "top"]);
    let top = directory.0.join("top");
    let options = DriverOptions {
        direct_io: DirectIo::Off,
        backing_chain: BackingChain::Allow,
        ..DriverOptions::new(&top)
    };
    let device = Arc::new(Qcow2::open(&options).unwrap());
    let mut h = Harness::open(&*device).unwrap();
    let tags = [h.write(4 * MIB, vec![pattern(MIB as usize, 1)]), h.bare(Operation::Flush, PLAIN, 0, 0)];
    tags.into_iter().for_each(|tag| assert_eq!(h.run(tag).0, Ok(())));
    let files = open_base(&top, BackingChain::Allow).unwrap().files;
    let mut commit = begin(&device, files);
    disk.fill();
    while commit.find(&not_cancelled, || Ok::<_, Error>(())).unwrap() {
        while commit.copy().unwrap() {}
    }
    let error = commit.next_pass(&not_cancelled).unwrap_err().to_string();
    assert!(error.starts_with("cannot sync the backing file: "), "{error}");
    let mut of_base = Harness::open(commit.driver().unwrap()).unwrap();
    let flush = of_base.bare(Operation::Flush, PLAIN, 0, 0);
    assert!(of_base.run(flush).0.is_err(), "the sync above hides the lost data from the flushes of the base");
    drop(of_base);
    drop(commit);
    assert_eq!(h.read_back(4 * MIB, MIB as usize), pattern(MIB as usize, 1).to_vec());
}
