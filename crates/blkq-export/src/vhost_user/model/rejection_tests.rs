//! A ring is rejected on its engine, while the control thread reports that, stops the ring, starts it again,
//! or disconnects. The rejection must be reported once, and requests must be neither lost nor executed twice.

use super::front_end_harness::FrontEnd;
use super::{model, thread};

const REQUESTS: u16 = 2;

#[derive(Clone, Copy, PartialEq)]
enum NextStep {
    /// Stop the ring, let the driver repair it, and start it again.
    Restart,
    Reset,
    Disconnect,
}

fn rejected_once(next: NextStep) {
    let mut front_end = FrontEnd::connect();
    let error = front_end.error();
    (0..u64::from(REQUESTS)).for_each(|number| front_end.add(number));
    front_end.spoil(REQUESTS);
    front_end.start();
    // If the ring has been rejected already, this reports it.
    front_end.device.turn();
    // Rejections before the ring was started again.
    let mut rejected_before = 0;
    match next {
        NextStep::Disconnect => {}
        NextStep::Reset => front_end.reset(),
        NextStep::Restart => {
            front_end.stop();
            front_end.device.turn();
            let counters = front_end.device.counters();
            assert_eq!(
                counters.rejected_rings,
                counters.requests / u64::from(REQUESTS),
                "reported at the stop"
            );
            front_end.repair(REQUESTS);
            rejected_before = counters.rejected_rings;
            front_end.start();
            let mut taken = 0;
            while taken < REQUESTS {
                match front_end.driver.take_used(&front_end.guest) {
                    Some(_) => taken += 1,
                    None => thread::yield_now(),
                }
            }
            front_end.device.turn();
            assert_eq!(front_end.stop(), REQUESTS.into());
            assert!(front_end.driver.take_used(&front_end.guest).is_none());
        }
    }
    let FrontEnd { device, guest, engine, .. } = front_end;
    let counters = device.disconnect();
    // A ring takes the valid requests in the turn in which it finds the invalid descriptor.
    let rejected = match next {
        NextStep::Restart => rejected_before,
        NextStep::Reset | NextStep::Disconnect => counters.requests / u64::from(REQUESTS),
    };
    assert_eq!(counters.rejected_rings, rejected, "each rejection is reported once");
    assert_eq!(FrontEnd::errors(&error), rejected, "the front end is notified once");
    assert_eq!(counters.errors, 0);
    guest.assert_intact();
    drop(engine);
}

#[cfg(loom)]
#[test]
fn loom_a_rejection_is_reported_once() {
    model("loom_a_rejection_is_reported_once: reset", 2, 3_000, || rejected_once(NextStep::Reset));
    model("loom_a_rejection_is_reported_once: disconnect", 2, 3_000, || rejected_once(NextStep::Disconnect));
    model("loom_a_rejection_is_reported_once: restart", 2, 3_000, || rejected_once(NextStep::Restart));
}

#[cfg(shuttle)]
#[test]
fn shuttle_a_rejection_is_reported_once() {
    model("shuttle_a_rejection_is_reported_once: reset", 2, 2_000, || rejected_once(NextStep::Reset));
    model("shuttle_a_rejection_is_reported_once: disconnect", 2, 2_000, || {
        rejected_once(NextStep::Disconnect)
    });
    model("shuttle_a_rejection_is_reported_once: restart", 2, 2_000, || rejected_once(NextStep::Restart));
}
