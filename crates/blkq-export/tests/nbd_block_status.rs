//! Block status requests of clients that send more of them than the image can answer soon.

use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crate::nbd::*;
use blkq::testing::wait_until;
use blkq_export::nbd::reply::ReplyStyle;

const REQUESTS: u64 = 200;

fn in_flight(served: &Served) -> u64 {
    served.server.connections().iter().map(|client| client.in_flight).sum()
}

/// A client with [`REQUESTS`] block status requests in flight.
fn greedy(served: &Served) -> Client<UnixStream> {
    let mut client = served.client(ReplyStyle::Structured);
    client.stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    (0..REQUESTS).for_each(|cookie| client.send(7, 0, cookie, 0, 4096, &[]));
    wait_until("all requests are in flight", || in_flight(served) == REQUESTS);
    client
}

#[test]
fn clients_take_turns_with_block_status() {
    let (driver, let_go, _) = SlowExtents::driver();
    let served = serve(driver, 1, options());
    // This is dropped before the server if the test fails, so that the query ends.
    let let_go = let_go;
    let _greedy = greedy(&served);
    let mut other = served.client(ReplyStyle::Structured);
    other.stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    other.send(7, 0, 1, 0, 4096, &[]);
    wait_until("the other request is in flight", || in_flight(&served) > REQUESTS);
    (0..2).for_each(|_| let_go.send(()).unwrap());
    assert_eq!(other.reply(|_| 0).error, 0);
}

// Contract: detach
#[test]
fn a_forced_stop_cancels_block_status_requests() {
    let (driver, let_go, begun) = SlowExtents::driver();
    let served = serve(driver, 1, options());
    let let_go = let_go;
    let mut client = greedy(&served);
    let stopping = served.server.begin_stop(true).unwrap();
    for _ in 1..REQUESTS {
        assert_eq!(client.reply(|_| 0).error, 108, "ESHUTDOWN");
    }
    let_go.send(()).unwrap();
    stopping.wait();
    assert_eq!(client.reply(|_| 0).error, 0, "the query that was running");
    assert_eq!(begun.load(Relaxed), 1);
}

#[test]
fn a_client_that_vanishes_leaves_no_queries() {
    let (driver, let_go, begun) = SlowExtents::driver();
    let served = serve(driver, 1, options());
    let let_go = let_go;
    drop(greedy(&served));
    // The server notices that the client has disconnected when it sends a reply, at the latest.
    let mut ended = 0;
    wait_until("the connection is dropped", || {
        if begun.load(Relaxed) > ended {
            let_go.send(()).unwrap();
            ended += 1;
        }
        served.server.connection_count() == 0
    });
    assert!(u64::from(begun.load(Relaxed)) < REQUESTS);
    assert_eq!(served.server.counters().errors, 0, "cancelled requests were not answered");
}
