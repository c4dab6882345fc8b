//! Starts to serve a device. The order of the steps matters: each resource is opened while this process still
//! has the threads, mounts and privileges that it requires.

use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blkq::clock::monotonic_ns;
use blkq::throttle::WEIGHT_DEFAULT;
use blkq::{Disk, Driver, EngineThread};
use blkq_drivers::DriverSpec;
use blkq_drivers::qcow2::Journals;
use blkq_export::Listen;
use blkq_export::nbd::TlsOptions;
use blkq_export::ublk::{Identity, IdleWatch, SetupProcess, UblkDevice, UblkOptions, process};
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::group::{self, Joined};
use blkq_protocol::info::{Confinement, StateFile};
use blkq_protocol::options::{AttachOptions, Export, Mechanism, Record, with_write_access};
use blkq_protocol::state::{Claim, DYING_WAIT, StateDir};
use rustix::fs::{CWD, Mode, OFlags, openat};

use super::Device;
use super::background::BackgroundThreads;
use super::exports::{choose_exports, limit_threads, no_block_device, not_taken_over, size_of};
use super::image::{
    Opening, absolute, ceph_mounts, image_name, journals, keep_format, keep_size, open_driver, refusal,
    serves_bytes, with_ceph_files,
};
use super::listen::{Sockets, directories_of, listen_at, tls, unix_path};
use super::running::{Changes, PersistentBitmaps, Running, Served};
use super::saved_settings::DeviceSettings;
use super::servers::{Events, ServerContext, Servers, new_event};
use super::settings::{LiveSettings, apply};
use crate::hangs::HangWatch;
use crate::log;
use crate::metrics::Endpoint;
use crate::pid_file::real_path;
use crate::sandbox::{self, Needs};

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
    device.fallback = exports.no_ublk;
    device.warnings.extend(fewer_threads);
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
    device.warnings.extend(fewer_threads);
    Ok(device)
}

pub(super) struct Plan<'a> {
    pub(super) options: AttachOptions,
    pub(super) claim: &'a Claim,
    pub(super) sockets: Sockets,
    /// Contains the size of the device if the block device is taken over.
    pub(super) opening: Opening,
    pub(super) served: Served,
    /// The block device that is taken over or will be created.
    pub(super) block_device: Option<Identity>,
    /// The changed settings of the last daemon.
    pub(super) settings: Vec<(String, String)>,
}

