use std::sync::{Arc, Mutex, Weak};

use blkq::StatsSnapshot;
use blkq::clock::monotonic_ns;
use blkq::sync::lock;
use blkq::throttle::{Ceiling, RateLimits};
use blkq_export::nbd::{NbdCounters, NbdServer};
use blkq_protocol::control::statistics::{Gate, Nbd, QueueSums, Statistics, Throttle, VhostUser};
use blkq_protocol::group::Joined;

use super::running::Running;
use crate::hangs::{HangCounters, HangWatch};
use crate::metrics::Sample;

/// The group of a device. Replacing the value frees the device's slot in the previous group.
pub(super) type Membership = Arc<Mutex<Option<Joined>>>;

/// Reads the counters of a device. Holds only a weak reference, so it does not keep the device from stopping.
#[derive(Clone)]
pub struct Meter {
    name: String,
    opened_ns: u64,
    running: Weak<Running>,
    hangs: HangCounters,
    group: Membership,
}

impl Meter {
    pub(super) fn new(name: &str, running: &Arc<Running>, hangs: &HangWatch, group: Membership) -> Meter {
        let (running, hangs) = (Arc::downgrade(running), hangs.counters.clone());
        Meter { name: name.to_owned(), opened_ns: monotonic_ns(), running, hangs, group }
    }

    pub fn uptime_ns(&self) -> u64 {
        monotonic_ns().saturating_sub(self.opened_ns)
    }

    /// `None` if the device has stopped.
    pub fn statistics(&self) -> Option<Statistics> {
        let running = self.running.upgrade()?;
        let disk = &running.disk;
        let now_ns = monotonic_ns();
        let mut counters = NbdCounters::default();
        running.servers.nbd.iter().for_each(|server| counters += server.counters());
        let connected = running.servers.nbd.iter().map(NbdServer::connection_count).sum::<usize>() as u64;
        let gate = disk.gate_counters();
        let queues: Vec<StatsSnapshot> = disk.queue_stats().collect();
        let mut sum = StatsSnapshot::default();
        queues.iter().for_each(|queue| sum += queue);
        let mut statistics = Statistics::new(&sum, now_ns, now_ns.saturating_sub(self.opened_ns));
        statistics.queues = queues.iter().map(QueueSums::new).collect();
        statistics.stalls = self.hangs.stalls();
        statistics.hang_warning_ns = self.hangs.limit().as_nanos() as u64;
        statistics.gate = Gate {
            waiting: disk.gate_waiting(),
            waits: gate.waits,
            wakeups: gate.wakeups,
            grants: gate.grants,
            largest_grant: gate.largest_grant,
        };
        let text = |limits: RateLimits| if limits.is_none() { String::new() } else { limits.to_string() };
        let member = disk.group_member();
        let group = lock(&self.group).as_ref().map(|joined| joined.name().to_owned());
        let group_limits = member.as_ref().and_then(|member| member.group().limits());
        statistics.throttle = Throttle {
            limits: match disk.ceiling() {
                Ceiling::NotSearched => text(disk.rate_limits()),
                Ceiling::Unknown => "auto".to_owned(),
                Ceiling::Found(ceiling) => format!("auto ({ceiling})"),
            },
            group,
            group_limits: group_limits.map(|(_, limits)| text(limits)).unwrap_or_default(),
            weight: member.map_or(0, |member| member.weight()),
        };
        statistics.vhost_user = running.servers.vhost.as_ref().map(|vhost| VhostUser {
            connected: vhost.connection_count() as u64,
            counters: vhost.counters(),
        });
        statistics.nbd = (!running.servers.nbd.is_empty()).then_some(Nbd { connected, counters });
        Some(statistics)
    }

    /// `None` if the device has stopped.
    pub fn sample(&self) -> Option<Sample> {
        let size_bytes = self.running.upgrade()?.disk.limits().size_bytes();
        Some(Sample { name: self.name.clone(), size_bytes, statistics: self.statistics()? })
    }
}
