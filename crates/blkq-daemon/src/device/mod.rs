//! Serves a device: connects the block layer to an image and to the exports.

mod access;
mod background;
mod bitmaps;
mod commit;
mod descriptors;
mod disk;
mod events;
mod exports;
mod facts;
mod image;
mod listen;
pub mod lock_holders;
mod memory_limits;
mod meter;
mod open;
mod opened;
mod persistent_bitmaps;
mod preflight;
mod rejections;
mod running;
mod saved_settings;
mod servers;
mod settings;
mod snapshot;
mod stop;
mod trace;

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, MutexGuard};

use blkq::sync::lock;
use blkq::units::format_bytes;
use blkq::{ErrorKind, Resume};
use blkq_drivers::qcow2::Journals;
use blkq_export::nbd::{PreparedCertificates, TlsCertificates};
use blkq_protocol::control::NewSize;
use blkq_protocol::control::statistics::Statistics;
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::info::{CommitInfo, Confinement, DaemonState};
use blkq_protocol::options::Record;

use crate::sandbox::{self, Needs};

use background::BackgroundThreads;
use meter::{Membership, Meter};
use running::{Running, flush_unless_held, flush_unless_stopped, stopping};
use saved_settings::DeviceSettings;

pub use events::{Events, take};
pub use image::{absolute, with_ceph_files};
pub use open::FLUSHES_IGNORED;
pub use preflight::{check_successor, check_take_over, obstacles};
pub use settings::Change;

/// Fails if a change must not be made, because its client has exited.
pub type Permit<'a> = &'a dyn Fn() -> Outcome;

pub struct Device {
    /// The first field, because fields are dropped in order: these threads stop before `running` does.
    background: Mutex<Option<BackgroundThreads>>,
    attached: Attached,
    served: Mutex<Served>,
    meter: Meter,
    events: Events,
    /// Whether the device detaches with its last client, as a loop device with `LO_FLAGS_AUTOCLEAR` does. Only clients
    /// that disconnect after it was set count.
    autoclear: AtomicBool,
    settings: DeviceSettings,
    group: Membership,
    certificates: Option<TlsCertificates>,
    journals: Option<Arc<Journals>>,
    /// The files that the control plane may still access, until it is confined. `None` if it is already confined, or
    /// if the user disabled the sandbox.
    needs: Option<Needs>,
    confinement: Confinement,
    /// Whether the device has a block device of the kernel, as far as is known. The next daemon takes it over.
    has_block_device: AtomicBool,
    /// Serializes changes of the device. May be held while waiting for I/O.
    changing: Mutex<()>,
    /// The block commit in progress.
    commit: Mutex<Option<CommitInfo>>,
    /// The process that traces the device.
    traced_by: Mutex<Option<String>>,
    running: Mutex<Option<Arc<Running>>>,
}

/// Facts that do not change after the attach.
struct Attached {
    name: String,
    state_directory: PathBuf,
    warnings: Vec<String>,
    /// Why the device is not exported over ublk, if that would have been the default.
    fallback: Option<Failure>,
    partscan: bool,
    flushes_ignored: bool,
}

#[derive(Clone)]
struct Served {
    image: String,
    /// The number of the image in `NAME.options`.
    number: u64,
    attach_options: Option<Record>,
}

impl Device {
    pub fn events(&self) -> &Events {
        &self.events
    }

    /// `None` if the device has stopped.
    pub fn statistics(&self) -> Option<Statistics> {
        self.meter.statistics()
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
        lock(&self.background).as_mut().map_or(Ok(()), |threads| threads.start(&running, &self.meter))
    }

    /// `blkq show` prints the warning until the daemon exits.
    pub fn add_warning(&mut self, warning: String) {
        self.attached.warnings.push(warning);
    }

    fn running(&self) -> Outcome<Arc<Running>> {
        lock(&self.running).clone().ok_or_else(stopping)
    }

    /// A name that other processes understand.
    pub fn image(&self) -> String {
        lock(&self.served).image.clone()
    }

    /// Whether the device detaches with its last client.
    pub fn is_autoclear(&self) -> bool {
        self.autoclear.load(SeqCst)
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
        events::take(&self.events.failure);
        Some(self.running().ok()?.ublk.as_ref()?.failure()?.into())
    }

    /// Locks `changing` for a client, who may have exited while another change was in progress. Fails as `permit` does,
    /// which is called when no other change is in progress.
    fn begin_change_if(&self, permit: Permit) -> Outcome<MutexGuard<'_, ()>> {
        let changing = lock(&self.changing);
        permit().map(|()| changing)
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
        Ok(DaemonState {
            pid: std::process::id(),
            image: lock(&self.served).number,
            exports: running.exports(),
            settings: self.settings.changed(),
        })
    }

    /// Returns the new size in bytes. Unless `force` is set, a device in use cannot shrink. `user` is a user
    /// of the block device that the client has found, for which a confined daemon cannot look. Fails as `permit` does.
    pub fn resize(&self, new: NewSize, force: bool, user: Option<String>, permit: Permit) -> Outcome<u64> {
        let running = self.running()?;
        // This keeps other changes away until the new size is in effect: another resize, which could make
        // this a shrink, and a block commit.
        let _changing = self.begin_change_if(permit)?;
        self.check_not_changed()?;
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
        if let Some(vhost) = &running.servers.vhost {
            vhost.resized();
        }
        Ok(bytes)
    }

    /// Returns the number of held requests. Fails if the device has stopped.
    pub fn resume(&self, fail: bool) -> Outcome<u64> {
        let how = if fail { Resume::Fail } else { Resume::Reissue };
        Ok(self.running()?.disk.resume(how))
    }

    /// Fails while requests are held after I/O errors.
    pub fn check_not_held(&self) -> Outcome {
        match self.running()?.disk.held() {
            0 => Ok(()),
            held => Err(Failure::held(held)),
        }
    }

    /// Fails if an earlier write or this flush failed, if requests are held, for which the flush would wait,
    /// or if the device has stopped.
    pub fn flush(&self) -> Outcome {
        // The flush would wait for held requests.
        self.check_not_held()?;
        flush_unless_held(&self.running()?)
    }
}
