//! Front ends that pass descriptors which hang, or that do not send or read, must not block others.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::front_end::*;
use crate::vhost::{self, Served, image, ram, serve};
use blkq::testing::wait_until;
use blkq_drivers::r#loop::DirectIo;
use blkq_export::vhost_user::Event;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

fn check(served: &Served) {
    served.until_idle();
    let mut front = FrontEnd::started(&served.path, FEATURES, 1);
    assert_eq!(front.run(0, 1, 0, DATA, 512), 0);
    drop(front);
    served.until_idle();
}

/// Creates sockets whose last close waits two minutes for a peer that never reads.
struct Lingering {
    peer: TcpListener,
}

impl Lingering {
    fn new() -> Lingering {
        Lingering { peer: TcpListener::bind("127.0.0.1:0").unwrap() }
    }

    fn socket(&self) -> OwnedFd {
        let mut socket = TcpStream::connect(self.peer.local_addr().unwrap()).unwrap();
        socket.set_nonblocking(true).unwrap();
        while socket.write(&[0; 1 << 20]).map_or_else(|e| e.kind() != ErrorKind::WouldBlock, |_| true) {}
        rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::from_secs(120))).unwrap();
        socket.into()
    }
}

/// Closes `sockets` after the first bytes of a message, so that the device has the only references.
fn send_and_close(connection: &Connection, header: [u32; 3], payload: &[u8], sockets: Vec<OwnedFd>) {
    let bytes = [words(&header), payload.to_vec()].concat();
    let files: Vec<BorrowedFd<'_>> = sockets.iter().map(AsFd::as_fd).collect();
    connection.bytes(&bytes[..8], &files);
    drop(sockets);
    connection.bytes(&bytes[8..], &[]);
}

/// Number of replies that must be read before more requests can be sent. The kernel wakes a sender only when
/// a part of the queue is free.
const REPLIES: usize = 300;

/// Sends requests without reading replies, until the device stops reading requests.
fn flood(connection: &mut Connection) {
    connection.0.set_nonblocking(true).unwrap();
    let (message, mut sent) = (words(&[GET_FEATURES, 1, 0]), 0);
    let blocked = rustix::event::Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
    loop {
        match connection.0.write(&message) {
            Ok(bytes) => {
                assert_eq!(bytes, 12);
                sent += 1;
            }
            Err(_) => {
                let mut sockets = [PollFd::new(&connection.0, PollFlags::OUT)];
                // A slow device may still read more.
                if poll(&mut sockets, Some(&blocked)).unwrap() == 0 && sent > REPLIES {
                    return;
                }
            }
        }
    }
}

fn make_room(connection: &mut Connection) {
    connection.0.set_nonblocking(false).unwrap();
    (0..REPLIES).for_each(|_| drop(connection.reply()));
}

#[test]
fn a_lingering_socket_delays_no_front_end() {
    let (served, lingering) = (serve(ram(), 1), Lingering::new());
    let begin = Instant::now();
    let messages: [([u32; 3], Vec<u8>); 4] = [
        // A superfluous descriptor, two of the wrong type, and one of an invalid message.
        ([SET_OWNER, 1, 0], vec![]),
        ([SET_VRING_KICK, 1, 8], longs(&[0])),
        ([SET_MEM_TABLE, 1, 40], [words(&[1, 0]), longs(&[0, 1 << 20, 0, 0])].concat()),
        ([GET_FEATURES, 0, 0], vec![]),
    ];
    for (header, payload) in messages {
        let mut connection = Connection::new(&served.path);
        send_and_close(&connection, header, &payload, vec![lingering.socket()]);
        assert!(connection.is_closed(), "{header:?}");
        check(&served);
    }
    // Together with more descriptors than a message may have.
    let mut connection = Connection::new(&served.path);
    connection.bytes(&[1], &[lingering.socket().as_fd()]);
    let event = eventfd(0, EventfdFlags::empty()).unwrap();
    connection.bytes(&[0], &[event.as_fd(); 40]);
    assert!(connection.is_closed());
    check(&served);
    // In a queue that the device no longer reads.
    let mut connection = Connection::new(&served.path);
    flood(&mut connection);
    make_room(&mut connection);
    send_and_close(&connection, [SET_OWNER, 1, 0], &[], vec![lingering.socket()]);
    drop(connection);
    check(&served);
    // While the device stops.
    let connection = Connection::new(&served.path);
    connection.bytes(&[0], &[lingering.socket().as_fd()]);
    served.device.stop(true).unwrap();
    assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", begin.elapsed());
}

