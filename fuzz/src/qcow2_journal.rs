//! Journals that a killed process has left, with arbitrary patches. An unchanged journal must be applied: the image then
//! contains all writes that completed, and its refcounts match its tables. A damaged journal must be applied or rejected.
//!
//! Input: the number of steps, the steps of three bytes each (a write: its first sector, its number of sectors, its
//! content; or a flush), then patches of the journal: the index of a word (two bytes), and the word.
// Contract: bounded-input

use std::cell::RefCell;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use blkq::{Bio, Disk, Driver, IoBuffer, LocalQueue, Sector};
use blkq_drivers::r#loop::DirectIo;
use blkq_drivers::qcow2::{DriverOptions, Journals, Qcow2};

const CLUSTER: usize = 4096;
const CLUSTER_BITS: u32 = 12;
const DEVICE_BYTES: usize = 256 << 10;
const STEPS_MAX: usize = 16;
/// Mask of the offset in a table entry.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// An image without data clusters: header, refcount table, refcount block, L1 table.
fn empty_image() -> Vec<u8> {
    let mut image = vec![0; 4 * CLUSTER];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"QFI\xfb");
    put(4, &3_u32.to_be_bytes());
    put(20, &CLUSTER_BITS.to_be_bytes());
    put(24, &(DEVICE_BYTES as u64).to_be_bytes());
    put(36, &1_u32.to_be_bytes());
    put(40, &(3 * CLUSTER as u64).to_be_bytes());
    put(48, &(CLUSTER as u64).to_be_bytes());
    put(56, &1_u32.to_be_bytes());
    put(96, &4_u32.to_be_bytes());
    put(100, &104_u32.to_be_bytes());
    put(CLUSTER, &(2 * CLUSTER as u64).to_be_bytes());
    (0..4).for_each(|cluster| put(2 * CLUSTER + 2 * cluster, &1_u16.to_be_bytes()));
    image
}

/// Checks that the refcount of each cluster matches the number of its references.
fn check_refcounts(image: &[u8]) {
    let word =
        |at: usize| image.get(at..at + 8).map_or(0, |word| u64::from_be_bytes(word.try_into().expect("8")));
    let mut references = vec![0_u16; CLUSTER / 2];
    references[..4].fill(1);
    let table = (word(3 * CLUSTER) & OFFSET) as usize;
    if table != 0 {
        references[table / CLUSTER] += 1;
        for entry in
            (0..CLUSTER / 8).map(|index| word(table + 8 * index) & OFFSET).filter(|entry| *entry != 0)
        {
            references[entry as usize / CLUSTER] += 1;
        }
    }
    for (cluster, references) in references.into_iter().enumerate() {
        let at = 2 * CLUSTER + 2 * cluster;
        let refcount = u16::from_be_bytes([image[at], image[at + 1]]);
        assert_eq!(refcount, references, "cluster {cluster}");
    }
}

struct Place {
    image: File,
    options: DriverOptions,
    journals: PathBuf,
}

thread_local! {
    static PLACE: RefCell<Place> = RefCell::new({
        let directory = std::env::temp_dir().join(format!("qcow2-journal-{}", std::process::id()));
        fs::create_dir_all(&directory).expect("a directory");
        let path = directory.join("image");
        let mut options = File::options();
        let image = options.read(true).write(true).create(true).truncate(true).open(&path).expect("a file");
        let journals = directory.join("journals");
        let all = Some(Journals::open(&journals).expect("a directory"));
        let options = DriverOptions { direct_io: DirectIo::Off, journals: all, ..DriverOptions::new(path) };
        Place { image, options, journals }
    });
}

impl Place {
    fn set_image(&self, bytes: &[u8]) {
        self.image.set_len(0).expect("memory");
        self.image.write_all_at(bytes, 0).expect("memory");
    }

    fn journal(&self) -> Option<PathBuf> {
        fs::read_dir(&self.journals).expect("a directory").next().map(|entry| entry.expect("an entry").path())
    }

