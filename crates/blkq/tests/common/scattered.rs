//! Memory in pieces, with gaps between them that must not be accessed.

use blkq::{Data, IoBuffer, Segment, SegmentOwner};

const CANARY: u8 = 0xC5;

/// Pieces of one allocation, each followed by a gap.
pub struct Scattered {
    _memory: IoBuffer,
    segments: Vec<Segment>,
    gaps: Vec<(*const u8, usize)>,
}

// SAFETY: the memory belongs to the value, which does not move it before it is dropped.
unsafe impl Send for Scattered {}

// SAFETY: the segments point into memory that the value owns, and never change.
unsafe impl SegmentOwner for Scattered {
    fn segments(&self) -> &[Segment] {
        &self.segments
    }
}

impl Scattered {
    /// `bytes` in pieces whose lengths are those of `cuts`, repeated and rounded to `align`; empty pieces are
    /// kept. The last piece is `surplus` bytes longer than needed.
    pub fn data(bytes: &[u8], cuts: &[usize], align: usize, surplus: usize) -> Data {
        let gap = align.max(8);
        let lens: Vec<usize> = {
            let (mut left, mut lens) = (bytes.len(), Vec::new());
            let mut cuts = cuts.iter().cycle();
            while left > 0 {
                let cut = cuts.next().map_or(left, |cut| cut.next_multiple_of(align).min(left));
                lens.push(cut);
                left -= cut;
                // Without this limit, a list of empty cuts would loop forever.
                if lens.len() > 4096 {
                    lens.push(left);
                    left = 0;
                }
            }
            *lens.last_mut().unwrap() += surplus.next_multiple_of(align);
            lens
        };
        let mut memory = IoBuffer::zeroed(lens.iter().map(|len| len + gap).sum());
        memory.fill(CANARY);
        let base = memory.as_mut_ptr();
        let (mut at, mut done) = (0, 0);
        let (mut segments, mut gaps) = (Vec::new(), Vec::new());
        for len in lens {
            let data = len.min(bytes.len() - done);
            // SAFETY: the memory is as long as all pieces and gaps together.
            let ptr = unsafe { base.add(at) };
            // SAFETY: the memory is as long as all pieces and gaps together.
            unsafe { ptr.copy_from_nonoverlapping(bytes[done..].as_ptr(), data) };
            segments.push(Segment::new(ptr, len as u32));
            // Bytes of a piece beyond the bio must not be changed either.
            gaps.push((ptr.wrapping_add(data).cast_const(), len - data + gap));
            done += data;
            at += len + gap;
        }
        Data::Segments(Box::new(Box::new(Scattered { _memory: memory, segments, gaps })))
    }

    fn assert_intact(&self) {
        for &(ptr, len) in &self.gaps {
            // SAFETY: the gap is inside the memory of the value.
            let gap = unsafe { std::slice::from_raw_parts(ptr, len) };
            assert!(gap.iter().all(|byte| *byte == CANARY), "memory beside the bio was touched");
        }
    }
}

impl Drop for Scattered {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.assert_intact();
        }
    }
}

/// The first `length` bytes of the memory of a completed bio.
pub fn bytes_of(data: &Data, length: usize) -> Vec<u8> {
    match data {
        // Pages of the kernel cannot be read.
        Data::None | Data::Kernel(_) => Vec::new(),
        Data::Buffer(buffer) => buffer[..length].to_vec(),
        Data::Segments(owner) => {
            let mut bytes = Vec::new();
            for segment in owner.segments() {
                // SAFETY: the owner keeps its segments valid, and the bio has completed.
                bytes.extend(unsafe { std::slice::from_raw_parts(segment.ptr, segment.len as usize) });
            }
            bytes.truncate(length);
            bytes
        }
    }
}
