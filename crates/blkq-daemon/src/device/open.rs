//! Starts to serve a device. The order of the steps matters: each resource is opened while this process still
//! has the threads, mounts and privileges that it requires.

use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blkq::clock::monotonic_ns;
use blkq_export::ublk::{Identity, UblkDevice, UblkOptions};
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::info::{Confinement, DaemonState, StateFile};
use blkq_protocol::options::{AttachOptions, Export, Record, with_write_access};
use blkq_protocol::state::{Claim, DYING_WAIT};

use super::background::BackgroundThreads;
use super::commit::Changes;
use super::disk::ServedDisk;
use super::exports::{choose_exports, limit_threads, no_block_device, not_taken_over, size_of};
use super::image::{Opening, absolute, image_name, keep_format, keep_size, serves_bytes, with_ceph_files};
use super::listen::Sockets;
use super::opened::Opened;
use super::running::Running;
use super::saved_settings::DeviceSettings;
use super::servers::{ServerContext, Servers};
use super::settings::LiveSettings;
use super::trace::Tracing;
use super::{Attached, Device, Events, Served, new_event};
use crate::hangs::HangWatch;
use crate::metrics::Endpoint;

/// A daemon of another name may have been killed just before.
const IN_USE_WAIT: Duration = Duration::from_millis(300);

const NO_PARTITION_SCAN: &str = "--partscan has no effect on an NBD export, whose client scans for partitions; \
     to serve one partition, use --offset and --size-limit";

pub const FLUSHES_IGNORED: &str =
    "flushes are ignored: a crash of this machine or a power loss destroys the data of the device";

/// NBD listens on the addresses of `options`, else on the `inherited` sockets, else on a unix socket in
/// the state directory. `settings` are those that were changed under the last daemon; one that cannot be
/// restored becomes a warning, unless it made the device writable: then this fails. If the device cannot
/// be served, nothing is left open.
pub fn open(
    options: &AttachOptions,
    settings: Vec<(String, String)>,
    claim: &Claim,
    inherited: Vec<OwnedFd>,
) -> Outcome<Device> {
    let recorded = with_ceph_files(options);
    let mut options = with_write_access(&recorded, &settings);
    if claim.is_of_guest() {
        keep_format(&mut options);
    }
    let exports = choose_exports(&options, &inherited)?;
    let sockets = Sockets::new(&options, claim, exports.nbd, inherited)?;
    let before = claim.predecessor_of(&image_name(&options.image));
    let opening = Opening {
        device_bytes: None,
        wait: if before.is_some() { DYING_WAIT } else { IN_USE_WAIT },
        predecessor: before.and_then(|before| before.owner.clone()),
    };
    // Checked before the image is opened, because opening may change it.
    claim.dir().check_not_waiting(claim.name(), &options)?;
    let block_device = exports.ublk.then(Identity::of_new);
    let served = Served::record(&recorded, claim, block_device)?;
    let fewer_threads = if exports.ublk { limit_threads(&mut options)? } else { None };
    let plan = Plan { options, claim, sockets, opening, served, block_device, settings };
    let mut device = plan.serve()?;
    device.attached.fallback = exports.no_ublk;
    device.attached.warnings.extend(fewer_threads);
    Ok(device)
}

/// As [`open`], but takes over the block device of `state`, with the settings of its last daemon.
/// If this fails, the block device is unchanged.
pub fn recover(
    options: &AttachOptions,
    claim: &Claim,
    state: StateFile,
    inherited: Vec<OwnedFd>,
) -> Outcome<Device> {
    let Some(block_device) = state.ublk else {
        return Err(Failure::new("the state file names no block device to take over"));
    };
    let recorded = &with_ceph_files(options);
    let identity = block_device.identity();
    let mut options = with_write_access(recorded, &state.settings);
    let fewer_threads = limit_threads(&mut options)?;
    keep_format(&mut options);
    let bytes = size_of(identity)?;
    keep_size(&mut options, bytes);
    // The files may have been replaced by those of another device that waits.
    claim.dir().check_not_waiting(claim.name(), &options)?;
    let served = Served::record(recorded, claim, Some(identity))?;
    let sockets = Sockets::new(&options, claim, options.exports.contains(&Export::Nbd), inherited)?;
    let opening = Opening { device_bytes: Some(bytes), wait: DYING_WAIT, predecessor: state.owner };
    let (block_device, settings) = (Some(identity), state.settings);
    let mut device = Plan { options, claim, sockets, opening, served, block_device, settings }.serve()?;
    device.attached.warnings.extend(fewer_threads);
    Ok(device)
}

pub(super) struct Plan<'a> {
    pub(super) options: AttachOptions,
    pub(super) claim: &'a Claim,
    pub(super) sockets: Sockets,
    /// Has the size of the device if it is taken over.
    pub(super) opening: Opening,
    pub(super) served: Served,
    /// The block device that is taken over or will be created.
    pub(super) block_device: Option<Identity>,
    /// The changed settings of the last daemon.
    pub(super) settings: Vec<(String, String)>,
}

