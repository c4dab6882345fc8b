//! Power losses. The files are in memory, which keeps synced data apart from other data, and operations
//! complete in any order. At any moment, a power loss leaves an image with any part of the data that was not
//! synced. It must contain everything that was flushed; qemu-img may find leaked clusters, but no errors. The next
//! attach frees the leaked clusters, even after a second power loss.
// Contract: durability

use std::rc::Rc;

use blkq::bitmap::{Bitmap, BitmapState};
use blkq::random::Random;
use blkq::{IoBuffer, Segment, Tag};

use super::kill::die;
use super::*;
use crate::qcow2::bitmaps::format::BitmapEntry;
use crate::qcow2::bitmaps::places::{Places, exchange};
use crate::qcow2::format::TAG_AT;
use crate::qcow2::io::env::Env;
use crate::qcow2::io::flush_metadata::flush_metadata;
use crate::qcow2::io::operations::{Action, Executor, Memory, Op};
use crate::qcow2::io::read::read_device;
use crate::qcow2::io::write::{Source, write};
use crate::qcow2::io::zero::{Wanted, clear};

pub(super) const SECTOR: usize = 512;

/// An operation in flight. Its memory is valid until [`Io::complete`](crate::qcow2::io::operations::Io::complete) gets
/// its result.
pub(super) struct Submitted {
    place: u32,
    action: Action,
    layer: usize,
    range: Range<u64>,
    pieces: Vec<libc::iovec>,
}

/// The files of the chain in memory. Only the active image is written.
pub(super) struct Disk {
    pub files: Vec<Vec<u8>>,
    durable: Vec<u8>,
    /// Writes that are not durable: when each was done, its offset and its data.
    log: Vec<(u64, usize, Vec<u8>)>,
    clock: u64,
    /// Submitted operations, and when each was submitted.
    pub pending: Vec<(u64, Submitted)>,
}

impl Disk {
    pub fn new(files: Vec<Vec<u8>>) -> Disk {
        Disk { durable: files[0].clone(), files, log: Vec::new(), clock: 0, pending: Vec::new() }
    }

    /// Makes the tag, which the attach has written, a write that no sync has made durable.
    fn forget_tag(&mut self) {
        let tag = self.durable[TAG_AT..][..4].to_vec();
        self.durable[TAG_AT..][..4].fill(0);
        self.log.push((0, TAG_AT, tag));
    }

    fn put(image: &mut Vec<u8>, at: usize, bytes: &[u8]) {
        image.resize(image.len().max(at + bytes.len()), 0);
        image[at..at + bytes.len()].copy_from_slice(bytes);
    }

    pub fn collect(&mut self, env: &Env) {
        let submitted = |op: &Op| (op.action, op.layer, op.rest(), op.pieces.clone());
        while let Some((place, (action, layer, range, pieces))) = env.io.next(submitted) {
            self.clock += 1;
            self.pending.push((self.clock, Submitted { place, action, layer, range, pieces }));
        }
    }

    pub fn execute(&mut self, env: &Env, random: &mut Random) {
        let (submitted, operation) =
            self.pending.swap_remove(random.below(self.pending.len() as u64) as usize);
        self.clock += 1;
        let (begin, end) = (operation.range.start as usize, operation.range.end as usize);
        let file = &mut self.files[operation.layer];
        let mut at = begin;
        let result = match operation.action {
            Action::Read => {
                for piece in &operation.pieces {
                    let there = file.len().saturating_sub(at).min(piece.iov_len);
                    // SAFETY: the memory of an operation that has not completed is valid for its pieces.
                    let memory =
                        unsafe { std::slice::from_raw_parts_mut(piece.iov_base.cast::<u8>(), there) };
                    memory.copy_from_slice(&file[at.min(file.len())..][..there]);
                    at += there;
                }
                at - begin
            }
            Action::Write => {
                let mut bytes = Vec::new();
                for piece in &operation.pieces {
                    // SAFETY: as above.
                    bytes.extend(unsafe {
                        std::slice::from_raw_parts(piece.iov_base.cast::<u8>(), piece.iov_len)
                    });
                }
                assert_eq!(bytes.len(), end - begin);
                Disk::put(file, begin, &bytes);
                self.log.push((self.clock, begin, bytes));
                end - begin
            }
            Action::Punch => {
                let zeroes = vec![0; end.min(file.len()).saturating_sub(begin)];
                Disk::put(file, begin.min(file.len()), &zeroes);
                self.log.push((self.clock, begin, zeroes));
                0
            }
            Action::Extend => {
                Disk::put(file, end, &[]);
                self.log.push((self.clock, end, Vec::new()));
                0
            }
            Action::Sync => {
                let durable = &mut self.durable;
                self.log.retain(|(done, at, bytes)| {
                    let kept = *done >= submitted;
                    if !kept {
                        Disk::put(durable, *at, bytes);
                    }
                    kept
                });
                0
            }
        };
        env.io.complete(operation.place, result as i32);
    }

