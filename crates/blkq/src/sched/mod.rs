//! The schedulers of a queue (the kernel's elevators). A scheduler has the requests that the driver has not
//! taken yet, and selects the next one. Without one, requests reach the driver in the order of submission.

use crate::enumeration::enumeration;
use crate::error::{Error, ErrorKind};

mod kyber;
mod mq_deadline;
mod scheduler;

use kyber::Kyber;
use mq_deadline::MqDeadline;
pub(crate) use scheduler::Scheduler;

enumeration! {
    /// The schedulers from which a disk can choose.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    #[non_exhaustive]
    pub enum SchedulerKind {
        /// First in, first out. The best choice if the order of positions does not matter to the device.
        #[default]
        None => "none",
        /// In order of position, reads before writes, with a deadline for each request.
        MqDeadline => "mq-deadline",
        /// First in, first out per operation. Each operation may have a number of requests in the driver, which
        /// follows from the measured latencies.
        Kyber => "kyber",
    }

    /// The name of the scheduler in settings, as in the kernel.
    pub const fn name(self) -> &'static str;
    parse |name| -> Error {
        let names = SchedulerKind::ALL.map(SchedulerKind::name).join(", ");
        Error::new(ErrorKind::Invalid, format!("unknown scheduler {name:?}; the schedulers are {names}"))
    }
}

impl SchedulerKind {
    pub(crate) fn open(self, tags: usize) -> Option<Box<dyn Scheduler>> {
        match self {
            SchedulerKind::None => None,
            SchedulerKind::MqDeadline => Some(Box::new(MqDeadline::new(tags))),
            SchedulerKind::Kyber => Some(Box::new(Kyber::new(tags))),
        }
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
