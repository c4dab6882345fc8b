//! How a device comes to be served: what is opened, started and given up, in which order.

use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blkq::drivers::qcow2::Journals;
use blkq::drivers::{self, DriverSpec};
use blkq::throttle::{LimitMode, WEIGHT_DEFAULT};
use blkq::{Disk, Driver, EngineHandle, EngineThread};
use blkq_export::nbd::{Listen, NbdExport, NbdOptions, NbdServer, NbdSwitches};
use blkq_export::ublk::{Identity, IdleWatch, SetupProcess, UblkDevice, UblkOptions, process};
use blkq_export::vhost_user::{VhostUserDevice, VhostUserOptions};
use rustix::fs::{CWD, Mode, OFlags, openat};

use super::exports::{choose_exports, limit_threads, no_block_device, not_taken_over, size_of};
use super::image::{
    absolute, ceph_mounts, image_name, journals, keep_format, keep_size, open_driver, refusal, serves_bytes,
    with_ceph_files,
};
use super::kept_bitmaps::KeptBitmaps;
use super::listen::{
    addresses, directories_of, listen_at, no_server, tls, vhost_address, warn_of_access,
    warn_of_closed_directories,
};
use super::memory_limits::memory_limits;
use super::running::Running;
use super::settings::Kept;
use super::{BackgroundThreads, Device, Meter, Served, rejections};
use crate::access::socket_access;
use crate::autoclear::{Autoclear, new_event};
use crate::confine::{self, Confinement, Needs};
use crate::descriptors::{clients_max, reserve};
use crate::failure::{Failure, Outcome};
use crate::group::{GroupWatch, Joined};
use crate::hangs::HangWatch;
use crate::info::{BlockDevice, StateFile};
use crate::log;
use crate::metrics::Endpoint;
use crate::options::{AttachOptions, Export, Record};
use crate::settings::SettingGroups;
use crate::state::{Claim, DYING_WAIT, StateDir};

/// How long an image may still be in use by a daemon that was killed, and had another name.
const IN_USE_WAIT: Duration = Duration::from_millis(300);

/// NBD connections at a time, and seconds for a handshake, unless others are asked for.
const CONNECTIONS: u16 = 64;
const HANDSHAKE_TIMEOUT_S: u16 = 10;

/// `--partscan` of a device without a node.
const NO_PARTITION_SCAN: &str = "partitions are not scanned here: an NBD export has no node in /dev; \
     the kernel of its client scans them (nbd-client), or use --offset and --size-limit for one";

/// The warning of `--unsafe-flush-ignore`.
pub const FLUSHES_IGNORED: &str =
    "flushes are ignored: a crash of this machine, or a power loss, destroys what is on the device";

