use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use blkq::bitmap::{Bitmap, BitmapStore};
use blkq::clock::monotonic_ns;
use blkq::disk::Exchange;
use blkq::gate::GateCounters;
use blkq::sync::lock;
use blkq::throttle::{Ceiling, RateLimits};
use blkq::{Disk, Driver, EngineThread, StatsSnapshot};
use blkq_drivers::qcow2::Journals;
use blkq_drivers::{Image, Opened};
use blkq_export::nbd::{NbdCounters, NbdServer};
use blkq_export::ublk::{Identity, UblkDevice};
use blkq_export::vhost_user::VhostUserDevice;
use blkq_protocol::control::statistics::{Gate, Nbd, QueueSums, Statistics, Throttle, VhostUser};
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::group::Joined;
use blkq_protocol::info::{BlockDevice, CommitInfo, DaemonState, OlderState};
use blkq_protocol::options::Record;

use super::servers::{Connected, Servers};
use crate::hangs::HangCounters;
use crate::log;
use crate::metrics::Sample;

/// How often a caller that waits for a flush checks whether requests are held. The flush cannot complete
/// before these requests.
const HELD_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How long a device that stops waits for commands that still use it.
const USERS_WAIT: Duration = Duration::from_secs(1);
/// How long the last flush before a handover may take.
const FLUSH_WAIT: Duration = Duration::from_secs(30);

/// The image as other processes know it.
#[derive(Clone)]
pub(super) struct Served {
    pub(super) image: String,
    /// The number of the image in `NAME.options`.
    pub(super) number: u64,
    pub(super) attach_options: Option<Record>,
}

impl Served {
    /// The state of the device `name` without exports, with the block device `ublk` and changed `settings`.
    pub(super) fn state(
        &self,
        name: &str,
        ublk: Option<Identity>,
        settings: Vec<(String, String)>,
    ) -> DaemonState {
        let Served { image, number, attach_options } = self.clone();
        let ublk = ublk.map(BlockDevice::new);
        let older = OlderState { name: name.to_owned(), image, attach_options, ublk }.if_short();
        DaemonState { pid: std::process::id(), number, exports: Vec::new(), settings, older }
    }
}

/// The parts of a device that exist while it is served, in the order in which they must stop: fields are
/// dropped in order.
pub(super) struct Running {
    pub(super) servers: Servers,
    pub(super) ublk: Option<UblkDevice>,
    /// One engine per hardware queue. Dropping the last reference stops the engines, before the disk.
    pub(super) engines: Vec<EngineThread>,
    /// Saved when this is dropped, after the engines have stopped writing to the image.
    pub(super) bitmaps: PersistentBitmaps,
    /// Replaced together with the driver. `None` if the driver has no image.
    pub(super) image: Mutex<Option<Image>>,
    pub(super) served: Mutex<Served>,
    pub(super) journals: Option<Arc<Journals>>,
    pub(super) disk: Arc<Disk>,
    pub(super) changes: Changes,
    /// The group of the device. Replacing the value frees the device's slot in the previous group.
    pub(super) group: Mutex<Option<Joined>>,
    pub(super) hangs: Arc<HangCounters>,
    pub(super) opened_ns: u64,
}

impl Running {
    /// Changes of the device replace the image, so a caller that needs it to stay must exclude them.
    pub(super) fn image(&self) -> Option<Image> {
        lock(&self.image).clone()
    }

    /// Replaces the image with the driver. Fails as [`Exchange::replace`] does; nothing has changed then.
    pub(super) fn replace(&self, exchange: &Exchange<'_>, next: Opened) -> Outcome {
        exchange.replace(next.driver)?;
        *lock(&self.image) = next.image;
        Ok(())
    }

    pub(super) fn exports(&self) -> Vec<String> {
        let ublk = self.ublk.iter().map(|ublk| ublk.identity().path());
        ublk.chain(self.servers.uris()).collect()
    }

    pub(super) fn group_name(&self) -> Option<String> {
        lock(&self.group).as_ref().map(|joined| joined.name().to_owned())
    }

    pub(super) fn uptime_ns(&self) -> u64 {
        monotonic_ns().saturating_sub(self.opened_ns)
    }