/// A front end passes its own connection to the device, which must not keep it open.
#[test]
fn a_connection_that_is_passed_to_the_device_still_closes() {
    let served = serve(ram(), 1);
    let begun = || {
        let mut connection = Connection::new(&served.path);
        connection.negotiate(FEATURES);
        connection
    };
    // As the socket for requests of the back end.
    let connection = begun();
    connection.send(SET_BACKEND_REQ_FD, &[], &[connection.0.as_fd()]);
    drop(connection);
    check(&served);
    let connection = begun();
    connection.send(SET_VRING_CALL, &longs(&[0]), &[connection.0.as_fd()]);
    drop(connection);
    check(&served);
    // In the queue of that socket, together with its other end.
    let connection = begun();
    let (one, other) = UnixStream::pair().unwrap();
    Connection(other.try_clone().unwrap()).raw([0; 3], &[], &[connection.0.as_fd(), other.as_fd()]);
    connection.send(SET_BACKEND_REQ_FD, &[], &[one.as_fd()]);
    drop((connection, one, other));
    check(&served);
    // With half a message, and with a message after replies that the front end does not read.
    let connection = begun();
    connection.raw([SET_OWNER, 1, 8], &[], &[connection.0.as_fd()]);
    drop(connection);
    check(&served);
    let mut connection = begun();
    flood(&mut connection);
    make_room(&mut connection);
    connection.raw([SET_OWNER, 1, 0], &[], &[connection.0.as_fd()]);
    drop(connection);
    check(&served);
}

/// The device disconnects such a front end after ten seconds, and serves another one.
#[test]
fn a_front_end_that_does_not_send_or_read_is_disconnected() {
    std::thread::scope(|scope| {
        for reads in [false, true] {
            scope.spawn(move || {
                let served = serve(ram(), 1);
                let mut front = FrontEnd::started(&served.path, FEATURES, 1);
                if reads {
                    write_all(&mut front.connection, &[1, 0, 0]);
                } else {
                    flood(&mut front.connection);
                }
                assert_eq!(front.run(0, 1, 0, DATA, 512), 0, "the ring is served meanwhile");
                check(&served);
                let report = served.report().event;
                assert!(matches!(&report, Event::Violation(why) if why.contains("10 s")), "{report:?}");
            });
        }
    });
}

#[test]
fn only_an_eventfd_can_be_a_kick_descriptor() {
    let served = serve(ram(), 1);
    let mut front = FrontEnd::started(&served.path, FEATURES, 1);
    let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).unwrap();
    let (mut read, write) = UnixStream::pair().unwrap();
    let pipe = rustix::pipe::pipe().unwrap();
    for file in [epoll.as_fd(), pipe.0.as_fd(), pipe.1.as_fd(), write.as_fd()] {
        assert_eq!(front.connection.acknowledged(SET_VRING_KICK, &longs(&[0]), &[file]), 1);
    }
    // For calls, user-mode Linux passes a socket.
    assert_eq!(front.connection.acknowledged(SET_VRING_CALL, &longs(&[0]), &[epoll.as_fd()]), 1);
    front.connection.done(SET_VRING_CALL, &longs(&[0]), &[write.as_fd()]);
    front.submit(0, 1, 0, DATA, 512);
    front.kick(0);
    read.read_exact(&mut [0; 8]).unwrap();
    wait_until("the request completes", || !front.completed(0).is_empty());
}

