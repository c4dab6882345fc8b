//! Kills of the process. Everything that the process has written stays in the file, any part of what is in
//! flight may be there, and the journal is as it is in memory. The next process must find each write that
//! completed, and leave an image in which qemu-img finds neither errors nor leaked clusters.
// Contract: durability

use std::rc::Rc;
use std::sync::Arc;

use blkq::random::Random;
use blkq::{IoBuffer, Segment, Tag};

use super::power::{Disk, SECTOR, content_of, run_read};
use super::*;
use crate::qcow2::io::env::Env;
use crate::qcow2::io::flush_metadata::flush_metadata;
use crate::qcow2::io::operations::{Executor, Memory};
use crate::qcow2::io::write::{Source, write};
use crate::qcow2::io::zero::{Wanted, clear};
use crate::qcow2::journal::{self, Left, Record};
use crate::{DriverOptions, DriverSpec, ImageFormat, check};

/// Index in the journal of the identity of its image.
const IDENTITY_AT: usize = 32;

/// The contents that each sector may have.
type Allowed = Vec<Vec<u32>>;

struct Life {
    directory: Directory,
    journals: Arc<Journals>,
    journal: PathBuf,
}

impl Life {
    fn options(&self, name: &str) -> DriverOptions {
        let path = self.directory.0.join(name);
        let journals = Some(Arc::clone(&self.journals));
        DriverOptions { direct_io: DirectIo::Off, journals, ..DriverOptions::new(path) }
    }

    /// Opens a copy of the image as another process would, with the journal as it is now, and checks it.
    fn revive(&self, image: &[u8], allowed: &Allowed, seed: u64) {
        use std::os::unix::fs::MetadataExt;
        let path = self.directory.0.join("killed.qcow2");
        std::fs::write(&path, image).unwrap();
        let (dev, inode) = std::fs::metadata(&path).map(|file| (file.dev(), file.ino())).unwrap();
        let mut journal = std::fs::read(&self.journal).unwrap();
        journal[IDENTITY_AT..][..8].copy_from_slice(&dev.to_ne_bytes());
        journal[IDENTITY_AT + 8..][..8].copy_from_slice(&inode.to_ne_bytes());
        let left = self.journals.directory().join(format!("{dev:x}-{inode:x}"));
        std::fs::write(&left, journal).unwrap();
        let device = Qcow2::open(&self.options("killed.qcow2")).unwrap();
        assert_eq!(device.warnings(), Vec::<String>::new(), "seed {seed}");
        drop(device);
        assert!(!left.exists(), "a journal is left");
        let (images, directory) = (["killed.qcow2", "killed.raw"], &self.directory.0);
        let check = ["check", "-f", "qcow2", images[0]];
        let check = Command::new("qemu-img").args(check).current_dir(directory).output().unwrap();
        let text =
            String::from_utf8_lossy(&check.stdout).into_owned() + &String::from_utf8_lossy(&check.stderr);
        assert_eq!(check.status.code(), Some(0), "seed {seed}: {text}");
        self.directory.qemu_img(&["convert", "-f", "qcow2", "-O", "raw", images[0], images[1]]);
        let raw = std::fs::read(directory.join(images[1])).unwrap();
        for (number, (sector, allowed)) in raw.chunks(SECTOR).zip(allowed).enumerate() {
            let found = u32::from_ne_bytes([sector[0], sector[1], sector[2], sector[3]]);
            assert!(
                allowed.contains(&found),
                "seed {seed}: sector {number} has {found}, not one of {allowed:?}"
            );
        }
    }
}

