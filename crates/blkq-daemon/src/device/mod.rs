//! Serves a device: connects the block layer to an image and to the exports.

mod background;
mod commit;
mod exports;
mod facts;
mod image;
mod limits;
mod listen;
pub mod lock_holders;
mod open;
mod preflight;
mod running;
mod saved_settings;
mod servers;
mod settings;
mod trace;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, Weak};

use blkq::sync::lock;
use blkq::throttle::{Ceiling, WEIGHT_DEFAULT};
use blkq::units::format_bytes;
use blkq::{ErrorKind, Resume};
use blkq_drivers::qcow2::{BaseFiles, Qcow2, Target};
use blkq_drivers::{DriverSpec, Opened, no_overlay};
use blkq_export::nbd::{PreparedCertificates, TlsCertificates};
use blkq_export::ublk::UblkDevice;
use blkq_export::vhost_user::VhostUserDevice;
use blkq_protocol::control::statistics::Statistics;
use blkq_protocol::control::{BitmapChange, BitmapInfo, Committed, NewSize};
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::group::Joined;
use blkq_protocol::info::{Confinement, DaemonState, DeviceInfo};
use blkq_protocol::options::{AttachOptions, Key, Record, Setting};

use crate::log;
use crate::sandbox::{self, Needs};

use commit::Commit;
use image::image_name;
use running::{Running, Served, new_warnings, stopping};
use settings::{LiveSettings, apply, check_change};
use trace::DeviceTrace;

pub use exports::size_of;
pub use image::{absolute, with_ceph_files};
pub use open::{FLUSHES_IGNORED, open, recover};
pub use preflight::{check_successor, check_take_over, obstacles};
pub use running::Permit;
pub use servers::{Events, take};
pub use settings::Change;

pub struct Device {
    /// The first field, because fields are dropped in order: its threads stop before `running` does.
    settings: LiveSettings,
    pub events: Events,
    certificates: Option<TlsCertificates>,
    /// The files that the control plane may still access, until it is confined. `None` if it is already confined, or
    /// if the user disabled the sandbox.
    needs: Option<Needs>,
    confinement: Confinement,
    /// Whether the device has a block device of the kernel, as far as is known. The next daemon takes it over.
    has_block_device: AtomicBool,
    /// The process that traces the device; one at a time can.
    tracer: Mutex<Option<String>>,
    running: Mutex<Option<Arc<Running>>>,
    /// The value in `running`, whose statistics are also reported while the device stops, which may take long.
    counted: Weak<Running>,
    state_directory: PathBuf,
    /// `blkq show` prints the warnings until the daemon exits.
    pub warnings: Vec<String>,
    /// Why the device is not exported over ublk, if that would have been the default.
    fallback: Option<Failure>,
    partscan: bool,
    flushes_ignored: bool,
}

impl Device {
    /// `None` if the device has stopped.
    pub fn statistics(&self) -> Option<Statistics> {
        Some(self.counted.upgrade()?.statistics())
    }

    /// Confines this thread and the threads that it creates from now on, unless the user disabled the
    /// sandbox. Before that, starts to watch the users of the block device, if the device detaches with its
    /// last user. Fails if the kernel supports a confinement but refuses it, or if the users cannot be
    /// watched.
    pub fn confine(&mut self, removed: impl IntoIterator<Item = PathBuf>) -> Outcome {
        if self.is_autoclear()
            && let Some(ublk) = &self.running()?.ublk
        {
            ublk.watch_users(true).map_err(|e| Failure::from(e).during("autoclear"))?;
        }
        if let Some(mut needs) = self.needs.take() {
            needs.removed.extend(removed);
            self.confinement = sandbox::control(&needs)?;
        }
        Ok(())
    }

    /// The threads inherit the privileges of the calling thread. Fails if a thread cannot be started.
    pub fn start_background(&self) -> Outcome {
        let running = self.running()?;
        self.settings.with_threads(|threads| threads.start(&running))
    }

    fn running(&self) -> Outcome<Arc<Running>> {
        lock(&self.running).clone().ok_or_else(stopping)
    }

    /// A name that other processes understand.
    pub fn image(&self) -> Outcome<String> {
        Ok(lock(&self.running()?.served).image.clone())
    }

    /// Whether a block device of the kernel survives this process.
    pub fn leaves_block_device(&self) -> bool {
        self.has_block_device.load(SeqCst)
    }

