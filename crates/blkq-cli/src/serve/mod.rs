//! Where a daemon meets the block layer and its attachments.

mod bitmaps;
mod commit;
mod commit_progress;
mod exports;
mod facts;
mod image;
mod kept_bitmaps;
mod listen;
mod memory_limits;
mod meter;
mod open;
mod rehearsal;
mod rejections;
mod running;
mod settings;
mod snapshot;
mod trace;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use blkq::disk::AutoLimiter;
use blkq::drivers::qcow2::Journals;
use blkq::{ErrorKind, Resume};
use blkq_export::nbd::{NbdSwitches, PreparedCertificates, TlsCertificates};
use blkq_export::ublk::UblkDevice;
use blkq_export::vhost_user::VhostUserDevice;

use crate::autoclear::Autoclear;
use crate::confine::{self, Confinement, Needs};
use crate::failure::{Failure, Outcome};
use crate::group::{GroupWatch, Joined};
use crate::hangs::HangWatch;
use crate::info::{BlockDevice, StateFile};
use crate::log;
use crate::metrics::Endpoint;
use crate::options::Record;
use crate::settings::SettingGroups;
use crate::size::format_size;
use crate::statistics::Statistics;

use commit_progress::CommitProgress;
use meter::Meter;
use running::{Running, busy};

pub use image::find_format;
pub use open::FLUSHES_IGNORED;
pub use rehearsal::{check_successor, check_take_over};
pub use settings::Change;

/// How long a device that stops waits for commands that use it.
const USERS_WAIT: Duration = Duration::from_secs(1);
/// How long the last flush before another daemon may take.
const FLUSH_WAIT: Duration = Duration::from_secs(30);
/// How often a flush checks whether it waits for held requests.
const HELD_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// A device being served, until it is stopped.
pub struct Device {
    name: String,
    served: Mutex<Served>,
    state_directory: PathBuf,
    warnings: Vec<String>,
    /// Why it has no node in /dev, though none was declined.
    fallback: Option<Failure>,
    partscan: bool,
    autoclear: Autoclear,
    meter: Meter,
    background: Mutex<Option<BackgroundThreads>>,
    /// The parts of the system that the control plane needs, until it is confined to them.
    needs: Option<Needs>,
    sandbox: Confinement,
    flushes_ignored: bool,
    /// The kernel's block device, which the next daemon takes over.
    block_device: Option<BlockDevice>,
    /// It was removed.
    block_device_stopped: AtomicBool,
    /// Readable when the kernel rejected a command of its queues.
    failure_event: Arc<OwnedFd>,
    /// Readable when the image may have changed its size by itself.
    size_event: Arc<OwnedFd>,
    /// The groups of settings that it has.
    has: SettingGroups,
    /// And what was changed since it was attached, by its last value, as the state file has it. Never locked while
    /// something waits: reports read it.
    settings: Mutex<Vec<(String, String)>>,
    /// The block commit that is under way.
    commit: Mutex<Option<Arc<CommitProgress>>>,
    /// Locked while the device is changed: one change at a time, which may wait for I/O.
    changing: Mutex<()>,
    certificates: Option<TlsCertificates>,
    /// The journals of qcow2 images.
    journals: Option<Arc<Journals>>,
    rejection_event: Arc<OwnedFd>,
    switches: Arc<NbdSwitches>,
    /// The process that traces it.
    traced_by: Mutex<Option<String>>,
    /// Its group, if it is in one.
    group: Option<Joined>,
    running: Mutex<Option<Arc<Running>>>,
}

/// The image that is served.
#[derive(Clone)]
struct Served {
    image: String,
    /// How it was attached, or would be now.
    attach_options: Option<Record>,
}

/// Threads that only watch, and stop before all else does.
struct BackgroundThreads {
    /// Searches the device's ceiling.
    auto_limit: Option<AutoLimiter>,
    /// That is to be started.
    wants_auto_limit: bool,
    hangs: HangWatch,
    metrics: Option<Endpoint>,
    group: Option<GroupWatch>,
}

