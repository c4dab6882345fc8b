//! A virtual machine over vhost-user-blk. The device's session, rings and record of requests in flight are those of
//! production. The front end and the guest are simulated; they survive the daemon, or do not.

mod front_end;
mod greedy;
mod life;
mod machine;
mod wiring;

pub use greedy::fill_rings;
pub use life::{Seen, live};
pub use machine::Machine;
pub use wiring::Tamper;
