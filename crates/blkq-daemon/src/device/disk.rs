use std::sync::Arc;

use blkq::throttle::WEIGHT_DEFAULT;
use blkq::{Disk, Driver, EngineThread};
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::group::{self, GroupWatch, Joined};
use blkq_protocol::options::AttachOptions;
use blkq_protocol::state::Claim;

use super::persistent_bitmaps::PersistentBitmaps;
use super::saved_settings::SavedSettings;
use super::settings::apply;
use crate::{log, sandbox};

/// A disk with running engines, its bitmaps and its group, and without clients.
pub(super) struct ServedDisk {
    /// One engine per hardware queue.
    pub(super) engines: Vec<EngineThread>,
    pub(super) group: Option<Joined>,
    pub(super) group_watch: Option<GroupWatch>,
    pub(super) bitmaps: PersistentBitmaps,
    pub(super) disk: Arc<Disk>,
    pub(super) warnings: Vec<String>,
}

impl ServedDisk {
    /// Restores the `saved` settings before the engines start. With `is_successor`, the device had a daemon before: it
    /// is served even if it cannot join its group, because its clients wait for I/O. With `partscan`, the kernel scans
    /// the block device for partitions. Fails if the driver or the files of its bitmaps cannot be used, the device
    /// cannot join its group or become writable, or a thread cannot be started.
    pub(super) fn new(
        options: &AttachOptions,
        claim: &Claim,
        driver: Arc<dyn Driver>,
        saved: &mut SavedSettings,
        is_successor: bool,
        partscan: bool,
    ) -> Outcome<ServedDisk> {
        let disk = Disk::builder_shared(driver)
            .name(claim.name())
            .queues(usize::from(options.queues) * usize::from(options.threads_per_queue))
            .depth(options.depth)
            .scheduler(options.scheduler)
            .merge(options.merge)
            .early_submission(options.early_submission)
            .batching(options.batching)
            .iostats(options.iostats)
            .clock(options.clock)
            .read_only(options.read_only)
            .rate_limits(options.limit.limits())
            .error_policy(options.on_error)
            .ignore_flushes(options.unsafe_flush_ignore)
            .build()?;
        let (bitmaps, warnings) = PersistentBitmaps::load(&disk)?;
        let engines = Vec::new();
        let mut served = ServedDisk { engines, group: None, group_watch: None, bitmaps, disk, warnings };
        served.join_group(options, claim, is_successor)?;
        let is_read_only = served.disk.limits().read_only;
        saved.restore(is_read_only, |setting| apply(&served.disk, None, setting))?;
        served.engines = start_engines(&served.disk, options.sandbox, partscan)?;
        Ok(served)
    }

    /// A child process must not inherit the group's file: a lock on it would then survive this process.
    fn join_group(&mut self, options: &AttachOptions, claim: &Claim, is_successor: bool) -> Outcome {
        // The device may join a group later, when the daemon is confined.
        group::prepare();
        let Some(group) = &options.group else { return Ok(()) };
        let weight = options.weight.unwrap_or(WEIGHT_DEFAULT);
        match Joined::open(claim.dir(), group, claim.name(), weight) {
            Ok((joined, member)) => {
                self.group_watch = Some(GroupWatch::new(&joined, &member, self.disk.clone()));
                self.disk.join_group(member);
                self.group = Some(joined);
            }
            // The device's clients wait for I/O, which matters more than the limits of the group.
            Err(failure) if is_successor => {
                let warning = format!(
                    "only the limits of the device itself apply, because it cannot join its group: {failure}"
                );
                log::line(&format!("warning: {warning}"));
                self.warnings.push(warning);
            }
            Err(failure) => return Err(failure),
        }
        Ok(())
    }
}

/// If `sandbox` is set, engines are confined from the start; `partscan` keeps the capability that the kernel
/// requires for a partition scan.
fn start_engines(disk: &Arc<Disk>, sandbox: bool, partscan: bool) -> Outcome<Vec<EngineThread>> {
    let start = || -> Outcome<Vec<EngineThread>> {
        if sandbox {
            sandbox::engine(partscan)?;
        }
        let spawn = |queue| EngineThread::spawn(&format!("blkq-queue-{queue}"), vec![(disk.clone(), queue)]);
        Ok((0..disk.queue_count()).map(spawn).collect::<Result<_, _>>()?)
    };
    // Threads inherit the privileges of the thread that creates them. This short-lived thread drops its
    // privileges, creates the engines and exits.
    std::thread::scope(|scope| scope.spawn(start).join())
        .unwrap_or_else(|_| Err(Failure::new("cannot start the engines")))
}