fn live(kind: &str, backing: bool, seed: u64) {
    let mut random = Random::new(seed);
    let directory = Directory::new();
    let sectors = 768 * 1024 / SECTOR;
    let base_content: Vec<u32> =
        (0..if backing { sectors / 2 } else { 0 }).map(|sector| sector as u32 + 1).collect();
    std::fs::write(directory.0.join("base"), &*content_of(&base_content)).unwrap();
    let bytes = (sectors * SECTOR).to_string();
    let mut words = vec!["create", "-q", "-f", "qcow2", "-o", kind];
    if backing {
        words.extend(["-b", "base", "-F", "raw"]);
    }
    directory.qemu_img(&[&words[..], &["d.qcow2", &bytes]].concat());
    let journals = Journals::open(&directory.0.join("journals")).unwrap();
    let mut life = Life { directory, journals, journal: PathBuf::new() };
    let device = Qcow2::open(&life.options("d.qcow2")).unwrap();
    life.journal = std::fs::read_dir(life.journals.directory()).unwrap().next().unwrap().unwrap().path();
    let env = Env::new(Arc::clone(&device.shared), None);
    let files = ["d.qcow2", "base"].map(|name| std::fs::read(life.directory.0.join(name)).unwrap());
    let mut disk = Disk::new(files.into());
    let mut now = base_content;
    now.resize(sectors, 0);
    let mut allowed: Allowed = now.iter().map(|content| vec![*content]).collect();
    let mut executor = Executor::default();
    let mut next = 10_000;
    for _ in 0..30 {
        let mut buffers = Vec::new();
        // For each request its range, and whether it is a write and not a discard.
        let mut requests = Vec::new();
        for part in 0..8 {
            let room = sectors / 8;
            let longest = [2, 16, 192][random.below(3) as usize];
            let length = random.below(longest) as usize + 1;
            let first = part * room + random.below((room - length.min(room) + 1) as u64) as usize;
            let range = first..(first + length).min((part + 1) * room);
            let (position, bytes) = ((range.start * SECTOR) as u64, (range.len() * SECTOR) as u64);
            let (task, tag) = (Rc::clone(&env), Tag(requests.len() as u16));
            let wanted = match random.below(10) {
                0..6 => None,
                6 => Some(Wanted::Zeroes),
                7 => Some(Wanted::ZeroesKept),
                8 => Some(Wanted::Discard),
                _ => {
                    executor.spawn(&env.io, async move {
                        let done = flush_metadata(&task, true).await;
                        task.io.finish(tag, done);
                    });
                    requests.push((0..0, true));
                    continue;
                }
            };
            match wanted {
                Some(wanted) => {
                    range.clone().for_each(|sector| allowed[sector].push(0));
                    executor.spawn(&env.io, async move {
                        let done = clear(&task, position, bytes, wanted).await;
                        task.io.finish(tag, done);
                    });
                }
                None => {
                    let contents: Vec<u32> = range.clone().map(|sector| next + sector as u32).collect();
                    range.clone().zip(&contents).for_each(|(sector, content)| allowed[sector].push(*content));
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
            requests.push((range, wanted != Some(Wanted::Discard)));
        }
        let mut death = random.below(80);
        loop {
            executor.run(&env.io);
            disk.collect(&env);
            while let Some((tag, result)) = env.io.take_finished() {
                assert_eq!(result, Ok(()), "seed {seed}");
                let (range, known) = requests[tag.index()].clone();
                range.filter(|_| known).for_each(|sector| drop(allowed[sector].drain(..1)));
            }
            if death == 0 {
                life.revive(&disk.kill(&mut random), &allowed, seed);
            }
            if disk.pending.is_empty() {
                break;
            }
            disk.execute(&env, &mut random);
            death = death.wrapping_sub(1);
        }
        assert!(executor.is_idle(), "seed {seed}: a task waits for nothing");
        for (range, known) in requests {
            if !known {
                let contents = run_read(&env, &mut executor, &mut disk, &mut random, range.clone());
                for (sector, content) in range.zip(contents) {
                    assert!(allowed[sector].contains(&content));
                    allowed[sector] = vec![content];
                }
            }
        }
        drop(buffers);
    }
    life.revive(&disk.files[0], &allowed, seed);
}

#[test]
fn completed_writes_survive_a_kill() {
    let kinds = [
        ("cluster_size=512", false),
        ("cluster_size=4k", true),
        ("cluster_size=64k", true),
        ("cluster_size=512,refcount_bits=64", true),
    ];
    each_kind(3, &kinds, |(kind, backing), seed| live(kind, backing, seed));
}

/// Writes to a new cluster, and simulates a kill before its tables are written.
fn write_and_die(device: &Qcow2) {
    let mut h = Harness::open(device).unwrap();
    let tag = h.write(MIB, vec![pattern(4096, 1)]);
    assert_eq!(h.run(tag).0, Ok(()));
    drop(h);
    die(device);
}

pub(super) fn die(device: &Qcow2) {
    device.superseded.store(true, Relaxed);
    device.file().unlock(&WHOLE_FILE);
}

#[test]
fn an_image_whose_journal_cannot_be_opened_keeps_it() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    let path = directory.image("d.qcow2", "cluster_size=64k", 4 * MIB);
    let journals = Journals::open(&directory.0.join("journals")).unwrap();
    let options = DriverOptions { journals: Some(journals), ..DriverOptions::new(&path) };
    write_and_die(&Qcow2::open(&options).unwrap());
    let journal = std::fs::read_dir(directory.0.join("journals")).unwrap().next().unwrap().unwrap().path();
    let aside = directory.0.join("aside");
    std::fs::rename(&journal, &aside).unwrap();
    std::fs::create_dir(&journal).unwrap();
    for read_only in [false, true] {
        let refused = Qcow2::open(&DriverOptions { read_only, ..options.clone() }).err().unwrap().to_string();
        assert!(refused.contains(journal.to_str().unwrap()), "{refused}");
    }
    std::fs::remove_dir(&journal).unwrap();
    std::fs::rename(&aside, &journal).unwrap();
    let mut h = Harness::open(&Qcow2::open(&options).unwrap()).unwrap();
    assert_eq!(h.read_back(MIB, 4096), pattern(4096, 1).to_vec());
}

#[test]
fn a_backing_file_that_lacks_writes_is_rejected() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    let base = directory.image("base.qcow2", "cluster_size=64k", 4 * MIB);
    for top in ["top.qcow2", "other.qcow2"] {
        directory.qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", top]);
    }
    let journals = Journals::open(&directory.0.join("journals")).unwrap();
    let options = |name: &str| DriverOptions {
        journals: Some(Arc::clone(&journals)),
        ..DriverOptions::new(directory.0.join(name))
    };
    let is_lacking = |rejected: Result<Qcow2, Error>| {
        let rejected = rejected.err().unwrap().to_string();
        assert!(rejected.contains("base.qcow2 lacks writes"), "{rejected}");
    };
    write_and_die(&Qcow2::open(&options("base.qcow2")).unwrap());
    is_lacking(Qcow2::open(&options("top.qcow2")));
    drop(Qcow2::open(&options("base.qcow2")).unwrap());
    // The overlay hides the data that the commit has copied.
    let target = |device: &Qcow2| {
        let file = File::options().read(true).write(true).open(&base).unwrap();
        device.of_base(file, &base, Some(&journals))
    };
    let top = Qcow2::open(&options("top.qcow2")).unwrap();
    let killed = target(&top).unwrap();
    killed.shared.run("", async |env| clear(env, MIB, 65536, Wanted::ZeroesKept).await).unwrap();
    die(&killed);
    die(&top);
    drop((killed, top));
    is_lacking(Qcow2::open(&options("other.qcow2")));
    let other = Qcow2::open(&DriverOptions { journals: None, ..options("other.qcow2") }).unwrap();
    is_lacking(target(&other));
    drop(other);
    let top = Qcow2::open(&options("top.qcow2")).unwrap();
    let killed = target(&top).unwrap();
    // The device pivots to the base.
    write_and_die(&killed);
    die(&top);
    drop((killed, top));
    is_lacking(Qcow2::open(&options("top.qcow2")));
    let mut h = Harness::open(&Qcow2::open(&options("base.qcow2")).unwrap()).unwrap();
    assert_eq!(h.read_back(MIB, 4096), pattern(4096, 1).to_vec());
}

