//! Live block commit: copies the overlay into its backing file, then pivots the device to that file.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use blkq::bitmap::BitmapStore;
use blkq::sync::lock;
use blkq::text::shell_word;
use blkq::{Disk, Driver, ErrorKind};
use blkq_drivers::no_backing_file;
use blkq_drivers::qcow2::{BackingFile, BaseFiles, BlockCommit, CommitSource};
use blkq_protocol::control::Committed;
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::options::Record;

use super::running::{Running, Served, new_warnings};
use crate::log;

/// Number of passes in which copying pauses while clients do I/O.
const THROTTLED_PASSES: u32 = 3;
/// Limits how long clients may have to wait for the last pass, during which I/O is frozen: this time after
/// the first pass, doubled after each further pass, up to [`LAST_PASS_MAX`].
const LAST_PASS: Duration = Duration::from_millis(50);
const LAST_PASS_MAX: Duration = Duration::from_secs(10);
/// Assumed until a rate was measured, in bytes per second.
const RATE_ASSUMED: f64 = 1e8;

/// A block commit in progress, which ends when this is dropped.
pub(super) struct Commit<'a> {
    running: &'a Arc<Running>,
    commit: BlockCommit,
    /// The driver of the overlay.
    top: Arc<dyn Driver>,
    /// The image after the pivot.
    next: Served,
    stop: &'a dyn Fn() -> Outcome,
    /// Number of passes so far.
    passes: u32,
}

impl Drop for Commit<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.commit.stop() {
            log::line(&format!("warning: cannot restore the shared lock on the backing file: {error}"));
        }
        self.running.changes.end_commit();
    }
}

