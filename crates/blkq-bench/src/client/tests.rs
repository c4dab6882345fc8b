//! Compares the client with a model: each read must return what was last written, whatever the cache did.

use blkq::drivers::ram::Ram;
use blkq::random::Random;
use blkq::{Driver, EngineThread};
use blkq_drivers::r#loop::{DirectIo, DriverOptions, LoopDevice};

use super::*;

const CACHE_PAGES: usize = 64;

fn page_of(value: u64) -> Vec<u8> {
    value.to_le_bytes().repeat(PAGE_BYTES / 8)
}

/// Reads and writes random runs of pages in two files with small caches, then reads both files with empty caches.
fn check(driver: Box<dyn Driver>) {
    let disk = Disk::builder(driver).depth(16).build().unwrap();
    let engine = EngineThread::spawn("test", vec![(disk.clone(), 0)]).unwrap();
    std::thread::scope(|scope| {
        for number in 0..2 {
            let disk = &disk;
            scope.spawn(move || {
                let layout = Layout { file: number, files: 2 };
                let mut file = File::open(disk, layout, CACHE_PAGES * PAGE_BYTES);
                let (pages, mut random) = (file.pages, Random::new(number));
                let mut model = vec![0; pages as usize];
                let mut bytes = vec![0; PAGE_BYTES];
                for step in 1..3000_u64 {
                    let first = random.below(pages);
                    let run = first..(first + random.below(40)).min(pages);
                    let write = random.below(2) == 0;
                    for page in run {
                        if write {
                            model[page as usize] = step;
                            file.write(page, &page_of(step)).unwrap();
                        } else {
                            file.read(page, &mut bytes).unwrap();
                            assert!(bytes == page_of(model[page as usize]), "page {page} in step {step}");
                        }
                    }
                    if step % 500 == 0 {
                        let cached = (0..pages).filter(|page| file.cache.contains(*page)).count();
                        assert!(cached <= CACHE_PAGES && file.cache.capacity() == CACHE_PAGES);
                        file.sync().unwrap();
                    }
                }
                file.sync().unwrap();
                let mut fresh = File::open(disk, layout, CACHE_PAGES * PAGE_BYTES);
                for page in 0..pages {
                    fresh.read(page, &mut bytes).unwrap();
                    assert!(bytes == page_of(model[page as usize]), "page {page} at the end");
                }
            });
        }
    });
    drop(engine);
}

#[test]
fn reads_return_the_last_write_on_memory() {
    check(Box::new(Ram::new(32 << 20, 4096, false).unwrap()));
}

#[test]
fn reads_return_the_last_write_on_a_file() {
    let path = std::env::temp_dir().join(format!("blkq-bench-client-{}", std::process::id()));
    std::fs::File::create(&path).unwrap().set_len(32 << 20).unwrap();
    for direct_io in [DirectIo::Off, DirectIo::Auto] {
        std::fs::File::create(&path).unwrap().set_len(32 << 20).unwrap();
        check(Box::new(LoopDevice::open(&DriverOptions { direct_io, ..DriverOptions::new(&path) }).unwrap()));
    }
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn sequential_reads_read_ahead_and_random_reads_do_not() {
    let disk = Disk::builder(Box::new(Ram::new(32 << 20, 4096, false).unwrap())).build().unwrap();
    let engine = EngineThread::spawn("test", vec![(disk.clone(), 0)]).unwrap();
    let mut file = File::open(&disk, Layout { file: 0, files: 1 }, CACHE_PAGES * PAGE_BYTES);
    let mut bytes = vec![0; PAGE_BYTES];
    let reads = || disk.stats()[blkq::StatGroup::Read].ios;
    for page in [4000, 7, 3000, 5] {
        file.read(page, &mut bytes).unwrap();
    }
    assert_eq!(reads(), 4);
    // Up to two read-ahead windows are in flight; the cache must be large enough for both.
    let mut file = File::open(&disk, Layout { file: 0, files: 1 }, 256 * PAGE_BYTES);
    for page in 0..1024 {
        file.read(page, &mut bytes).unwrap();
    }
    // Most windows have the maximum size; the first ones, and those that an extent ends, are smaller.
    assert!(reads() - 4 <= 2 * 1024 / READ_AHEAD_MAX, "{} reads", reads() - 4);
    drop(engine);
}

#[test]
fn files_do_not_overlap() {
    let layouts = [0, 1, 2].map(|file| Layout { file, files: 3 });
    let bytes = 256 << 20;
    let pages =
        layouts.iter().flat_map(|layout| (0..layout.file_pages(bytes)).map(|page| layout.device_page(page)));
    let mut pages: Vec<u64> = pages.collect();
    let count = pages.len();
    pages.sort_unstable();
    pages.dedup();
    assert!(pages.len() == count && pages[count - 1] < bytes / PAGE_BYTES as u64);
}
