//! The data structures between the kernel and a ublk server. Any descriptor must become a bio that the block layer completes
//! or fails, without access beyond its buffer. Any valid limits must become parameters that the kernel accepts
//! (`ublk_validate_params`).
//!
//! Input: a mode byte; then descriptors of 20 bytes each for one device (even), or the words of limits (odd).
// Contract: bounded-input

use std::cell::RefCell;

use arbitrary::{Result, Unstructured};
use blkq::drivers::ram::Ram;
use blkq::{Data, Disk, IoBuffer, LocalQueue, Operation, QueueLimits};
use blkq_export::ublk::fuzzing::{CopyMode, IoDescriptor, REQUEST_MAX_BYTES, bio_of, parameters};

const BUFFER_BYTES: usize = 64 << 10;

thread_local! {
    static QUEUE: RefCell<LocalQueue> = RefCell::new({
        let ram = Ram::new(1 << 20, 512, false).expect("memory");
        Disk::builder(Box::new(ram)).build().expect("a disk").open_queue(0).expect("a queue")
    });
}

fn descriptor(words: &[u8; 20], queue: &mut LocalQueue) {
    let u32_at = |at: usize| u32::from_ne_bytes([words[at], words[at + 1], words[at + 2], words[at + 3]]);
    // Half of the descriptors are inside the device.
    let small = |word: u32, most: u32| if words[16] & 1 == 0 { word % most } else { word };
    let start = small(u32_at(8), 2048);
    let high = if words[16] & 2 == 0 { 0 } else { u64::from(u32_at(12)) << 32 };
    let descriptor = IoDescriptor {
        op_flags: u32_at(0),
        nr_sectors: small(u32_at(4), 160),
        start_sector: high | u64::from(start),
        addr: u64::from(u32_at(16)),
    };
    let bytes = u64::from(descriptor.nr_sectors) << 9;
    match bio_of(&descriptor, BUFFER_BYTES as u32) {
        Err(errno) => assert!(errno > 0),
        Ok(mut bio) => {
            let operation = bio.operation;
            if operation.has_data() {
                bio.data = Data::Buffer(IoBuffer::zeroed(BUFFER_BYTES));
            }
            assert!(!operation.has_data() || bytes <= BUFFER_BYTES as u64);
            if operation != Operation::Flush {
                assert_eq!((bio.sector.0, bio.sectors << 9), (descriptor.start_sector, bytes));
            }
            queue.submit(bio).expect("room");
            queue.wait(1);
            let completion = queue.take_completion().expect("a completion");
            let inside = descriptor
                .start_sector
                .checked_add(u64::from(descriptor.nr_sectors))
                .is_some_and(|end| end <= 2048);
            if operation == Operation::Flush || inside && bytes > 0 {
                assert_eq!(completion.result, Ok(()), "{descriptor:?}");
            } else if !inside {
                assert!(completion.result.is_err(), "{descriptor:?}");
            }
            if operation.has_data() {
                assert_eq!(completion.data.into_buffer().map(|buffer| buffer.len()), Some(BUFFER_BYTES));
            }
        }
    }
}

fn limits(u: &mut Unstructured<'_>) -> Result<()> {
    let limits = QueueLimits {
        capacity_bytes: u.arbitrary::<u64>()? >> u.int_in_range(0..=40)? << u.int_in_range(0..=12)?,
        logical_block_bytes: 1 << u.int_in_range(8..=17)?,
        physical_block_bytes: 1 << u.int_in_range(8..=31)?,
        io_opt_bytes: u.arbitrary()?,
        max_request_bytes: u.arbitrary()?,
        max_segments: u.arbitrary()?,
        max_segment_bytes: u.arbitrary()?,
        chunk_bytes: u.arbitrary::<u32>()? << u.int_in_range(0..=16)?,
        memory_align: 1 << u.int_in_range(0..=13)?,
        max_discard_bytes: u.arbitrary()?,
        discard_granularity: u.arbitrary()?,
        discard_zeroes: u.arbitrary()?,
        max_write_zeroes_bytes: u.arbitrary()?,
        max_write_zeroes_no_unmap_bytes: u.arbitrary()?,
        write_cache: u.arbitrary()?,
        fua: u.arbitrary()?,
        read_only: u.arbitrary()?,
        rotational: u.arbitrary()?,
        kernel_pages: u.arbitrary()?,
        // The ublk export rejects these limits elsewhere: it serves only whole sectors.
        padding_bytes: 0,
        page_cache: false,
    };
    let copy = *u.choose(&[CopyMode::Kernel, CopyMode::User, CopyMode::None])?;
    if limits.validate().is_err() {
        return Ok(());
    }
    let Ok(made) = parameters(&limits, copy) else {
        assert!(limits.logical_block_bytes > 4096, "{limits:?}");
        return Ok(());
    };
    let basic = made.basic;
    assert!((9..=12).contains(&basic.logical_bs_shift) && basic.logical_bs_shift <= basic.physical_bs_shift);
    assert!((8..=REQUEST_MAX_BYTES >> 9).contains(&basic.max_sectors));
    assert!((basic.max_sectors << 9).is_multiple_of(limits.logical_block_bytes));
    assert_eq!(basic.dev_sectors, limits.capacity_bytes >> 9);
    assert!(basic.chunk_sectors == 0 || basic.chunk_sectors.is_power_of_two());
    let discard = made.discard;
    assert!(discard.discard_granularity > 0 && discard.max_discard_segments == 1);
    assert!(u64::from(discard.max_discard_sectors) << 9 <= limits.max_discard_bytes);
    Ok(())
}

/// Checks one input.
pub fn check(data: &[u8]) {
    let Some((mode, rest)) = data.split_first() else { return };
    if mode % 2 == 1 {
        let _ = limits(&mut Unstructured::new(rest));
        return;
    }
    QUEUE.with_borrow_mut(|queue| {
        for words in rest.as_chunks::<20>().0.iter().take(32) {
            descriptor(words, queue);
        }
    });
}
