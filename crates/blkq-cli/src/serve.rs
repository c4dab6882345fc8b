//! Where a daemon meets the block layer and its attachments.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use blkq::clock::monotonic_ns;
use blkq::drivers::{self, DriverOptions, DriverSpec, Opened};
use blkq::{Disk, EngineHandle, EngineThread, ErrorKind, QueueLimits};
use blkq_export::nbd::{ConnectionInfo, Listen, NbdExport, NbdOptions, NbdServer};
use blkq_export::ublk::{CONTROL_PATH, ControlDevice, Features, Identity, UblkDevice, process};
use rustix::process::geteuid;

use crate::autoclear::Autoclear;
use crate::commands::attach::{Address, Args, Export, image_text, own_words};
use crate::failure::{Failure, Outcome};
use crate::info::{BlockDevice, ClientInfo, DeviceInfo, DirectIoInfo, StateFile};
use crate::state::StateDir;
use crate::statistics::Statistics;

/// How long an image may still be in use by a daemon that was killed.
const IN_USE_WAIT: Duration = Duration::from_millis(300);
/// The same for the one that it is taken over from: until its I/O in flight has ended.
const RECOVERY_WAIT: Duration = Duration::from_secs(30);

/// `--partscan` of a device without a node.
const NO_PARTITION_SCAN: &str = "partitions are not scanned here: an NBD export has no node in /dev; \
     the kernel of its client scans them (nbd-client), or use --offset and --size-limit for one";

/// A device being served, until it is ended.
pub struct Device {
    name: String,
    image: String,
    warnings: Vec<String>,
    partscan: bool,
    autoclear: Autoclear,
    opened_ns: u64,
    /// What the next daemon of the kernel's block device needs, but for which it is.
    words: Option<Vec<String>>,
    running: Mutex<Option<Arc<Running>>>,
}

/// What of a device ends with it, in the order in which it goes.
struct Running {
    servers: Vec<NbdServer>,
    ublk: Option<UblkDevice>,
    /// One per hardware queue. They end with the last use of this, before the disk.
    _engines: Vec<EngineThread>,
    disk: Arc<Disk>,
}

impl Device {
    /// Opens the image and serves it: over ublk, or NBD on the addresses of `args`, if there are
    /// none on the sockets `inherited`, and if there are none on the unix socket `default`.
    ///
    /// # Errors
    /// Whatever keeps it from being served; nothing is left open then.
    pub fn open(args: &Args, name: &str, default: &Path, inherited: Vec<OwnedFd>) -> Outcome<Device> {
        let exports = choose_exports(args, &inherited)?;
        if args.autoclear && exports.ublk {
            return Err(no_autoclear("--autoclear"));
        }
        let listen = if exports.nbd { addresses(args, default, inherited)? } else { Vec::new() };
        let words = own_words();
        // What is in memory only is gone with the daemon, and so shall the device be.
        let recoverable = words.is_some() && !matches!(args.image, DriverSpec::Ram(_));
        let attach = |disk: &Arc<Disk>, engines: &[EngineHandle]| {
            let start = || UblkDevice::start(disk, engines, recoverable);
            exports.ublk.then(start).transpose()
        };
        Device::serve(args, name, open_driver(args, IN_USE_WAIT)?, listen, exports.ublk, attach, words)
    }

    /// As [`Device::open`], for the block device that `state` tells of.
    ///
    /// # Errors
    /// Whatever keeps it from being taken over; it stays as it was.
    pub fn recover(args: &Args, name: &str, default: &Path, state: StateFile) -> Outcome<Device> {
        let Some(block_device) = state.ublk else {
            return Err(Failure::new("there is no block device to take over"));
        };
        let nbd = args.exports.contains(&Export::Nbd);
        let listen = if nbd { addresses(args, default, Vec::new())? } else { Vec::new() };
        let attach = |disk: &Arc<Disk>, engines: &[EngineHandle]| {
            UblkDevice::take_over(block_device.identity(), disk, engines).map(Some)
        };
        let opened = open_driver(args, RECOVERY_WAIT)?;
        Device::serve(args, name, opened, listen, true, attach, Some(block_device.words.clone()))
    }

