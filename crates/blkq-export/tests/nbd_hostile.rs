//! The NBD server with clients that attack it or die: other clients are not affected, and no resource leaks.

use blkq::testing::{assert_stays, wait_until};
use std::io::{Read, Write};
use std::time::{Duration, Instant};

use crate::nbd::*;
use blkq_export::nbd::NbdOptions;
use blkq_export::nbd::reply::ReplyStyle;

fn assert_serves(served: &Served) {
    let mut client = served.client(ReplyStyle::Structured);
    assert_eq!(client.write(4096, &[5; 4096]), 0);
    assert_eq!(client.read(4096, 4096).len(), 4096);
}

#[test]
fn garbage_closes_only_the_connection_that_sent_it() {
    let served = serve(ram(), 1, options());
    let long = |option: u32, length: u32| {
        let mut bytes = b"\0\0\0\x03IHAVEOPT".to_vec();
        bytes.extend(option.to_be_bytes());
        bytes.extend(length.to_be_bytes());
        bytes
    };
    let garbage = [
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        vec![0xff; 300_000],
        b"\0\0\0\x03IHAVEOPS\0\0\0\0\0\0\0\0".to_vec(),
        long(7, u32::MAX),
        long(1, 5000),
        [long(1, 6), b"absent".to_vec()].concat(),
    ];
    for bytes in garbage {
        let mut stream = served.raw();
        // The server may close the connection before it has received everything.
        let _ = stream.write_all(&bytes);
        let mut greeting = Vec::new();
        let _ = stream.read_to_end(&mut greeting);
        assert!(greeting.len() <= 18);
    }
    for style in [ReplyStyle::Simple, ReplyStyle::Extended] {
        let mut client = served.client(style);
        client.stream.write_all(&[0x55; 1000]).unwrap();
        client.expect_close();
        // The payload is larger than the server announced.
        let mut client = served.client(style);
        let header = client.bytes(1, 0x20, 0, 0, (32 << 20) + 1, &[]);
        client.stream.write_all(&header).unwrap();
        client.expect_close();
    }
    wait_until("all have disconnected", || served.server.connection_count() == 0);
    let counters = served.server.counters();
    assert_eq!((counters.connections, counters.violations, counters.timeouts), (10, 10, 0));
    // A client that sends ABORT does not violate the protocol.
    let mut client = Client::new(served.raw(), ReplyStyle::Simple);
    client.take(18);
    client.stream.write_all(&[&3u32.to_be_bytes()[..], &option_bytes(2, &[])].concat()).unwrap();
    client.take(20);
    client.expect_close();
    assert_serves(&served);
    wait_until("all have disconnected", || served.server.connection_count() == 0);
    let after = served.server.counters();
    assert_eq!((after.connections, after.violations, after.requests), (12, 10, counters.requests + 2));
    assert_eq!((after.read_bytes, after.written_bytes), (4096, 4096));
}

/// Programs with Rust's main function ignore SIGPIPE. A program with another main function would be killed.
#[test]
fn a_reply_to_a_client_that_has_disconnected_raises_no_signal() {
    // SAFETY: sets the default action; no handler is installed.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    let served = serve(slow(50_000_000..=60_000_000), 1, options());
    for _ in 0..3 {
        let mut client = served.client(ReplyStyle::Simple);
        client.send(0, 0, 7, 0, 4096, &[]);
        wait_until("the read is in flight", || served.disk.stats().in_flight[0] == 1);
        drop(client);
        wait_until("the connection is closed", || served.server.connection_count() == 0);
    }
    assert_serves(&served);
}

// Contract: detach
#[test]
fn clients_that_never_read_do_not_delay_a_forced_stop() {
    let served = serve(ram(), 2, options());
    let mut silent: Vec<_> = (0..16).map(|_| served.client(ReplyStyle::Simple)).collect();
    for client in &mut silent {
        (0..2).for_each(|cookie| client.send(0, 0, cookie, 0, 32 << 20, &[]));
    }
    // One more client has not finished its handshake.
    let mut early = served.raw();
    early.write_all(&[&3u32.to_be_bytes()[..], &option_bytes(3, &[]).repeat(100)].concat()).unwrap();
    wait_until("each client has replies to read", || {
        let connections = served.server.connections();
        connections.len() == 17 && connections[..16].iter().all(|client| client.in_flight > 0)
    });
    let begin = Instant::now();
    served.server.stop(true).unwrap();
    // A limit to detect hangs. Each send may take one second; without this limit, the clients would be
    // disconnected after 31 seconds or more.
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    assert!(served.server.counters().timeouts > 0);
}

