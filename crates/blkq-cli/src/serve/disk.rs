//! The disk of a device, with its bitmaps and its group, and the engines that serve it.

use std::sync::Arc;

use blkq::throttle::WEIGHT_DEFAULT;
use blkq::{Disk, Driver, EngineHandle, EngineThread};

use super::kept_bitmaps::KeptBitmaps;
use super::kept_settings::KeptSettings;
use crate::confine;
use crate::failure::{Failure, Outcome};
use crate::group::{GroupWatch, Joined};
use crate::log;
use crate::options::AttachOptions;
use crate::state::Claim;

/// A disk that has its engines, and no clients yet.
pub(super) struct ServedDisk {
    /// One per hardware queue.
    pub(super) engines: Vec<EngineThread>,
    /// Its group, if it is in one.
    pub(super) group: Option<Joined>,
    pub(super) group_watch: Option<GroupWatch>,
    pub(super) bitmaps: KeptBitmaps,
    pub(super) disk: Arc<Disk>,
    pub(super) warnings: Vec<String>,
}

/// How the disk of a device comes to be, beyond its options.
pub(super) struct DiskStart {
    /// It goes on without a group that it cannot join: its users wait for I/O.
    pub(super) is_successor: bool,
    /// The kernel scans for partitions on a block device of its engines.
    pub(super) partscan: bool,
}

impl ServedDisk {
    /// The disk of `driver`, with the settings of `kept` in force.
    ///
    /// # Errors
    /// Of the driver, the files of its bitmaps, its group, and if there can be no more threads.
    pub(super) fn new(
        options: &AttachOptions,
        claim: &Claim,
        driver: Arc<dyn Driver>,
        kept: &mut KeptSettings,
        start: &DiskStart,
    ) -> Outcome<ServedDisk> {
        let disk = build(options, claim.name(), driver)?;
        let (bitmaps, warnings) = KeptBitmaps::load(&disk)?;
        let engines = Vec::new();
        let mut served = ServedDisk { engines, group: None, group_watch: None, bitmaps, disk, warnings };
        served.join_group(options, claim, start.is_successor)?;
        kept.set(&served.disk);
        served.engines = start_engines(&served.disk, options.sandbox, start.partscan)?;
        Ok(served)
    }

    /// Its engines.
    pub(super) fn handles(&self) -> Vec<EngineHandle> {
        self.engines.iter().map(|engine| engine.handle().clone()).collect()
    }

    /// Joins the group of `options`, if they have one. No child of this process has the group's open file, which a
    /// member that died must not leave locked.
    fn join_group(&mut self, options: &AttachOptions, claim: &Claim, is_successor: bool) -> Outcome {
        let Some(group) = &options.group else { return Ok(()) };
        let weight = options.weight.unwrap_or(WEIGHT_DEFAULT);
        match Joined::open(claim.dir(), group, claim.name(), weight) {
            Ok((joined, member)) => {
                self.group_watch = Some(GroupWatch::new(joined.keeper(&member), self.disk.clone()));
                self.disk.join_group(member);
                self.group = Some(joined);
            }
            // Its users wait for I/O, and a group is not worth that.
            Err(failure) if is_successor => {
                let warning = format!("only its own limits count, as it could not join its group: {failure}");
                log::line(&format!("warning: {warning}"));
                self.warnings.push(warning);
            }
            Err(failure) => return Err(failure),
        }
        Ok(())
    }
}

fn build(options: &AttachOptions, name: &str, driver: Arc<dyn Driver>) -> Outcome<Arc<Disk>> {
    let disk = Disk::builder_shared(driver)
        .name(name)
        .queues(usize::from(options.queues) * usize::from(options.threads_per_queue))
        .depth(options.depth)
        .scheduler(options.scheduler.kind())
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
    Ok(disk)
}

/// Starts one engine per queue, on threads that are confined from their beginning if `sandbox`;
/// such that the kernel scans for partitions on a block device of theirs if `partscan`.
fn start_engines(disk: &Arc<Disk>, sandbox: bool, partscan: bool) -> Outcome<Vec<EngineThread>> {
    let start = || -> Outcome<Vec<EngineThread>> {
        if sandbox {
            confine::engine(partscan)?;
        }
        let spawn = |queue| EngineThread::spawn(&format!("blkq-queue-{queue}"), vec![(disk.clone(), queue)]);
        Ok((0..disk.queue_count()).map(spawn).collect::<Result<_, _>>()?)
    };
    // Threads inherit privileges from the one that makes them: this one drops them, and exits.
    std::thread::scope(|scope| scope.spawn(start).join())
        .unwrap_or_else(|_| Err(Failure::new("starting the engines failed")))
}