#[test]
fn a_missing_journal_is_reported_once() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    let path = directory.image("d.qcow2", "cluster_size=64k", 4 * MIB);
    let journals = Journals::open(&directory.0.join("journals")).unwrap();
    let options = DriverOptions { journals: Some(journals), ..DriverOptions::new(&path) };
    let warned = || {
        let device = Qcow2::open(&options).unwrap();
        device.warnings.iter().any(|warning| warning.contains("its journal does not exist"))
    };
    write_and_die(&Qcow2::open(&options).unwrap());
    std::fs::remove_dir_all(directory.0.join("journals")).unwrap();
    std::fs::create_dir(directory.0.join("journals")).unwrap();
    assert!(warned());
    assert!(!warned());
    // The image becomes a backing file, and its journal is removed.
    let superseded = Qcow2::open(&options).unwrap();
    superseded.supersede().unwrap();
    drop(superseded);
    assert!(!warned());
}

/// A kill at this point loses nothing, and must not be reported as a loss.
#[test]
fn a_kill_while_the_journal_is_emptied_loses_nothing() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    let path = directory.image("d.qcow2", "cluster_size=64k", 4 * MIB);
    let journals = Journals::open(&directory.0.join("journals")).unwrap();
    let options = DriverOptions { journals: Some(journals), ..DriverOptions::new(&path) };
    for has_tag in [false, true, false] {
        let device = Qcow2::open(&options).unwrap();
        write_and_die(&device);
        drop(device);
        // And a second kill, while the next process empties the journal.
        for again in [false, true] {
            let device = Qcow2::open(&options).unwrap();
            assert_eq!(device.warnings(), Vec::<String>::new());
            let tag = device.tag();
            let begin = |tag| locked(&device.shared.state).journal.as_mut().unwrap().begin(tag, None);
            let next = begin(tag);
            if has_tag {
                device.set_tag(next).unwrap();
            }
            if again {
                begin(if has_tag { next } else { tag });
            }
            die(&device);
        }
        let device = Qcow2::open(&options).unwrap();
        assert_eq!(device.warnings(), Vec::<String>::new());
        let mut h = Harness::open(&device).unwrap();
        assert_eq!(h.read_back(MIB, 4096), pattern(4096, 1).to_vec());
    }
    assert_eq!(std::fs::read_dir(directory.0.join("journals")).unwrap().count(), 0);
}

