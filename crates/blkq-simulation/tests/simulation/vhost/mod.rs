//! A virtual machine over vhost-user-blk: the device's session, rings and record of requests in flight as
//! they run in production, and a front end with a guest that outlive the daemon, or do not.

mod front_end;
mod life;
mod machine;
mod wiring;

pub use life::{Seen, live};
pub use machine::Machine;
pub use wiring::Tamper;