// Contract: detach
#[test]
fn no_engine_serves_while_a_forced_stop_waits_for_another() {
    let served = serve(ram(), 2, options());
    let quiesced = served.disk.quiesce();
    let mut busy = served.client(ReplyStyle::Simple);
    let mut idle = served.client(ReplyStyle::Simple);
    busy.send(0, 0, 7, 0, 4096, &[]);
    wait_until("the read is in flight", || {
        served.server.connections().iter().any(|client| client.in_flight == 1)
    });
    std::thread::scope(|scope| {
        let stop = scope.spawn(|| served.server.stop(true));
        idle.expect_close();
        assert!(!stop.is_finished());
        drop(quiesced);
        stop.join().unwrap().unwrap();
    });
    assert_eq!(busy.reply(|_| 4096).error, 0, "the read was in flight, so it is answered");
}

#[test]
fn an_oversized_option_is_refused_and_skipped() {
    let served = serve(ram(), 1, options());
    let mut client = Client::new(served.raw(), ReplyStyle::Simple);
    client.take(18);
    let mut bytes = 3u32.to_be_bytes().to_vec();
    bytes.extend(option_bytes(6, &vec![b'I'; 1 << 20]));
    bytes.extend(option_bytes(1, b"disk"));
    client.stream.write_all(&bytes).unwrap();
    let header = client.take(20);
    assert_eq!(header[12..16], [0x80, 0, 0, 9]);
    client.take(header[19].into());
    client.take(10);
    assert_eq!(client.read(0, 512), [0; 512]);
}

#[test]
fn a_client_that_stalls_in_the_handshake_is_disconnected() {
    let served = serve(ram(), 1, NbdOptions { handshake_timeout_s: 2, ..options() });
    let mut working = served.client(ReplyStyle::Simple);
    let begin = Instant::now();
    let silent = served.raw();
    let mut halfway = served.raw();
    halfway.write_all(b"\0\0\0\x03IHAVEOPT\0\0").unwrap();
    wait_until("all are connected", || served.server.counters().connections == 3);
    for stream in [silent, halfway] {
        let mut client = Client::new(stream, ReplyStyle::Simple);
        client.take(18);
        client.expect_close();
    }
    assert!(begin.elapsed() >= Duration::from_millis(1900));
    wait_until("both are counted", || served.server.counters().timeouts == 2);
    assert_eq!(served.server.counters().violations, 0);
    assert_stays("the client that has finished is connected", || served.server.connection_count() >= 1);
    assert_eq!(working.read(0, 512), [0; 512]);
}

#[test]
fn connections_beyond_the_limit_are_closed_immediately() {
    let served = serve(ram(), 1, NbdOptions { connections_max: 2, ..options() });
    let mut first = served.client(ReplyStyle::Simple);
    let second = served.client(ReplyStyle::Simple);
    let mut third = Client::new(served.raw(), ReplyStyle::Simple);
    third.expect_close();
    assert_eq!(served.server.counters().refused_connections, 1);
    assert_eq!(first.read(0, 512), [0; 512]);
    drop(second);
    wait_until("a connection is free", || served.server.connection_count() == 1);
    assert_serves(&served);
}

// Contract: non-blocking
#[test]
fn a_client_that_does_not_read_is_disconnected_without_delays() {
    let limits = NbdOptions { transfer_timeout_s: 3, buffered_bytes_max: 2 << 20, ..options() };
    let served = serve(ram(), 1, limits);
    let mut stuck = served.client(ReplyStyle::Simple);
    stuck.stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    let begin = Instant::now();
    // The client requests gigabytes and takes no reply.
    let request = stuck.bytes(0, 0, 0, 0, 1 << 20, &[]);
    let mut sent = 0;
    while sent < 20_000 && stuck.stream.write_all(&request).is_ok() {
        sent += 1;
    }
    assert!(sent < 20_000, "the client is not throttled");
    // Two requests have buffers, and one waits for memory.
    let connections = served.server.connections();
    assert!(connections.iter().all(|info| info.in_flight <= 3), "{connections:?}");
    let mut other = served.client(ReplyStyle::Simple);
    for _ in 0..100 {
        other.read(0, 4096);
    }
    wait_until("the stuck client is disconnected", || served.server.connection_count() == 1);
    assert!(begin.elapsed() >= Duration::from_millis(2900), "three seconds, and one for each MiB");
    other.read(0, 4096);
}