    /// An image with everything that was done, and any part of what is in flight.
    pub fn kill(&self, random: &mut Random) -> Vec<u8> {
        let mut image = self.files[0].clone();
        for (_, operation) in self.pending.iter().filter(|(_, one)| one.action == Action::Write) {
            let mut at = operation.range.start as usize;
            for piece in &operation.pieces {
                // SAFETY: as in `execute`.
                let bytes = unsafe { std::slice::from_raw_parts(piece.iov_base.cast::<u8>(), piece.iov_len) };
                for sector in bytes.chunks(SECTOR) {
                    if random.below(2) == 0 {
                        Disk::put(&mut image, at, sector);
                    }
                    at += sector.len();
                }
            }
        }
        image
    }

    fn lose(&self, random: &mut Random) -> Vec<u8> {
        let mut image = self.durable.clone();
        for (_, at, bytes) in &self.log {
            for (number, sector) in bytes.chunks(SECTOR).enumerate() {
                if random.below(2) == 0 {
                    Disk::put(&mut image, at + number * SECTOR, sector);
                }
            }
        }
        image
    }
}

struct Model {
    now: Vec<u32>,
    /// For each sector the contents that it may have after a power loss.
    allowed: Vec<Vec<u32>>,
}

impl Model {
    fn set(&mut self, sector: usize, content: u32) {
        self.now[sector] = content;
        self.allowed[sector].push(content);
    }

    fn check(&self, image: &[u8], seed: u64) {
        for (sector, bytes) in image.chunks(SECTOR).enumerate() {
            let content = u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            assert!(
                bytes.chunks(4).all(|word| word == content.to_ne_bytes()),
                "seed {seed}: {sector} is torn"
            );
            let allowed = &self.allowed[sector];
            assert!(
                allowed.contains(&content),
                "seed {seed}: {sector} has {content}, not one of {allowed:?}"
            );
        }
    }
}

pub(super) fn content_of(contents: &[u32]) -> IoBuffer {
    let mut buffer = IoBuffer::zeroed(contents.len() * SECTOR);
    for (sector, content) in buffer.chunks_exact_mut(SECTOR).zip(contents) {
        sector.chunks_exact_mut(4).for_each(|word| word.copy_from_slice(&content.to_ne_bytes()));
    }
    buffer
}

/// Options with journals of their own, which are lost with the power.
fn options(directory: &Directory, name: &str) -> DriverOptions {
    let journals = directory.0.join(format!("{name}.journals"));
    let _ = std::fs::remove_dir_all(&journals);
    let journals = Some(Journals::open(&journals).unwrap());
    DriverOptions { direct_io: DirectIo::Off, journals, ..DriverOptions::new(directory.0.join(name)) }
}

fn check(path: &Path, allowed: &[i32], seed: u64) {
    let check = Command::new("qemu-img").args(["check", "-f", "qcow2"]).arg(path).output().unwrap();
    let text = String::from_utf8_lossy(&check.stdout).into_owned() + &String::from_utf8_lossy(&check.stderr);
    assert!(allowed.contains(&check.status.code().unwrap()), "seed {seed}: {text}");
}

fn verify(directory: &Directory, image: &[u8], model: &Model, random: &mut Random, seed: u64) {
    let path = directory.0.join("lost.qcow2");
    std::fs::write(&path, image).unwrap();
    // Exit code 3: clusters to which nothing refers.
    check(&path, &[0, 3], seed);
    let device = Qcow2::open(&options(directory, "lost.qcow2")).unwrap();
    // An image of version 2 has no tag, so leaked clusters stay.
    let version = locked(&device.shared.state).top.header.version;
    let allowed: &[i32] = if version < 3 { &[0, 3] } else { &[0] };
    die(&device);
    check(&path, allowed, seed);
    let mut torn = std::fs::read(&path).unwrap();
    // Any of the sectors that the attach wrote.
    for (sector, old) in image.chunks(SECTOR).enumerate().filter(|_| random.below(2) == 0) {
        torn[sector * SECTOR..][..old.len()].copy_from_slice(old);
    }
    std::fs::write(&path, &torn).unwrap();
    check(&path, &[0, 3], seed);
    let device = Qcow2::open(&options(directory, "lost.qcow2")).unwrap();
    let is_allowed = |warning: &String| !warning.contains("stay allocated");
    assert!(device.warnings().iter().all(is_allowed), "seed {seed}: {:?}", device.warnings());
    drop(device);
    check(&path, allowed, seed);
    directory.qemu_img(&["convert", "-f", "qcow2", "-O", "raw", "lost.qcow2", "lost.raw"]);
    model.check(&std::fs::read(directory.0.join("lost.raw")).unwrap(), seed);
}