impl Device {
    /// Starts to watch the users of a block device that is to stop with its last one, and confines this
    /// thread, the first, and those that it makes from now on, unless that was not wanted. Engines are
    /// confined already.
    ///
    /// # Errors
    /// Confinement that the kernel has, and refuses; if users cannot be seen.
    pub fn confine(&mut self, removed: impl IntoIterator<Item = PathBuf>) -> Outcome {
        if self.autoclear.is_on()
            && let Some(ublk) = &self.running()?.ublk
        {
            ublk.watch_users(true).map_err(|e| Failure::from(e).during("autoclear"))?;
        }
        if let Some(mut needs) = self.needs.take() {
            needs.removed.extend(removed);
            self.sandbox = confine::control(&needs)?;
        }
        Ok(())
    }

    /// Starts to scan for hung requests, and to answer requests for metrics: on threads that have no
    /// more rights than the one that calls this.
    ///
    /// # Errors
    /// If there can be no more threads.
    pub fn start_background(&self) -> Outcome {
        let mut background = self.background();
        let Some(BackgroundThreads { hangs, metrics, group, auto_limit, wants_auto_limit }) =
            &mut *background
        else {
            return Ok(());
        };
        hangs.start(log::line)?;
        group.as_mut().map_or(Ok(()), |group| group.start(log::line))?;
        if std::mem::take(wants_auto_limit) {
            *auto_limit = Some(AutoLimiter::start(&self.running()?.disk)?);
        }
        if let Some(vhost) = &self.running()?.vhost {
            vhost.serve()?;
        }
        let meter = self.meter.clone();
        metrics.as_mut().map_or(Ok(()), |endpoint| endpoint.start(move || meter.sample()))
    }

    fn background(&self) -> MutexGuard<'_, Option<BackgroundThreads>> {
        self.background.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn running(&self) -> Outcome<Arc<Running>> {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        running.clone().ok_or_else(stopping)
    }

    fn served(&self) -> MutexGuard<'_, Served> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The image that is served, as another process finds it.
    pub fn image(&self) -> String {
        self.served().image.clone()
    }

    /// Whether it detaches with its last client.
    pub fn autoclear(&self) -> &Autoclear {
        &self.autoclear
    }

    /// Whether the kernel's block device outlives this process, as far as that is known.
    pub fn leaves_block_device(&self) -> bool {
        self.block_device.is_some() && !self.block_device_stopped.load(SeqCst)
    }

    /// Readable when [`Device::take_failure`] has something.
    pub fn failure_event(&self) -> &OwnedFd {
        &self.failure_event
    }

    /// Readable when [`Device::follow_size`] may have something to do.
    pub fn size_event(&self) -> &OwnedFd {
        &self.size_event
    }

    /// Takes over the size that the image has now, if it is another one, and returns it.
    ///
    /// # Errors
    /// As [`Device::resize`].
    pub fn follow_size(&self) -> Outcome<Option<u64>> {
        let running = self.running()?;
        if running.disk.prepare_resize(None)? == running.disk.limits().size_bytes() {
            return Ok(None);
        }
        drop(running);
        // A smaller one is a fact: what is beyond it is no longer there.
        self.resize(None, true, None).map(Some)
    }

    /// Why the block device lost a tag: its requests can be answered by another daemon only.
    pub fn take_failure(&self) -> Option<Failure> {
        let _ = rustix::io::read(&self.failure_event, &mut [0; 8]);
        Some(self.running().ok()?.ublk.as_ref()?.failure()?.into())
    }