    fn serve(
        args: &Args,
        name: &str,
        opened: Opened,
        listen: Vec<Listen>,
        block_device: bool,
        attach: impl FnOnce(&Arc<Disk>, &[EngineHandle]) -> Result<Option<UblkDevice>, blkq::Error>,
        words: Option<Vec<String>>,
    ) -> Outcome<Device> {
        let autoclear = Autoclear::new(args.autoclear)?;
        let driver = opened.driver.name();
        let disk = Disk::builder(opened.driver)
            .name(name)
            .queues(usize::from(args.queues))
            .depth(args.depth)
            .scheduler(args.scheduler.kind())
            .merge(!args.no_merge)
            .batching(!args.no_batching)
            .iostats(!args.no_iostats)
            .clock(args.clock)
            .read_only(args.read_only)
            .build()?;
        if block_device {
            let mut kept = vec![StateDir::locate()?.path().to_owned()];
            kept.extend(listen.iter().filter_map(|listen| match listen {
                Listen::Unix(path) => Some(path.clone()),
                _ => None,
            }));
            // Before there are other threads.
            process::prepare(&kept)?;
        }
        let spawn = |queue| EngineThread::spawn(&format!("blkq-queue-{queue}"), vec![(disk.clone(), queue)]);
        let engines = (0..disk.queue_count()).map(spawn).collect::<Result<Vec<_>, _>>()?;
        let handles: Vec<EngineHandle> = engines.iter().map(|engine| engine.handle().clone()).collect();
        let image = image_name(&args.image);
        let export = NbdExport { name: name.to_owned(), description: format!("{driver} {image}"), queue: 0 };
        let options = NbdOptions {
            exports: vec![export],
            connections_max: usize::from(args.max_connections),
            handshake_timeout_s: u64::from(args.handshake_timeout),
            idle_event: Some(autoclear.idle_event().clone()),
            ..NbdOptions::default()
        };
        // Made before the servers, so that these end first if one of them does not start.
        let mut running = Running { servers: Vec::new(), ublk: None, _engines: engines, disk };
        for listen in listen {
            match NbdServer::start(listen, options.clone(), &handles) {
                Ok(server) => running.servers.push(server),
                Err(error) => {
                    running.close_servers();
                    return Err(error.into());
                }
            }
        }
        match attach(&running.disk, &handles) {
            Ok(ublk) => running.ublk = ublk,
            Err(error) => {
                running.close_servers();
                return Err(error.into());
            }
        }
        let mut warnings = opened.warnings;
        warnings.extend(running.servers.iter().filter_map(|server| warn_of_the_world(server.uri())));
        if args.partscan && !running.exports().iter().any(|export| export.starts_with("/dev/")) {
            warnings.push(NO_PARTITION_SCAN.to_owned());
        }
        Ok(Device {
            name: name.to_owned(),
            image,
            warnings,
            partscan: args.partscan,
            autoclear,
            opened_ns: monotonic_ns(),
            words,
            running: Mutex::new(Some(Arc::new(running))),
        })
    }

    fn running(&self) -> Outcome<Arc<Running>> {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        running.clone().ok_or_else(|| Failure::new("the device is ending"))
    }