impl Device {
    /// Opens the image and serves it under the name of `claim`: over ublk, or NBD on the addresses of
    /// `options`, if there are none on the sockets `inherited`, and if there are none on a unix socket in
    /// the state directory. `settings` are those that its last daemon had, changed since it was attached; one that
    /// it cannot have any more becomes a warning.
    ///
    /// # Errors
    /// Whatever keeps it from being served; nothing is left open then.
    pub fn open(
        options: &AttachOptions,
        settings: Vec<(String, String)>,
        claim: &Claim,
        inherited: Vec<OwnedFd>,
    ) -> Outcome<Device> {
        let options = &with_ceph_files(options);
        let exports = choose_exports(options, &inherited)?;
        let listen = if exports.nbd { addresses(options, claim, inherited)? } else { Vec::new() };
        let wait = if claim.is_after(&image_name(&options.image)) { DYING_WAIT } else { IN_USE_WAIT };
        let open = |journals| {
            let predecessor = claim.owner_before(&image_name(&options.image));
            let opened = open_driver(options, exports.ublk, wait, predecessor, journals);
            opened.map_err(|error| refusal(error, options, claim))
        };
        let identity = Identity::of_new();
        let intent = StateFile {
            name: claim.name().to_owned(),
            pid: std::process::id(),
            image: image_name(&options.image),
            exports: Vec::new(),
            attach_options: Some(Record::new(&absolute(options)?)?),
            ublk: exports.ublk.then(|| BlockDevice::new(identity)),
            owner: None,
            settings,
        };
        let mut options = options.clone();
        let fewer_threads = if exports.ublk { limit_threads(&mut options)? } else { None };
        let options = &options;
        let attach =
            |disk: &Arc<Disk>, engines: &[EngineHandle], children: Option<Children>, failure_event| {
                let Some((setup, users)) = children else { return Ok(None) };
                // Written before there is one: if this daemon is killed meanwhile, there is nothing
                // that no state file has.
                claim.write_state(&StateFile { owner: disk.driver().owner(), ..intent.clone() })?;
                let copy = options.copy.mode();
                let options = UblkOptions {
                    identity,
                    recoverable: !disk.driver().is_lost_with_process(),
                    partscan: !options.partscan.refused,
                    copy,
                    threads_per_queue: options.threads_per_queue,
                    setup,
                    users,
                    failure_event,
                };
                let started = UblkDevice::start(disk, engines, options);
                Ok(Some(started.map_err(|error| no_block_device(error, copy))?))
            };
        let sockets = Sockets { nbd: listen, vhost: vhost_address(options, claim)? };
        let mut device = Device::serve(options, claim, open, sockets, intent.clone(), false, attach)?;
        device.fallback = exports.no_ublk;
        device.warnings.extend(fewer_threads);
        Ok(device)
    }

    /// As [`Device::open`], for the block device of `state`, with the settings that its
    /// last daemon had.
    ///
    /// # Errors
    /// Whatever keeps it from being taken over; it stays as it was.
    pub fn recover(
        options: &AttachOptions,
        claim: &Claim,
        mut state: StateFile,
        inherited: Vec<OwnedFd>,
    ) -> Outcome<Device> {
        let Some(block_device) = state.ublk.take() else {
            return Err(Failure::new("there is no block device to take over"));
        };
        let options = &with_ceph_files(options);
        let identity = block_device.identity();
        state.ublk = Some(BlockDevice::new(identity));
        state.attach_options = Some(Record::new(&absolute(options)?)?);
        let mut options = options.clone();
        let fewer_threads = limit_threads(&mut options)?;
        let threads = options.threads_per_queue;
        keep_format(&mut options);
        let bytes = size_of(identity)?;
        keep_size(&mut options, bytes);
        let nbd = options.exports.contains(&Export::Nbd);
        let listen = if nbd { addresses(&options, claim, inherited)? } else { Vec::new() };
        let attach =
            |disk: &Arc<Disk>, engines: &[EngineHandle], children: Option<Children>, failure_event| {
                let Some(children) = children else { return Ok(None) };
                // The image has grown, and the kernel was not notified.
                if disk.limits().size_bytes() > bytes {
                    disk.resize(Some(bytes))?;
                }
                let taken_over =
                    UblkDevice::take_over(identity, disk, engines, threads, children, failure_event);
                Ok(Some(taken_over.map_err(not_taken_over)?))
            };
        let predecessor = state.owner.take();
        let open = |journals| {
            let opened = open_driver(&options, true, DYING_WAIT, predecessor.clone(), journals);
            opened.map_err(|error| refusal(error, &options, claim))
        };
        let sockets = Sockets { nbd: listen, vhost: vhost_address(&options, claim)? };
        let mut device = Device::serve(&options, claim, open, sockets, state, true, attach)?;
        device.warnings.extend(fewer_threads);
        Ok(device)
    }

