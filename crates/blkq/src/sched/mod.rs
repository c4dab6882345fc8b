//! The scheduler slot of a queue: it has the requests that the driver has not yet got,
//! and chooses the next. Without a scheduler requests reach the driver in the order
//! of submission.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, ErrorKind};

mod kyber;
mod mq_deadline;
mod scheduler;

use kyber::Kyber;
use mq_deadline::MqDeadline;
pub(crate) use scheduler::Scheduler;

/// The schedulers that a disk can be set to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum SchedulerKind {
    /// First come, first served: best where the order of positions does not matter.
    #[default]
    None,
    /// In the order of positions, reads before writes, with a deadline for each request.
    MqDeadline,
    /// First come, first served of each operation, with a share of the device for each
    /// that follows from the latencies seen.
    Kyber,
}

impl SchedulerKind {
    /// Every kind.
    pub const ALL: [SchedulerKind; 3] =
        [SchedulerKind::None, SchedulerKind::MqDeadline, SchedulerKind::Kyber];

    /// The name by which it is chosen.
    pub const fn name(self) -> &'static str {
        match self {
            SchedulerKind::None => "none",
            SchedulerKind::MqDeadline => "mq-deadline",
            SchedulerKind::Kyber => "kyber",
        }
    }

    /// A scheduler of this kind for a queue of `tags` requests.
    pub(crate) fn open(self, tags: usize) -> Option<Box<dyn Scheduler>> {
        match self {
            SchedulerKind::None => None,
            SchedulerKind::MqDeadline => Some(Box::new(MqDeadline::new(tags))),
            SchedulerKind::Kyber => Some(Box::new(Kyber::new(tags))),
        }
    }
}

impl fmt::Display for SchedulerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for SchedulerKind {
    type Err = Error;

    fn from_str(name: &str) -> Result<SchedulerKind, Error> {
        SchedulerKind::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
            let names = SchedulerKind::ALL.map(SchedulerKind::name).join(", ");
            Error::new(ErrorKind::Invalid, format!("no scheduler is named {name:?}: there are {names}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_found_by_name() {
        for kind in SchedulerKind::ALL {
            assert_eq!(kind.to_string().parse::<SchedulerKind>().map_err(|e| e.to_string()), Ok(kind));
            assert_eq!(kind.open(8).is_some(), kind != SchedulerKind::None);
        }
        let error = "bfq".parse::<SchedulerKind>().map_err(|e| e.kind());
        assert_eq!(error, Err(ErrorKind::Invalid));
    }
}