    /// The device as it is now.
    ///
    /// # Errors
    /// If it has ended.
    pub fn info(&self) -> Outcome<DeviceInfo> {
        let running = self.running()?;
        let disk = &running.disk;
        let (limits, settings) = (disk.limits(), disk.settings());
        let switch = |on: bool| if on { "on" } else { "off" }.to_owned();
        let mut facts = disk.driver().describe();
        let mut fact = |name: &str| {
            let at = facts.iter().position(|(key, _)| *key == name)?;
            Some(facts.remove(at).1)
        };
        let direct_io = match (fact("direct-io-requested"), fact("direct-io")) {
            (Some(requested), Some(effective)) => direct_io_info(&requested, &effective),
            _ => direct_io_info("auto", "off (there is no file behind the device)"),
        };
        let dispatch = fact("dispatch").map(|dispatch| ("dispatch", dispatch));
        let ublk = running.ublk.as_ref().map(|ublk| ("ublk", ublk.describe()));
        let settings = [
            ("queues", disk.queue_count().to_string()),
            ("depth", settings.depth.to_string()),
            ("scheduler", settings.scheduler.to_string()),
            ("merge", switch(settings.merge)),
            ("batching", switch(settings.batching)),
            ("iostats", switch(settings.iostats)),
            ("clock", settings.clock.to_string()),
        ];
        let owned = |(name, value): (&'static str, String)| (name.to_owned(), value);
        Ok(DeviceInfo {
            name: self.name.clone(),
            pid: std::process::id(),
            exports: running.exports(),
            clients: running.connections().map(client_info).collect(),
            image: self.image.clone(),
            driver: disk.driver().name().to_owned(),
            size: limits.capacity_bytes,
            sector_size: limits.logical_block_bytes,
            physical_sector_size: limits.physical_block_bytes,
            read_only: limits.read_only,
            autoclear: self.autoclear.is_on(),
            partscan: self.partscan,
            direct_io,
            capabilities: capabilities(&limits),
            settings: settings.into_iter().chain(dispatch).chain(ublk).map(owned).collect(),
            driver_facts: facts.into_iter().map(owned).collect(),
            warnings: self.warnings.clone(),
        })
    }

    /// Whether it ends with its last client.
    pub fn autoclear(&self) -> &Autoclear {
        &self.autoclear
    }

    /// Changes whether it ends with its last client.
    ///
    /// # Errors
    /// If it cannot, or `value` is neither `on` nor `off`.
    pub fn set_autoclear(&self, value: &str) -> Outcome {
        if value == "on" && self.running()?.ublk.is_some() {
            return Err(no_autoclear("autoclear"));
        }
        self.autoclear.set(value)
    }

    /// The counters.
    ///
    /// # Errors
    /// If the device has ended.
    pub fn statistics(&self) -> Outcome<Statistics> {
        let snapshot = self.running()?.disk.stats();
        let now_ns = monotonic_ns();
        Ok(Statistics::new(&snapshot, now_ns, now_ns - self.opened_ns))
    }

    /// What is kept in a file.
    ///
    /// # Errors
    /// If the device has ended.
    pub fn state_file(&self) -> Outcome<StateFile> {
        let running = self.running()?;
        let identity = running.ublk.as_ref().map(UblkDevice::identity);
        let block_device = identity.map(|Identity { id, cookie }| BlockDevice {
            id,
            cookie,
            words: self.words.clone().unwrap_or_default(),
            directory: std::env::current_dir().unwrap_or_default(),
        });
        Ok(StateFile::new(&self.info()?, block_device))
    }

    /// Changes a setting of the disk or its driver, while no I/O is in flight.
    ///
    /// # Errors
    /// If there is no such setting, or it cannot have that value.
    pub fn set(&self, key: &str, value: &str) -> Outcome {
        let running = self.running()?;
        running.disk.set(key, value)?;
        match &running.ublk {
            Some(ublk) if key == "read-only" => Ok(ublk.set_read_only(value == "on")?),
            _ => Ok(()),
        }
    }

    /// Changes the size; `None` takes over that of the image. Returns the new one in bytes.
    ///
    /// # Errors
    /// If the device cannot have that size.
    pub fn resize(&self, bytes: Option<u64>) -> Outcome<u64> {
        let running = self.running()?;
        if let Some(ublk) = &running.ublk {
            ublk.check_resizable()?;
        }
        let bytes = running.disk.resize(bytes)?;
        if let Some(ublk) = &running.ublk {
            ublk.resize(bytes)?;
        }
        Ok(bytes)
    }

    /// Refuses to end a device that is in use, unless its clients are to be dropped by `force`.
    /// When it returns well, there are no clients, no sockets and no block device any more.
    ///
    /// # Errors
    /// Who uses it; the device goes on.
    pub fn close(&self, force: bool) -> Outcome {
        let running = self.running()?;
        if !force {
            running.check_no_clients()?;
        }
        if let Some(ublk) = &running.ublk {
            ublk.stop(force)?;
        }
        // The first one that refuses goes on, unless something has gone already: then a client
        // that came in between is dropped.
        for (stopped, server) in running.servers.iter().enumerate() {
            if server.stop(force || running.ublk.is_some() || stopped > 0).is_err() {
                return Err(busy(server.connection_count().max(1)));
            }
        }
        Ok(())
    }

    /// As [`Device::close`], but leaves the block device to the next daemon.
    ///
    /// # Errors
    /// If there is none that could be left; the device goes on.
    pub fn leave(&self) -> Outcome {
        let running = self.running()?;
        if !running.ublk.as_ref().is_some_and(UblkDevice::is_recoverable) {
            return Err(Failure::new(
                "there is no block device that another daemon could take over; detach it, and attach it again",
            ));
        }
        running.check_no_clients()?;
        running.close_servers();
        Ok(())
    }

    /// Ends a device that is closed: flushes, ends the engines and lets go of the image.
    ///
    /// # Errors
    /// If the flush failed; the device has ended all the same.
    pub fn end(&self) -> Outcome {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(running) = running else { return Ok(()) };
        let limits = running.disk.limits();
        let flushed =
            if limits.write_cache && !limits.read_only { running.disk.submitter().flush() } else { Ok(()) };
        drop(running);
        flushed.map_err(|e| Failure::new(format!("flush: {e}")))
    }
}

impl Running {
    fn connections(&self) -> impl Iterator<Item = ConnectionInfo> {
        self.servers.iter().flat_map(NbdServer::connections)
    }

