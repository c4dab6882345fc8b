//! How a device comes to be served: what is opened, started and given up, in which order.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use blkq::drivers::{self, DriverOptions, DriverSpec};
use blkq::{Disk, Driver, EngineHandle, EngineThread, ErrorKind};
use blkq_export::nbd::{Listen, NbdExport, NbdOptions, NbdServer, NbdSwitches, TlsCertificates, TlsOptions};
use blkq_export::ublk::{
    CONTROL_PATH, ControlDevice, Deputy, Features, Identity, UblkDevice, UblkOptions, process,
};
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::process::geteuid;

use super::{
    AUTOCLEAR, Attendants, Device, HANG_WARNING, Meter, NOT_OF_DISK, PACING, RECEIVE_BACKOFF, Running,
    rejections,
};
use crate::access::{closed_directory, socket_access};
use crate::autoclear::{Autoclear, new_event};
use crate::confine::{self, Confinement, Needs};
use crate::descriptors::clients_max;
use crate::elsewhere;
use crate::failure::{Failure, Outcome};
use crate::hangs::{self, HangWatch};
use crate::info::{BlockDevice, StateFile};
use crate::metrics::Endpoint;
use crate::options::{Address, AttachOptions, Export, Format, Record, Tls, image_text};
use crate::state::{Claim, DYING_WAIT, StateDir};

/// How long an image may still be in use by a daemon that was killed, and had another name.
const IN_USE_WAIT: Duration = Duration::from_millis(300);

/// NBD connections at a time, and seconds for a handshake, unless others are asked for.
const CONNECTIONS: u16 = 64;
const HANDSHAKE_TIMEOUT_S: u16 = 10;

/// `--partscan` of a device without a node.
const NO_PARTITION_SCAN: &str = "partitions are not scanned here: an NBD export has no node in /dev; \
     the kernel of its client scans them (nbd-client), or use --offset and --size-limit for one";

impl Device {
    /// Opens the image and serves it under the name of `claim`: over ublk, or NBD on the addresses of
    /// `options`, if there are none on the sockets `inherited`, and if there are none on a unix socket in
    /// the state directory.
    ///
    /// # Errors
    /// Whatever keeps it from being served; nothing is left open then.
    pub fn open(options: &AttachOptions, claim: &Claim, inherited: Vec<OwnedFd>) -> Outcome<Device> {
        let exports = choose_exports(options, &inherited)?;
        let listen = if exports.nbd { addresses(options, claim, inherited)? } else { Vec::new() };
        // What is in memory only is gone with the daemon, and so shall the device be.
        let recoverable = !matches!(options.image, DriverSpec::Ram(_));
        let wait = if claim.is_after(&image_name(&options.image)) { DYING_WAIT } else { IN_USE_WAIT };
        let opened =
            open_driver(options, exports.ublk, wait).map_err(|error| refusal(error, options, claim))?;
        let identity = Identity::of_new();
        let intent = StateFile {
            name: claim.name().to_owned(),
            pid: std::process::id(),
            image: image_name(&options.image),
            exports: Vec::new(),
            attach_options: Some(Record::new(&absolute(options)?)?),
            ublk: exports.ublk.then(|| BlockDevice::new(identity)),
            settings: Vec::new(),
        };
        let attach = |disk: &Arc<Disk>, engines: &[EngineHandle], deputy: Option<Deputy>, failure_event| {
            let Some(deputy) = deputy else { return Ok(None) };
            // Written down before there is one: whoever kills this daemon meanwhile leaves nothing
            // that nobody knows of.
            claim.write_state(&intent)?;
            let (partscan, copy) = (!options.partscan.refused, options.copy.mode());
            let options = UblkOptions { identity, recoverable, partscan, copy, deputy, failure_event };
            Ok(Some(UblkDevice::start(disk, engines, options)?))
        };
        let mut device = Device::serve(options, claim, opened, listen, intent.clone(), attach)?;
        device.fallback = exports.no_ublk;
        Ok(device)
    }