#[test]
fn a_journal_is_void_after_another_program_wrote_to_the_image() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    let path = directory.image("d.qcow2", "cluster_size=64k", 4 * MIB);
    let journals = Journals::open(&directory.0.join("journals")).unwrap();
    let options = DriverOptions { journals: Some(journals), ..DriverOptions::new(&path) };
    for by_qemu in [true, false] {
        let device = Qcow2::open(&options).unwrap();
        assert!(!device.is_lost_with_process());
        write_and_die(&device);
        let reader = Qcow2::open(&DriverOptions { read_only: true, ..options.clone() });
        assert!(reader.err().unwrap().to_string().contains("open it for writing once"));
        if by_qemu {
            let program = ["-f", "qcow2", "-c", "write -P 7 0 64k", path.to_str().unwrap()];
            assert!(Command::new("qemu-io").args(program).output().unwrap().status.success());
        }
        let is_ignored = |device: &Qcow2| device.warnings().iter().any(|line| line.contains("is ignored"));
        let reader = Qcow2::open(&DriverOptions { read_only: true, ..options.clone() });
        assert_eq!(reader.is_ok_and(|reader| is_ignored(&reader)), by_qemu);
        let device = Qcow2::open(&options).unwrap();
        assert_eq!(is_ignored(&device), by_qemu);
        let mut h = Harness::open(&device).unwrap();
        let expected =
            if by_qemu { pattern(4096, 1).iter().map(|_| 0).collect() } else { pattern(4096, 1).to_vec() };
        assert_eq!(h.read_back(MIB, 4096), expected);
        assert_eq!(h.read_back(0, 512), [7; 512]);
        drop(h);
        drop(device);
        directory.check(&path);
    }
    assert_eq!(std::fs::read_dir(directory.0.join("journals")).unwrap().count(), 0);
}

#[test]
fn an_ignored_journal_of_a_backing_file_is_reported() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    let base = directory.image("base.qcow2", "cluster_size=64k", 4 * MIB);
    directory.qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "top.qcow2"]);
    let journals = Journals::open(&directory.0.join("journals")).unwrap();
    let options = |name: &str| DriverOptions {
        journals: Some(Arc::clone(&journals)),
        ..DriverOptions::new(directory.0.join(name))
    };
    write_and_die(&Qcow2::open(&options("base.qcow2")).unwrap());
    // The program opens the image for writing, and changes only the header.
    directory.qemu_img(&["check", "-q", "-r", "leaks", base.to_str().unwrap()]);
    let warnings = Qcow2::open(&options("top.qcow2")).unwrap().warnings();
    let expected = format!("the journal of {} is ignored", base.display());
    assert!(warnings.iter().any(|line| line.starts_with(&expected)), "{warnings:?}");
}

// Contract: errors
#[test]
fn a_journal_that_cannot_be_applied_leaves_the_image_unchanged() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    let path = directory.image("d.qcow2", "cluster_size=64k", 4 * MIB);
    let journals = Journals::open(&directory.0.join("journals")).unwrap();
    let options = DriverOptions { journals: Some(journals), ..DriverOptions::new(&path) };
    let device = Qcow2::open(&options).unwrap();
    write_and_die(&device);
    // A record for an entry that the refcount table does not have.
    let damaged = Record::RefcountTable { index: 1 << 40, entry: 0 };
    locked(&device.shared.state).journal.as_mut().unwrap().append(damaged);
    drop(device);
    let before = std::fs::read(&path).unwrap();
    let journal = std::fs::read_dir(directory.0.join("journals")).unwrap().next().unwrap().unwrap().path();
    for _ in 0..2 {
        let refused = Qcow2::open(&options).err().unwrap().to_string();
        assert!(refused.ends_with(&format!("delete {}", journal.display())), "{refused}");
        assert!(std::fs::read(&path).unwrap() == before);
    }
    std::fs::remove_file(&journal).unwrap();
    Qcow2::open(&options).unwrap();
}