    /// Where clients find it, one line each.
    fn exports(&self) -> Vec<String> {
        let ublk = self.ublk.iter().map(|ublk| ublk.identity().path());
        ublk.chain(self.servers.iter().map(|server| server.uri().to_owned())).collect()
    }

    fn check_no_clients(&self) -> Outcome {
        match self.connections().count() {
            0 => Ok(()),
            clients => Err(busy(clients)),
        }
    }

    /// Ends all servers, whoever is connected.
    fn close_servers(&self) {
        for server in &self.servers {
            // Forced, it does not refuse.
            let _ = server.stop(true);
        }
    }
}

fn busy(clients: usize) -> Failure {
    let are = if clients == 1 { "client is" } else { "clients are" };
    Failure::new(format!("{clients} {are} connected; disconnect first, or use --force"))
}

/// Why a block device does not end by itself.
fn no_autoclear(what: &str) -> Failure {
    Failure::new(format!(
        "{what}: that is for the clients of NBD; the kernel does not tell when a block device has none any more; attach with --export nbd"
    ))
}

/// Which attachments serve a device.
struct Exports {
    nbd: bool,
    ublk: bool,
}

/// Those that are asked for. If none is: NBD if there is an address for it, else ublk where the
/// kernel has it and the user may use it, else NBD.
fn choose_exports(args: &Args, inherited: &[OwnedFd]) -> Outcome<Exports> {
    let asked = |export| args.exports.contains(&export);
    if !args.exports.is_empty() {
        if asked(Export::Ublk) {
            check_ublk()?;
        }
        return Ok(Exports { nbd: asked(Export::Nbd), ublk: asked(Export::Ublk) });
    }
    let addressed = !args.listen.is_empty() || !inherited.is_empty();
    let ublk = !addressed && check_ublk().is_ok();
    Ok(Exports { nbd: !ublk, ublk })
}

/// Refuses if this process may not make ublk devices.
fn check_ublk() -> Outcome {
    load_driver();
    let check = || {
        let mut control = ControlDevice::open()?;
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
fn open_driver(args: &Args, wait: Duration) -> Outcome<Opened> {
    let until = Instant::now() + wait;
    loop {
        match drivers::open(&args.image, &driver_options(args)) {
            Err(error) if error.kind() == ErrorKind::Busy && Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(10));
            }
            opened => return Ok(opened?),
        }
    }
}

fn driver_options(args: &Args) -> DriverOptions {
    DriverOptions {
        offset: args.offset,
        size_limit: args.size_limit,
        sector_size: args.sector_size.bytes(),
        direct_io: args.direct_io,
        dispatch: args.dispatch,
        read_only: args.read_only,
        shared: args.shared,
        fault: args.fault.clone(),
    }
}

/// Where to serve.
fn addresses(args: &Args, default: &Path, inherited: Vec<OwnedFd>) -> Outcome<Vec<Listen>> {
    if args.listen.is_empty() && inherited.is_empty() {
        return Ok(vec![Listen::Unix(default.to_owned())]);
    }
    if args.listen.is_empty() {
        return Ok(inherited.into_iter().map(Listen::Inherited).collect());
    }
    let listen = |address: &Address| match address {
        // The daemon changes its directory, and removes the socket from there.
        Address::Unix(path) => std::path::absolute(path)
            .map(Listen::Unix)
            .map_err(|e| Failure::new(format!("cannot listen on {}: {e}", path.display()))),
        Address::Tcp(host, port) => Ok(Listen::Tcp(host.clone(), *port)),
    };
    args.listen.iter().map(listen).collect()
}

/// What the user should know of an address that other machines reach.
fn warn_of_the_world(uri: &str) -> Option<String> {
    let address: SocketAddr = uri.strip_prefix("nbd://")?.parse().ok()?;
    (!address.ip().is_loopback()).then(|| {
        format!("whoever reaches {address} can use the device: no password is asked for; keep others out with a firewall, or listen on 127.0.0.1 or a unix socket")
    })
}

/// The image as another process finds it.
fn image_name(image: &DriverSpec) -> String {
    match image {
        DriverSpec::Image(path) => path.canonicalize().unwrap_or_else(|_| path.clone()).display().to_string(),
        _ => image_text(image),
    }
}

fn client_info(connection: ConnectionInfo) -> ClientInfo {
    ClientInfo {
        peer: connection.peer,
        seconds: connection.age.as_secs(),
        requests: connection.requests,
        errors: connection.errors,
        read_bytes: connection.read_bytes,
        written_bytes: connection.written_bytes,
        in_flight: connection.in_flight,
    }
}

/// Splits what a driver says of direct I/O: `on` or `off`, then more in brackets.
fn direct_io_info(requested: &str, effective: &str) -> DirectIoInfo {
    let (effective, reason) = effective.split_once(' ').unwrap_or((effective, ""));
    let reason = reason.strip_prefix('(').and_then(|reason| reason.strip_suffix(')')).unwrap_or(reason);
    let [requested, effective, reason] = [requested, effective, reason].map(str::to_owned);
    DirectIoInfo { requested, effective, reason }
}

fn capabilities(limits: &QueueLimits) -> Vec<String> {
    let able = [
        (limits.write_cache, "flush"),
        (limits.fua, "fua"),
        (limits.max_discard_bytes > 0, "discard"),
        (limits.max_write_zeroes_bytes > 0, "write-zeroes"),
        (limits.max_write_zeroes_no_unmap_bytes > 0, "write-zeroes-no-unmap"),
    ];
    able.into_iter().filter(|(able, _)| *able).map(|(_, name)| name.to_owned()).collect()
}
