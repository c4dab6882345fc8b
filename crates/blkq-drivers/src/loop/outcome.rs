//! The meaning of a ring's completion for the requests of its call.

use blkq::sync::atomic::Ordering::Relaxed;
use blkq::{BioFlags, DriverContext, IoResult, Operation, Status, Tag};

use super::counters::QueueCounters;
use super::image::Image;
use super::progress::Progress;
use super::shared::Shared;

/// Attempts after which an operation fails.
const ATTEMPTS_MAX: u64 = 64;

/// The meaning of a ring's completion.
pub(super) enum Outcome {
    /// The requests have completed.
    Completed(IoResult),
    /// There is more to do.
    Unfinished,
}

/// Takes the result of a call for `tags`.
pub(super) fn of(
    image: &Image,
    shared: &Shared,
    counters: &QueueCounters,
    cx: &mut DriverContext<'_>,
    tags: &[Tag],
    result: i32,
) -> Outcome {
    let request = cx.request(tags[0]);
    let (operation, has_tail) = (request.operation(), image.has_tail(request));
    let progress = Progress::load(cx.pdu(tags[0]));
    if matches!(result.wrapping_neg(), libc::EAGAIN | libc::EINTR) {
        return again(counters, cx, tags[0], progress, Status::Resource);
    }
    if !operation.has_data() {
        return without_data(image, shared, cx, tags[0], result);
    }
    if result < 0 {
        return Outcome::Completed(Err(Status::from_errno(-result)));
    }
    let total: u64 = match has_tail {
        true => image.bytes(cx.request(tags[0])),
        false => tags.iter().map(|&tag| cx.request(tag).bytes()).sum(),
    };
    let reached = progress.done + result as u64;
    if reached >= total {
        if has_tail && operation == Operation::Read {
            image.tail().clear_padding(cx, tags[0]);
        }
        return Outcome::Completed(Ok(()));
    }
    // A remainder that continues through the page cache was not asked for at once.
    if !has_tail || reached < image.tail().until(cx.request(tags[0]), progress.done) {
        counters.short_transfer();
    }
    // Direct I/O can continue only at a multiple of its unit: an odd rest is done again.
    let done = reached - reached % image.align();
    if done > progress.done {
        Progress { done, attempts: 0 }.store(cx.pdu(tags[0]));
        return Outcome::Unfinished;
    }
    match (operation, result) {
        // The file has become shorter than the device.
        (Operation::Read, _) => Outcome::Completed(Err(Status::Io)),
        (_, 0) => Outcome::Completed(Err(Status::NoSpace)),
        _ => again(counters, cx, tags[0], progress, Status::Io),
    }
}

/// An attempt that came to nothing: there is another one, or the request completes as `spent`.
fn again(
    counters: &QueueCounters,
    cx: &mut DriverContext<'_>,
    tag: Tag,
    progress: Progress,
    spent: Status,
) -> Outcome {
    let attempts = progress.attempts + 1;
    Progress { attempts, ..progress }.store(cx.pdu(tag));
    counters.retry();
    if attempts < ATTEMPTS_MAX { Outcome::Unfinished } else { Outcome::Completed(Err(spent)) }
}

/// The completion of a flush. Pages that could not be written count as clean from then on, and
/// the next fdatasync knows nothing of them: once one has failed, none can be believed.
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
) -> Outcome {
    let request = cx.request(tag);
    let (operation, flags) = (request.operation(), request.flags());
    let bytes = image.bytes(request);
    let end_unit = image.end_unit(request);
    if operation == Operation::Flush {
        return Outcome::Completed(flushed(image, shared, result));
    }
    let progress = Progress::load(cx.pdu(tag));
    if progress.done > 0 {
        // The file may have become shorter than the device.
        let zeroed = result >= 0 && result as u64 == end_unit;
        let status = if result < 0 { Status::from_errno(-result) } else { Status::Io };
        return Outcome::Completed(if zeroed { Ok(()) } else { Err(status) });
    }
    if result >= 0 && operation == Operation::WriteZeroes && !shared.block_device {
        Progress { done: bytes, attempts: 0 }.store(cx.pdu(tag));
        return Outcome::Unfinished;
    }
    if result >= 0 {
        return Outcome::Completed(Ok(()));
    }
    let status = Status::from_errno(-result);
    let by_command = operation == Operation::Discard && shared.discard_by_command.load(Relaxed);
    if by_command && matches!(status, Status::NotSupported | Status::Invalid) {
        // A kernel before 6.12: there is the slower way through fallocate.
        shared.discard_by_command.store(false, Relaxed);
        return Outcome::Unfinished;
    }
    if status == Status::NotSupported {
        let able = match operation {
            Operation::Discard => &shared.discards,
            _ if flags.contains(BioFlags::NO_UNMAP) => &shared.zeroes_no_unmap,
            _ => &shared.zeroes,
        };
        able.store(false, Relaxed);
        cx.limits_changed();
    }
    Outcome::Completed(Err(status))
}