impl Plan<'_> {
    /// Fails as [`open`] does.
    pub(super) fn serve(self) -> Outcome<Device> {
        let Plan { mut options, claim, sockets, opening, mut served, block_device, settings } = self;
        let settings = DeviceSettings::new(&options, settings);
        let mut saved = settings.saved();
        saved.apply_to(&mut options);
        let options = &options;
        let idle = new_event()?;
        let is_take_over = opening.device_bytes.is_some();
        let is_after = is_take_over || claim.predecessor_of(&image_name(&options.image)).is_some();

        let opened = Opened::new(options, claim, &sockets, block_device.map(|_| &idle), opening)?;
        let Opened { image, source, journals, no_journals, metrics, tls, mut needs, children } = opened;
        claim.write_owner(source.driver.owner().as_deref())?;

        let partscan = block_device.is_some() && !options.partscan.refused;
        let of_disk = ServedDisk::new(options, claim, source.driver, &mut saved, is_take_over, partscan)?;
        let handles: Vec<_> = of_disk.engines.iter().map(|engine| engine.handle().clone()).collect();
        // `engines` is declared last, so it is dropped first if a later step fails: this thread closes the
        // image, which the confined engines must not do.
        let ServedDisk { group, group_watch, bitmaps, disk, mut warnings, engines } = of_disk;
        let events = Events::new(idle, &*disk.driver())?;
        let metrics = metrics.map(|at| Endpoint::bind(at, options.insecure)).transpose()?;
        warnings.extend(no_journals);
        warnings.extend(saved.warnings);
        if options.unsafe_flush_ignore {
            warnings.push(FLUSHES_IGNORED.to_owned());
        }

        let certificates = tls.as_ref().map(|tls| tls.certificates.clone());
        let context = ServerContext {
            disk: &disk,
            engines: &handles,
            image: &image,
            tls,
            serves_bytes: serves_bytes(options, block_device.is_some()),
            is_after,
            events: &events,
        };
        let (servers, of_servers) = Servers::start(options, sockets, context)?;
        warnings.extend(of_servers);
        let hangs = HangWatch::new(disk.clone(), handles.clone(), options.hang_warning);
        let mut running = Running {
            servers,
            ublk: None,
            engines,
            bitmaps,
            image: Mutex::new(source.image),
            disk,
            changes: Changes::default(),
            group: Mutex::new(group),
            hangs: hangs.counters.clone(),
            opened_ns: monotonic_ns(),
        };
        if let (Some(identity), Some(children)) = (block_device, children) {
            let (disk, failure_event) = (&running.disk, events.failure.clone());
            let (copy, threads_per_queue) = (options.copy.mode(), options.threads_per_queue);
            let started = if is_take_over {
                UblkDevice::take_over(identity, disk, &handles, threads_per_queue, children, failure_event)
                    .map_err(not_taken_over)
            } else {
                // The state file is written before the block device is created, so that a block device never
                // exists without one, even if this daemon is killed.
                claim.write_state(&DaemonState {
                    pid: std::process::id(),
                    image: served.number,
                    exports: Vec::new(),
                    settings: settings.changed(),
                })?;
                let (recoverable, (setup, users)) = (!disk.driver().is_lost_with_process(), children);
                let options = UblkOptions {
                    identity,
                    recoverable,
                    partscan,
                    copy,
                    threads_per_queue,
                    setup,
                    users,
                    failure_event,
                };
                UblkDevice::start(disk, &handles, options).map_err(|error| no_block_device(error, copy))
            };
            let started = started.inspect_err(|_| running.servers.close())?;
            needs.block_device = Some(started.identity().id);
            running.ublk = Some(started);
        }
        served.image = image;

        if options.partscan.wanted && !running.exports().iter().any(|export| export.starts_with("/dev/")) {
            warnings.push(NO_PARTITION_SCAN.to_owned());
        }
        warnings.extend(metrics.as_ref().and_then(|endpoint| endpoint.warning.clone()));
        let threads = BackgroundThreads::new(options, hangs, metrics, group_watch);
        let attached = Attached {
            name: claim.name().to_owned(),
            state_directory: claim.dir().path().to_owned(),
            warnings,
            fallback: None,
            partscan: options.partscan.wanted || running.ublk.is_some() && !options.partscan.refused,
            flushes_ignored: options.unsafe_flush_ignore,
        };
        Ok(Device {
            settings: LiveSettings::new(settings, options.autoclear, threads),
            attached,
            served: Mutex::new(served),
            events,
            certificates,
            journals,
            needs: options.sandbox.then_some(needs),
            confinement: Confinement::default(),
            has_block_device: AtomicBool::new(block_device.is_some()),
            tracing: Tracing::default(),
            running: Mutex::new(Some(Arc::new(running))),
        })
    }
}

impl Served {
    /// Must happen before this process reads anything from a client: the next daemon trusts the file.
    fn record(options: &AttachOptions, claim: &Claim, ublk: Option<Identity>) -> Outcome<Served> {
        let (image, options) = (image_name(&options.image), Record::new(&absolute(options)?)?);
        let number = claim.write_options(&image, &options, ublk.map(|identity| identity.cookie))?;
        Ok(Served { image, number, attach_options: Some(options) })
    }
}
