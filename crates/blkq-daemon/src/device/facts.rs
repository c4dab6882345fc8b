//! The state of a device, for `blkq show` and `blkq list`.

use std::path::Path;

use blkq::sync::lock;
use blkq::throttle::Ceiling;
use blkq::{Disk, QueueLimits};
use blkq_export::nbd::ConnectionInfo;
use blkq_export::vhost_user::{FrontEndInfo, VhostUserDevice};
use blkq_protocol::failure::Outcome;
use blkq_protocol::info::{ClientInfo, DeviceInfo, DirectIoInfo};
use blkq_protocol::options::{Key, ROWS, Scope};

use super::Device;
use super::background::BackgroundThreads;
use super::running::Running;
use crate::log;

/// Settings that have fields of [`DeviceInfo`], or are among the facts of the driver.
const SHOWN_ELSEWHERE: [Key; 4] = [Key::Autoclear, Key::DirectIo, Key::Fault, Key::ReadOnly];

impl Device {
    /// Includes notes for the user who attached the device. Fails if the device has stopped.
    pub fn info_at_attach(&self) -> Outcome<DeviceInfo> {
        let mut info = self.info()?;
        let fallback = |why| format!("served over NBD, without a node in /dev: {why}");
        info.warnings.extend(self.attached.fallback.as_ref().map(fallback));
        Ok(info)
    }

