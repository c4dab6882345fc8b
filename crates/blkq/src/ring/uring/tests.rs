//! The ring of the kernel: tables of files and buffers, restrictions, and when it submits.

use std::cell::Cell;
use std::os::fd::{AsFd, AsRawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};

use io_uring::opcode;

use super::*;
use crate::buffer::IoBuffer;
use crate::ring::Registrar;

fn registrar(ring: &mut Ring) -> Registrar<'_> {
    Registrar::new(ring)
}

#[test]
fn slots_for_the_kernel_are_allocated_once_apart_from_others() {
    let mut ring = Ring::new(4).unwrap();
    assert_eq!(ring.kernel_buffers_left(), KERNEL_SLOTS);
    let first = registrar(&mut ring).keep_kernel_buffers(4000).unwrap();
    assert_eq!(ring.kernel_buffers_left(), KERNEL_SLOTS - 4000);
    let mut buffer = IoBuffer::zeroed(4096);
    registrar(&mut ring).register_buffer(&mut buffer);
    assert!(ring.registered_buffer(&buffer.segment()).unwrap() < first);
    assert_eq!(registrar(&mut ring).keep_kernel_buffers(90).unwrap(), first + 4000);
    assert!(registrar(&mut ring).keep_kernel_buffers(7).is_err());
    registrar(&mut ring).unregister_buffer(&mut buffer);
}

#[test]
fn a_file_slot_is_valid_for_its_ring_until_it_is_unregistered() {
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    let (mut ring, mut other) = (Ring::new(4).unwrap(), Ring::new(4).unwrap());
    let mut slot = registrar(&mut ring).register_file(file.as_fd()).unwrap();
    let mut foreign = registrar(&mut other).register_file(file.as_fd()).unwrap();
    assert_eq!(ring.file(&slot).0, other.file(&foreign).0, "both tables have it in the same place");
    let mut refused =
        |attempt: &mut dyn FnMut(&mut Ring)| catch_unwind(AssertUnwindSafe(|| attempt(&mut ring))).is_err();
    assert!(refused(&mut |ring| _ = ring.file(&foreign)));
    assert!(refused(&mut |ring| registrar(ring).unregister_file(&mut foreign)));
    assert!(!refused(&mut |ring| registrar(ring).unregister_file(&mut slot)));
    assert!(refused(&mut |ring| _ = ring.file(&slot)));
    assert!(refused(&mut |ring| registrar(ring).unregister_file(&mut slot)));
    registrar(&mut other).unregister_file(&mut foreign);
}

#[test]
fn only_missing_memory_makes_ring_setup_wait() {
    let calls = Cell::new(0);
    let fail = |errno| {
        calls.set(calls.get() + 1);
        Err(std::io::Error::from_raw_os_error(errno))
    };
    let late = || if calls.get() < 3 { fail(libc::ENOMEM) } else { IoUring::new(4) };
    assert!(retry_without_memory(late).is_ok());
    assert_eq!(calls.replace(0), 3);
    let refused = retry_without_memory(|| fail(libc::EPERM)).err().unwrap();
    assert_eq!((calls.get(), refused.raw_os_error()), (1, Some(libc::EPERM)));
}

#[test]
fn buffers_are_registered_up_to_a_share_of_lockable_memory() {
    let mut ring = Ring::new(4).unwrap();
    ring.tables.bytes_max = 8192;
    let mut buffers = [IoBuffer::zeroed(4096), IoBuffer::zeroed(4096), IoBuffer::zeroed(4096)];
    buffers.iter_mut().for_each(|buffer| registrar(&mut ring).register_buffer(buffer));
    assert_eq!(buffers.each_ref().map(IoBuffer::is_registered), [true, true, false]);
    registrar(&mut ring).unregister_buffer(&mut buffers[0]);
    registrar(&mut ring).register_buffer(&mut buffers[2]);
    assert!(buffers[2].is_registered());
    buffers.iter_mut().for_each(|buffer| registrar(&mut ring).unregister_buffer(buffer));
}

/// Reads the beginning of this program into `buffer`, through its registration if the ring has one, and
/// otherwise by address.
fn read_into(ring: &mut Ring, buffer: &mut IoBuffer) -> i32 {
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    let segment = buffer.segment();
    let file_fd = types::Fd(file.as_raw_fd());
    let entry = match ring.registered_buffer(&segment) {
        Some(place) => opcode::ReadFixed::new(file_fd, segment.ptr, segment.len, place).build(),
        None => opcode::Read::new(file_fd, segment.ptr, segment.len).build(),
    };
    // SAFETY: buffer and file live until the completion below.
    unsafe { ring.push(entry, Token::new(1, 1)) };
    let mut cqes = Vec::new();
    while cqes.is_empty() {
        ring.enter(1, None);
        ring.reap_all(&mut cqes);
    }
    cqes[0].result
}