#[test]
fn a_journal_of_a_removed_file_is_not_reported() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    let path = directory.image("d.qcow2", "cluster_size=64k", 4 * MIB);
    let journals = Journals::open(&directory.0.join("journals")).unwrap();
    let options = DriverOptions { journals: Some(Arc::clone(&journals)), ..DriverOptions::new(&path) };
    let device = Qcow2::open(&options).unwrap();
    write_and_die(&device);
    let birth = device.file().birth();
    assert_ne!(birth, 0, "the file system does not report when a file was created");
    let journal = journal::find(&journals, device.file()).unwrap().unwrap();
    let is_found = |birth| journal.has_ignored_writes(birth);
    assert_eq!([birth, 0, birth + 1].map(is_found), [true, true, false]);
}

#[test]
fn qemu_img_check_leaves_the_journal_valid() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    let path = directory.image("d.qcow2", "cluster_size=64k", 4 * MIB);
    let journals = Journals::open(&directory.0.join("journals")).unwrap();
    let options = DriverOptions { journals: Some(journals), ..DriverOptions::new(&path) };
    write_and_die(&Qcow2::open(&options).unwrap());
    let before = std::fs::read(&path).unwrap();
    let checked = DriverOptions { format: ImageFormat::Qcow2, ..DriverOptions::default() };
    check(&DriverSpec::Image(path.clone()), &checked).unwrap();
    // Without the journal, the writes would be lost.
    let refused = Qcow2::open(&DriverOptions { journals: None, ..options.clone() }).err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
    assert!(std::fs::read(&path).unwrap() == before);
    let mut h = Harness::open(&Qcow2::open(&options).unwrap()).unwrap();
    assert_eq!(h.read_back(MIB, 4096), pattern(4096, 1).to_vec());
}

/// All writes begin before the refcounts are in memory, so that none of them has changed a table yet.
#[test]
fn the_journal_has_room_for_any_number_of_concurrent_writes() {
    if !has_qemu() {
        return;
    }
    const WRITES: u64 = 800;
    let directory = Directory::new();
    let path = directory.image("d.qcow2", "cluster_size=64k", 64 * MIB);
    let journals = Journals::open(&directory.0.join("journals")).unwrap();
    let options = DriverOptions { journals: Some(journals), ..DriverOptions::new(&path) };
    let device = Qcow2::open(&options).unwrap();
    for cluster in [0, WRITES] {
        device
            .shared
            .run("write", async move |env| write(env, cluster << 16, 4096, Source::Zeroes).await)
            .unwrap();
    }
    device.flush_all_metadata().unwrap();
    let tag = device.tag();
    let env = Env::new(Arc::clone(&device.shared), None);
    {
        // From here on the slices of the L2 table are in memory, and none of refcount blocks.
        let mut state = locked(&device.shared.state);
        let (block, cluster) = (state.writer.refcount_table[0], state.top.header.cluster_bytes());
        state.cache.forget(0, block..block + cluster);
    }
    let mut data = IoBuffer::zeroed(4096);
    data.fill(7);
    let segment = Segment::new(data.as_mut_ptr(), 4096);
    let mut executor = Executor::default();
    let done = Rc::new(std::cell::Cell::new(0));
    for number in 0..WRITES {
        let (env, done) = (Rc::clone(&env), Rc::clone(&done));
        // SAFETY: the buffer outlives all operations, which are performed below, and nothing uses the tag.
        let memory = unsafe { Memory::new(Tag(0), vec![segment]) };
        let io = Rc::clone(&env);
        executor.spawn(&io.io, async move {
            write(&env, number << 16, 4096, Source::Memory(&memory)).await.unwrap();
            done.set(done.get() + 1);
        });
    }
    while !executor.is_idle() {
        executor.run(&env.io);
        while let Some((place, done)) = env.io.next(|op| op.perform(&device.shared.files)) {
            env.io.complete(place, done);
        }
        let left = locked(&device.shared.state).journal.as_ref().unwrap().left(tag);
        assert_ne!(left, Left::Incomplete, "after {} writes", done.get());
    }
    assert_eq!(done.get(), WRITES);
    die(&device);
    let mut h = Harness::open(&Qcow2::open(&options).unwrap()).unwrap();
    assert_eq!(h.read_back((WRITES - 1) << 16, 4096), vec![7; 4096]);
}