    pub(super) fn statistics(&self) -> Statistics {
        let disk = &self.disk;
        let now_ns = monotonic_ns();
        let mut counters = NbdCounters::default();
        self.servers.nbd.iter().for_each(|server| counters += server.counters());
        let connected = self.servers.nbd.iter().map(NbdServer::connection_count).sum::<usize>() as u64;
        let queues: Vec<StatsSnapshot> = disk.queue_stats().collect();
        let mut sum = StatsSnapshot::default();
        queues.iter().for_each(|queue| sum += queue);
        let mut statistics = Statistics::new(&sum, now_ns, self.uptime_ns());
        statistics.queues = queues.iter().map(QueueSums::new).collect();
        statistics.stalls = self.hangs.stalls();
        statistics.hang_warning_ns = self.hangs.limit().as_nanos() as u64;
        let GateCounters { waits, wakeups, grants, largest_grant, .. } = disk.gate_counters();
        statistics.gate = Gate { waiting: disk.gate_waiting(), waits, wakeups, grants, largest_grant };
        let text = |limits: RateLimits| if limits.is_none() { String::new() } else { limits.to_string() };
        let member = disk.group_member();
        let group_limits = member.as_ref().and_then(|member| member.group().limits());
        statistics.throttle = Throttle {
            limits: match disk.ceiling() {
                Ceiling::NotSearched => text(disk.rate_limits()),
                Ceiling::Unknown => "auto".to_owned(),
                Ceiling::Found(ceiling) => format!("auto ({ceiling})"),
            },
            group: self.group_name(),
            group_limits: group_limits.map(|(_, limits)| text(limits)).unwrap_or_default(),
            weight: member.map_or(0, |member| member.weight()),
        };
        statistics.vhost_user = self.servers.vhost.as_ref().map(|vhost| VhostUser {
            connected: vhost.connection_count() as u64,
            counters: vhost.counters(),
        });
        statistics.nbd = (!self.servers.nbd.is_empty()).then_some(Nbd { connected, counters });
        statistics
    }

    pub(super) fn sample(&self) -> Sample {
        let size_bytes = self.disk.limits().size_bytes();
        Sample { name: self.disk.name().to_owned(), size_bytes, statistics: self.statistics() }
    }

    /// Keeps clients and users of the block device away until the returned guard is dropped. Fails if there
    /// are clients or users, or `user` is given.
    pub(super) fn claim_unused(&self, user: Option<String>) -> Outcome<impl Sized> {
        if let Some(user) = user {
            return Err(Failure::new(user));
        }
        let paused = self.servers.pause().map_err(Connected::unless_forced)?;
        let claimed = self.ublk.as_ref().map(UblkDevice::claim).transpose();
        Ok((paused, claimed.map_err(Failure::unless_forced)?))
    }

    /// Fails if an earlier write or this flush failed.
    pub(super) fn flush(&self) -> Outcome {
        let limits = self.disk.limits();
        if !limits.write_cache || limits.read_only {
            return Ok(());
        }
        self.disk.submitter().flush().map_err(|e| Failure::new(format!("cannot flush the image: {e}")))
    }

    /// Fails while requests are held after I/O errors.
    pub(super) fn check_not_held(&self) -> Outcome {
        match self.disk.held() {
            0 => Ok(()),
            held => Err(Failure::held(held)),
        }
    }

    /// If the flush takes longer than `wait`, it continues on its own thread and this fails.
    fn flush_within(self: &Arc<Running>, wait: Duration) -> Outcome {
        self.begin_flush()?.recv_timeout(wait).unwrap_or_else(|_| {
            Err(Failure::new(format!("the flush did not complete within {} s", wait.as_secs())))
        })
    }

    /// Fails if requests are held: the flush would wait for them, and continues on its own thread.
    pub(super) fn flush_unless_held(self: &Arc<Running>) -> Outcome {
        self.flush_unless_stopped(&|| Ok(()))
    }

    /// As [`Running::flush_unless_held`]; also fails when `stop` does.
    pub(super) fn flush_unless_stopped(self: &Arc<Running>, stop: &dyn Fn() -> Outcome) -> Outcome {
        let flushed = self.begin_flush()?;
        loop {
            match flushed.recv_timeout(HELD_POLL_INTERVAL) {
                Ok(flushed) => return flushed,
                Err(RecvTimeoutError::Timeout) => self.check_not_held().and_then(|()| stop())?,
                Err(RecvTimeoutError::Disconnected) => return Err(stopping()),
            }
        }
    }