    /// Serves the driver that `open` opens, with the settings of `state`; without its group if it
    /// `is_successor` of a daemon and cannot join.
    ///
    /// # Errors
    /// As [`Device::open`].
    pub(super) fn serve(
        options: &AttachOptions,
        claim: &Claim,
        open: impl Fn(Option<Arc<Journals>>) -> Outcome<Box<dyn Driver>>,
        sockets: Sockets,
        state: StateFile,
        is_successor: bool,
        attach: impl FnOnce(
            &Arc<Disk>,
            &[EngineHandle],
            Option<Children>,
            Arc<OwnedFd>,
        ) -> Outcome<Option<UblkDevice>>,
    ) -> Outcome<Device> {
        let StateFile { attach_options, ublk: block_device, settings, .. } = state;
        let Sockets { nbd: listen, vhost: vhost_listen } = sockets;
        let name = claim.name();
        let has = SettingGroups::new(options);
        let mut kept = Kept::read(has, &settings);
        let mut options = options.clone();
        kept.put_into(&mut options);
        let options = &options;
        let autoclear = Autoclear::new(options.autoclear)?;
        // Before the mount that it is on may go.
        let image = image_name(&options.image);
        // The client of a cluster has threads, and they are to be made after all processes; a file may be on a
        // mount that goes with them.
        let is_file = !matches!(options.image, DriverSpec::Rbd(_));
        let (journals, no_journals) = journals(options, claim.dir().path())?;
        let opened = is_file.then(|| open(journals.clone())).transpose()?;
        let metrics = options.metrics.as_ref().map(listen_at).transpose()?;
        // Before the mounts that these are on may go.
        let tls = tls(options)?;
        let certificates = tls.as_ref().map(|tls| tls.certificates.clone());
        let mut needs = needs(options, listen.iter().chain(&metrics).chain(&vhost_listen))?;
        needs
            .read
            .extend(certificates.iter().flat_map(|certificates| directories_of(certificates.directory())));
        needs.journals = journals.as_ref().map(|journals| journals.directory().to_owned());
        let mut children = None;
        if block_device.is_some() {
            let mut kept = vec![StateDir::locate()?.path().to_owned()];
            kept.extend(listen.iter().chain(&metrics).chain(&vhost_listen).filter_map(
                |listen| match listen {
                    Listen::Unix(path) => Some(path.clone()),
                    _ => None,
                },
            ));
            kept.extend(needs.read.iter().cloned());
            kept.extend(ceph_mounts(options));
            kept.extend(options.pid_file.as_ref().and_then(|path| std::path::absolute(path).ok()));
            if !is_file {
                // Its libraries may be on a mount that goes, too; and they make no threads by themselves.
                drivers::rbd::load()?;
            }
            // Before there are other threads.
            process::prepare(&kept)?;
            let sandbox = options.sandbox;
            // SAFETY: as above; and with that it has no mounts.
            let setup = unsafe { SetupProcess::fork(move || !sandbox || confine::ublk_commands().is_ok()) }?;
            // It cannot be made later, when there are threads and no privileges.
            let confine = move || !sandbox || confine::watcher().is_ok();
            // SAFETY: as above.
            let users = unsafe { IdleWatch::fork(autoclear.idle_event(), confine) }?;
            children = Some((setup, users));
        }
        let driver = opened.map_or_else(|| open(None), Ok)?;
        let driver_name = driver.name();
        let disk = Disk::builder(driver)
            .name(name)
            .queues(usize::from(options.queues) * usize::from(options.threads_per_queue))
            .depth(options.depth)
            .scheduler(options.scheduler.kind())
            .merge(options.merge)
            .early_submission(options.early_submission)
            .batching(options.batching)
            .iostats(options.iostats)
            .clock(options.clock)
            .read_only(options.read_only)
            .rate_limits(options.limit.limits())
            .error_policy(options.on_error)
            .ignore_flushes(options.unsafe_flush_ignore)
            .build()?;
        let weight = options.weight.unwrap_or(WEIGHT_DEFAULT);
        // No child has its open file, which a member that died must not leave locked.
        let mut group = None;
        let mut group_watch = None;
        let (bitmaps, mut warnings) = KeptBitmaps::load(&disk)?;
        match options.group.as_ref().map(|group| Joined::open(claim.dir(), group, name, weight)) {
            Some(Ok((joined, member))) => {
                group_watch = Some(GroupWatch::new(joined.keeper(&member), disk.clone()));
                disk.join_group(member);
                group = Some(joined);
            }
            // Its users wait for I/O, and a group is not worth that.
            Some(Err(failure)) if is_successor => {
                let warning = format!("only its own limits count, as it could not join its group: {failure}");
                log::line(&format!("warning: {warning}"));
                warnings.push(warning);
            }
            Some(Err(failure)) => return Err(failure),
            None => {}
        }
        kept.set(&disk);
        let size_event = match disk.driver().size_event() {
            Some(event) => {
                let cloned = event.try_clone_to_owned();
                Arc::new(cloned.map_err(|e| Failure::new(format!("an eventfd: {e}")))?)
            }
            None => new_event()?,
        };
        let engines =
            start_engines(&disk, options.sandbox, block_device.is_some() && !options.partscan.refused)?;
        let handles: Vec<EngineHandle> = engines.iter().map(|engine| engine.handle().clone()).collect();
        let background = BackgroundThreads {
            auto_limit: None,
            wants_auto_limit: options.limit == LimitMode::Auto,
            hangs: HangWatch::new(disk.clone(), handles.clone(), options.hang_warning),
            metrics: metrics.map(|at| Endpoint::bind(at, options.insecure)).transpose()?,
            group: group_watch,
        };
        let export = NbdExport {
            name: options.export_name.clone().unwrap_or_else(|| name.to_owned()),
            description: format!("{driver_name} {image}"),
            queue: 0,
        };
        let access = socket_access(options.socket_mode, options.socket_group.as_deref())?;
        let closed = warn_of_closed_directories(listen.iter().chain(&vhost_listen), access);
        let rejection_event = rejections::event()?;
        let vhost = vhost_listen.map(|listen| {
            let vhost_options = VhostUserOptions {
                serial: name.to_owned(),
                access,
                idle_event: Some(autoclear.idle_event().clone()),
                report_event: Some(rejection_event.clone()),
                register_memory: options.register_memory.then(|| memory_limits(options.sandbox)),
            };
            VhostUserDevice::listen(listen, vhost_options, &disk, &handles)
        });
        let vhost = vhost.transpose()?;
        // Later it could make no ring; and clients get the descriptors that are left.
        let reserved = reserve();
        let prepared = vhost.iter().filter(|_| options.sandbox).try_for_each(VhostUserDevice::prepare);
        drop(reserved);
        let connections_wanted = usize::from(options.max_connections.unwrap_or(CONNECTIONS));
        let connections_max = clients_max(connections_wanted, listen.len());
        let switches = Arc::new(NbdSwitches {
            pacing: options.pacing.into(),
            receive_backoff: options.receive_backoff.into(),
            split_reads: options.split_reads.into(),
        });
        let nbd_options = NbdOptions {
            exports: vec![export],
            connections_max,
            handshake_timeout_s: u64::from(options.handshake_timeout.unwrap_or(HANDSHAKE_TIMEOUT_S)),
            tls,
            insecure: options.insecure,
            access,
            named_in_uri: options.export_name.is_some(),
            unaligned: serves_bytes(options, block_device.is_some()).then(Arc::default),
            idle_event: Some(autoclear.idle_event().clone()),
            rejection_event: Some(rejection_event.clone()),
            switches: switches.clone(),
            ..NbdOptions::default()
        };
        // Made before the servers, so that these stop first if one of them does not start.
        let unaligned = nbd_options.unaligned.clone();
        let mut running =
            Running { servers: Vec::new(), vhost, ublk: None, engines, bitmaps, disk, unaligned };
        for listen in listen {
            match NbdServer::start(listen, nbd_options.clone(), &handles) {
                Ok(server) => running.servers.push(server),
                Err(error) => {
                    running.close_servers();
                    return Err(no_server(error));
                }
            }
        }
        let failure_event = new_event()?;
        match attach(&running.disk, &handles, children, failure_event.clone()) {
            Ok(ublk) => running.ublk = ublk,
            Err(failure) => {
                running.close_servers();
                return Err(failure);
            }
        }
        needs.block_device =
            running.ublk.as_ref().map(|ublk| (ublk.identity().id, claim.dir().path().to_owned()));
        warnings.extend(no_journals);
        warnings.extend(kept.warnings);
        if options.unsafe_flush_ignore {
            warnings.push(FLUSHES_IGNORED.to_owned());
        }
        if connections_max < connections_wanted && !running.servers.is_empty() {
            warnings.push(format!(
                "only {connections_max} clients at a time: no more open files are allowed (ulimit -n)"
            ));
        }
        warnings.extend(
            prepared
                .err()
                .map(|error| format!("some queues of virtual machines, or all, are not served: {error}")),
        );
        warnings.extend(warn_of_access(options, &nbd_options, &running.servers, running.vhost.as_ref()));
        warnings.extend(closed);
        if options.partscan.wanted && !running.exports().iter().any(|export| export.starts_with("/dev/")) {
            warnings.push(NO_PARTITION_SCAN.to_owned());
        }
        let running = Arc::new(running);
        let meter = Meter::new(
            name,
            &running,
            &background.hangs,
            group.as_ref().map(|group| group.name().to_owned()),
        );
        if let Some(endpoint) = &background.metrics {
            warnings.extend(endpoint.warning().map(str::to_owned));
        }
        Ok(Device {
            name: name.to_owned(),
            served: Mutex::new(Served { image, attach_options }),
            journals,
            state_directory: claim.dir().path().to_owned(),
            warnings,
            fallback: None,
            partscan: options.partscan.wanted || running.ublk.is_some() && !options.partscan.refused,
            autoclear,
            meter,
            background: Mutex::new(Some(background)),
            needs: (options.sandbox).then_some(needs),
            sandbox: Confinement::default(),
            flushes_ignored: options.unsafe_flush_ignore,
            block_device,
            block_device_stopped: AtomicBool::new(false),
            failure_event,
            size_event,
            has,
            settings: Mutex::new(settings),
            commit: Mutex::new(None),
            changing: Mutex::new(()),
            certificates,
            rejection_event,
            switches,
            traced_by: Mutex::new(None),
            group,
            running: Mutex::new(Some(running)),
        })
    }
}