    /// Returns the new size, or `None` if the image has not changed. Fails as [`Device::resize`] does.
    pub fn follow_size(&self) -> Outcome<Option<u64>> {
        let running = self.running()?;
        if running.disk.prepare_resize(None)? == running.disk.limits().size_bytes() {
            return Ok(None);
        }
        drop(running);
        // A smaller size is forced: the data beyond the end of the image is already gone.
        self.resize(NewSize::OfImage, true, None, &|| Ok(())).map(Some)
    }

    /// Why the block device lost a tag, if it has. Then only another daemon can answer the requests of the
    /// device.
    pub fn take_failure(&self) -> Option<Failure> {
        take(&self.events.failure);
        Some(self.running().ok()?.ublk.as_ref()?.failure()?.into())
    }

    /// Affects clients that connect from now on. Returns the directory, or `None` if there are no
    /// certificates. If the certificates cannot be used, the old ones stay in use.
    pub fn reload_certificates(&self) -> Outcome<Option<&Path>> {
        Ok(self.prepare_certificates()?.map(|(directory, certificates)| {
            certificates.install();
            directory
        }))
    }

    /// Loads the certificates without using them yet. Returns `None` if there are none.
    pub fn prepare_certificates(&self) -> Outcome<Option<(&Path, PreparedCertificates)>> {
        let Some(certificates) = &self.certificates else { return Ok(None) };
        let prepared = certificates.prepare();
        let prepared = prepared.map_err(|e| Failure::from(e).during("the old certificates stay in use"))?;
        Ok(Some((certificates.directory(), prepared)))
    }

    /// Fails if the device has stopped.
    pub fn state(&self) -> Outcome<DaemonState> {
        let running = self.running()?;
        let served = lock(&running.served).clone();
        Ok(self.state_with(&running, &served))
    }

    /// The state of the device when it serves the image `served`.
    fn state_with(&self, running: &Running, served: &Served) -> DaemonState {
        let ublk = running.ublk.as_ref().map(UblkDevice::identity);
        let state = served.state(running.disk.name(), ublk, self.settings.saved.changed());
        DaemonState { exports: running.exports(), ..state }
    }

    /// Returns the new size in bytes. Unless `force` is set, a device in use cannot shrink. `user` is a user
    /// of the block device that the client has found, for which a confined daemon cannot look. Fails as `permit` does.
    pub fn resize(&self, new: NewSize, force: bool, user: Option<String>, permit: Permit) -> Outcome<u64> {
        let running = self.running()?;
        // This keeps other changes away until the new size is in effect: another resize, which could make
        // this a shrink, and a block commit.
        let _changing = running.changes.begin(permit)?;
        running.changes.check_no_commit()?;
        if let Some(ublk) = &running.ublk {
            let again = "detach the device and attach it again";
            ublk.check_resizable().map_err(|e| Failure::of(e, ErrorKind::Unsupported, again))?;
        }
        let before = running.disk.limits().size_bytes();
        let bytes = new.bytes(before)?;
        let other = "detach the device and attach it with another size";
        let prepared = running.disk.prepare_resize(bytes);
        let after = prepared.map_err(|e| Failure::of(e, ErrorKind::Unsupported, other))?;
        let shrink = || format!("shrink from {} to {}", format_bytes(before), format_bytes(after));
        let unused = (after < before && !force).then(|| running.claim_unused(user)).transpose();
        // New clients, which would use the old size, are kept away until this guard is dropped.
        let _unused = unused.map_err(|failure| failure.during(shrink()))?;
        let bytes = match &running.servers.unaligned {
            Some(lock) => lock.resize(&running.disk, bytes)?,
            None => running.disk.resize(bytes)?,
        };
        if let Some(ublk) = &running.ublk {
            ublk.resize(bytes).inspect_err(|_| {
                // The disk gets its old size back; the error of the block device is the reason for the
                // failure.
                let _ = running.disk.resize(Some(before));
            })?;
        }
        running.servers.vhost.iter().for_each(|vhost| vhost.resized());
        Ok(bytes)
    }

    /// Returns the number of held requests. Fails if the device has stopped.
    pub fn resume(&self, fail: bool) -> Outcome<u64> {
        let how = if fail { Resume::Fail } else { Resume::Reissue };
        Ok(self.running()?.disk.resume(how))
    }

    /// Fails if an earlier write or this flush failed, if requests are held, for which the flush would wait,
    /// or if the device has stopped.
    pub fn flush(&self) -> Outcome {
        let running = self.running()?;
        // The flush would wait for held requests.
        running.check_not_held()?;
        running.flush_unless_held()
    }

