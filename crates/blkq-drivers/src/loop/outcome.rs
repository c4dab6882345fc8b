//! Interprets the result of a completed call: the requests complete, or the call continues or is repeated.

use blkq::stats::add;
use blkq::sync::atomic::Ordering::Relaxed;
use blkq::{BioFlags, DriverContext, IoResult, Operation, Status, Tag};

use super::counters::QueueCounters;
use super::image::Image;
use super::progress::Progress;
use super::shared::Shared;

/// Consecutive attempts without progress after which an operation fails: a file system may return EAGAIN or
/// empty transfers forever.
const ATTEMPTS_MAX: u64 = 64;

/// Interprets `result`, which the ring returned for the call of the requests `tags`. Returns `None` if the call
/// must be submitted again, for the rest.
pub(super) fn of(
    image: &Image,
    shared: &Shared,
    counters: &QueueCounters,
    cx: &mut DriverContext<'_>,
    tags: &[Tag],
    result: i32,
) -> Option<IoResult> {
    let request = cx.request(tags[0]);
    let (operation, has_tail) = (request.operation(), image.tail.is_reached_by(request));
    let progress = Progress::load(cx.pdu(tags[0]));
    if matches!(result.wrapping_neg(), libc::EAGAIN | libc::EINTR) {
        return again(counters, cx, tags[0], progress, Status::Resource);
    }
    if !operation.has_data() {
        return without_data(image, shared, cx, tags[0], result);
    }
    if result < 0 {
        return Some(Err(Status::from_errno(-result)));
    }
    let total: u64 = match has_tail {
        true => image.bytes(cx.request(tags[0])),
        false => tags.iter().map(|&tag| cx.request(tag).bytes()).sum(),
    };
    let reached = progress.done + result as u64;
    if reached >= total {
        if has_tail && operation == Operation::Read {
            image.tail.clear_padding(cx, tags[0]);
        }
        return Some(Ok(()));
    }
    // A request that reaches the tail takes two calls; ending at the boundary is not a short transfer.
    if !has_tail || reached < image.tail.until(cx.request(tags[0]), progress.done) {
        add(&counters.short_transfers, 1);
    }
    // Direct I/O can continue only at a multiple of its alignment, so the bytes beyond the last multiple are
    // transferred again.
    let done = reached - reached % image.align;
    if done > progress.done {
        Progress { done, attempts: 0 }.store(cx.pdu(tags[0]));
        return None;
    }
    match (operation, result) {
        // A read without progress means that the file has become shorter than the device.
        (Operation::Read, _) => Some(Err(Status::Io)),
        (_, 0) => Some(Err(Status::NoSpace)),
        _ => again(counters, cx, tags[0], progress, Status::Io),
    }
}

/// Repeats a call that made no progress; once [`ATTEMPTS_MAX`] is reached it fails with `spent`.
fn again(
    counters: &QueueCounters,
    cx: &mut DriverContext<'_>,
    tag: Tag,
    progress: Progress,
    spent: Status,
) -> Option<IoResult> {
    let attempts = progress.attempts + 1;
    Progress { attempts, ..progress }.store(cx.pdu(tag));
    add(&counters.retries, 1);
    if attempts < ATTEMPTS_MAX { None } else { Some(Err(spent)) }
}

/// The result of a flush. After a failed write-back the kernel marks the pages as clean, and the next fdatasync(2)
/// succeeds without them. So once a flush has failed, all later ones fail, too.
fn flushed(image: &Image, shared: &Shared, result: i32) -> IoResult {
    let lost = &shared.writeback_failed;
    if result < 0 {
        lost.fetch_or(image.is_cached(), Relaxed);
        return Err(Status::from_errno(-result));
    }
    if lost.load(Relaxed) { Err(Status::Io) } else { Ok(()) }
}

fn without_data(
    image: &Image,
    shared: &Shared,
    cx: &mut DriverContext<'_>,
    tag: Tag,
    result: i32,
) -> Option<IoResult> {
    let request = cx.request(tag);
    let (operation, flags) = (request.operation(), request.flags());
    let bytes = image.bytes(request);
    let end_unit = image.end_unit(request);
    if operation == Operation::Flush {
        return Some(flushed(image, shared, result));
    }
    let progress = Progress::load(cx.pdu(tag));
    if progress.done > 0 {
        // This was the read of `Image::end_entry`: if it is short, the file has become shorter than the device.
        let zeroed = result >= 0 && result as u64 == end_unit;
        let status = if result < 0 { Status::from_errno(-result) } else { Status::Io };
        return Some(if zeroed { Ok(()) } else { Err(status) });
    }
    if result >= 0 && operation == Operation::WriteZeroes && !shared.block_device {
        Progress { done: bytes, attempts: 0 }.store(cx.pdu(tag));
        return None;
    }
    if result >= 0 {
        return Some(Ok(()));
    }
    let status = Status::from_errno(-result);
    let by_command = operation == Operation::Discard && shared.discard_by_command.load(Relaxed);
    if by_command && matches!(status, Status::NotSupported | Status::Invalid) {
        // Kernels before 6.12 do not have the command. Discards use the slower fallocate(2) from now on.
        shared.discard_by_command.store(false, Relaxed);
        return None;
    }
    if status == Status::NotSupported {
        let supported = match operation {
            Operation::Discard => &shared.discards,
            _ if flags.contains(BioFlags::NO_UNMAP) => &shared.zeroes_no_unmap,
            _ => &shared.zeroes,
        };
        supported.store(false, Relaxed);
        cx.limits_changed();
    }
    Some(Err(status))
}
