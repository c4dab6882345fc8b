//! Arbitrary qcow2 images, alone and as a backing chain, on a real ring. An image must be rejected, or every bio must
//! complete once; the header and all backing files must not change. On a valid image nothing may fail, and the data and
//! the dirty bitmap, if there is one, must match a model, also after the image was opened again.
//!
//! Input: the shape of the images and whether the first has a bitmap, the number of steps, the steps of four bytes each,
//! then patches of the files: the file and the number of words of 8 bytes, the index of the first word (two bytes), and
//! the words.
//!
//! A thread decompresses clusters in debug builds, which replay the corpus, but not under libFuzzer.
// Contract: bounded-input

use std::cell::RefCell;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blkq::bitmap::BitmapState;
use blkq::{Bio, BioFlags, Disk, IoBuffer, LocalQueue, Operation, Sector, Status};
use blkq_drivers::qcow2::{DriverOptions, Qcow2};

const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const STEPS_MAX: usize = 32;
const MODEL_MAX_BYTES: u64 = 4 << 20;
/// Maximum I/O size in sectors, and maximum bios in flight.
const SECTORS_MAX: u64 = 64;
const IN_FLIGHT_MAX: usize = 8;
/// Size of the raw backing file, and the content of the images.
const RAW_BYTES: usize = 24 << 10;
const RAW: u8 = 0x11;
const BEHIND: u8 = 0x22;
const TOP: u8 = 0x33;

/// Offset of the backing file name in a header.
const NAME_AT: u64 = 192;

const NAMES: [&str; 3] = ["top", "behind", "raw"];

/// The shape of an image: three tables, two data clusters, and an optional backing file.
#[derive(Clone, Copy)]
struct Shape {
    v2: bool,
    cluster_bits: u32,
    refcount_order: u32,
    size: u64,
    behind: Option<(&'static str, &'static str)>,
    fill: u8,
    zstd: bool,
    bitmap: bool,
}

/// A zstd frame of `length` bytes: one repeated byte, in blocks.
fn zstd_frame(length: u64, fill: u8) -> Vec<u8> {
    const BLOCK_MAX: u64 = 128 << 10;
    // The header of a single segment, with its length in 4 bytes.
    let mut frame = vec![0x28, 0xb5, 0x2f, 0xfd, 0xa0];
    frame.extend((length as u32).to_le_bytes());
    for at in (0..length).step_by(BLOCK_MAX as usize) {
        let (block, last) = ((length - at).min(BLOCK_MAX), at + BLOCK_MAX >= length);
        frame.extend(&((block << 3 | 1 << 1 | u64::from(last)) as u32).to_le_bytes()[..3]);
        frame.push(fill);
    }
    frame
}

impl Shape {
    fn cluster(self) -> u64 {
        1 << self.cluster_bits
    }

    /// Writes the image: header, refcount table and block, L1 and L2 table, data, and zero clusters if the version has them.
    fn write(self, file: &File) {
        let put = |at: u64, bytes: &[u8]| file.write_all_at(bytes, at).expect("memory");
        let cluster = self.cluster();
        let l2_covers = cluster * cluster / 8;
        let mut header = b"QFI\xfb".to_vec();
        header.extend(if self.v2 { 2_u32 } else { 3 }.to_be_bytes());
        let name = self.behind.map_or("", |(name, _)| name);
        header.extend(if name.is_empty() { 0 } else { NAME_AT }.to_be_bytes());
        header.extend((name.len() as u32).to_be_bytes());
        header.extend(self.cluster_bits.to_be_bytes());
        header.extend(self.size.to_be_bytes());
        header.extend([0; 4]);
        header.extend((self.size.div_ceil(l2_covers) as u32).to_be_bytes());
        header.extend((3 * cluster).to_be_bytes());
        header.extend(cluster.to_be_bytes());
        header.extend(1_u32.to_be_bytes());
        header.extend([0; 12]);
        if !self.v2 {
            header.extend((u64::from(self.zstd) << 3).to_be_bytes());
            header.extend([0; 8]);
            header.extend(u64::from(self.bitmap).to_be_bytes());
            header.extend(self.refcount_order.to_be_bytes());
            header.extend(112_u32.to_be_bytes());
            header.extend([u8::from(self.zstd), 0, 0, 0, 0, 0, 0, 0]);
        }
        if let Some((_, format)) = self.behind {
            header.extend(0xe279_2aca_u32.to_be_bytes());
            header.extend((format.len() as u32).to_be_bytes());
            header.extend(format.as_bytes());
            header.resize(header.len().next_multiple_of(8), 0);
        }
        if self.bitmap {
            self.write_bitmap(&mut header, put);
        }
        header.resize(NAME_AT as usize, 0);
        header.extend(name.as_bytes());
        put(0, &header);
        put(cluster, &(2 * cluster).to_be_bytes());
        let clusters = if self.bitmap { 10 } else { 7 };
        let mut refcounts = [0_u8; 80];
        for index in 0..clusters {
            match 1_usize << self.refcount_order {
                bits @ 1..8 => refcounts[index * bits / 8] |= 1 << (index * bits % 8),
                bits => refcounts[(index + 1) * bits / 8 - 1] = 1,
            }
        }
        put(2 * cluster, &refcounts);
        put(3 * cluster, &(COPIED | (4 * cluster)).to_be_bytes());
        let data = if self.zstd { COMPRESSED } else { COPIED };
        put(4 * cluster, &(data | (5 * cluster)).to_be_bytes());
        put(4 * cluster + 8, &(COPIED | (6 * cluster) | u64::from(!self.v2)).to_be_bytes());
        match self.zstd {
            true => put(5 * cluster, &zstd_frame(cluster, self.fill)),
            false => put(5 * cluster, &vec![self.fill; cluster.min(self.size) as usize]),
        }
        file.set_len(clusters as u64 * cluster).expect("memory");
    }

