//! A device goes on in the image behind its own, which gets all that this has.

use std::sync::{Arc, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use blkq::bitmap::BitmapStore;
use blkq::{Disk, Driver, ErrorKind};
use blkq_drivers::no_backing_file;
use blkq_drivers::qcow2::{BaseFiles, BaseImage, BlockCommit, CommitSource};
use blkq_export::ublk::UblkDevice;

use super::commit_progress::CommitProgress;
use super::running::Running;
use super::snapshot::{log_broken, new_warnings};
use super::{Device, Served, flush_unless_stopped};
use crate::control::Committed;
use crate::failure::{Failure, Outcome};
use crate::info::{CommitInfo, DaemonState};
use crate::log;
use crate::options::Record;

/// Passes in which clients go first.
const POLITE_PASSES: u32 = 3;
/// How long clients may have to wait for the last pass: so long after the first one, twice as long after each other, up
/// to the second.
const LAST_PASS: Duration = Duration::from_millis(50);
const LAST_PASS_MAX: Duration = Duration::from_secs(10);
/// The rate of copies that is assumed as long as none was made, in bytes per second.
const RATE_ASSUMED: f64 = 1e8;

/// A block commit that stops when this is dropped, unless it has finished.
struct Stopping(BlockCommit);

impl Drop for Stopping {
    fn drop(&mut self) {
        if let Err(error) = self.0.stop() {
            log::line(&format!("warning: the image behind is not locked as it was: {error}"));
        }
    }
}

/// The progress of a device's block commit, which is over when this is dropped.
struct Reported<'a> {
    device: &'a Device,
    progress: Arc<CommitProgress>,
}

impl Drop for Reported<'_> {
    fn drop(&mut self) {
        *self.device.commit_progress() = None;
    }
}

impl Device {
    /// The block commit that is under way.
    pub(super) fn commit_info(&self) -> Option<CommitInfo> {
        self.commit_progress().as_ref().map(|progress| progress.info())
    }

    fn commit_progress(&self) -> MutexGuard<'_, Option<Arc<CommitProgress>>> {
        self.commit.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses another change of the image while a block commit is under way.
    ///
    /// # Errors
    /// That a block commit is under way, and for which client.
    pub fn check_not_changed(&self) -> Outcome {
        self.commit_progress().as_ref().map_or(Ok(()), |progress| Err(progress.refusal()))
    }

    /// Checks whether there is an image behind its own, which can take what that has.
    ///
    /// # Errors
    /// Why not.
    pub fn check_committable(&self) -> Outcome {
        commit_source(&*self.running()?)?;
        self.check_not_changed()
    }

    /// Has all that the image has go to the one behind it, which `files` are, as
    /// [`open_base`](blkq_drivers::qcow2::open_base) opened it, and which gets that `number` in `NAME.options`, for `client`, and the device go on in that, with its
    /// dirty bitmaps. Most of it is copied while I/O goes on. `stop` is asked again and again whether to go on. I/O
    /// waits for the rest, while `last` is asked too, and while `keep` writes the state file. Its value is kept until
    /// that is over; if there is none, I/O goes on before it is asked again.
    ///
    /// # Errors
    /// Why the device goes on as it was.
    pub fn commit<G>(
        &self,
        files: BaseFiles,
        number: u64,
        client: &str,
        stop: &dyn Fn() -> Outcome,
        last: impl Fn() -> Outcome<Option<G>>,
        keep: impl FnOnce(&DaemonState) -> Outcome,
    ) -> Outcome<Committed> {
        let running = self.running()?;
        self.check_not_held()?;
        let (top, served, reported, mut commit);
        {
            // Another change is over, or finds this one reported.
            let _changing = self.begin_change();
            top = running.disk.driver();
            let source = commit_source(&running)?;
            served = self.served_in(&running, source.base(), number)?;
            reported = self.report_commit(client, &served.image)?;
            let size = running.disk.limits().size_bytes();
            let journals = self.journals.as_deref();
            let begun = source.begin(files, journals);
            commit = Stopping(begun.map_err(|e| not_begun(e, size))?);
            prepare(&running, commit.0.driver()?)?;
        }
        let commit = &mut commit.0;
        commit.count(stop)?;
        let mut rounds = 0;
        loop {
            let most = copy_passes(&running, commit, &reported.progress, stop, &mut rounds)?;
            let changing = self.begin_change();
            self.check_not_held()?;
            let state = DaemonState { image: number, ..self.state()? };
            let emptied = self.image();
            let exchange = running.disk.begin_exchange()?;
            check_same(&running.disk, &top)?;
            // Before the image is emptied.
            exchange.check(commit.driver()?)?;
            let until = Instant::now() + 2 * most;
            if !commit.catch_up(&|| Ok::<_, Failure>(last()?.is_some() && Instant::now() < until))? {
                continue;
            }
            let Some(stage) = last()? else { continue };
            let (image, copied_bytes) = (served.image.clone(), commit.progress().0);
            let warnings = new_warnings(commit.driver()?, &*top);
            running.replace(&exchange, commit.finish(|| keep(&state))?.into())?;
            *self.served() = served;
            drop(exchange);
            // A flush may take long, or hang, and a forced stop does not wait for it.
            drop((stage, changing));
            log_broken(&running);
            commit.free();
            return Ok(Committed { image, emptied, copied_bytes, warnings });
        }
    }