fn live(kind: &str, backing: bool, seed: u64) {
    let mut random = Random::new(seed);
    let directory = Directory::new();
    let size = 768 * 1024;
    let sectors = size / SECTOR;
    let base_content: Vec<u32> =
        (0..if backing { sectors / 2 } else { 0 }).map(|sector| sector as u32 + 1).collect();
    std::fs::write(directory.0.join("base"), &*content_of(&base_content)).unwrap();
    let bytes = size.to_string();
    let mut words = vec!["create", "-q", "-f", "qcow2", "-o", kind];
    if backing {
        words.extend(["-b", "base", "-F", "raw"]);
    }
    directory.qemu_img(&[&words[..], &["d.qcow2", &bytes]].concat());
    let path = directory.0.join("d.qcow2");
    let device = Qcow2::open(&options(&directory, "d.qcow2")).unwrap();
    let env = Env::new(Arc::clone(&device.shared), None);
    let file = std::fs::read(&path).unwrap();
    let base = std::fs::read(directory.0.join("base")).unwrap();
    let mut disk = Disk::new(vec![file, base]);
    disk.forget_tag();
    let mut now = base_content;
    now.resize(sectors, 0);
    let mut model = Model { allowed: now.iter().map(|content| vec![*content]).collect(), now };
    let mut executor = Executor::default();
    let mut next = 10_000;
    for _ in 0..12 {
        let before = model.now.clone();
        let mut buffers = Vec::new();
        let mut flush = None;
        let mut discards = Vec::new();
        // Requests that do not overlap: each has a part of the device for itself.
        for part in 0..8 {
            let room = sectors / 8;
            let longest = [2, 16, 192][random.below(3) as usize];
            let length = random.below(longest) as usize + 1;
            let first = part * room + random.below((room - length.min(room) + 1) as u64) as usize;
            let range = first..(first + length).min((part + 1) * room);
            let (position, bytes) = ((range.start * SECTOR) as u64, (range.len() * SECTOR) as u64);
            let (task, tag) = (Rc::clone(&env), Tag(part as u16));
            let wanted = match random.below(8) {
                0..4 => None,
                4 => Some(Wanted::Zeroes),
                5 => Some(Wanted::ZeroesKept),
                6 => Some(Wanted::Discard),
                _ => {
                    flush.get_or_insert(Tag(100));
                    continue;
                }
            };
            match wanted {
                Some(wanted) => {
                    if wanted == Wanted::Discard {
                        range.clone().for_each(|sector| model.allowed[sector].push(0));
                        discards.push(range);
                    } else {
                        range.for_each(|sector| model.set(sector, 0));
                    }
                    executor.spawn(&env.io, async move {
                        let done = clear(&task, position, bytes, wanted).await;
                        task.io.finish(tag, done);
                    });
                }
                None => {
                    let contents: Vec<u32> = range.clone().map(|sector| next + sector as u32).collect();
                    range.zip(&contents).for_each(|(sector, content)| model.set(sector, *content));
                    next += sectors as u32;
                    let mut buffer = content_of(&contents);
                    let segment = Segment::new(buffer.as_mut_ptr(), buffer.len() as u32);
                    buffers.push(buffer);
                    // SAFETY: the buffers live until all operations have completed, below.
                    let memory = unsafe { Memory::new(tag, vec![segment]) };
                    executor.spawn(&env.io, async move {
                        let done = write(&task, position, bytes, Source::Memory(&memory)).await;
                        task.io.finish(tag, done);
                    });
                }
            }
        }
        if let Some(tag) = flush {
            let task = Rc::clone(&env);
            executor.spawn(&env.io, async move {
                let done = flush_metadata(&task, true).await;
                task.io.finish(tag, done);
            });
        }
        let mut loss = random.below(60);
        loop {
            executor.run(&env.io);
            disk.collect(&env);
            while let Some((tag, result)) = env.io.take_finished() {
                assert_eq!(result, Ok(()), "seed {seed}");
                if Some(tag) == flush {
                    // The contents that the flush covers, and those that were written since it began.
                    for (sector, content) in before.iter().enumerate() {
                        let allowed = &mut model.allowed[sector];
                        let begin = allowed.iter().rposition(|one| one == content).unwrap_or(0);
                        allowed.drain(..begin);
                    }
                }
            }
            if disk.pending.is_empty() {
                break;
            }
            disk.execute(&env, &mut random);
            if loss == 0 {
                verify(&directory, &disk.lose(&mut random), &model, &mut random, seed);
            }
            loss = loss.wrapping_sub(1);
        }
        assert!(executor.is_idle(), "seed {seed}: a task waits for nothing");
        for range in discards {
            let contents = run_read(&env, &mut executor, &mut disk, &mut random, range.clone());
            for (sector, content) in range.zip(contents) {
                assert!(model.allowed[sector].contains(&content));
                model.now[sector] = content;
            }
        }
        drop(buffers);
    }
}