    /// Flushes on a new thread, which continues even if the receiver is dropped.
    fn begin_flush(self: &Arc<Running>) -> Outcome<Receiver<Outcome>> {
        let (sender, flushed) = channel();
        let running = self.clone();
        let flush = move || _ = sender.send(running.flush());
        let spawned = thread::Builder::new().name("blkq-flush".to_owned()).spawn(flush);
        spawned.map_err(|e| Failure::new(format!("cannot start a thread for the flush: {e}")))?;
        Ok(flushed)
    }

    /// A block device that survives its daemon promises to keep recent writes if the daemon is killed. `why` is the
    /// reason for which `driver` does not; by default, its warnings are.
    pub(super) fn check_outlives(&self, driver: &dyn Driver, why: Option<&str>) -> Outcome {
        if self.ublk.as_ref().is_some_and(UblkDevice::is_recoverable) && driver.is_lost_with_process() {
            let why = why.map_or_else(|| driver.warnings().join("; "), str::to_owned);
            return Err(Failure::new(format!("a killed daemon would lose data of the block device: {why}")));
        }
        Ok(())
    }

    /// Logs a queue that broke when the image was replaced.
    pub(super) fn log_broken(self: &Arc<Running>) {
        // When the flush completes, every queue has switched to the new driver.
        let flushed = self.flush_unless_held();
        if let (Err(_), Some(why)) = (flushed, self.disk.broken()) {
            log::line(&format!("all I/O fails: {why}; detach the device and attach it again"));
        }
    }

    /// As `Device::close`. Calls `removed_block_device` when the kernel has removed the block device.
    pub(super) fn close(&self, force: bool, removed_block_device: impl FnOnce()) -> Outcome {
        // Held requests must fail first: clients that are disconnected wait for them.
        let _reporting = force.then(|| self.disk.report_errors());
        if !force {
            self.check_not_held()?;
            if let clients @ 1.. = self.servers.client_count() {
                return Err(Connected(clients).unless_forced());
            }
        }
        // Clients that are disconnected wait for their I/O in flight, so limits must not delay it. If the
        // device stays, the limits apply again.
        let _unlimited = self.disk.bypass_limits();
        // Stopping the block device may take seconds, because the kernel writes back dirty pages. NBD clients
        // are disconnected before, so that they are not served meanwhile.
        let dropping = force.then(|| self.servers.begin_stop(true)).transpose()?;
        let removed = self.ublk.as_ref().map_or(Ok(()), |ublk| {
            ublk.stop(force).map_err(Failure::unless_forced).inspect(|()| removed_block_device())
        });
        if let Some(dropping) = dropping {
            dropping.wait();
            return removed;
        }
        removed?;
        self.servers.begin_stop(self.ublk.is_some())?.wait();
        Ok(())
    }

    /// As `Device::leave`.
    pub(super) fn leave(self: &Arc<Running>) -> Outcome {
        let ublk = self.ublk.as_ref();
        // The virtual machine of a device that is not a block device will connect to the next daemon.
        let guest = self.servers.vhost.as_ref().filter(|_| ublk.is_none());
        let why = match (ublk, guest) {
            (Some(ublk), _) if !ublk.is_recoverable() => {
                Some("another daemon cannot take over this block device; detach it and attach it again")
            }
            (None, Some(_)) if self.disk.driver().is_lost_with_process() => Some(
                "the daemon holds data of the image in memory, which would be lost; detach the device and attach it again",
            ),
            (None, None) => Some(
                "NBD connections cannot be handed to another daemon; detach the device, attach it again, and let clients \
                 reconnect",
            ),
            _ => None,
        };
        if let Some(why) = why {
            return Err(Failure::new(why));
        }
        // A client that connects from here on is rejected.
        let paused = if guest.is_some() { self.servers.pause_nbd() } else { self.servers.pause() };
        let _unused = paused.map_err(Connected::not_handed_over)?;
        let _unlimited = self.disk.bypass_limits();
        guest.map_or(Ok(()), VhostUserDevice::stop_for_next).map_err(|_| {
            Failure::new(
                "the front end does not track requests in flight, so the disk cannot move to another daemon; unplug the disk from the virtual machine first",
            )
        })?;
        self.servers.close();
        ublk.iter().for_each(|ublk| ublk.quiesce(&self.disk));
        self.release()
    }

