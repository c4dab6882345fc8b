//! The threads that watch a device. They stop before the rest of the device does.

use std::sync::Arc;

use blkq::disk::AutoLimiter;
use blkq::sync::lock;
use blkq::throttle::{LimitMode, Member};
use blkq::{Disk, PeriodicThread};
use blkq_protocol::failure::Outcome;
use blkq_protocol::group::{self, Joined};
use blkq_protocol::options::AttachOptions;

use super::running::Running;
use crate::hangs::HangWatch;
use crate::log;
use crate::metrics::Endpoint;

pub(super) struct BackgroundThreads {
    /// Searches for the ceiling of the device (`--limit auto`).
    auto_limit: Option<AutoLimiter>,
    wants_auto_limit: bool,
    pub(super) hangs: HangWatch,
    pub(super) metrics: Option<Endpoint>,
    group_watch: Option<PeriodicThread>,
}

impl BackgroundThreads {
    pub(super) fn new(options: &AttachOptions, hangs: HangWatch, metrics: Option<Endpoint>) -> Self {
        let wants_auto_limit = options.limit == LimitMode::Auto;
        BackgroundThreads { auto_limit: None, wants_auto_limit, hangs, metrics, group_watch: None }
    }

    /// The threads inherit the privileges of the calling thread. Fails if a thread cannot be started.
    pub(super) fn start(&mut self, running: &Arc<Running>) -> Outcome {
        self.hangs.start(log::line)?;
        self.watch_group(running)?;
        if std::mem::take(&mut self.wants_auto_limit) {
            self.auto_limit = Some(AutoLimiter::start(&running.disk)?);
        }
        running.servers.vhost.iter().try_for_each(|vhost| vhost.serve())?;
        // The thread must not keep the device from stopping.
        let running = Arc::downgrade(running);
        let sample = move || Some(running.upgrade()?.sample());
        self.metrics.as_mut().map_or(Ok(()), |endpoint| endpoint.start(sample))
    }

    /// Changes the rate limits of `disk`, and starts or stops the search for its ceiling. Fails if a thread
    /// cannot be started.
    pub(super) fn set_limit(&mut self, disk: &Arc<Disk>, mode: LimitMode) -> Outcome {
        self.wants_auto_limit = false;
        if mode != LimitMode::Auto {
            self.auto_limit = None;
            disk.set_rate_limits(&mode.limits());
        } else if self.auto_limit.is_none() {
            self.auto_limit = Some(AutoLimiter::start(disk)?);
        }
        Ok(())
    }

    /// The device leaves its previous group. If the thread of the group cannot be started, the device is in no group.
    pub(super) fn join_group(&mut self, running: &Running, joined: Joined, member: Member) -> Outcome {
        // The `blkq-group` thread repairs the previous group's file from the member of the disk, so it must
        // stop before the disk gets a member of another group.
        self.group_watch = None;
        running.disk.join_group(member);
        *lock(&running.group) = Some(joined);
        self.watch_group(running).inspect_err(|_| self.leave_group(running))
    }

    fn watch_group(&mut self, running: &Running) -> Outcome {
        let Running { disk, group, .. } = running;
        if let (Some(joined), Some(member)) = (&*lock(group), disk.group_member()) {
            self.group_watch = Some(group::watch(joined, &member, disk.clone(), log::line)?);
        }
        Ok(())
    }

    pub(super) fn leave_group(&mut self, running: &Running) {
        self.group_watch = None;
        running.disk.leave_group();
        *lock(&running.group) = None;
    }
}