    /// Writes the bitmap `b` with all bits of its first cluster set: directory, table and bits.
    fn write_bitmap(self, header: &mut Vec<u8>, put: impl Fn(u64, &[u8])) {
        let cluster = self.cluster();
        header.extend(0x2385_2875_u32.to_be_bytes());
        header.extend(24_u32.to_be_bytes());
        header.extend(1_u32.to_be_bytes());
        header.extend([0; 4]);
        header.extend(32_u64.to_be_bytes());
        header.extend((7 * cluster).to_be_bytes());
        let mut entry = (8 * cluster).to_be_bytes().to_vec();
        entry.extend(1_u32.to_be_bytes());
        // The bitmap is enabled, and has the type "dirty tracking", a granularity of 512 bytes and a name of one byte.
        entry.extend(2_u32.to_be_bytes());
        entry.extend([1, 9, 0, 1, 0, 0, 0, 0]);
        entry.extend(b"b\0\0\0\0\0\0\0");
        put(7 * cluster, &entry);
        put(8 * cluster, &(9 * cluster).to_be_bytes());
        put(9 * cluster, &vec![0xff; cluster as usize]);
    }

    /// Applies the content of the image to the content of its backing file.
    fn content(self, model: &mut [u8]) {
        let cluster = self.cluster() as usize;
        for (number, byte) in model.iter_mut().take(2 * cluster).enumerate() {
            *byte = if number < cluster { self.fill } else { 0 };
        }
    }
}

/// The files of the images, which every input rewrites.
struct Images {
    directory: PathBuf,
    files: [File; 3],
}