    pub fn log_rejections(&self) {
        take(&self.events.rejection);
        if let Ok(running) = self.running() {
            running.servers.log_rejections();
        }
    }

    /// Includes notes for the user who attached the device. Fails if the device has stopped.
    pub fn info_at_attach(&self) -> Outcome<DeviceInfo> {
        let mut info = self.info()?;
        let fallback = |why| format!("served over NBD, without a node in /dev: {why}");
        info.warnings.extend(self.fallback.as_ref().map(fallback));
        Ok(info)
    }

    /// Fails if the device has stopped.
    pub fn info(&self) -> Outcome<DeviceInfo> {
        let running = self.running()?;
        let now = lock(&running.served).clone();
        let disk = &running.disk;
        let limits = disk.limits();
        let mut driver_facts = disk.driver().describe();
        let front_end = running.servers.vhost.as_ref().and_then(VhostUserDevice::front_end);
        let front_end = front_end.as_ref();
        let settings = facts::settings(&self.settings, &running, &driver_facts, front_end);
        let direct_io = facts::take_direct_io(&mut driver_facts);
        // Shown with the settings.
        facts::take(&mut driver_facts, Key::Dispatch.row().name);
        Ok(DeviceInfo {
            name: disk.name().to_owned(),
            pid: std::process::id(),
            uptime_seconds: running.uptime_ns() / 1_000_000_000,
            state_directory: self.state_directory.clone(),
            log: log::path().map(Path::to_owned),
            exports: running.exports(),
            clients: facts::clients(&running, front_end),
            image: now.image,
            driver: disk.driver().name().to_owned(),
            size: limits.size_bytes(),
            sector_size: limits.logical_block_bytes,
            physical_sector_size: limits.physical_block_bytes,
            read_only: limits.read_only,
            autoclear: self.is_autoclear(),
            held: disk.held(),
            commit: running.changes.commit(),
            unsafe_flush_ignore: self.flushes_ignored,
            partscan: self.partscan,
            sandbox: self.confinement.clone(),
            direct_io,
            attach_options: now.attach_options,
            capabilities: facts::capabilities(&limits),
            settings: facts::owned(settings),
            driver_facts: facts::owned(driver_facts),
            warnings: facts::warnings(&running, &self.warnings, front_end),
        })
    }

