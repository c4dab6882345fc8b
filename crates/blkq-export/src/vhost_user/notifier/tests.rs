use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{OFlags, fcntl_setfl};

use super::*;
use blkq::testing::wait_until;

fn event() -> (OwnedFd, CallFile) {
    let event = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let other = event.try_clone().unwrap();
    (event, CallFile::Event(other))
}

fn take(event: &OwnedFd) -> u64 {
    let mut count = [0; 8];
    rustix::io::read(event, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
}

#[test]
fn notifying_an_eventfd_counts_and_never_blocks() {
    for prepared in [false, true] {
        let notifier = Notifier::default();
        if prepared {
            notifier.prepare(Instant::now()).unwrap();
        }
        assert!(!notifier.notify().unwrap());
        let [(one, first), (other, second)] = [(); 2].map(|()| event());
        notifier.set(Some(first)).unwrap();
        for _ in 0..1000 {
            assert!(notifier.notify().unwrap());
        }
        assert_eq!(take(&one), 1000);
        notifier.set(Some(second)).unwrap();
        fcntl_setfl(&other, OFlags::empty()).unwrap();
        // With its largest count, a blocking eventfd would block write(2).
        rustix::io::write(&other, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        for _ in 0..10 {
            assert!(notifier.notify().unwrap());
        }
        assert_eq!((take(&one), take(&other)), (0, u64::MAX));
        notifier.set(None).unwrap();
        assert!(!notifier.notify().unwrap());
    }
}

#[test]
fn notifying_a_socket_sends_a_number_and_never_blocks() {
    let notifier = Notifier::default();
    let (mut reader, writer) = UnixStream::pair().unwrap();
    notifier.set(Some(CallFile::Socket(writer.into()))).unwrap();
    assert!(notifier.notify().unwrap());
    let mut number = [0; 8];
    reader.read_exact(&mut number).unwrap();
    assert_eq!(number, 1u64.to_ne_bytes());
    for _ in 0..100_000 {
        assert!(notifier.notify().unwrap());
    }
    drop(reader);
    assert!(notifier.notify().unwrap());
    let (one, file) = event();
    notifier.set(Some(file)).unwrap();
    assert!(notifier.notify().unwrap());
    assert_eq!(take(&one), 1);
}

#[test]
fn notify_once_keeps_no_descriptor() {
    let notifier = Notifier::default();
    let ((one, file), (other, second)) = (event(), event());
    notifier.notify_once(&file).unwrap();
    notifier.notify_once(&second).unwrap();
    assert!(!notifier.notify().unwrap());
    assert_eq!((take(&one), take(&other)), (1, 1));
    let (mut reader, writer) = UnixStream::pair().unwrap();
    notifier.notify_once(&CallFile::Socket(writer.into())).unwrap();
    let mut number = [0; 8];
    reader.read_exact(&mut number).unwrap();
    assert_eq!(number, 1u64.to_ne_bytes());
}

#[test]
fn a_descriptor_set_during_notifications_is_signaled() {
    let notifier = Notifier::default();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                notifier.notify().unwrap();
            }
        });
        for _ in 0..200 {
            let (one, file) = event();
            notifier.set(Some(file)).unwrap();
            wait_until("the new eventfd is signaled", || take(&one) > 0);
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

#[test]
fn a_ring_can_execute_nothing_but_nops() {
    let mut ring = make_ring().unwrap();
    let poll = opcode::PollAdd::new(io_uring::types::Fd(0), libc::POLLIN as u32).build();
    // SAFETY: the poll has no memory, and standard input stays open.
    unsafe { ring.submission().push(&poll).unwrap() };
    ring.submit().unwrap();
    assert_eq!(ring.completion().next().unwrap().result(), -libc::EACCES);
    let refused = ring.submitter().register_files(&[0]).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EACCES));
}

#[test]
fn without_a_ring_only_sockets_are_notified() {
    let notifier = Notifier { state: State { ring: Some(Err(libc::ENOMEM)), ..State::default() }.into() };
    let (_, file) = event();
    for result in [notifier.prepare(Instant::now()), notifier.set(Some(file))] {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("eventfd") && error.contains("ulimit -l"), "{error}");
    }
    assert!(!notifier.notify().unwrap());
    let (_reader, writer) = UnixStream::pair().unwrap();
    notifier.set(Some(CallFile::Socket(writer.into()))).unwrap();
    assert!(notifier.notify().unwrap());
}