thread_local! {
    static IMAGES: RefCell<Images> = RefCell::new({
        let directory = std::env::temp_dir().join(format!("qcow2-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a directory");
        let files = NAMES.map(|name| {
            let mut options = File::options();
            options.read(true).write(true).create(true).truncate(true);
            options.open(directory.join(name)).expect("a file")
        });
        Images { directory, files }
    });
}

/// The expected content of a device; `None` if it is unknown.
type Model = Option<Vec<Option<u8>>>;

struct Sent {
    operation: Operation,
    range: Range<u64>,
    expected: Option<Vec<Option<u8>>>,
}

struct Session {
    disk: Arc<Disk>,
    queue: LocalQueue,
    sent: Vec<Option<Sent>>,
    model: Model,
    read_only: bool,
    /// The sectors that must be dirty, for an image with a bitmap and known data.
    dirty: Option<Vec<bool>>,
}

impl Session {
    fn open(
        path: &Path,
        read_only: bool,
        model: Model,
        dirty: Option<Vec<bool>>,
    ) -> Result<Session, blkq::Error> {
        let device = Qcow2::open(&DriverOptions { read_only, ..DriverOptions::new(path) })?;
        let disk = Disk::builder(Box::new(device)).depth(IN_FLIGHT_MAX as u16).build()?;
        let (bitmaps, _) = disk.driver().require_bitmap_store()?.load()?;
        disk.load_bitmaps(bitmaps)?;
        let queue = disk.open_queue(0)?;
        let session = Session { disk, queue, sent: Vec::new(), model, read_only, dirty };
        session.check_bitmap();
        Ok(session)
    }

    fn check_bitmap(&self) {
        let Some(dirty) = &self.dirty else { return };
        let bitmaps = self.disk.bitmaps();
        let [bitmap] = &bitmaps[..] else { panic!("{} bitmaps", bitmaps.len()) };
        assert_eq!((bitmap.name(), bitmap.state()), ("b", BitmapState::Recording));
        let size = self.disk.limits().capacity_bytes;
        let mut found = Vec::new();
        for extent in bitmap.extents(0..size, usize::MAX) {
            found.extend(std::iter::repeat_n(extent.dirty, extent.length.div_ceil(512) as usize));
        }
        assert_eq!(&found, dirty);
    }

    /// Stores the bitmaps in the image, which may fail if its tables are invalid.
    fn keep_bitmaps(&self) {
        if !self.read_only {
            let kept =
                self.disk.driver().require_bitmap_store().and_then(|kept| kept.store(&self.disk.bitmaps()));
            assert!(kept.is_ok() || self.model.is_none(), "{kept:?}");
        }
    }

    fn take(&mut self) {
        for completion in self.queue.completions() {
            let sent = self.sent[completion.user_data as usize].take().expect("a second completion");
            let Some(model) = &self.model else { continue };
            let result = completion.result;
            let may_lack = matches!(sent.operation, Operation::Discard | Operation::WriteZeroes);
            let writes = sent.operation.is_write() && sent.operation != Operation::Flush;
            if writes && self.read_only {
                assert!(result.is_err(), "{:?} of what is read-only", sent.operation);
            } else if !may_lack || result != Err(Status::NotSupported) {
                assert_eq!(result, Ok(()), "{:?} {:?} of {}", sent.operation, sent.range, model.len());
            }
            let Some(expected) = sent.expected else { continue };
            let data = completion.data.into_buffer().expect("the buffer");
            for (number, (byte, known)) in data.iter().zip(expected).enumerate() {
                assert!(
                    known.is_none_or(|known| known == *byte),
                    "byte {} has {byte}",
                    sent.range.start + number as u64
                );
            }
        }
    }

    fn wait(&mut self) {
        while self.queue.in_flight() > 0 {
            self.queue.wait(1);
            self.take();
        }
        self.take();
    }

    fn note(&mut self, operation: Operation, range: &Range<u64>, fill: u8) {
        let limits = self.queue.limits();
        let zeroes = limits.max_write_zeroes_bytes.min(limits.max_write_zeroes_no_unmap_bytes) > 0;
        let Some(model) = self.model.as_mut().filter(|_| !self.read_only) else { return };
        let place = &mut model[range.start as usize..range.end as usize];
        if let Some(dirty) = self.dirty.as_mut().filter(|_| operation.is_write()) {
            dirty[(range.start >> 9) as usize..(range.end >> 9) as usize].fill(true);
        }
        match operation {
            Operation::Write => place.fill(Some(fill)),
            Operation::WriteZeroes if zeroes => place.fill(Some(0)),
            Operation::WriteZeroes | Operation::Discard => place.fill(None),
            _ => {}
        }
    }

    fn submit(&mut self, operation: Operation, words: [u8; 4]) {
        let capacity = self.queue.limits().capacity_bytes >> 9;
        let sectors = (u64::from(words[0] >> 4) + 1).pow(2).min(SECTORS_MAX).min(capacity);
        // Near the start or near the end of the device.
        let near = u64::from(u16::from_le_bytes([words[1], words[2]])) % (capacity - sectors + 1);
        let start = if words[3] & 1 == 0 { near } else { capacity - sectors - near };
        let range = start << 9..(start + sectors) << 9;
        let meets = |sent: &Sent| {
            (sent.operation.is_write() || operation.is_write())
                && sent.range.start < range.end
                && range.start < sent.range.end
        };
        // The device may execute overlapping bios in any order.
        if self.queue.in_flight() >= IN_FLIGHT_MAX
            || self.model.is_some() && self.sent.iter().flatten().any(meets)
        {
            self.wait();
        }
        let (sector, number, fill) = (Sector(start), self.sent.len() as u64, words[3] | 1);
        let mut data = IoBuffer::zeroed(if operation.has_data() { sectors as usize * 512 } else { 0 });
        let bio = match operation {
            Operation::Read => Bio::read(sector, data, number),
            Operation::Write => {
                data.fill(fill);
                Bio::write(sector, data, number)
            }
            Operation::Discard => Bio::discard(sector, sectors, number),
            Operation::WriteZeroes if words[3] & 2 != 0 => {
                Bio::write_zeroes(sector, sectors, number).with_flags(BioFlags::NO_UNMAP)
            }
            Operation::WriteZeroes => Bio::write_zeroes(sector, sectors, number),
            Operation::Flush => Bio::flush(number),
        };
        let reads = operation == Operation::Read;
        let expected = self.model.as_ref().filter(|_| reads);
        let expected = expected.map(|model| model[range.start as usize..range.end as usize].to_vec());
        self.note(operation, &range, fill);
        self.sent.push(Some(Sent { operation, range, expected }));
        self.queue.submit(bio).expect("room");
        if words[3] & 4 != 0 {
            self.wait();
        }
    }

    fn grow(&mut self, words: [u8; 4]) {
        self.wait();
        let now = self.disk.limits().capacity_bytes;
        let Some(bytes) = now.checked_add(u64::from(words[1]) << 12 << (words[2] % 16)) else { return };
        if self.model.is_some() && bytes > MODEL_MAX_BYTES {
            return;
        }
        if self.disk.resize(Some(bytes)).is_ok()
            && let Some(model) = &mut self.model
        {
            model.resize(bytes as usize, Some(0));
            if let Some(dirty) = &mut self.dirty {
                dirty.resize((bytes >> 9) as usize, true);
            }
        }
    }

    /// Checks block status: it must stay within the requested range, and report no data where the model has none.
    fn status(&mut self) {
        self.wait();
        let size = self.disk.limits().capacity_bytes;
        let begin = (size / 3) & !511;
        match self.disk.driver().extents(begin..size, 16) {
            Ok(extents) => {
                assert!(extents.len() <= 16 && extents.iter().all(|extent| extent.length > 0));
                let mut at = begin;
                for extent in extents {
                    let part = at..at + extent.length;
                    assert!(part.end <= size);
                    if let Some(model) = self.model.as_ref().filter(|_| extent.zero) {
                        let part = &model[part.start as usize..part.end as usize];
                        assert!(part.iter().flatten().all(|byte| *byte == 0), "data at {at} is no data");
                    }
                    at = part.end;
                }
            }
            Err(error) => assert!(self.model.is_none(), "{error}"),
        }
    }

    fn step(&mut self, words: [u8; 4]) {
        match words[0] % 16 {
            0..5 => self.submit(Operation::Write, words),
            5..8 => self.submit(Operation::Read, words),
            8 | 9 => self.submit(Operation::Discard, words),
            10 | 11 => self.submit(Operation::WriteZeroes, words),
            12 => self.submit(Operation::Flush, words),
            13 => self.status(),
            14 => self.grow(words),
            _ => self.wait(),
        }
    }

    fn read_all(&mut self) {
        let Some(model) = self.model.clone() else { return };
        for (chunk, expected) in model.chunks(SECTORS_MAX as usize * 512).enumerate() {
            let start = chunk as u64 * SECTORS_MAX;
            let range = start << 9..(start << 9) + expected.len() as u64;
            let (number, data) = (self.sent.len() as u64, IoBuffer::zeroed(expected.len()));
            let expected = Some(expected.to_vec());
            self.sent.push(Some(Sent { operation: Operation::Read, range, expected }));
            self.queue.submit(Bio::read(Sector(start), data, number)).expect("room");
            self.wait();
        }
    }
}

/// Applies the patches to the files. Returns whether there are any.
fn overlay(files: &[File; 3], mut pieces: &[u8]) -> bool {
    let mut any = false;
    while let [head, low, high, rest @ ..] = pieces {
        let words = usize::from(head & 0x7f) % 64 + 1;
        let (bytes, left) = rest.split_at(rest.len().min(words * 8));
        let at = u64::from(u16::from_le_bytes([*low, *high])) * 8;
        files[usize::from(head >> 7)].write_all_at(bytes, at).expect("memory");
        any |= !bytes.is_empty();
        pieces = left;
    }
    any
}

fn bytes_of(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.metadata().expect("a file").len() as usize];
    file.read_exact_at(&mut bytes, 0).expect("memory");
    bytes
}