#[test]
fn other_rings_ignore_a_registered_buffer() {
    let (mut ring, mut other) = (Ring::new(4).unwrap(), Ring::new(4).unwrap());
    let (mut buffer, mut foreign) = (IoBuffer::zeroed(4096), IoBuffer::zeroed(4096));
    registrar(&mut ring).register_buffer(&mut buffer);
    registrar(&mut other).register_buffer(&mut foreign);
    assert_eq!(ring.registered_buffer(&buffer.segment()), other.registered_buffer(&foreign.segment()));
    assert_eq!(ring.registered_buffer(&foreign.segment()), None);
    // Registering again, and unregistering with another ring, have no effect.
    registrar(&mut ring).register_buffer(&mut foreign);
    registrar(&mut ring).unregister_buffer(&mut foreign);
    assert!(foreign.is_registered() && buffer.is_registered());
    for buffer in [&mut buffer, &mut foreign] {
        assert_eq!(read_into(&mut ring, buffer), 4096);
        assert_eq!(&buffer[..4], b"\x7fELF");
    }
    drop(other);
    assert!(!foreign.is_registered());
    registrar(&mut ring).register_buffer(&mut foreign);
    assert!(ring.registered_buffer(&foreign.segment()).is_some());
}

#[test]
fn a_buffer_dropped_while_registered_leaves_nothing_behind() {
    let mut ring = Ring::new(4).unwrap();
    ring.tables.bytes_max = 4 * 4096;
    let mut kept = IoBuffer::zeroed(4096);
    registrar(&mut ring).register_buffer(&mut kept);
    // More buffers than the table has slots or bytes. The heap places them at the same addresses.
    for _ in 0..2000 {
        let mut buffer = IoBuffer::zeroed(4096);
        registrar(&mut ring).register_buffer(&mut buffer);
        assert!(buffer.is_registered());
        std::thread::scope(|scope| _ = scope.spawn(move || drop(buffer)));
    }
    assert_eq!(read_into(&mut ring, &mut kept), 4096);
    let mut last = IoBuffer::zeroed(4096);
    registrar(&mut ring).register_buffer(&mut last);
    assert_eq!(read_into(&mut ring, &mut last), 4096);
    assert_eq!(&last[..4], b"\x7fELF");
}

// Contract: bounded-input
#[test]
fn a_restricted_ring_rejects_other_operations() {
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    let mut builder = IoUring::builder();
    builder.setup_single_issuer().setup_defer_taskrun().setup_r_disabled();
    let mut uring: IoUring = builder.build(4).unwrap();
    uring.submitter().register_files_sparse(4).unwrap();
    restrict(&uring, [opcode::Nop::CODE, opcode::Read::CODE].into_iter()).unwrap();
    uring.submitter().register_files_update(0, &[file.as_raw_fd()]).unwrap();
    let mut bytes = [0u8; 4];
    let path = c"/etc/passwd";
    let entries = [
        opcode::Nop::new().build(),
        opcode::Read::new(types::Fixed(0), bytes.as_mut_ptr(), 4).build(),
        opcode::OpenAt::new(types::Fd(libc::AT_FDCWD), path.as_ptr()).build(),
        opcode::Socket::new(libc::AF_UNIX, libc::SOCK_STREAM, 0).build(),
    ];
    let mut run = |entry: &squeue::Entry| {
        // SAFETY: path, file and bytes live until the completion below.
        unsafe { uring.submission().push(entry).unwrap() };
        uring.submit_and_wait(1).unwrap();
        uring.completion().next().unwrap().result()
    };
    let results: Vec<i32> = entries.iter().map(&mut run).collect();
    assert_eq!(results, [0, 4, -libc::EACCES, -libc::EACCES]);
    assert_eq!(&bytes, b"\x7fELF");
    let error = uring.submitter().register_eventfd(file.as_raw_fd()).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EACCES));
}

#[test]
fn early_submission_submits_before_the_fifth() {
    let mut ring = Ring::new(16).unwrap();
    let push = |ring: &mut Ring, count| {
        for _ in 0..count {
            // SAFETY: A NOP uses no memory and no descriptor.
            unsafe { ring.push_early(opcode::Nop::new().build(), Token::new(1, 1)) };
        }
        let RingCounters { enters, early_submissions, .. } = ring.counters();
        (enters, early_submissions, ring.uring.submission().len())
    };
    assert_eq!(push(&mut ring, 4), (0, 0, 4));
    ring.enter(0, None);
    assert_eq!(push(&mut ring, 4), (1, 0, 4));
    assert_eq!(push(&mut ring, 5), (3, 2, 1));
    let mut cqes = Vec::new();
    ring.enter(1, None);
    ring.reap_all(&mut cqes);
    assert_eq!(cqes.len(), 4 + 9);
}

#[test]
fn completions_reaped_to_make_room_are_not_waited_for_nor_lost() {
    let mut ring = Ring::new(4).unwrap();
    // SAFETY: A NOP uses no memory and no descriptor.
    unsafe { ring.push(opcode::Nop::new().build(), Token::new(1, 7)) };
    ring.enter(1, None);
    ring.make_room();
    ring.enter(1, None);
    let mut cqes = Vec::new();
    ring.reap_all(&mut cqes);
    assert_eq!(cqes.iter().map(|cqe| cqe.token).collect::<Vec<_>>(), [Token::new(1, 7)]);
}