impl Plan<'_> {
    /// Fails as [`open`] does.
    pub(super) fn serve(mut self) -> Outcome<Device> {
        let settings = DeviceSettings::new(&self.options, &self.settings);
        let mut saved = settings.saved();
        saved.apply_to(&mut self.options);
        let idle = new_event()?;
        let is_take_over = self.opening.device_bytes.is_some();
        let is_after = is_take_over || self.claim.predecessor_of(&image_name(&self.options.image)).is_some();
        let opened = self.open(&idle)?;
        let Opened { image, source, journals, no_journals, metrics, tls, mut needs, children } = opened;
        let Plan { ref options, claim, sockets, mut served, block_device, .. } = self;
        claim.write_owner(source.driver.owner().as_deref())?;

        let disk = build_disk(options, claim, source.driver)?;
        let (bitmaps, mut warnings) = PersistentBitmaps::load(&disk)?;
        // A child process must not inherit the group's file: a lock on it would then survive this process.
        let group = join_group(options, claim, &disk).or_else(|failure| match is_take_over {
            // The device's clients wait for I/O, which matters more than the limits of the group.
            true => {
                let warning = format!(
                    "only the limits of the device itself apply, because it cannot join its group: {failure}"
                );
                log::line(&format!("warning: {warning}"));
                warnings.push(warning);
                Ok(None)
            }
            false => Err(failure),
        })?;
        saved.restore(disk.limits().read_only, |setting| apply(&disk, None, setting))?;
        let partscan = block_device.is_some() && !options.partscan.refused;
        // `engines` is declared last, so it is dropped first if a later step fails: this thread closes the
        // image, which the confined engines must not do.
        let engines = start_engines(&disk, options.sandbox, partscan)?;
        let handles: Vec<_> = engines.iter().map(|engine| engine.handle().clone()).collect();
        let events = Events::new(idle, &*disk.driver())?;
        let metrics = metrics.map(|at| Endpoint::bind(at, options.insecure)).transpose()?;
        warnings.extend(no_journals);
        warnings.extend(saved.warnings);
        if options.unsafe_flush_ignore {
            warnings.push(FLUSHES_IGNORED.to_owned());
        }

        let certificates = tls.as_ref().map(|tls| tls.certificates.clone());
        let context = ServerContext {
            options,
            disk: &disk,
            engines: &handles,
            image: &image,
            tls,
            serves_bytes: serves_bytes(options, block_device.is_some()),
            is_after,
            events: &events,
        };
        let (servers, of_servers) = Servers::start(sockets, context)?;
        warnings.extend(of_servers);
        served.image = image;
        let starting = served.state(disk.name(), block_device, settings.changed());
        let hangs = HangWatch::new(disk.clone(), handles.clone(), options.hang_warning);
        let mut running = Running {
            servers,
            ublk: None,
            engines,
            bitmaps,
            image: Mutex::new(source.image),
            served: Mutex::new(served),
            journals,
            disk,
            changes: Changes::default(),
            group: Mutex::new(group),
            hangs: hangs.counters.clone(),
            opened_ns: monotonic_ns(),
        };
        if let (Some(identity), Some(children)) = (block_device, children) {
            let (disk, failure_event) = (&running.disk, events.failure.clone());
            let (copy, threads_per_queue) = (options.copy.mode(), options.threads_per_queue);
            let start = || match is_take_over {
                true => {
                    let threads = threads_per_queue;
                    UblkDevice::take_over(identity, disk, &handles, threads, children, failure_event)
                        .map_err(not_taken_over)
                }
                false => {
                    // The state file is written before the block device is created, so that a block device never
                    // exists without one, even if this daemon is killed.
                    claim.write_state(&starting)?;
                    let (setup, users) = children;
                    let options = UblkOptions {
                        identity,
                        recoverable: !disk.driver().is_lost_with_process(),
                        partscan,
                        copy,
                        threads_per_queue,
                        setup,
                        users,
                        failure_event,
                    };
                    UblkDevice::start(disk, &handles, options).map_err(|error| no_block_device(error, copy))
                }
            };
            let started = start().inspect_err(|_| running.servers.close())?;
            needs.block_device = Some(started.identity().id);
            running.ublk = Some(started);
        }

        if options.partscan.wanted && !running.exports().iter().any(|export| export.starts_with("/dev/")) {
            warnings.push(NO_PARTITION_SCAN.to_owned());
        }
        warnings.extend(metrics.as_ref().and_then(|endpoint| endpoint.warning.clone()));
        let threads = BackgroundThreads::new(options, hangs, metrics);
        let partscan = options.partscan.wanted || running.ublk.is_some() && !options.partscan.refused;
        let running = Arc::new(running);
        Ok(Device {
            settings: LiveSettings {
                threads: Mutex::new(Some(threads)),
                saved: settings,
                autoclear: AtomicBool::new(options.autoclear),
            },
            events,
            certificates,
            needs: options.sandbox.then_some(needs),
            confinement: Confinement::default(),
            has_block_device: AtomicBool::new(block_device.is_some()),
            tracer: Mutex::default(),
            counted: Arc::downgrade(&running),
            running: Mutex::new(Some(running)),
            state_directory: claim.dir().path().to_owned(),
            warnings,
            fallback: None,
            partscan,
            flushes_ignored: options.unsafe_flush_ignore,
        })
    }

    /// If the device will have a block device, this process gets a mount namespace of its own, and the `idle` event
    /// becomes readable when the block device has no users. Fails if a file cannot be opened or a process cannot be
    /// created.
    fn open(&self, idle: &Arc<OwnedFd>) -> Outcome<Opened> {
        let Plan { options, claim, sockets, opening, block_device, .. } = self;
        let open = |journals| {
            let opened = open_driver(claim.dir(), options, block_device.is_some(), opening, journals);
            let opened = opened.map_err(|error| refusal(error, options, claim))?;
            // A daemon may have exited since the check before the image was opened, and its device may wait for the
            // next daemon.
            claim.dir().check_not_waiting(claim.name(), options).map(|()| opened)
        };
        // The path must be resolved before the mount on which the image is may be detached.
        let image = image_name(&options.image);
        // An RBD image must be opened after the processes are forked, because its client library has threads.
        // A file must be opened before, because its mount may be detached in between.
        let is_file = !matches!(options.image, DriverSpec::Rbd(_));
        let (journals, no_journals) = journals(options, claim.dir().path())?;
        let source = is_file.then(|| open(journals.clone())).transpose()?;
        let metrics = options.metrics.as_ref().map(listen_at).transpose()?;
        let tls = tls(options, claim.is_kept())?;
        let listen = sockets.nbd.iter().chain(&metrics).chain(&sockets.vhost);
        // The block device is added later.
        let mut needs = Needs::default();
        if options.sandbox {
            if let DriverSpec::Image(path) = &options.image {
                let file = openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
                needs.image = Some(file.map_err(|e| Failure::new(format!("{}: {e}", path.display())))?);
            }
            needs.removed.extend(listen.clone().filter_map(unix_path));
        }
        let certificates = tls.iter().flat_map(|tls| directories_of(tls.certificates.directory()));
        needs.read.extend(certificates);
        needs.journals = journals.as_ref().map(|journals| journals.directory().to_owned());
        let children = block_device.map(|_| fork_children(options, listen, &needs, idle)).transpose()?;
        let source = source.map_or_else(|| open(None), Ok)?;
        Ok(Opened { image, source, journals, no_journals, metrics, tls, needs, children })
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

/// The files, locks and processes of a device, which are opened before its mounts are detached and threads are created.
struct Opened {
    /// A name that other processes understand.
    image: String,
    source: blkq_drivers::Opened,
    journals: Option<Arc<Journals>>,
    no_journals: Option<String>,
    metrics: Option<Listen>,
    tls: Option<TlsOptions>,
    needs: Needs,
    children: Option<(SetupProcess, IdleWatch)>,
}

/// Afterwards this process has a mount namespace of its own, with only the mounts that it needs.
fn fork_children<'a>(
    options: &AttachOptions,
    listen: impl Iterator<Item = &'a Listen>,
    needs: &Needs,
    idle: &Arc<OwnedFd>,
) -> Outcome<(SetupProcess, IdleWatch)> {
    let mut kept = vec![StateDir::locate()?.path().to_owned()];
    kept.extend(listen.filter_map(unix_path));
    kept.extend(needs.read.iter().cloned());
    kept.extend(ceph_mounts(options));
    let pid_file = options.pid_file.as_ref();
    kept.extend(pid_file.cloned().into_iter().chain(pid_file.and_then(|path| real_path(path).ok())));
    if matches!(options.image, DriverSpec::Rbd(_)) {
        // The libraries may be on a mount that is detached below. Loading them creates no threads.
        blkq_drivers::rbd::load()?;
    }
    process::prepare(&kept)?;
    let sandbox = options.sandbox;
    // SAFETY: this process has no other threads yet.
    let setup = unsafe { SetupProcess::fork(move || !sandbox || sandbox::ublk_commands().is_ok()) }?;
    // This process must be forked now: later this daemon has threads and lacks the privileges.
    let confine = move || !sandbox || sandbox::watcher().is_ok();
    // SAFETY: as above.
    let users = unsafe { IdleWatch::fork(idle, confine) }?;
    Ok((setup, users))
}