pub(super) fn run_read(
    env: &Rc<Env>,
    executor: &mut Executor,
    disk: &mut Disk,
    random: &mut Random,
    range: Range<usize>,
) -> Vec<u32> {
    let read = Rc::new(std::cell::RefCell::new(Vec::new()));
    let (task, kept) = (Rc::clone(env), Rc::clone(&read));
    executor.spawn(&env.io, async move {
        let (position, bytes) = ((range.start * SECTOR) as u64, (range.len() * SECTOR) as u64);
        let content = read_device(&task, position, bytes).await.unwrap();
        kept.borrow_mut()
            .extend(content.chunks(SECTOR).map(|at| u32::from_ne_bytes([at[0], at[1], at[2], at[3]])));
    });
    loop {
        executor.run(&env.io);
        disk.collect(env);
        if disk.pending.is_empty() {
            return read.take();
        }
        disk.execute(env, random);
    }
}

#[test]
fn flushed_data_survives_a_power_loss_at_any_moment() {
    let kinds = [
        ("cluster_size=512", false),
        ("cluster_size=4k", true),
        ("cluster_size=64k", true),
        ("cluster_size=512,refcount_bits=64", true),
        ("compat=0.10,cluster_size=4k", false),
    ];
    each_kind(3, &kinds, |(kind, backing), seed| live(kind, backing, seed));
}

/// Adds and removes dirty bitmaps of an image, and checks what a power loss at several moments would leave.
/// The header cluster has QEMU's feature name table, so that extensions and the backing file's name span
/// several sectors.
fn live_with_bitmaps((kind, name_bytes): (&str, usize), seed: u64) {
    let mut random = Random::new(seed);
    let directory = Directory::new();
    let sectors = 128 << 10 >> 9;
    let contents: Vec<u32> = (0..sectors as u32).map(|sector| sector + 1).collect();
    let name = "b".repeat(name_bytes);
    std::fs::write(directory.0.join(&name), &*content_of(&contents)).unwrap();
    directory.qemu_img(&["create", "-q", "-f", "qcow2", "-o", kind, "-b", &name, "-F", "raw", "d.qcow2"]);
    let model = Model { allowed: contents.iter().map(|content| vec![*content]).collect(), now: contents };
    let path = directory.0.join("d.qcow2");
    let device = Qcow2::open(&options(&directory, "d.qcow2")).unwrap();
    let env = Env::new(Arc::clone(&device.shared), None);
    let mut disk =
        Disk::new(vec![std::fs::read(&path).unwrap(), std::fs::read(directory.0.join(&name)).unwrap()]);
    disk.forget_tag();
    let mut executor = Executor::default();
    let places = Rc::new(std::cell::RefCell::new(Places::default()));
    for _ in 0..4 {
        let bitmaps = (0..random.below(3)).map(|number| {
            let name = format!("bitmap{number}");
            Bitmap::new(&name, 4096, (sectors * SECTOR) as u64, BitmapState::Recording).unwrap()
        });
        let named = bitmaps.map(|bitmap| BitmapEntry::of(&bitmap, bitmap.size())).collect();
        let (task, places) = (Rc::clone(&env), Rc::clone(&places));
        executor.spawn(&env.io, async move {
            let old = places.borrow().clone();
            let exchanged = exchange(&task, old, named).await;
            *places.borrow_mut() = exchanged.expect("no error of the file");
        });
        loop {
            executor.run(&env.io);
            disk.collect(&env);
            if disk.pending.is_empty() {
                break;
            }
            disk.execute(&env, &mut random);
            // Before the first sync, a power loss may undo the change of the tag.
            if disk.log.first().is_some_and(|(done, ..)| *done == 0) || random.below(4) == 0 {
                verify(&directory, &disk.lose(&mut random), &model, &mut random, seed);
            }
        }
        assert!(executor.is_idle(), "seed {seed}: a task waits for nothing");
    }
}

#[test]
fn a_power_loss_while_bitmaps_are_added_keeps_the_backing_file() {
    let kinds = [
        ("cluster_size=64k", 4),
        ("cluster_size=4k", 200),
        ("cluster_size=2k", 100),
        ("cluster_size=512", 4),
    ];
    each_kind(3, &kinds, live_with_bitmaps);
}
