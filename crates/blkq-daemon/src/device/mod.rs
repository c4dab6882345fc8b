//! Serves a device: connects the block layer to an image and to the exports.

mod access;
mod autoclear;
mod background;
mod bitmaps;
mod block_device;
mod commit;
mod commit_progress;
mod descriptors;
mod disk;
mod events;
mod exports;
mod facts;
mod flush;
mod image;
mod listen;
pub mod lock_holders;
mod membership;
mod memory_limits;
mod meter;
mod obstacles;
mod open;
mod opened;
mod persistent_bitmaps;
mod preflight;
mod rejections;
mod running;
mod sandbox;
mod saved_settings;
mod servers;
mod settings;
mod snapshot;
mod stop;
mod trace;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blkq::{ErrorKind, Resume};
use blkq_drivers::qcow2::Journals;
use blkq_export::nbd::{PreparedCertificates, TlsCertificates};
use blkq_protocol::control::resize::NewSize;
use blkq_protocol::control::statistics::Statistics;
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::group::Membership;
use blkq_protocol::info::DaemonState;
use blkq_protocol::options::Record;

use crate::device::autoclear::Autoclear;
use blkq::units::format_bytes;

use background::BackgroundThreads;
use block_device::BlockDeviceState;
use commit_progress::CommitProgress;
use events::Events;
use flush::{flush_unless_held, flush_unless_stopped};
use meter::Meter;
use running::{Running, stopping};
use sandbox::Sandbox;
use saved_settings::DeviceSettings;

pub use image::{absolute, with_ceph_files};
pub use obstacles::obstacles;
pub use open::FLUSHES_IGNORED;
pub use preflight::{check_successor, check_take_over};
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
    autoclear: Autoclear,
    settings: DeviceSettings,
    group: Membership,
    certificates: Option<TlsCertificates>,
    journals: Option<Arc<Journals>>,
    sandbox: Sandbox,
    block_device: BlockDeviceState,
    /// Serializes changes of the device. May be held while waiting for I/O.
    changing: Mutex<()>,
    commit: Mutex<Option<Arc<CommitProgress>>>,
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
    /// Confines this thread and the threads that it creates from now on, unless the user disabled the
    /// sandbox. Before that, starts to watch the users of the block device, if the device detaches with its
    /// last user. Fails if the kernel supports a confinement but refuses it, or if the users cannot be
    /// watched.
    pub fn confine(&mut self, removed: impl IntoIterator<Item = PathBuf>) -> Outcome {
        if self.autoclear.is_on()
            && let Some(ublk) = &self.running()?.ublk
        {
            ublk.watch_users(true).map_err(|e| Failure::from(e).during("autoclear"))?;
        }
        self.sandbox.enter(removed)
    }

    /// The threads inherit the privileges of the calling thread. Fails if a thread cannot be started.
    pub fn start_background(&self) -> Outcome {
        let running = self.running()?;
        self.background().as_mut().map_or(Ok(()), |threads| threads.start(&running, &self.meter))
    }

    /// `blkq show` prints the warnings until the daemon exits.
    pub fn add_warnings(&mut self, warnings: impl IntoIterator<Item = String>) {
        self.attached.warnings.extend(warnings);
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

    /// A name that other processes understand.
    pub fn image(&self) -> String {
        self.served().image.clone()
    }

    pub fn autoclear(&self) -> &Autoclear {
        &self.autoclear
    }

    pub fn leaves_block_device(&self) -> bool {
        self.block_device.outlives_daemon()
    }

    /// Readable when [`Device::take_failure`] returns a failure.
    pub fn failure_event(&self) -> &OwnedFd {
        &self.events.failure
    }

    /// Readable when [`Device::follow_size`] may have to be called.
    pub fn size_event(&self) -> &OwnedFd {
        &self.events.size
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

    fn begin_change(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`Device::begin_change`] for a client, who may have exited while another change was in progress. Fails as
    /// `permit` does, which is called when no other change is in progress.
    fn begin_change_if(&self, permit: Permit) -> Outcome<MutexGuard<'_, ()>> {
        let changing = self.begin_change();
        permit().map(|()| changing)
    }

    /// `None` if the device has stopped.
    pub fn statistics(&self) -> Option<Statistics> {
        self.meter.statistics()
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
            image: self.served().number,
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
        // This keeps new clients away, which would use the old size.
        let _unused = if after < before && !force {
            let unused = running.claim_unused(user).map_err(|failure| {
                failure.during(format_args!(
                    "shrink from {} to {}",
                    format_bytes(before),
                    format_bytes(after)
                ))
            })?;
            Some(unused)
        } else {
            None
        };
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
        flush_unless_held(&self.running()?)
    }
}