#[test]
fn semaphores_and_full_eventfds_can_be_kick_descriptors() {
    let served = serve(ram(), 1);
    let mut front = FrontEnd::started(&served.path, FEATURES, 1);
    for flags in [EventfdFlags::SEMAPHORE, EventfdFlags::empty()] {
        let kick = eventfd(0, flags | EventfdFlags::NONBLOCK).unwrap();
        front.connection.done(SET_VRING_KICK, &longs(&[0]), &[kick.as_fd()]);
        for _ in 0..1 << 12 {
            let _ = rustix::io::write(&kick, &1u64.to_ne_bytes());
        }
        rustix::io::write(&kick, &(u64::MAX - (1 << 13)).to_ne_bytes()).unwrap();
        front.rings[0].kick = kick;
        for _ in 0..100 {
            assert_eq!(front.run(0, 1, 0, DATA, 512), 0);
        }
    }
}

/// If two messages are sent together, all descriptors belong to the first one.
#[test]
fn descriptors_of_two_messages_belong_to_the_first() {
    let served = serve(ram(), 1);
    let mut front = FrontEnd::started(&served.path, FEATURES, 1);
    let event = eventfd(0, EventfdFlags::empty()).unwrap();
    let call = |code: u32| [words(&[code, 9, 8]), longs(&[0])].concat();
    let both = [call(SET_VRING_CALL), call(SET_VRING_ERR)].concat();
    for (files, results) in [(2, [1, 1]), (1, [0, 1]), (0, [1, 1])] {
        let files = vec![event.as_fd(); files];
        front.connection.raw([SET_VRING_CALL, 9, 8], &both[12..], &files);
        let replies = [(); 2].map(|()| front.connection.reply().unwrap().number());
        assert_eq!(replies, results, "{} descriptors", files.len());
    }
    front.submit(0, 1, 0, DATA, 512);
    front.kick(0);
    wait_until("the request completes", || !front.completed(0).is_empty());
}

/// Receives the next request of the device: its code, flags and length.
fn request(socket: &UnixStream) -> (u32, u32, u32) {
    let mut header = [0; 12];
    (&mut &*socket).read_exact(&mut header).unwrap();
    let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap());
    (word(0), word(4), word(8))
}

#[test]
fn a_new_size_reaches_a_front_end() {
    let served = serve(image(DirectIo::Off, None), 1);
    let mut front = FrontEnd::started(&served.path, FEATURES, 1);
    let (mine, its) = UnixStream::pair().unwrap();
    mine.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    front.connection.done(SET_BACKEND_REQ_FD, &[], &[its.as_fd()]);
    drop(its);
    let sectors = |front: &mut FrontEnd| {
        let config = front.connection.ask(GET_CONFIG, &[words(&[0, 8, 0]), vec![0; 8]].concat());
        u64::from_ne_bytes(config.payload[12..].try_into().unwrap())
    };
    for bytes in [vhost::SIZE / 2, vhost::SIZE] {
        served.disk.resize(Some(bytes)).unwrap();
        served.device.resized();
        // Version 1, and without the flag for a reply, which the device would not read.
        assert_eq!(request(&mine), (2, 1, 0));
        assert_eq!(sectors(&mut front), bytes >> 9);
    }
    // A front end that never reads misses no change: a message stays in the queue of its socket.
    mine.set_nonblocking(true).unwrap();
    for _ in 0..2000 {
        served.device.resized();
        assert!(sectors(&mut front) > 0);
    }
    mine.set_nonblocking(false).unwrap();
    assert_eq!(request(&mine), (2, 1, 0));
    assert_eq!(served.device.take_reports(), []);
    // After an unexpected reply, the device closes this socket.
    (&mine).write_all(&[words(&[2, 5, 8]), longs(&[0])].concat()).unwrap();
    let report = served.report().event;
    assert!(matches!(&report, Event::Refused(why) if why.contains("new size")), "{report:?}");
    assert_eq!(front.run(0, 1, 0, DATA, 512), 0);
}
