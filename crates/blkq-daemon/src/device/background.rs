//! The threads that watch a device. They stop before the rest of the device does.

use std::sync::Arc;

use blkq::disk::AutoLimiter;
use blkq::throttle::LimitMode;
use blkq::{Disk, EngineHandle};
use blkq_protocol::failure::Outcome;
use blkq_protocol::group::GroupWatch;
use blkq_protocol::options::AttachOptions;

use super::meter::Meter;
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
    pub(super) group: Option<GroupWatch>,
}

impl BackgroundThreads {
    pub(super) fn new(
        options: &AttachOptions,
        disk: &Arc<Disk>,
        engines: Vec<EngineHandle>,
        metrics: Option<Endpoint>,
        group: Option<GroupWatch>,
    ) -> BackgroundThreads {
        BackgroundThreads {
            auto_limit: None,
            wants_auto_limit: options.limit == LimitMode::Auto,
            hangs: HangWatch::new(disk.clone(), engines, options.hang_warning),
            metrics,
            group,
        }
    }

    /// The threads inherit the privileges of the calling thread. Fails if a thread cannot be started.
    pub(super) fn start(&mut self, running: &Running, meter: &Meter) -> Outcome {
        self.hangs.start(log::line)?;
        self.group.as_mut().map_or(Ok(()), |group| group.start(log::line))?;
        if std::mem::take(&mut self.wants_auto_limit) {
            self.auto_limit = Some(AutoLimiter::start(&running.disk)?);
        }
        if let Some(vhost) = &running.servers.vhost {
            vhost.serve()?;
        }
        let meter = meter.clone();
        self.metrics.as_mut().map_or(Ok(()), |endpoint| endpoint.start(move || meter.sample()))
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
}