#[test]
fn unread_error_replies_take_bounded_memory() {
    let served = serve(ram(), 1, options());
    let mut client = served.client(ReplyStyle::Structured);
    client.stream.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
    let request = client.bytes(77, 0, 1, 0, 512, &[]).repeat(1000);
    let mut sent = 0;
    while sent < 2000 && client.stream.write_all(&request).is_ok() {
        sent += 1;
    }
    assert!(sent < 2000, "the server keeps two million error replies");
    assert!(served.server.connections()[0].in_flight <= 256);
    assert_serves(&served);
}

#[test]
fn large_requests_of_many_clients_share_the_memory_of_one() {
    let served = serve(ram(), 1, NbdOptions { buffered_bytes_total: 1, ..options() });
    std::thread::scope(|scope| {
        for number in 0..6u8 {
            let served = &served;
            scope.spawn(move || {
                let mut client = served.client(ReplyStyle::Structured);
                let (offset, content) = (u64::from(number) << 25, vec![number; 32 << 20]);
                for _ in 0..3 {
                    assert_eq!(client.write(offset, &content), 0);
                    assert!(client.read(offset, 32 << 20) == content);
                }
            });
        }
    });
}

/// A client may disconnect at any byte of its stream, with I/O in flight. Nothing of it must be left.
#[test]
fn a_client_may_disconnect_at_any_byte_of_its_stream() {
    let served = serve(slow(100_000..=2_000_000), 2, options());
    let mut conversation = b"\0\0\0\x03".to_vec();
    conversation.extend(option_bytes(8, &[]));
    conversation.extend(option_bytes(10, b"\0\0\0\0\0\0\0\x01\0\0\0\x0fbase:allocation"));
    conversation.extend(option_bytes(7, b"\0\0\0\0\0\0"));
    let handshake = conversation.len();
    let template = Client::new(std::io::empty(), ReplyStyle::Structured);
    for cookie in 0..10u64 {
        conversation.extend(template.bytes(0, 0, cookie, cookie << 20, 65536, &[]));
        conversation.extend(template.bytes(
            1,
            0,
            cookie,
            cookie << 20,
            70_000 / 512 * 512,
            &[7; 70_000 / 512 * 512],
        ));
        conversation.extend(template.bytes(7, 0, cookie, 0, 1 << 20, &[]));
        conversation.extend(template.bytes(3, 0, cookie, 0, 0, &[]));
        conversation.extend(template.bytes(4, 1, cookie, 0, 1 << 20, &[]));
    }
    let cuts = (0..handshake).step_by(3).chain((handshake..conversation.len()).step_by(9973));
    for (number, cut) in cuts.enumerate() {
        let mut stream = served.raw();
        stream.write_all(&conversation[..cut]).unwrap();
        if number % 3 == 0 {
            // Some clients read the beginning of the reply before they disconnect.
            let _ = stream.read(&mut [0; 40]);
        }
        drop(stream);
    }
    wait_until("all have disconnected", || served.server.connection_count() == 0);
    wait_until("all I/O has completed", || served.disk.stats().in_flight == [0, 0]);
    assert_serves(&served);
}

#[test]
fn stalled_handshakes_leave_connections_to_other_clients() {
    let served = serve(ram(), 2, NbdOptions { connections_max: 8, ..options() });
    let stalled: Vec<_> = (0..8).map(|_| served.raw()).collect();
    // The client waits for the clients before it, which have one second each, two at a time.
    let mut client = served.client(ReplyStyle::Structured);
    assert_eq!(client.read(0, 512), [0; 512]);
    assert!(served.server.connection_count() <= 3, "{}", served.server.connection_count());
    let timeouts = served.server.counters().timeouts;
    assert!((6..=8).contains(&timeouts), "{timeouts}");
    assert_eq!(served.server.counters().refused_connections, 0);
    // A client that finishes its handshake makes room immediately, until the limit of connections is reached.
    drop(stalled);
    let others: Vec<_> = (0..7).map(|_| served.client(ReplyStyle::Structured)).collect();
    assert_eq!(served.server.connections().iter().filter(|client| client.export.is_some()).count(), 8);
    drop(others);
}