impl<'a> Commit<'a> {
    /// Begins a commit of the active overlay into `files`, as `Device::commit` describes it. Refuses an
    /// unsuitable backing file, and reserves space in it for the dirty bitmaps of the device.
    pub(super) fn begin(
        running: &'a Arc<Running>,
        files: BaseFiles,
        number: u64,
        client: &str,
        stop: &'a dyn Fn() -> Outcome,
    ) -> Outcome<Commit<'a>> {
        running.check_not_held()?;
        // From here on, either another change has completed, or it is refused because this one is published.
        let _changing = running.changes.begin(&|| Ok(()))?;
        let top = running.disk.driver();
        let source = source(running)?;
        let next = next_image(running, source.base(), number)?;
        running.changes.check_no_commit()?;
        let size = running.disk.limits().size_bytes();
        let begun = source.begin(files, running.journals.as_deref());
        let commit = begun.map_err(|e| not_begun(e, size))?;
        running.changes.begin_commit(next.image.clone(), client.to_owned());
        let commit = Commit { running, commit, top, next, stop, passes: 0 };
        let driver = commit.commit.driver()?;
        running.disk.check_exchange(driver)?;
        running.check_outlives(driver, None)?;
        check_keeps_bitmaps(&running.disk, driver)?;
        driver.require_bitmap_store()?.reserve(&running.disk.bitmaps())?;
        Ok(commit)
    }

    /// Copies the overlay, and pivots the device to the backing file.
    pub(super) fn run<G>(
        mut self,
        last: impl Fn() -> Outcome<Option<G>>,
        save: impl FnOnce(&Served) -> Outcome,
    ) -> Outcome<Committed> {
        let running = self.running;
        self.commit.count(self.stop)?;
        loop {
            let most = self.copy_passes()?;
            let changing = running.changes.begin(&|| Ok(()))?;
            running.check_not_held()?;
            let emptied = lock(&running.served).image.clone();
            let exchange = running.disk.begin_exchange()?;
            if !Arc::ptr_eq(&running.disk.driver(), &self.top) {
                return Err(Failure::new("the device has switched to another image; try again"));
            }
            let commit = &mut self.commit;
            // This must be checked before the overlay is emptied.
            exchange.check(commit.driver()?)?;
            let until = Instant::now() + 2 * most;
            if !commit.catch_up(&|| Ok::<_, Failure>(last()?.is_some() && Instant::now() < until))? {
                continue;
            }
            let Some(stage) = last()? else { continue };
            let (image, copied_bytes) = (self.next.image.clone(), commit.progress().0);
            let warnings = new_warnings(commit.driver()?, &*self.top);
            running.replace(&exchange, commit.finish(|| save(&self.next))?.into())?;
            *lock(&running.served) = self.next.clone();
            drop(exchange);
            // The locks are released before the flush below, which may take long or hang: a forced stop must
            // not wait for it.
            drop((stage, changing));
            running.log_broken();
            commit.free();
            return Ok(Committed { image, emptied, copied_bytes, warnings });
        }
    }

    /// Copies in passes until the rest can be copied in the time that clients may have to wait. Returns that
    /// time, which grows with the number of passes.
    fn copy_passes(&mut self) -> Outcome<Duration> {
        let Commit { running, commit, stop, passes, .. } = self;
        let (mut copying, data_before) = (Duration::ZERO, commit.data_bytes());
        loop {
            let pass = *passes;
            *passes += 1;
            let (mut seen, before) = (activity(&running.disk), commit.data_bytes());
            while commit.find(*stop, || running.flush_unless_stopped(*stop))? {
                loop {
                    stop()?;
                    running.changes.report(commit.progress());
                    let (begin, data) = (Instant::now(), commit.data_bytes());
                    if !commit.copy()? {
                        break;
                    }
                    let took = begin.elapsed();
                    if commit.data_bytes() > data {
                        copying += took;
                    }
                    let now = activity(&running.disk);
                    if pass < THROTTLED_PASSES && now != seen {
                        // Leave the clients as much time as the copy took.
                        thread::sleep(took);
                    }
                    seen = now;
                }
            }
            let begin = Instant::now();
            commit.next_pass(*stop)?;
            if commit.data_bytes() > before {
                // A copy may only be in the page cache, so the time to make it durable counts, too.
                copying += begin.elapsed();
            }
            let (copied, total) = commit.progress();
            // Zeroes are not counted: they are much faster to copy, and the estimate would be too low for data.
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
}

pub(super) fn source(running: &Running) -> Outcome<CommitSource> {
    let image = running.image().ok_or_else(|| no_backing_file(running.disk.driver().name()))?;
    Ok(image.commit_source()?)
}

fn check_keeps_bitmaps(disk: &Disk, driver: &dyn Driver) -> Outcome {
    let bitmaps = disk.bitmaps();
    let Some(first) = bitmaps.first() else { return Ok(()) };
    driver.require_bitmap_store().and_then(BitmapStore::check).map_err(|error| {
        let why: Vec<String> = std::iter::once(error.to_string()).chain(driver.warnings()).collect();
        Failure::new(format!(
            "the backing file cannot store the dirty bitmap {}: {}; make a backup, then run `blkq bitmap remove {} {}`",
            first.name(),
            why.join("; "),
            shell_word(disk.name()),
            shell_word(first.name())
        ))
    })
}

/// The image after the pivot to `base`.
fn next_image(running: &Running, base: &BackingFile, number: u64) -> Outcome<Served> {
    let options = lock(&running.served).attach_options.as_ref().map(Record::read).transpose()?;
    let unknown = "the attach options of this device are unknown; detach it and attach it again";
    let options = options.ok_or_else(|| Failure::new(unknown))?;
    let options =
        options.committed_into(&base.path, base.qcow2, running.disk.limits().logical_block_bytes)?;
    let attach_options = Some(Record::new(&options)?);
    Ok(Served { image: base.path.display().to_string(), number, attach_options })
}

/// The reads, writes and discards that clients have begun.
fn activity(disk: &Disk) -> [u64; 3] {
    let fields = disk.stats().fields();
    [fields[0], fields[4], fields[11]]
}

fn not_begun(error: blkq::Error, size: u64) -> Failure {
    match error.kind() {
        ErrorKind::Busy => Failure::new(format!(
            "{error}; detach the device that uses the backing file, as its image or in its backing chain"
        )),
        ErrorKind::Mismatch => Failure::new(format!(
            "{error}; enlarge the device, which has {size} bytes, with `blkq resize` first"
        )),
        _ => error.into(),
    }
}