fn build_disk(options: &AttachOptions, claim: &Claim, driver: Arc<dyn Driver>) -> Outcome<Arc<Disk>> {
    if options.without.includes(Mechanism::HugePages) {
        blkq::set_huge_pages(false);
    }
    Ok(Disk::builder_shared(driver)
        .name(claim.name())
        .queues(usize::from(options.queues) * usize::from(options.threads_per_queue))
        .depth(options.depth)
        .scheduler(options.scheduler)
        .merge(options.merge)
        .early_submission(!options.without.includes(Mechanism::EarlySubmission))
        .batching(options.batching)
        .iostats(options.iostats)
        .clock(options.clock)
        .read_only(options.read_only)
        .rate_limits(options.limit.limits())
        .error_policy(options.on_error)
        .ignore_flushes(options.unsafe_flush_ignore)
        .build()?)
}

fn join_group(options: &AttachOptions, claim: &Claim, disk: &Disk) -> Outcome<Option<Joined>> {
    // The device may join a group later, when the daemon is confined.
    group::prepare();
    let Some(group) = &options.group else { return Ok(None) };
    let weight = options.weight.unwrap_or(WEIGHT_DEFAULT);
    let (joined, member) = Joined::open(claim.dir(), group, claim.name(), weight)?;
    disk.join_group(member);
    Ok(Some(joined))
}

/// If `sandbox` is set, engines are confined from the start; `partscan` keeps the capability that the kernel
/// requires for a partition scan.
fn start_engines(disk: &Arc<Disk>, sandbox: bool, partscan: bool) -> Outcome<Vec<EngineThread>> {
    let start = || -> Outcome<Vec<EngineThread>> {
        if sandbox {
            sandbox::engine(partscan)?;
        }
        let spawn = |queue| EngineThread::spawn(&format!("blkq-queue-{queue}"), vec![(disk.clone(), queue)]);
        Ok((0..disk.queue_count()).map(spawn).collect::<Result<_, _>>()?)
    };
    // Threads inherit the privileges of the thread that creates them. This short-lived thread drops its
    // privileges, creates the engines and exits.
    std::thread::scope(|scope| scope.spawn(start).join())
        .unwrap_or_else(|_| Err(Failure::new("cannot start the engines")))
}