    /// Releases the image, which has no clients, for the next daemon. If it cannot be released, the next daemon
    /// breaks its lock or waits for it. Fails if the last writes cannot be made durable: the next daemon would
    /// not know, and would answer flushes without an error.
    fn release(self: &Arc<Running>) -> Outcome {
        self.flush_within(FLUSH_WAIT).inspect_err(|failure| {
            log::line(&format!("not handed to another daemon, because the last flush failed: {failure}"));
        })?;
        // If this fails, the bitmaps are inconsistent for the next daemon.
        if let Err(failure) = self.bitmaps.save_for_next() {
            log::line(&format!("warning: {failure}"));
        }
        if let Err(error) = self.disk.release() {
            log::line(&format!(
                "cannot release the image, so the next daemon opens it as after a crash: {error}"
            ));
        }
        Ok(())
    }

    /// Flushes and stops a closed device. Fails if the flush failed or the dirty bitmaps could not be saved.
    pub(super) fn stop(self: Arc<Running>) -> Outcome {
        let _unlimited = self.disk.bypass_limits();
        let _reporting = self.disk.report_errors();
        let flushed = self.flush();
        // Dropping the last reference closes the image. A command may hold it; wait for that, because this
        // process is about to exit.
        let until = Instant::now() + USERS_WAIT;
        while Arc::strong_count(&self) > 1 && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
        let saved = self.bitmaps.save();
        drop(self);
        flushed.map_err(|e| e.during("data may be lost")).and(saved)
    }
}

/// Fails if a change must not be made, because its client has exited.
pub type Permit<'a> = &'a dyn Fn() -> Outcome;

/// Serializes the changes of a device. A block commit is a change that takes long: while it copies, it excludes only
/// other changes of the image.
#[derive(Default)]
pub(super) struct Changes {
    /// May be held while waiting for I/O.
    changing: Mutex<()>,
    /// The block commit in progress.
    commit: Mutex<Option<CommitInfo>>,
}

impl Changes {
    /// Waits for a change in progress, and excludes others until the returned guard is dropped. Fails as `permit` does,
    /// which is called when no other change is in progress: the client may have exited meanwhile.
    pub(super) fn begin(&self, permit: Permit) -> Outcome<MutexGuard<'_, ()>> {
        let changing = lock(&self.changing);
        permit().map(|()| changing)
    }

    /// Refuses another change of the image while a block commit is in progress, and names its client.
    pub(super) fn check_no_commit(&self) -> Outcome {
        let Some(CommitInfo { by, .. }) = self.commit() else { return Ok(()) };
        let why = format!("a block commit by {by} is in progress; wait for it, or stop that process");
        Err(Failure::new(why))
    }

    /// The block commit in progress.
    pub(super) fn commit(&self) -> Option<CommitInfo> {
        lock(&self.commit).clone()
    }

    pub(super) fn begin_commit(&self, into: String, by: String) {
        *lock(&self.commit) = Some(CommitInfo { into, by, copied_bytes: 0, total_bytes: 0 });
    }

    /// Publishes the progress of the block commit.
    pub(super) fn report(&self, (copied_bytes, total_bytes): (u64, u64)) {
        if let Some(commit) = &mut *lock(&self.commit) {
            (commit.copied_bytes, commit.total_bytes) = (copied_bytes, total_bytes);
        }
    }

    pub(super) fn end_commit(&self) {
        *lock(&self.commit) = None;
    }
}

pub(super) fn stopping() -> Failure {
    Failure::new("the device is stopping")
}

pub(super) fn new_warnings(next: &dyn Driver, before: &dyn Driver) -> Vec<String> {
    let known = before.warnings();
    next.warnings().into_iter().filter(|warning| !known.contains(warning)).collect()
}

/// The dirty bitmaps of a disk. [`PersistentBitmaps::save`], or dropping, saves them in its image.
pub(super) struct PersistentBitmaps {
    disk: Arc<Disk>,
    /// The image had bitmaps at attach.
    loaded: bool,
    saved: AtomicBool,
}