    /// The device as it is served in `base`.
    fn served_in(&self, running: &Running, base: &BaseImage, number: u64) -> Outcome<Served> {
        let options = self.served().attach_options.as_ref().map(Record::read).transpose()?;
        let Some(options) = options else {
            return Err(Failure::new("its options are not known; detach it, and attach it again"));
        };
        let options =
            options.committed_into(&base.path, base.qcow2, running.disk.limits().logical_block_bytes)?;
        let attach_options = Some(Record::new(&options)?);
        Ok(Served { image: base.path.display().to_string(), number, attach_options })
    }

    fn report_commit(&self, client: &str, into: &str) -> Outcome<Reported<'_>> {
        let mut under_way = self.commit_progress();
        if let Some(progress) = &*under_way {
            return Err(progress.refusal());
        }
        let progress = Arc::new(CommitProgress::new(client, into));
        *under_way = Some(Arc::clone(&progress));
        drop(under_way);
        Ok(Reported { device: self, progress })
    }
}

/// The image, as one that can be committed.
fn commit_source(running: &Running) -> Outcome<CommitSource> {
    let image = running.image().ok_or_else(|| no_backing_file(running.disk.driver().name()))?;
    Ok(image.commit_source()?)
}

/// Refuses an image that cannot take the place of the device's; else it names the device's dirty bitmaps.
fn prepare(running: &Running, driver: &dyn Driver) -> Outcome {
    running.disk.check_exchange(driver)?;
    check_outlives(running, driver)?;
    check_keeps_bitmaps(&running.disk, driver)?;
    Ok(driver.require_bitmap_store()?.reserve(&running.disk.bitmaps())?)
}

/// Refuses an image that has no place for the dirty bitmaps of the device.
fn check_keeps_bitmaps(disk: &Disk, driver: &dyn Driver) -> Outcome {
    let bitmaps = disk.bitmaps();
    let Some(first) = bitmaps.first() else { return Ok(()) };
    driver.require_bitmap_store().and_then(BitmapStore::check).map_err(|error| {
        let why: Vec<String> = std::iter::once(error.to_string()).chain(driver.warnings()).collect();
        Failure::new(format!(
            "its dirty bitmap {} would be lost: {}; make a backup, and remove it with blkq bitmap",
            first.name(),
            why.join("; ")
        ))
    })
}

/// Refuses to leave another image than that which was copied.
fn check_same(disk: &Disk, top: &Arc<dyn Driver>) -> Outcome {
    match Arc::ptr_eq(&disk.driver(), top) {
        true => Ok(()),
        false => Err(Failure::new("it has another image now; try again")),
    }
}

/// Refuses an image which loses with the daemon what a block device that outlives it was promised.
fn check_outlives(running: &Running, driver: &dyn Driver) -> Outcome {
    if running.ublk.as_ref().is_some_and(UblkDevice::is_recoverable) && driver.is_lost_with_process() {
        let why = driver.warnings().join("; ");
        return Err(Failure::new(format!(
            "a block device outlives its daemon, and the image behind would not: {why}"
        )));
    }
    Ok(())
}

/// Copies while I/O goes on, until the rest takes clients no longer than they may have to wait, which is returned:
/// longer after more `rounds`.
fn copy_passes(
    running: &Arc<Running>,
    commit: &mut BlockCommit,
    progress: &CommitProgress,
    stop: &dyn Fn() -> Outcome,
    rounds: &mut u32,
) -> Outcome<Duration> {
    let (mut copying, data_before) = (Duration::ZERO, commit.data_bytes());
    loop {
        let pass = *rounds;
        *rounds += 1;
        let (mut seen, before) = (activity(&running.disk), commit.data_bytes());
        while commit.find(stop, || flush_unless_stopped(running, stop))? {
            loop {
                stop()?;
                progress.note(commit.progress());
                let (begin, data) = (Instant::now(), commit.data_bytes());
                if !commit.copy()? {
                    break;
                }
                let took = begin.elapsed();
                if commit.data_bytes() > data {
                    copying += took;
                }
                let now = activity(&running.disk);
                if pass < POLITE_PASSES && now != seen {
                    // As much of the time for them.
                    thread::sleep(took);
                }
                seen = now;
            }
        }
        let begin = Instant::now();
        commit.next_pass(stop)?;
        if commit.data_bytes() > before {
            // To be durable is a part of it: a copy may be in the page cache only.
            copying += begin.elapsed();
        }
        let (copied, total) = commit.progress();
        // Zeroes would make it endless.
        let data = commit.data_bytes() - data_before;
        let rate = match copying.as_secs_f64() {
            seconds if seconds > 0.0 && data > 0 => data as f64 / seconds,
            _ => RATE_ASSUMED,
        };
        let most = LAST_PASS.saturating_mul(1 << pass.min(16)).min(LAST_PASS_MAX);
        if (total - copied) as f64 / rate <= most.as_secs_f64() {
            return Ok(most);
        }
    }
}

/// Reads, writes and discards that clients have begun.
fn activity(disk: &Disk) -> [u64; 3] {
    let fields = disk.stats().fields();
    [fields[0], fields[4], fields[11]]
}

/// Why a block commit could not begin, with the cure.
fn not_begun(error: blkq::Error, size: u64) -> Failure {
    match error.kind() {
        ErrorKind::Busy => {
            Failure::new(format!("{error}; detach there first what has it, or has it behind its own image"))
        }
        ErrorKind::Mismatch => Failure::new(format!(
            "{error}; give the device at least that size with blkq resize (it has {size})"
        )),
        _ => error.into(),
    }
}