    /// As [`Device::open`], for the block device that `state` tells of, with the settings that its
    /// last daemon had.
    ///
    /// # Errors
    /// Whatever keeps it from being taken over; it stays as it was.
    pub fn recover(options: &AttachOptions, claim: &Claim, mut state: StateFile) -> Outcome<Device> {
        let Some(block_device) = state.ublk.take() else {
            return Err(Failure::new("there is no block device to take over"));
        };
        let identity = block_device.identity();
        state.ublk = Some(BlockDevice::new(identity));
        state.attach_options = Some(Record::new(&absolute(options)?)?);
        let mut options = options.clone();
        // What it holds by now is what was written to the device.
        options.format = Some(Format::Raw);
        let bytes = identity.size_bytes()?;
        keep_size(&mut options, bytes);
        for (key, value) in &state.settings {
            match key.as_str() {
                AUTOCLEAR => options.autoclear = value == "on",
                PACING => options.pacing = value == "on",
                RECEIVE_BACKOFF => options.receive_backoff = value == "on",
                HANG_WARNING => options.hang_warning = hangs::parse(value).unwrap_or(options.hang_warning),
                _ => {}
            }
        }
        let nbd = options.exports.contains(&Export::Nbd);
        let listen = if nbd { addresses(&options, claim, Vec::new())? } else { Vec::new() };
        let attach = |disk: &Arc<Disk>, engines: &[EngineHandle], deputy: Option<Deputy>, failure_event| {
            let Some(deputy) = deputy else { return Ok(None) };
            // The image has grown, and nobody told the kernel so.
            if disk.limits().size_bytes() > bytes {
                disk.resize(Some(bytes))?;
            }
            Ok(Some(UblkDevice::take_over(identity, disk, engines, deputy, failure_event)?))
        };
        let opened =
            open_driver(&options, true, DYING_WAIT).map_err(|error| refusal(error, &options, claim))?;
        Device::serve(&options, claim, opened, listen, state, attach)
    }