impl PersistentBitmaps {
    /// The queues of `disk` must not be open yet. The image marks the bitmaps as in use from now on: if this
    /// process is killed, they are inconsistent. Also returns warnings.
    pub(super) fn load(disk: &Arc<Disk>) -> Outcome<(PersistentBitmaps, Vec<String>)> {
        let driver = disk.driver();
        let store = driver.bitmap_store();
        let (bitmaps, mut warnings) = store.map_or_else(|| Ok(Default::default()), BitmapStore::load)?;
        let saved = PersistentBitmaps {
            disk: disk.clone(),
            loaded: !bitmaps.is_empty(),
            saved: AtomicBool::new(false),
        };
        let left_out = disk.load_bitmaps(bitmaps)?;
        if !left_out.is_empty() {
            // Reserve the space for the remaining bitmaps now, and not only at detach.
            let reserved = store.map_or(Ok(()), |store| store.reserve(&disk.bitmaps()));
            warnings.extend(reserved.err().map(|e| format!("the dirty bitmaps may not be saved: {e}")));
        }
        warnings.extend(left_out.into_iter().map(|e| format!("a dirty bitmap is not kept up to date: {e}")));
        Ok((saved, warnings))
    }

    /// Saves the bitmaps once. They cannot be changed afterwards. The device must have no clients, now or
    /// later. If this fails, the bitmaps are inconsistent.
    pub(super) fn save(&self) -> Outcome {
        if self.saved.load(SeqCst) {
            return Ok(());
        }
        let bitmaps = self.disk.close_bitmaps();
        let _frozen = match self.disk.begin_exchange() {
            // No bitmap is lost.
            Err(_) if self.has_none(&bitmaps) => return Ok(()),
            frozen => frozen.map_err(not_saved)?,
        };
        self.saved.store(true, SeqCst);
        store_in(&*self.disk.driver(), &bitmaps).map_err(not_saved)
    }

    /// Saves the bitmaps for the next daemon, which takes over the device when this process exits. The block
    /// device may still receive requests: they wait for the next daemon. Also fails if I/O in flight does not
    /// complete, because the bitmaps would not include it.
    pub(super) fn save_for_next(&self) -> Outcome {
        let bitmaps = self.disk.close_bitmaps();
        if self.has_none(&bitmaps) || self.saved.swap(true, SeqCst) {
            return Ok(());
        }
        self.disk.freeze_until_exit().map_err(not_saved)?;
        store_in(&*self.disk.driver(), &bitmaps).map_err(not_saved)
    }

    fn has_none(&self, bitmaps: &[Arc<Bitmap>]) -> bool {
        !self.loaded && bitmaps.is_empty()
    }

    /// The device continues without the image of `driver`, which is no longer written.
    pub(super) fn save_in(&self, driver: &dyn Driver) {
        if let Err(error) = store_in(driver, &self.disk.bitmaps()) {
            log::line(&format!("warning: the dirty bitmaps in the previous image are inconsistent: {error}"));
        }
    }
}

/// Does nothing if the image has no place for bitmaps.
fn store_in(driver: &dyn Driver, all: &[Arc<Bitmap>]) -> Result<(), blkq::Error> {
    driver.bitmap_store().map_or(Ok(()), |store| store.store(all))
}

fn not_saved(error: blkq::Error) -> Failure {
    Failure::from(error).during("cannot save the dirty bitmaps, which are inconsistent now")
}

