//! Limits of I/Os and bytes per second, of a device and of a [`Group`] of devices.
//!
//! A limit is one word of virtual time (`bucket`). Requests are charged when they are dispatched. A request
//! that must wait keeps its place in the plug, the scheduler or the queue, and can still be merged. The
//! members of a group have shares by weight, and may use what the others leave.

mod auto;
mod bucket;
mod group;
mod limits;
mod meter;
#[cfg(all(test, model_check))]
mod model;
#[cfg(all(test, not(model_check)))]
mod tests;

use std::sync::Arc;

use crate::clock::monotonic_ns;
use crate::sync::atomic::{AtomicU64, Ordering::SeqCst};
use crate::sync::{Mutex, NestedSwitch, lock};

pub(crate) use auto::DeviceTimes;
pub use auto::{AutoLimit, DeviceLoad};
use bucket::Buckets;
pub use group::{Group, MEMBERS_MAX, Member, MemberInfo, WEIGHT_DEFAULT, WEIGHT_MAX};
pub use limits::{BPS_MAX, BPS_MIN, Burst, IOPS_MAX, LimitKey, LimitMode, RateLimit, RateLimits};
pub(crate) use meter::{Counted, Meter, SPARE_DELAY_NS};

/// The limits of a disk as its queues use them.
#[derive(Clone, Default)]
pub(crate) struct Throttle {
    pub limits: RateLimits,
    buckets: Arc<Buckets>,
    member: Option<Arc<Member>>,
    /// The counters of device times for each queue. `Some` while the disk's ceiling is searched.
    measured: Option<Arc<[Arc<DeviceTimes>]>>,
    /// The ceiling that the running search has found. Not kept up to date in the copies of queues.
    ceiling: Option<RateLimits>,
}

impl Throttle {
    pub fn member(&self) -> Option<&Arc<Member>> {
        self.member.as_ref()
    }

    /// Whether requests may have to wait, now or after a change of the group's limits.
    pub fn is_on(&self) -> bool {
        !self.limits.is_none() || self.member.is_some() || self.measured.is_some()
    }

    pub fn device_times(&self, index: usize) -> Option<&Arc<DeviceTimes>> {
        self.measured.as_ref()?.get(index)
    }

    /// The meters of all limits for a queue. `group` are the limits of the disk's group.
    pub fn meters(&self, group: &RateLimits) -> Vec<Meter> {
        let mut meters = Meter::of_device(&self.limits, &self.buckets);
        meters.extend(self.member.iter().flat_map(|member| Meter::of_group(group, member)));
        meters
    }
}

/// The ceiling of a device: the highest rate that it can sustain ([`Disk::ceiling`](crate::Disk::ceiling)).
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Ceiling {
    /// No search for the ceiling is running.
    NotSearched,
    /// A search is running, but the ceiling was not found yet, or is no longer known.
    Unknown,
    /// The limit that is just under the ceiling.
    Found(RateLimits),
}

/// The limits of a disk as its control threads use them.
#[derive(Default)]
pub(crate) struct ThrottleControl {
    throttle: Mutex<Throttle>,
    generation: AtomicU64,
    /// While this is on, all requests pass.
    bypass: NestedSwitch,
}

impl ThrottleControl {
    pub fn get(&self) -> Throttle {
        lock(&self.throttle).clone()
    }

    /// Changes the limits. The caller must wake the queues afterwards.
    fn change(&self, change: impl FnOnce(&mut Throttle)) {
        let mut throttle = lock(&self.throttle);
        change(&mut throttle);
        self.generation.fetch_add(1, SeqCst);
    }

    /// Changes the disk's own limits. The caller must wake the queues afterwards.
    pub fn set_limits(&self, limits: &RateLimits) {
        self.change(|throttle| {
            throttle.limits = *limits;
            throttle.buckets.forgive_debt(monotonic_ns());
        });
    }

    /// Starts or stops the measurement of device times. Returns false if it is running already. The caller
    /// must wake the queues afterwards.
    pub fn set_measured(&self, times: Option<Arc<[Arc<DeviceTimes>]>>) -> bool {
        let mut throttle = lock(&self.throttle);
        if times.is_some() && throttle.measured.is_some() {
            return false;
        }
        (throttle.measured, throttle.ceiling) = (times, None);
        self.generation.fetch_add(1, SeqCst);
        true
    }

    pub fn set_ceiling(&self, ceiling: Option<RateLimits>) {
        lock(&self.throttle).ceiling = ceiling;
    }

    pub fn ceiling(&self) -> Ceiling {
        let throttle = lock(&self.throttle);
        match throttle.ceiling {
            _ if throttle.measured.is_none() => Ceiling::NotSearched,
            None => Ceiling::Unknown,
            Some(limits) => Ceiling::Found(limits),
        }
    }

    /// Makes the disk a member of a group, or of none. The caller must wake the queues afterwards.
    pub fn set_member(&self, member: Option<Member>) {
        self.change(|throttle| throttle.member = member.map(Arc::new));
    }

    pub fn generation(&self) -> u64 {
        self.generation.load(SeqCst)
    }

    /// Starts or stops to let all requests pass. The caller must wake the queues afterwards.
    pub fn set_bypassed(&self, bypassed: bool) {
        self.bypass.set(bypassed);
        self.generation.fetch_add(1, SeqCst);
    }

    pub fn is_bypassed(&self) -> bool {
        self.bypass.is_on()
    }
}

/// Tells the simulated world which requests were admitted.
#[cfg(simulation)]
pub(crate) fn note_admitted(batch: &[crate::tags::Tag], requests: &[crate::request::Request]) {
    for request in batch.iter().map(|tag| &requests[tag.index()]) {
        crate::simulation::world().admitted(request.operation() as u8, request.bytes());
    }
}