    fn open(&self) -> Result<(Arc<Disk>, LocalQueue), blkq::Error> {
        let device = Qcow2::open(&self.options)?;
        let warnings = device.warnings();
        assert!(warnings.iter().all(|warning| !warning.contains('\n')), "{warnings:?}");
        let disk = Disk::builder(Box::new(device)).depth(4).build()?;
        let queue = disk.open_queue(0)?;
        Ok((disk, queue))
    }
}

fn complete(queue: &mut LocalQueue, bio: Bio) -> Option<IoBuffer> {
    queue.submit(bio).expect("room");
    loop {
        queue.wait(1);
        if let Some(completion) = queue.completions().next() {
            assert_eq!(completion.result, Ok(()));
            return completion.data.into_buffer();
        }
    }
}

/// Runs the steps on a new image. Returns the image and the journal as a kill leaves them, and the expected data.
fn live(place: &Place, steps: &[[u8; 3]]) -> (Vec<u8>, PathBuf, Vec<u8>, Vec<u8>) {
    let mut model = vec![0; DEVICE_BYTES];
    place.set_image(&empty_image());
    if let Some(left) = place.journal() {
        fs::remove_file(left).expect("a file");
    }
    let (disk, mut queue) = place.open().expect("a sound image");
    for [first, sectors, fill] in steps {
        if *sectors == 0 {
            complete(&mut queue, Bio::flush(0));
            continue;
        }
        let sectors = u64::from(sectors % 64) + 1;
        let first = u64::from(*first) * 2 % (DEVICE_BYTES as u64 / 512 - sectors + 1);
        let mut data = IoBuffer::zeroed(sectors as usize * 512);
        data.fill(*fill);
        model[first as usize * 512..][..data.len()].fill(*fill);
        complete(&mut queue, Bio::write(Sector(first), data, 0));
    }
    let journal = place.journal().expect("a journal");
    let mut image = vec![0; place.image.metadata().expect("a file").len() as usize];
    place.image.read_exact_at(&mut image, 0).expect("a file");
    let words = fs::read(&journal).expect("a journal");
    drop((queue, disk));
    (image, journal, words, model)
}

fn revive(place: &Place, data: &[u8]) {
    let Some((count, rest)) = data.split_first() else { return };
    let (steps, patches) = rest.split_at(rest.len().min(3 * (usize::from(*count) % STEPS_MAX)));
    let (image, path, mut journal, model) = live(place, steps.as_chunks().0);
    let patches = patches.as_chunks::<10>().0;
    for patch in patches {
        let at = usize::from(u16::from_le_bytes([patch[0], patch[1]])) * 8;
        if let Some(word) = journal.get_mut(at..at + 8) {
            word.copy_from_slice(&patch[2..]);
        }
    }
    place.set_image(&image);
    fs::write(&path, journal).expect("memory");
    let opened = place.open();
    if !patches.is_empty() {
        assert!(
            opened.is_ok_and(|opened| {
                drop(opened);
                true
            }) || path.exists()
        );
        return;
    }
    let (disk, mut queue) = opened.expect("a sound journal");
    let warnings = disk.driver().warnings();
    assert!(warnings.iter().all(|warning| !warning.contains("journal")), "{warnings:?}");
    let mut found = Vec::new();
    for at in (0..DEVICE_BYTES).step_by(64 << 10) {
        let read = Bio::read(Sector(at as u64 / 512), IoBuffer::zeroed(64 << 10), 0);
        found.extend_from_slice(&complete(&mut queue, read).expect("the buffer"));
    }
    assert!(found == model, "a write that completed is lost");
    drop((queue, disk));
    assert!(!path.exists(), "the journal was not removed");
    let mut image = vec![0; place.image.metadata().expect("a file").len() as usize];
    place.image.read_exact_at(&mut image, 0).expect("a file");
    check_refcounts(&image);
}

/// Checks one input.
pub fn check(data: &[u8]) {
    PLACE.with_borrow(|place| revive(place, data));
}