fn run(images: &Images, data: &[u8]) -> Option<()> {
    let [kind, clusters, size, count, rest @ ..] = data else { return None };
    let (steps, pieces) = rest.split_at_checked(usize::from(*count) % (STEPS_MAX + 1) * 4)?;
    let [top, behind, raw] = &images.files;
    images.files.iter().for_each(|file| file.set_len(0).expect("memory"));
    raw.write_all_at(&[RAW; RAW_BYTES], 0).expect("memory");
    let v2 = kind & 2 != 0;
    let shape = Shape {
        v2,
        cluster_bits: 9 + u32::from(clusters % 13),
        refcount_order: if v2 { 4 } else { u32::from(clusters / 13) % 7 },
        size: (u64::from(*size) + 1) * 2048,
        behind: [None, Some(("raw", "raw")), Some(("behind", "qcow2")), Some(("top", "qcow2"))]
            [usize::from(kind >> 2) % 4],
        fill: TOP,
        zstd: !v2 && size % 4 == 3,
        bitmap: !v2 && kind & 0x40 != 0,
    };
    let lower = Shape {
        cluster_bits: 9 + u32::from(kind >> 4) % 4,
        refcount_order: 4,
        size: 40 << 10,
        behind: Some(("raw", "raw")),
        fill: BEHIND,
        zstd: false,
        bitmap: false,
        ..shape
    };
    // If `kind` is odd, no images are generated: the patches are their whole content.
    let made = kind & 1 == 0;
    if made {
        shape.write(top);
        lower.write(behind);
    }
    let foreign = overlay(&images.files, pieces);
    let itself = shape.behind.is_some_and(|(name, _)| name == NAMES[0]);
    let model = (made && !foreign && !itself).then(|| {
        let mut model = vec![0; shape.size as usize];
        if shape.behind.is_some() {
            let length = model.len().min(RAW_BYTES);
            model[..length].fill(RAW);
        }
        if shape.behind.is_some_and(|(name, _)| name == NAMES[1]) {
            let length = model.len().min(lower.size as usize);
            lower.content(&mut model[..length]);
        }
        shape.content(&mut model);
        model.into_iter().map(Some).collect::<Vec<_>>()
    });
    let kept = [bytes_of(behind), bytes_of(raw)];
    let mut head = [0; 36];
    let had = top.read_at(&mut head, 0).expect("memory");
    let dirty = model.as_ref().filter(|_| shape.bitmap).map(|_| vec![true; shape.size as usize >> 9]);
    session(images, steps, model, dirty, kind & 0x80 != 0);
    assert!([bytes_of(behind), bytes_of(raw)] == kept, "a backing file changed");
    let mut now = [0; 36];
    top.read_at(&mut now, 0).expect("memory");
    // The size and the entries of the L1 table may have changed, because images grow.
    if had == head.len() {
        // Adding bitmaps moves the backing file name.
        let parts = [0..8, 16..24, 32..36];
        assert!(parts.into_iter().all(|part| now[part.clone()] == head[part]), "the header changed");
    }
    let blocks = std::os::unix::fs::MetadataExt::blocks(&top.metadata().expect("a file"));
    assert!(blocks << 9 < 256 << 20, "the file has {blocks} blocks");
    Some(())
}

fn session(images: &Images, steps: &[u8], model: Model, dirty: Option<Vec<bool>>, read_only: bool) {
    let path = images.directory.join(NAMES[0]);
    let mut session = match Session::open(&path, read_only, model.clone(), dirty) {
        Ok(session) => session,
        Err(error) => {
            assert!(!error.to_string().is_empty() && !error.to_string().contains('\n'));
            return assert!(model.is_none(), "{error}");
        }
    };
    for words in steps.as_chunks::<4>().0 {
        session.step(*words);
    }
    session.wait();
    session.check_bitmap();
    session.keep_bitmaps();
    let (model, dirty) = (session.model.take(), session.dirty.take());
    drop(session);
    if model.is_some() {
        let mut again = Session::open(&path, true, model, dirty).expect("the image that was closed");
        again.read_all();
    }
}

/// Checks one input.
pub fn check(data: &[u8]) {
    IMAGES.with_borrow(|images| run(images, data));
}