    fn settings(&self) -> MutexGuard<'_, Vec<(String, String)>> {
        self.settings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no other change is made.
    fn begin_change(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The counters, unless the device has stopped.
    pub fn statistics(&self) -> Option<Statistics> {
        self.meter.statistics()
    }

    /// Reads the certificates anew, for clients that connect from now on. Returns the directory that they are in,
    /// if there are any.
    ///
    /// # Errors
    /// Why they cannot be used; those from before stay.
    pub fn reload_certificates(&self) -> Outcome<Option<&Path>> {
        Ok(self.prepare_certificates()?.map(|(directory, certificates)| {
            certificates.install();
            directory
        }))
    }

    /// Reads the certificates anew, which no client gets yet, and returns the directory that they are in, if there are
    /// any.
    ///
    /// # Errors
    /// Why they cannot be used.
    pub fn prepare_certificates(&self) -> Outcome<Option<(&Path, PreparedCertificates)>> {
        let Some(certificates) = &self.certificates else { return Ok(None) };
        let prepared = certificates.prepare();
        let prepared = prepared.map_err(|e| Failure::from(e).during("the certificates stay as they were"))?;
        Ok(Some((certificates.directory(), prepared)))
    }

    /// The contents of the state file.
    ///
    /// # Errors
    /// If the device has stopped.
    pub fn state_file(&self) -> Outcome<StateFile> {
        let running = self.running()?;
        let mut block_device = self.block_device.clone();
        if let (Some(kept), Some(ublk)) = (&mut block_device, &running.ublk) {
            kept.id = ublk.identity().id;
        }
        let info = self.info()?;
        Ok(StateFile {
            name: info.name,
            pid: info.pid,
            image: info.image,
            exports: info.exports,
            attach_options: info.attach_options,
            ublk: block_device,
            owner: running.disk.driver().owner(),
            settings: self.settings().clone(),
        })
    }

    /// Changes the size; `None` takes over that of the image. Returns the new one in bytes. A smaller
    /// one is refused if the device is in use, unless `force` is set: as far as this process sees, or
    /// by `user`.
    ///
    /// # Errors
    /// If the device cannot have that size, or is in use: by which process.
    pub fn resize(&self, bytes: Option<u64>, force: bool, user: Option<String>) -> Outcome<u64> {
        let running = self.running()?;
        // One change at a time: what is larger than the size of now stays so, and no block commit begins.
        let _changing = self.begin_change();
        self.check_not_changed()?;
        if let Some(ublk) = &running.ublk {
            let again = "detach it, and attach it again";
            ublk.check_resizable().map_err(|e| Failure::of(e, ErrorKind::Unsupported, again))?;
        }
        let before = running.disk.limits().size_bytes();
        let other = "detach, and attach with another size";
        let prepared = running.disk.prepare_resize(bytes);
        let after = prepared.map_err(|e| Failure::of(e, ErrorKind::Unsupported, other))?;
        // No client begins to use it with the old size meanwhile.
        let _unused = if after < before && !force {
            let unused = running.claim_unused(user).map_err(|failure| {
                failure.during(format_args!("shrink from {} to {}", format_size(before), format_size(after)))
            })?;
            Some(unused)
        } else {
            None
        };
        let bytes = match &running.unaligned {
            Some(lock) => lock.resize(&running.disk, bytes)?,
            None => running.disk.resize(bytes)?,
        };
        if let Some(ublk) = &running.ublk {
            ublk.resize(bytes).inspect_err(|_| {
                // Undone; the error is the reason.
                let _ = running.disk.resize(Some(before));
            })?;
        }
        if let Some(vhost) = &running.vhost {
            vhost.resized();
        }
        Ok(bytes)
    }

    /// Refuses to close a device that is in use, unless its clients are to be dropped by `force`.
    /// When it returns `Ok`, there are no clients, no sockets and no block device any more.
    ///
    /// # Errors
    /// The clients or processes that use it; the device keeps running.
    pub fn close(&self, force: bool) -> Outcome {
        let running = self.running()?;
        // Held requests fail before clients that are dropped wait for them.
        let _reporting = force.then(|| running.disk.report_errors());
        if !force {
            self.check_not_held()?;
            running.check_no_clients()?;
        }
        // Clients that are dropped wait for their I/O in flight; if the device stays, the limits count again.
        let _unlimited = running.disk.bypass_limits();
        if let Some(ublk) = &running.ublk {
            ublk.stop(force).map_err(Failure::unless_forced)?;
            self.block_device_stopped.store(true, SeqCst);
        }
        // The first one that refuses keeps running, unless another has stopped already: then a
        // client that connected in between is dropped.
        let mut force = force || running.ublk.is_some();
        if let Some(vhost) = &running.vhost {
            vhost.stop(force).map_err(|_| busy(1))?;
            force = true;
        }
        for server in &running.servers {
            if server.stop(force).is_err() {
                return Err(busy(server.connection_count().max(1)));
            }
            force = true;
        }
        Ok(())
    }

    /// Closes all but the block device, which waits for the next daemon when this one exits. I/O
    /// in flight is reissued.
    ///
    /// # Errors
    /// If there is none that could be left; the device keeps running. If its last writes cannot be made durable; this
    /// daemon stays then, without clients.
    pub fn leave(&self) -> Outcome {
        let running = self.running()?;
        if let (None, Some(vhost)) = (&running.ublk, &running.vhost) {
            return self.leave_guest(&running, vhost);
        }
        if !running.ublk.as_ref().is_some_and(UblkDevice::is_recoverable) {
            return Err(Failure::new(
                "there is no block device that another daemon could take over; detach it, and attach it again",
            ));
        }
        // A client that connects from here on is turned away.
        let _unused = (running.pause_servers()?, running.pause_guest()?);
        let _unlimited = running.disk.bypass_limits();
        running.close_servers();
        if let Some(ublk) = &running.ublk {
            ublk.quiesce(&running.disk);
        }
        release(&running)
    }

    /// Closes a device whose virtual machine connects to the next daemon.
    fn leave_guest(&self, running: &Arc<Running>, vhost: &VhostUserDevice) -> Outcome {
        if running.disk.driver().is_lost_with_process() {
            return Err(Failure::new(
                "data of its image is in the memory of its daemon, and would be lost; detach it, and attach it again",
            ));
        }
        // A client that connects from here on is turned away.
        let _unused = running.pause_servers()?;
        let _unlimited = running.disk.bypass_limits();
        vhost.stop_for_next().map_err(|_| {
            Failure::new(
                "its virtual machine keeps no record of requests in flight, and cannot go on with another daemon; remove the disk there first",
            )
        })?;
        running.close_servers();
        release(running)
    }

    /// Reissues the requests that are held after errors, or has them fail. Returns how many.
    ///
    /// # Errors
    /// If the device has stopped.
    pub fn resume(&self, fail: bool) -> Outcome<u64> {
        let how = if fail { Resume::Fail } else { Resume::Reissue };
        Ok(self.running()?.disk.resume(how))
    }

    /// Refuses while requests are held after errors.
    ///
    /// # Errors
    /// How many, and the cure.
    pub fn check_not_held(&self) -> Outcome {
        match self.running()?.disk.held() {
            0 => Ok(()),
            held => Err(Failure::held(held)),
        }
    }

    /// Makes what was written durable.
    ///
    /// # Errors
    /// If this or an earlier write cannot be made durable, requests are held after errors, which a flush would
    /// wait for, or the device has stopped.
    pub fn flush(&self) -> Outcome {
        flush_unless_held(&self.running()?)
    }

    /// Stops a device that is closed: flushes, stops the engines and closes the image.
    ///
    /// # Errors
    /// If the flush failed; the device has stopped all the same.
    pub fn stop(&self) -> Outcome {
        // They may use it just now.
        drop(self.background().take());
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(running) = running else { return Ok(()) };
        let _unlimited = running.disk.bypass_limits();
        let _reporting = running.disk.report_errors();
        let flushed = running.flush();
        // The last one that uses the image closes it, and this process is about to exit.
        let until = Instant::now() + USERS_WAIT;
        while Arc::strong_count(&running) > 1 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        let kept = running.bitmaps.keep();
        drop(running);
        flushed.and(kept)
    }
}

impl BackgroundThreads {
    /// How they are set.
    fn describe(&self) -> Vec<(&'static str, String)> {
        let limit = ("hang-warning", self.hangs.limit().as_secs_f64().to_string());
        let metrics = self.metrics.iter().map(|endpoint| ("metrics", endpoint.uri().to_owned()));
        std::iter::once(limit).chain(metrics).collect()
    }
}

/// Releases the image, which has no clients any more, for the next daemon. One that finds it locked all the same
/// breaks the lock, or waits.
///
/// # Errors
/// If the last writes of the clients cannot be made durable: the next daemon would not know, and answer flushes
/// without an error.
fn release(running: &Arc<Running>) -> Outcome {
    flush_within(running, FLUSH_WAIT).inspect_err(|failure| {
        log::line(&format!("not left to another daemon, which would not know of it: {failure}"));
    })?;
    // The next daemon has them as inconsistent then.
    if let Err(failure) = running.bitmaps.keep_for_next() {
        log::line(&format!("warning: {failure}"));
    }
    if let Err(error) = running.disk.release() {
        log::line(&format!("the image is left as if this daemon were killed: {error}"));
    }
    Ok(())
}

/// Flushes; a flush that is not answered is left to itself.
fn flush_within(running: &Arc<Running>, wait: Duration) -> Outcome {
    begin_flush(running)?
        .recv_timeout(wait)
        .unwrap_or_else(|_| Err(Failure::new(format!("flush: no answer within {} s", wait.as_secs()))))
}

/// Flushes; a flush that waits for held requests, of now or of later, is left to itself.
fn flush_unless_held(running: &Arc<Running>) -> Outcome {
    flush_unless_stopped(running, &|| Ok(()))
}

/// As [`flush_unless_held`], as long as `stop` says so.
fn flush_unless_stopped(running: &Arc<Running>, stop: &dyn Fn() -> Outcome) -> Outcome {
    let flushed = begin_flush(running)?;
    loop {
        match (flushed.recv_timeout(HELD_POLL_INTERVAL), running.disk.held()) {
            (Ok(flushed), _) => return flushed,
            (Err(RecvTimeoutError::Timeout), 0) => stop()?,
            (Err(RecvTimeoutError::Timeout), held) => return Err(Failure::held(held)),
            (Err(RecvTimeoutError::Disconnected), _) => return Err(stopping()),
        }
    }
}

/// Has a thread flush, which is left to itself if nobody waits any longer.
fn begin_flush(running: &Arc<Running>) -> Outcome<Receiver<Outcome>> {
    let (sender, flushed) = channel();
    let running = running.clone();
    let flush = move || _ = sender.send(running.flush());
    let spawned = thread::Builder::new().name("blkq-flush".to_owned()).spawn(flush);
    spawned.map_err(|e| Failure::new(format!("flush: {e}")))?;
    Ok(flushed)
}

fn stopping() -> Failure {
    Failure::new("the device is stopping")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::tests::options;
    use crate::state::tests::scratch;

    #[test]
    fn a_device_has_stopped_when_no_command_uses_it_any_more() {
        let dir = scratch("users");
        let claim = dir.claim("a").unwrap();
        let options = options(&["ram:1M", "--export", "nbd", "--no-sandbox"]);
        let device = Device::open(&options, Vec::new(), &claim, Vec::new()).unwrap();
        device.close(true).unwrap();
        let used = device.running().unwrap();
        let disk = Arc::downgrade(&used.disk);
        let user = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            drop(used);
        });
        device.stop().unwrap();
        assert!(disk.upgrade().is_none(), "the image is closed");
        user.join().unwrap();
        drop((device, claim));
        std::fs::remove_dir_all(dir.path()).unwrap();
    }
}