    /// Fails if the device has stopped.
    pub fn info(&self) -> Outcome<DeviceInfo> {
        let running = self.running()?;
        let now = lock(&self.served).clone();
        let disk = &running.disk;
        let limits = disk.limits();
        let mut facts = disk.driver().describe();
        let front_end = running.servers.vhost.as_ref().and_then(VhostUserDevice::front_end);
        let owned = |(name, value): (&'static str, String)| (name.to_owned(), value);
        let settings = self.settings_now(&running, &facts, front_end.as_ref()).map(owned).collect();
        let direct_io = take_direct_io(&mut facts);
        // Shown with the settings.
        take(&mut facts, Key::Dispatch.row().name);
        let commit = lock(&self.commit).clone();
        let clients = running.servers.connections().map(client_info);
        Ok(DeviceInfo {
            name: self.attached.name.clone(),
            pid: std::process::id(),
            uptime_seconds: self.meter.uptime_ns() / 1_000_000_000,
            state_directory: self.attached.state_directory.clone(),
            log: log::path().map(Path::to_owned),
            exports: running.exports(),
            clients: clients.chain(front_end.as_ref().map(guest_info)).collect(),
            image: now.image,
            driver: disk.driver().name().to_owned(),
            size: limits.size_bytes(),
            sector_size: limits.logical_block_bytes,
            physical_sector_size: limits.physical_block_bytes,
            read_only: limits.read_only,
            autoclear: self.is_autoclear(),
            held: disk.held(),
            commit,
            unsafe_flush_ignore: self.attached.flushes_ignored,
            partscan: self.attached.partscan,
            sandbox: self.confinement.clone(),
            direct_io,
            attach_options: now.attach_options,
            capabilities: capabilities(&limits),
            settings,
            driver_facts: facts.into_iter().map(owned).collect(),
            warnings: self.warnings_now(disk, front_end.as_ref()),
        })
    }

    /// Also contains facts that are shown with settings. `facts` are those of the driver.
    fn settings_now(
        &self,
        running: &Running,
        facts: &[(&'static str, String)],
        front_end: Option<&FrontEndInfo>,
    ) -> impl Iterator<Item = (&'static str, String)> {
        let Running { servers, ublk, disk, .. } = running;
        let ceiling = match disk.ceiling() {
            Ceiling::NotSearched => None,
            Ceiling::Unknown => Some(("ceiling", "not found yet".to_owned())),
            Ceiling::Found(limits) => Some(("ceiling", limits.to_string())),
        };
        let ublk = ublk.as_ref().map(|ublk| ("ublk", ublk.describe()));
        let register_memory = servers.vhost.as_ref().filter(|vhost| vhost.registers_memory());
        let register_memory = register_memory.map(|_| ("register-memory", registered_memory(front_end)));
        let endpoint_uri = |threads: &BackgroundThreads| Some(threads.metrics.as_ref()?.uri.clone());
        let metrics = lock(&self.background).as_ref().and_then(endpoint_uri);
        let in_force = ROWS
            .iter()
            .filter(|row| !SHOWN_ELSEWHERE.contains(&row.key))
            .filter(|row| row.scope != Scope::Nbd || !servers.nbd.is_empty())
            .filter_map(|row| self.read_back(running, facts, row.key))
            .map(|setting| (setting.name(), setting.value()));
        std::iter::once(("queues", disk.queue_count().to_string()))
            .chain(in_force)
            .chain(ceiling)
            .chain(ublk)
            .chain(register_memory)
            .chain(metrics.map(|uri| ("metrics", uri)))
    }

    fn warnings_now(&self, disk: &Disk, front_end: Option<&FrontEndInfo>) -> Vec<String> {
        let mut warnings = disk.driver().warnings();
        warnings.extend(self.attached.warnings.iter().cloned());
        let broken = disk.broken();
        warnings
            .extend(broken.map(|why| format!("all I/O fails: {why}; detach the device and attach it again")));
        warnings.extend(front_end.into_iter().flat_map(rejected_rings));
        warnings.extend(front_end.and_then(unregistered_memory));
        warnings
    }
}

fn take(facts: &mut Vec<(&'static str, String)>, name: &str) -> Option<String> {
    let at = facts.iter().position(|(key, _)| *key == name)?;
    Some(facts.remove(at).1)
}

fn take_direct_io(facts: &mut Vec<(&'static str, String)>) -> DirectIoInfo {
    let [requested, effective, reason] =
        ["direct-io-requested", "direct-io", "direct-io-reason"].map(|name| take(facts, name));
    match (requested, effective, reason) {
        (Some(requested), Some(effective), Some(reason)) => DirectIoInfo { requested, effective, reason },
        _ => DirectIoInfo {
            requested: "auto".to_owned(),
            effective: "off".to_owned(),
            reason: "the device has no image file".to_owned(),
        },
    }
}

fn client_info(connection: ConnectionInfo) -> ClientInfo {
    ClientInfo {
        peer: connection.peer,
        seconds: connection.age.as_secs(),
        requests: connection.counters.requests,
        errors: connection.counters.errors,
        read_bytes: connection.counters.read_bytes,
        written_bytes: connection.counters.written_bytes,
        in_flight: connection.in_flight,
    }
}

fn guest_info(front_end: &FrontEndInfo) -> ClientInfo {
    let counters = &front_end.counters;
    ClientInfo {
        peer: front_end.peer.clone(),
        seconds: front_end.age.as_secs(),
        requests: counters.requests,
        errors: counters.errors,
        read_bytes: counters.read_bytes,
        written_bytes: counters.written_bytes,
        in_flight: front_end.in_flight,
    }
}

/// Describes the rings that were stopped because of their contents.
fn rejected_rings(front_end: &FrontEndInfo) -> impl Iterator<Item = String> {
    front_end.rings.iter().filter_map(|(ring, rejected)| {
        let reason = rejected.as_ref()?;
        Some(format!("ring {ring} of the virtual machine was stopped: {reason}; reset the virtio device"))
    })
}

fn registered_memory(front_end: Option<&FrontEndInfo>) -> String {
    match front_end.and_then(|front_end| front_end.registered_memory.as_ref()) {
        None => "on, without a virtual machine yet".to_owned(),
        Some(Ok(bytes)) => format!("on, {} MiB with each engine", bytes >> 20),
        Some(Err(_)) => "on, but the memory of the guest is not registered (see the warning)".to_owned(),
    }
}

fn unregistered_memory(front_end: &FrontEndInfo) -> Option<String> {
    let reason = front_end.registered_memory.as_ref()?.as_ref().err()?;
    Some(format!("the virtual machine is served without --register-memory: {reason}"))
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