    /// Makes the engines trace their queues into a new memory file with `ring_bytes` bytes per queue.
    /// `tracer` names the process that reads the trace. Fails if the device is already being traced or has
    /// stopped.
    pub fn trace(&self, ring_bytes: u64, tracer: &str) -> Outcome<DeviceTrace<'_>> {
        DeviceTrace::begin(&self.tracer, &self.running()?, ring_bytes, tracer)
    }

    /// Whether the device detaches with its last client.
    pub fn is_autoclear(&self) -> bool {
        self.settings.autoclear.load(SeqCst)
    }

    pub fn read_setting(&self, key: &str, value: &str) -> Outcome<Setting> {
        self.settings.saved.read(key, value)
    }

    /// Settings of earlier versions in terms of this version.
    pub fn translate(&self, settings: &[(String, String)]) -> Outcome<Vec<(String, String)>> {
        Ok(settings::without(&*self.running()?).translate(settings))
    }

    /// Changes settings of the disk or its driver while no I/O is in flight. Fails as `permit` does, or if the device
    /// rejects the value.
    pub fn set(&self, setting: &Setting, permit: Permit) -> Outcome {
        let running = self.running()?;
        // Serializes concurrent changes, so that the recorded value is the one that was set last.
        let _changing = running.changes.begin(permit)?;
        check_change(&running, setting)?;
        apply(&running.disk, Some((&self.settings, &running)), setting)?;
        match setting {
            // Also forgets the weight in the group.
            Setting::Group(None) => self.settings.saved.note_group(None),
            _ => self.settings.saved.replace(setting.name(), Some(setting.to_text())),
        }
        Ok(())
    }

    /// The changes that are necessary for the device to have `settings`. Each is checked as far as is
    /// possible without making it. Fails with the first setting that the device cannot have.
    pub fn prepare_changes(&self, settings: &[(String, String)]) -> Outcome<Vec<Change>> {
        let running = self.running()?;
        let facts = running.disk.driver().describe();
        let mut changes = Vec::new();
        for (key, value) in &self.translate(settings)? {
            let during = |failure: Failure| failure.during(format_args!("{key}={value}"));
            let to = self.read_setting(key, value).map_err(during)?;
            let from = self.settings.read_back(&running, &facts, to.key());
            // Some settings cannot be set at all on this device, not even to the value that they have.
            if from.as_ref() == Some(&to) {
                continue;
            }
            check_change(&running, &to).map_err(during)?;
            let saved = self.settings.saved.changed().into_iter().find(|(other, _)| other == key);
            changes.push(Change { to, from, saved });
        }
        Ok(changes)
    }

    /// Undoes a change, for the next daemon as well. Fails as [`Device::set`] does; the change then stays.
    pub fn undo(&self, change: &Change) -> Outcome {
        change.from.as_ref().map_or(Ok(()), |from| self.set(from, &|| Ok(())))?;
        self.settings.saved.replace(change.to.name(), change.saved.clone());
        Ok(())
    }

    /// The device leaves its previous group and keeps its weight. `file` is the open file of the group. Fails
    /// if the group cannot be joined, or if the device has `limit=auto`, and as `permit` does.
    pub fn join_group(&self, name: &str, file: File, permit: Permit) -> Outcome {
        let running = self.running()?;
        let _changing = running.changes.begin(permit)?;
        let disk = &running.disk;
        if disk.ceiling() != Ceiling::NotSearched {
            let rule = "a device with limit=auto cannot be in a group; set limit=none or another limit first";
            return Err(Failure::new(rule));
        }
        let weight = disk.group_member().map_or(WEIGHT_DEFAULT, |member| member.weight());
        let (joined, member) = Joined::over(file, name, disk.name(), weight)?;
        let joined =
            self.settings.with_threads(|threads| Ok(threads.join_group(&running, joined, member)))?;
        self.settings.saved.note_group(joined.is_ok().then_some((name, weight)));
        joined.map_err(|failure| Failure::new(format!("{failure}; the device is now in no group")))
    }

    /// Sorted by name. Fails if the device has stopped.
    pub fn bitmaps(&self) -> Outcome<Vec<BitmapInfo>> {
        Ok(self.running()?.disk.bitmaps().iter().map(|bitmap| facts::bitmap_info(bitmap)).collect())
    }

    /// Saves the bitmaps of a raw image in the new `file` from now on, unless the image already has such a
    /// file. Fails if the image cannot have a bitmap file, or the device is stopping, and as `permit` does.
    pub fn set_bitmap_file(&self, file: File, permit: Permit) -> Outcome {
        let running = self.running()?;
        let _changing = running.changes.begin(permit)?;
        // The device may have begun to stop meanwhile, and has then saved its bitmaps.
        Ok(self.running()?.disk.set_bitmap_file(file)?)
    }

    /// Atomic: no I/O is in flight during the change. Fails if the device cannot have such a bitmap, has no
    /// bitmap of that name, or is stopping, and as `permit` does.
    pub fn change_bitmap(&self, change: &BitmapChange, permit: Permit) -> Outcome {
        let running = self.running()?;
        let disk = &running.disk;
        if matches!(change, BitmapChange::Add { .. }) {
            // The name of the new bitmap is in the image when this returns; flushing first makes that write
            // short. No lock is held: a flush may hang.
            self.flush()?;
        }
        // Keeps a block commit from beginning.
        let _changing = running.changes.begin(permit)?;
        running.changes.check_no_commit()?;
        match change {
            BitmapChange::Add { name, granularity } => {
                disk.driver().require_bitmap_store()?.check()?;
                disk.add_bitmap(name, *granularity)?;
            }
            BitmapChange::Remove { name } => disk.remove_bitmap(name)?,
            BitmapChange::Clear { name } => disk.clear_bitmap(name)?,
            BitmapChange::Enable { name } => disk.set_bitmap_recording(name, true)?,
            BitmapChange::Disable { name } => disk.set_bitmap_recording(name, false)?,
            BitmapChange::Merge { from, into } => disk.merge_bitmaps(from, into)?,
        }
        Ok(())
    }

    /// Makes the empty `file` an overlay of the current image, and continues with it. `options` are those of
    /// the device with the overlay, which has the `number` in `NAME.options`. All I/O waits while `ready`
    /// waits for other devices and `save` writes the state file; after a failure, the device continues with
    /// its image. Returns warnings about the overlay that did not apply to the previous image.
    pub fn snapshot(
        &self,
        file: File,
        options: &AttachOptions,
        number: u64,
        ready: impl FnOnce() -> Outcome,
        save: impl FnOnce(&DaemonState) -> Outcome,
    ) -> Outcome<Vec<String>> {
        let running = self.running()?;
        let DriverSpec::Image(path) = &options.image else {
            return Err(Failure::new("the new image must be a file"));
        };
        if running.ublk.as_ref().is_some_and(UblkDevice::passes_kernel_pages) {
            return Err(Failure::new(
                "this ublk device uses --copy none, which qcow2 does not support; detach it and attach it with --copy \
                 kernel",
            ));
        }
        let attach_options = Some(Record::new(options)?);
        let served = Served { image: image_name(&options.image), number, attach_options };
        running.check_not_held()?;
        // This serializes changes: the state file gets the current settings, and no block commit begins.
        let _changing = running.changes.begin(&|| Ok(()))?;
        running.changes.check_no_commit()?;
        let state = self.state_with(&running, &served);
        let exchange = running.disk.begin_exchange()?;
        let before = running.disk.driver();
        let image = running.image().ok_or_else(|| no_overlay(before.name()))?;
        let overlay = Qcow2::over(image.overlay_base()?, file, path, running.journals.as_deref())?;
        let next = Opened::from(Target::Qcow2(Arc::new(overlay)));
        exchange.check(&*next.driver)?;
        let no_journals = "the directory of journals was not available when the device was attached";
        running.check_outlives(&*next.driver, running.journals.is_none().then_some(no_journals))?;
        next.driver.require_bitmap_store()?.reserve(&running.disk.bitmaps())?;
        ready()?;
        save(&state)?;
        let warnings = new_warnings(&*next.driver, &*before);
        running.replace(&exchange, next)?;
        running.bitmaps.save_in(&*before);
        if let Err(error) = image.supersede() {
            log::line(&format!("warning: cannot close the previous image: {error}"));
        }
        *lock(&running.served) = served;
        drop(exchange);
        running.log_broken();
        Ok(warnings)
    }

    /// Fails if the image has no backing file for a commit, or a block commit is in progress already.
    pub fn check_committable(&self) -> Outcome {
        let running = self.running()?;
        commit::source(&running)?;
        running.changes.check_no_commit()
    }

    /// Commits the overlay into its backing file for `client`, and pivots the device, with its dirty bitmaps,
    /// to the backing file. `files` come from [`open_base`](blkq_drivers::qcow2::open_base), and the backing
    /// file is entry `number` of `NAME.options`. I/O continues during most of the copy; between steps, `stop`
    /// may cancel the commit. The last step holds I/O: `last` may cancel it, or return `None` to let I/O
    /// continue before it is called again. Its value is dropped when `save` has written the state file. After
    /// a failure, the device continues with the overlay.
    pub fn commit<G>(
        &self,
        files: BaseFiles,
        number: u64,
        client: &str,
        stop: &dyn Fn() -> Outcome,
        last: impl Fn() -> Outcome<Option<G>>,
        save: impl FnOnce(&DaemonState) -> Outcome,
    ) -> Outcome<Committed> {
        // Fails if the device has stopped meanwhile.
        let save = |next: &Served| save(&self.state_with(&*self.running()?, next));
        Commit::begin(&self.running()?, files, number, client, stop)?.run(last, save)
    }

    /// Unless `force` is set, fails if the device is in use; the error names the clients or processes, and the device
    /// keeps running. With `force`, clients are disconnected. After success there are no clients, no sockets and no
    /// block device.
    pub fn close(&self, force: bool) -> Outcome {
        self.running()?.close(force, || self.has_block_device.store(false, SeqCst))
    }

    /// Closes everything except the block device, or the record of requests in flight that the vhost-user front end
    /// has. After this process has exited, the next daemon reissues the I/O in flight. Fails if another daemon could
    /// not continue the device; the device keeps running. Also fails if the last writes cannot be made durable; then
    /// this daemon keeps the device, but without clients.
    pub fn leave(&self) -> Outcome {
        self.running()?.leave()
    }

    /// Flushes and stops a closed device. Fails if the flush failed or the dirty bitmaps could not be saved;
    /// the device has stopped in any case.
    pub fn stop(&self) -> Outcome {
        // The background threads may hold references to `running`.
        drop(lock(&self.settings.threads).take());
        // The lock is released before this waits for the commands that use the device.
        let Some(running) = lock(&self.running).take() else { return Ok(()) };
        running.stop()
    }
}