/// Where a device listens.
#[derive(Default)]
pub(super) struct Sockets {
    nbd: Vec<Listen>,
    vhost: Option<Listen>,
}

/// The processes of a block device.
type Children = (SetupProcess, IdleWatch);

/// Starts one engine per queue, on threads that are confined from their beginning if `sandbox`;
/// such that the kernel scans for partitions on a block device of theirs if `partscan`.
fn start_engines(disk: &Arc<Disk>, sandbox: bool, partscan: bool) -> Outcome<Vec<EngineThread>> {
    let start = || -> Outcome<Vec<EngineThread>> {
        if sandbox {
            confine::engine(partscan)?;
        }
        let spawn = |queue| EngineThread::spawn(&format!("blkq-queue-{queue}"), vec![(disk.clone(), queue)]);
        Ok((0..disk.queue_count()).map(spawn).collect::<Result<_, _>>()?)
    };
    // Threads inherit privileges from the one that makes them: this one drops them, and exits.
    std::thread::scope(|scope| scope.spawn(start).join())
        .unwrap_or_else(|_| Err(Failure::new("starting the engines failed")))
}

/// The needs of the control plane, as far as there is no block device yet.
fn needs<'a>(options: &AttachOptions, listen: impl Iterator<Item = &'a Listen>) -> Outcome<Needs> {
    let mut needs = Needs::default();
    if !options.sandbox {
        return Ok(needs);
    }
    if let DriverSpec::Image(path) = &options.image {
        let file = openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
        needs.image = Some(file.map_err(|e| Failure::new(format!("{}: {e}", path.display())))?);
    }
    needs.removed.extend(listen.filter_map(|listen| match listen {
        Listen::Unix(path) => Some(path.clone()),
        _ => None,
    }));
    Ok(needs)
}
