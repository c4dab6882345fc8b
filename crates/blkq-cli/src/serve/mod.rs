//! Where a daemon meets the block layer and its attachments.

mod background;
mod bitmaps;
mod block_device;
mod commit;
mod commit_progress;
mod disk;
mod events;
mod exports;
mod facts;
mod flush;
mod image;
mod kept_bitmaps;
mod kept_settings;
mod listen;
mod memory_limits;
mod meter;
mod open;
mod opened;
mod rehearsal;
mod rejections;
mod running;
mod sandbox;
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

use crate::autoclear::Autoclear;
use crate::failure::{Failure, Outcome};
use crate::group::Joined;
use crate::info::DaemonState;
use crate::options::Record;
use crate::statistics::Statistics;
use blkq::units::format_bytes;

use background::BackgroundThreads;
use block_device::KeptBlockDevice;
use commit_progress::CommitProgress;
use events::Events;
use flush::{flush_unless_held, flush_unless_stopped};
use kept_settings::DeviceSettings;
use meter::Meter;
use running::{Running, stopping};
use sandbox::Sandbox;

pub use image::find_format;
pub use open::FLUSHES_IGNORED;
pub use rehearsal::{check_successor, check_take_over};
pub use settings::Change;

/// A device being served, until it is stopped.
pub struct Device {
    /// Stopped first, as `running` is last.
    background: Mutex<Option<BackgroundThreads>>,
    attached: Attached,
    served: Mutex<Served>,
    meter: Meter,
    events: Events,
    autoclear: Autoclear,
    settings: DeviceSettings,
    certificates: Option<TlsCertificates>,
    /// The journals of qcow2 images.
    journals: Option<Arc<Journals>>,
    sandbox: Sandbox,
    block_device: KeptBlockDevice,
    /// Locked while the device is changed: one change at a time, which may wait for I/O.
    changing: Mutex<()>,
    /// The block commit that is under way.
    commit: Mutex<Option<Arc<CommitProgress>>>,
    /// The process that traces it.
    traced_by: Mutex<Option<String>>,
    running: Mutex<Option<Arc<Running>>>,
}

/// The facts of a device that stay as they are from its attach on.
struct Attached {
    name: String,
    state_directory: PathBuf,
    warnings: Vec<String>,
    /// Why it has no node in /dev, though none was declined.
    fallback: Option<Failure>,
    partscan: bool,
    flushes_ignored: bool,
    /// Its group, if it is in one.
    group: Option<Joined>,
}

impl Attached {
    fn group_name(&self) -> Option<&str> {
        self.group.as_ref().map(Joined::name)
    }
}

/// The image that is served.
#[derive(Clone)]
struct Served {
    image: String,
    /// Its number in `NAME.options`.
    number: u64,
    /// How it was attached, or would be now.
    attach_options: Option<Record>,
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
        self.sandbox.enter(removed)
    }

    /// Starts to scan for hung requests, and to answer requests for metrics: on threads that have no
    /// more rights than the one that calls this.
    ///
    /// # Errors
    /// If there can be no more threads.
    pub fn start_background(&self) -> Outcome {
        let running = self.running()?;
        self.background().as_mut().map_or(Ok(()), |threads| threads.start(&running, &self.meter))
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
        self.block_device.outlives_daemon()
    }

    /// Readable when [`Device::take_failure`] has something.
    pub fn failure_event(&self) -> &OwnedFd {
        &self.events.failure
    }

    /// Readable when [`Device::follow_size`] may have something to do.
    pub fn size_event(&self) -> &OwnedFd {
        &self.events.size
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
        events::take(&self.events.failure);
        Some(self.running().ok()?.ublk.as_ref()?.failure()?.into())
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
    pub fn state(&self) -> Outcome<DaemonState> {
        let running = self.running()?;
        Ok(DaemonState {
            pid: std::process::id(),
            image: self.served().number,
            exports: running.exports(),
            owner: running.disk.driver().owner(),
            settings: self.settings.changed(),
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
                // Undone; the error is the reason.
                let _ = running.disk.resize(Some(before));
            })?;
        }
        if let Some(vhost) = &running.servers.vhost {
            vhost.resized();
        }
        Ok(bytes)
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
}
