//! The control thread sleeps until an engine that rejected a ring, or the owner of the device, wakes it.
//! After a wake-up the thread must find each reason.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use super::front_end_harness::FrontEnd;
use super::{model, thread};
use crate::sync::atomic::Ordering::SeqCst;

/// The owner of the device stops it (`stops`), or changes the configuration.
fn misses_no_wakeup(stops: bool) {
    let mut front_end = FrontEnd::connect();
    let (ours, its) = UnixStream::pair().unwrap();
    front_end.take_requests_on(its.into());
    let error = front_end.error();
    front_end.spoil(0);
    let shared = front_end.device.shared.clone();
    let owner = {
        let shared = shared.clone();
        thread::spawn(move || if stops { shared.stop() } else { shared.change_config() })
    };
    front_end.start();
    let (mut rejections, mut changes) = (0, 0);
    // A lost wake-up makes this wait for ever, which the model checkers report as a deadlock.
    while (rejections, changes) != (1, usize::from(!stops)) || stops != shared.stopping.load(SeqCst) {
        shared.wake.wait();
        front_end.device.turn();
        rejections += FrontEnd::errors(&error);
        changes += messages(&ours);
        assert!(rejections <= 1 && changes <= 1, "each is reported once");
    }
    owner.join().unwrap();
    let FrontEnd { device, guest, engine, .. } = front_end;
    assert_eq!(device.disconnect().rejected_rings, 1);
    assert_eq!((FrontEnd::errors(&error), messages(&ours)), (0, 0));
    guest.assert_intact();
    drop(engine);
}

fn messages(socket: &UnixStream) -> usize {
    socket.set_nonblocking(true).unwrap();
    let socket: OwnedFd = socket.try_clone().unwrap().into();
    let mut bytes = [0; 256];
    rustix::io::read(&socket, &mut bytes).unwrap_or(0) / 12
}

#[cfg(loom)]
#[test]
fn loom_the_control_thread_misses_no_wakeup() {
    model("loom_the_control_thread_misses_no_wakeup: a change", 2, 3_000, || misses_no_wakeup(false));
    model("loom_the_control_thread_misses_no_wakeup: a stop", 2, 3_000, || misses_no_wakeup(true));
}

#[cfg(shuttle)]
#[test]
fn shuttle_the_control_thread_misses_no_wakeup() {
    model("shuttle_the_control_thread_misses_no_wakeup: a change", 2, 3_000, || misses_no_wakeup(false));
    model("shuttle_the_control_thread_misses_no_wakeup: a stop", 2, 3_000, || misses_no_wakeup(true));
}