    fn serve(
        options: &AttachOptions,
        claim: &Claim,
        driver: Box<dyn Driver>,
        listen: Vec<Listen>,
        state: StateFile,
        attach: impl FnOnce(
            &Arc<Disk>,
            &[EngineHandle],
            Option<Deputy>,
            Arc<OwnedFd>,
        ) -> Outcome<Option<UblkDevice>>,
    ) -> Outcome<Device> {
        let StateFile { attach_options, ublk: block_device, settings, .. } = state;
        let name = claim.name();
        let autoclear = Autoclear::new(options.autoclear)?;
        let driver_name = driver.name();
        let disk = Disk::builder(driver)
            .name(name)
            .queues(usize::from(options.queues))
            .depth(options.depth)
            .scheduler(options.scheduler.kind())
            .merge(options.merge)
            .batching(options.batching)
            .iostats(options.iostats)
            .clock(options.clock)
            .read_only(options.read_only)
            .build()?;
        let of_disk = settings.iter().filter(|(key, _)| !NOT_OF_DISK.contains(&key.as_str()));
        let not_kept: Vec<String> = of_disk
            .filter_map(|(key, value)| {
                let error = disk.set(key, value).err()?;
                Some(format!("{key}={value} was set before and cannot be set again: {error}"))
            })
            .collect();
        let metrics = options.metrics.as_ref().map(listen_at).transpose()?;
        // Before the mounts that these are on may go.
        let tls = tls(options)?;
        let certificates = tls.as_ref().map(|tls| tls.certificates.clone());
        let mut needs = needs(options, listen.iter().chain(&metrics))?;
        needs
            .read
            .extend(certificates.iter().flat_map(|certificates| directories_of(certificates.directory())));
        let mut deputy = None;
        if block_device.is_some() {
            let mut kept = vec![StateDir::locate()?.path().to_owned()];
            kept.extend(listen.iter().chain(&metrics).filter_map(|listen| match listen {
                Listen::Unix(path) => Some(path.clone()),
                _ => None,
            }));
            kept.extend(needs.read.iter().cloned());
            kept.extend(options.pid_file.as_ref().and_then(|path| std::path::absolute(path).ok()));
            // Before there are other threads.
            process::prepare(&kept)?;
            let sandbox = options.sandbox;
            // SAFETY: as said; and with that it holds no mounts.
            deputy = Some(unsafe { Deputy::fork(move || !sandbox || confine::ublk_commands().is_ok()) }?);
        }
        let engines =
            start_engines(&disk, options.sandbox, block_device.is_some() && !options.partscan.refused)?;
        let handles: Vec<EngineHandle> = engines.iter().map(|engine| engine.handle().clone()).collect();
        let attendants = Attendants {
            hangs: HangWatch::new(disk.clone(), handles.clone(), options.hang_warning),
            metrics: metrics.map(|at| Endpoint::bind(at, options.insecure)).transpose()?,
            users: None,
        };
        let image = image_name(&options.image);
        let export = NbdExport {
            name: options.export_name.clone().unwrap_or_else(|| name.to_owned()),
            description: format!("{driver_name} {image}"),
            queue: 0,
        };
        let access = socket_access(options.socket_mode, options.socket_group.as_deref())?;
        let closed = listen.iter().filter_map(|listen| match listen {
            Listen::Unix(path) => Some((path, closed_directory(path, access)?)),
            _ => None,
        });
        let closed: Vec<String> = closed
            .map(|(path, directory)| {
                let (path, directory) = (path.display(), directory.display());
                format!("{path} cannot be reached by all who may connect: {directory} does not let them in; chmod it, or listen elsewhere")
            })
            .collect();
        let connections_wanted = usize::from(options.max_connections.unwrap_or(CONNECTIONS));
        let connections_max = clients_max(connections_wanted, listen.len());
        let rejection_event = rejections::event()?;
        let switches = Arc::new(NbdSwitches {
            pacing: options.pacing.into(),
            receive_backoff: options.receive_backoff.into(),
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
        // Made before the servers, so that these end first if one of them does not start.
        let unaligned = nbd_options.unaligned.clone();
        let mut running = Running { servers: Vec::new(), ublk: None, _engines: engines, disk, unaligned };
        for listen in listen {
            match NbdServer::start(listen, nbd_options.clone(), &handles) {
                Ok(server) => running.servers.push(server),
                Err(error) => {
                    running.close_servers();
                    return Err(error.into());
                }
            }
        }
        let failure_event = new_event()?;
        match attach(&running.disk, &handles, deputy, failure_event.clone()) {
            Ok(ublk) => running.ublk = ublk,
            Err(failure) => {
                running.close_servers();
                return Err(failure);
            }
        }
        needs.block_device =
            running.ublk.as_ref().map(|ublk| (ublk.identity().id, claim.dir().path().to_owned()));
        let mut warnings = not_kept;
        if connections_max < connections_wanted && !running.servers.is_empty() {
            warnings.push(format!(
                "only {connections_max} clients at a time: no more open files are allowed (ulimit -n)"
            ));
        }
        warnings.extend(
            running.servers.iter().filter_map(|server| warn_if_publicly_reachable(server, &nbd_options)),
        );
        let cure = match options.socket_mode {
            Some(_) => "give --socket-group and --socket-mode 660",
            None => "give its unit SocketMode=0600",
        };
        let open_to_all = running.servers.iter().filter_map(NbdServer::open_to_all_users);
        warnings.extend(
            open_to_all.map(|socket| format!("all users of this machine may connect to {socket}: {cure}")),
        );
        warnings.extend(closed);
        let verified = certificates.as_ref().is_some_and(TlsCertificates::verifies_clients);
        if !(options.insecure || verified && nbd_options.tls.as_ref().is_some_and(|tls| tls.required)) {
            warnings.extend(running.servers.iter().filter_map(NbdServer::on_loopback).map(|address| {
                format!("all users of this machine may connect to {address}: a unix socket is its owner's alone; TLS with ca-cert.pem keeps others out, and --insecure lets them in without this warning")
            }));
        }
        if options.partscan.wanted && !running.exports().iter().any(|export| export.starts_with("/dev/")) {
            warnings.push(NO_PARTITION_SCAN.to_owned());
        }
        let running = Arc::new(running);
        let meter = Meter::new(name, &running, &attendants.hangs);
        if let Some(endpoint) = &attendants.metrics {
            warnings.extend(endpoint.warning().map(str::to_owned));
        }
        Ok(Device {
            name: name.to_owned(),
            image,
            state_directory: claim.dir().path().to_owned(),
            warnings,
            fallback: None,
            partscan: options.partscan.wanted || running.ublk.is_some() && !options.partscan.refused,
            autoclear,
            meter,
            attendants: Mutex::new(Some(attendants)),
            needs: (options.sandbox).then_some(needs),
            sandbox: Confinement::default(),
            attach_options,
            block_device,
            block_device_gone: AtomicBool::new(false),
            failure_event,
            settings: Mutex::new(settings),
            certificates,
            rejection_event,
            switches,
            running: Mutex::new(Some(running)),
        })
    }
}

/// Which attachments serve a device.
struct Exports {
    nbd: bool,
    ublk: bool,
    /// Why there is no ublk, where it would have been the first choice.
    no_ublk: Option<Failure>,
}

/// Whether clients may begin and end in the middle of a block: where a sector size is asked for they
/// may not, and where something else than NBD writes too they would undo its writes.
fn serves_bytes(options: &AttachOptions, ublk: bool) -> bool {
    let only_nbd = !ublk && options.exports.iter().all(|export| *export == Export::Nbd);
    only_nbd && options.sector_size.bytes().is_none() && !options.whole_sectors
}

/// Those that are asked for. If none is: NBD if there is an address for it, else ublk where the
/// kernel has it and the user may use it, else NBD.
fn choose_exports(options: &AttachOptions, inherited: &[OwnedFd]) -> Outcome<Exports> {
    let asked = |export| options.exports.contains(&export);
    if !options.exports.is_empty() {
        if asked(Export::Ublk) {
            check_ublk()?;
        }
        return Ok(Exports { nbd: asked(Export::Nbd), ublk: asked(Export::Ublk), no_ublk: None });
    }
    let addressed = !options.listen.is_empty() || !inherited.is_empty();
    let no_ublk = if addressed { None } else { check_ublk().err() };
    let ublk = !addressed && no_ublk.is_none();
    options.check_exports(!ublk, ublk)?;
    Ok(Exports { nbd: !ublk, ublk, no_ublk })
}

/// Refuses if this process may not make ublk devices.
fn check_ublk() -> Outcome {
    load_driver();
    let check = || {
        let unusable = |e: blkq::Error| Failure::new(format!("{e}, or use --export nbd"));
        let mut control = ControlDevice::open().map_err(unusable)?;
        match control.features()?.contains(Features::UNPRIVILEGED_DEV) || control.is_privileged() {
            true => Ok(()),
            false => Err(Failure::new("this kernel makes ublk devices for root only; use --export nbd")),
        }
    };
    // The kernel's workers for a thread's ring go with it: none shall be left that is not fit to
    // serve a block device.
    std::thread::spawn(check)
        .join()
        .unwrap_or_else(|_| Err(Failure::new("asking for ublk's features failed")))
}

/// Loads the kernel's driver where it is a module that is not loaded. That it cannot be is said
/// by whoever then finds no control device.
fn load_driver() {
    if !Path::new(CONTROL_PATH).exists() && geteuid().is_root() {
        let program = std::fs::read_to_string("/proc/sys/kernel/modprobe").unwrap_or_default();
        let mut modprobe = Command::new(program.trim());
        modprobe.args(["-q", "ublk_drv"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let _ = modprobe.status();
    }
}

/// Opens the driver. An image in use is tried for a moment: the kernel lets go of the
/// files of a daemon that was killed only some time after the process is gone.
fn open_driver(options: &AttachOptions, ublk: bool, wait: Duration) -> Result<Box<dyn Driver>, blkq::Error> {
    let until = Instant::now() + wait;
    loop {
        match drivers::open(&options.image, &driver_options(options, ublk)) {
            // Also what others do with a block device for a moment to learn who uses it.
            Err(error)
                if matches!(error.kind(), ErrorKind::Busy | ErrorKind::Claimed) && Instant::now() < until =>
            {
                std::thread::sleep(Duration::from_millis(10));
            }
            opened => return opened,
        }
    }
}

/// Why the image was not opened, with the cure.
fn refusal(error: blkq::Error, options: &AttachOptions, claim: &Claim) -> Failure {
    let cure = match error.kind() {
        ErrorKind::Busy => {
            let place = match &options.image {
                DriverSpec::Image(path) => {
                    elsewhere::describe(claim.dir(), path, options.offset, options.size_limit)
                }
                _ => None,
            };
            let place = place.map(|place| format!(" {place}")).unwrap_or_default();
            format!("{place}; detach it there first, or attach with --shared on both sides")
        }
        ErrorKind::Claimed => "; release it there first, or attach with --shared: file systems that do not \
             know of each other destroy the data"
            .to_owned(),
        ErrorKind::Format => "; convert it with `qemu-img convert -O raw`, or attach with --format raw to \
             serve its bytes as they are"
            .to_owned(),
        _ => return error.into(),
    };
    Failure::new(format!("{error}{cure}"))
}

/// Has a disk opened at the size that its block device has now.
pub(super) fn keep_size(options: &mut AttachOptions, bytes: u64) {
    match &mut options.image {
        DriverSpec::Image(_) => options.size_limit = options.size_limit.map(|_| bytes),
        DriverSpec::Null(size) | DriverSpec::Ram(size) => *size = bytes,
    }
}

pub(super) fn driver_options(options: &AttachOptions, ublk: bool) -> DriverOptions {
    DriverOptions {
        offset: options.offset,
        size_limit: options.size_limit,
        sector_size: options.sector_size.bytes(),
        partial_block: serves_bytes(options, ublk),
        direct_io: options.direct_io,
        dispatch: options.dispatch,
        read_only: options.read_only,
        shared: options.shared,
        raw: options.format == Some(Format::Raw),
        fault: options.fault.clone(),
    }
}

/// Starts one engine per queue, on threads that are confined from their beginning if `sandbox`;
/// such that the kernel looks for partitions on a block device of theirs if `partscan`.
fn start_engines(disk: &Arc<Disk>, sandbox: bool, partscan: bool) -> Outcome<Vec<EngineThread>> {
    let start = || -> Outcome<Vec<EngineThread>> {
        if sandbox {
            confine::engine(partscan)?;
        }
        let spawn = |queue| EngineThread::spawn(&format!("blkq-queue-{queue}"), vec![(disk.clone(), queue)]);
        Ok((0..disk.queue_count()).map(spawn).collect::<Result<_, _>>()?)
    };
    // Threads have what the one that makes them has: this one gives it up, and goes.
    std::thread::scope(|scope| scope.spawn(start).join())
        .unwrap_or_else(|_| Err(Failure::new("starting the engines failed")))
}

/// What the control plane needs, of what there is before there is a block device.
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

/// Where to serve.
fn addresses(options: &AttachOptions, claim: &Claim, inherited: Vec<OwnedFd>) -> Outcome<Vec<Listen>> {
    if options.listen.is_empty() && inherited.is_empty() {
        return Ok(vec![Listen::Unix(claim.file(".nbd"))]);
    }
    if options.listen.is_empty() {
        return Ok(inherited.into_iter().map(Listen::Inherited).collect());
    }
    options.listen.iter().map(listen_at).collect()
}

fn listen_at(address: &Address) -> Outcome<Listen> {
    match address {
        // The daemon changes its directory, and removes the socket from there.
        Address::Unix(path) => std::path::absolute(path)
            .map(Listen::Unix)
            .map_err(|e| Failure::new(format!("cannot listen on {}: {e}", path.display()))),
        Address::Tcp(host, port) => Ok(Listen::Tcp(host.clone(), *port)),
    }
}

/// TLS as it is to be offered.
pub(super) fn tls(options: &AttachOptions) -> Outcome<Option<TlsOptions>> {
    let Some(directory) = options.tls_certificates.as_deref().filter(|_| options.tls != Some(Tls::Off))
    else {
        return Ok(None);
    };
    let certificates = TlsCertificates::load(directory)?;
    Ok(Some(TlsOptions { certificates, required: options.tls != Some(Tls::On) }))
}

/// A directory, and those that symbolic links in it lead to.
fn directories_of(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let real = entries.filter_map(|entry| entry.path().canonicalize().ok()?.parent().map(Path::to_owned));
    let mut directories: Vec<PathBuf> = real.chain([directory.to_owned()]).collect();
    directories.sort();
    directories.dedup();
    directories
}

/// What the user should know of a server that other machines reach.
fn warn_if_publicly_reachable(server: &NbdServer, options: &NbdOptions) -> Option<String> {
    let address = server.beyond_this_machine()?;
    let verified = options.tls.as_ref().filter(|tls| tls.required)?.certificates.verifies_clients();
    (!verified).then(|| {
        format!("whoever reaches {address} can use the device: no client needs a certificate; put ca-cert.pem into the directory of certificates, or keep others out with a firewall")
    })
}

/// The options as another process understands them, wherever it runs.
fn absolute(options: &AttachOptions) -> Outcome<AttachOptions> {
    // Where this process has no directory any more, there are no relative paths.
    options.clone().absolute(&std::env::current_dir().unwrap_or_default())
}

/// The image as another process finds it.
fn image_name(image: &DriverSpec) -> String {
    match image {
        DriverSpec::Image(path) => path.canonicalize().unwrap_or_else(|_| path.clone()).display().to_string(),
        _ => image_text(image),
    }
}