impl Drop for PersistentBitmaps {
    fn drop(&mut self) {
        if let Err(failure) = self.save() {
            log::line(&format!("warning: {failure}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use blkq::drivers::ram::Ram;
    use blkq::testing::wait_until;
    use blkq_protocol::harness::{options, scratch};

    use super::super::open;
    use super::*;

    impl Changes {
        pub(in crate::device) fn is_changing(&self) -> bool {
            self.changing.try_lock().is_err()
        }
    }

    // Contract: detach
    #[test]
    fn no_server_serves_while_a_forced_stop_waits_for_another() {
        let dir = scratch("servers");
        let claim = dir.claim("a").unwrap();
        let sockets = ["x", "y"].map(|name| dir.path().join(name));
        let [x, y] = sockets.each_ref().map(|path| format!("--listen=unix:{}", path.display()));
        let options = options(&["ram:1M", &x, &y, "--no-sandbox"]);
        let device = open(&options, Vec::new(), &claim, Vec::new()).unwrap();
        let running = device.running().unwrap();
        let quiesced = running.disk.quiesce();
        // The first server waits for a read of its client; the client of the second server is idle.
        let [mut busy, mut idle] = sockets.each_ref().map(|path| {
            let mut client = UnixStream::connect(path).unwrap();
            client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            client.write_all(&[&3_u32.to_be_bytes()[..], b"IHAVEOPT\0\0\0\x01\0\0\0\x01a"].concat()).unwrap();
            client.read_exact(&mut [0; 28]).unwrap();
            client
        });
        let read = [&b"\x25\x60\x95\x13"[..], &[0; 20], &512_u32.to_be_bytes()].concat();
        busy.write_all(&read).unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        while running.servers.connections().all(|client| client.in_flight == 0) {
            assert!(Instant::now() < until);
            std::thread::yield_now();
        }
        std::thread::scope(|scope| {
            let stop = scope.spawn(|| device.close(true));
            assert_eq!(idle.read(&mut [0]).unwrap(), 0, "disconnected while the other client is waited for");
            assert!(!stop.is_finished());
            drop(quiesced);
            stop.join().unwrap().unwrap();
        });
        drop(running);
        device.stop().unwrap();
        drop((device, claim));
        std::fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn a_device_stops_when_no_command_uses_it() {
        let dir = scratch("users");
        let claim = dir.claim("a").unwrap();
        let options = options(&["ram:1M", "--export", "nbd", "--no-sandbox"]);
        let device = open(&options, Vec::new(), &claim, Vec::new()).unwrap();
        device.close(true).unwrap();
        let used = device.running().unwrap();
        let disk = Arc::downgrade(&used.disk);
        std::thread::scope(|scope| {
            let device = &device;
            scope.spawn(move || {
                wait_until("the device stops", || device.running.lock().unwrap().is_none());
                drop(used);
            });
            device.stop().unwrap();
            assert!(disk.upgrade().is_none(), "the image is closed");
        });
        drop((device, claim));
        std::fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn no_write_completes_once_the_next_daemon_has_bitmaps() {
        let disk = Disk::builder(Box::new(Ram::new(1 << 20, 512, false).unwrap())).build().unwrap();
        let bitmaps = PersistentBitmaps::load(&disk).unwrap().0;
        disk.add_bitmap("b", 512).unwrap();
        // As in the daemon, which exits without stopping its engines.
        std::mem::forget(EngineThread::spawn("test", vec![(disk.clone(), 0)]).unwrap());
        disk.submitter().write_at(&[1; 512], 0).unwrap();
        bitmaps.save_for_next().unwrap();
        let (sender, completed) = channel();
        let writer = disk.clone();
        std::thread::spawn(move || sender.send(writer.submitter().write_at(&[1; 512], 512).is_ok()));
        assert!(completed.recv_timeout(Duration::from_millis(100)).is_err());
        assert_eq!(disk.bitmaps()[0].dirty_bytes(), 512);
    }

    #[test]
    fn bitmaps_cannot_be_changed_once_they_are_saved() {
        for save in [PersistentBitmaps::save, PersistentBitmaps::save_for_next] {
            let disk = Disk::builder(Box::new(Ram::new(1 << 20, 512, false).unwrap())).build().unwrap();
            let bitmaps = PersistentBitmaps::load(&disk).unwrap().0;
            disk.add_bitmap("b", 512).unwrap();
            disk.add_bitmap("c", 512).unwrap();
            save(&bitmaps).unwrap();
            for changed in [
                disk.add_bitmap("d", 512),
                disk.remove_bitmap("b"),
                disk.clear_bitmap("b"),
                disk.set_bitmap_recording("b", false),
                disk.merge_bitmaps(&["b".to_owned()], "c"),
                disk.resize(Some(2 << 20)).map(drop),
            ] {
                assert!(changed.unwrap_err().to_string().contains("the device is stopping"));
            }
        }
    }

    #[test]
    fn no_bitmap_is_added_once_the_next_daemon_has_none() {
        let disk = Disk::builder(Box::new(Ram::new(1 << 20, 512, false).unwrap())).build().unwrap();
        let bitmaps = PersistentBitmaps::load(&disk).unwrap().0;
        bitmaps.save_for_next().unwrap();
        assert!(disk.add_bitmap("b", 512).is_err());
    }
}
