//! The state of a device, for `blkq show` and `blkq list`.

use std::path::Path;
use std::time::Duration;

use blkq::QueueLimits;
use blkq::bitmap::{Bitmap, BitmapState};
use blkq::sync::lock;
use blkq::throttle::Ceiling;
use blkq_export::nbd::{ConnectionInfo, NbdCounters};
use blkq_export::ublk::UblkDevice;
use blkq_export::vhost_user::{FrontEndInfo, VhostUserCounters, VhostUserDevice};
use blkq_protocol::control::bitmaps::BitmapInfo;
use blkq_protocol::info::{ClientInfo, DeviceInfo, DirectIoInfo};
use blkq_protocol::options::{Key, ROWS};

use super::Device;
use super::running::Running;
use super::settings::{self, Fact};
use crate::log;

/// Settings that have fields of [`DeviceInfo`], or are among the facts of the driver.
const SHOWN_ELSEWHERE: [Key; 4] = [Key::Autoclear, Key::DirectIo, Key::Fault, Key::ReadOnly];

pub(super) fn info(device: &Device, running: &Running) -> DeviceInfo {
    let now = lock(&running.served).clone();
    let disk = &running.disk;
    let limits = disk.limits();
    let mut facts = disk.driver().describe();
    let front_end = running.servers.vhost.as_ref().and_then(VhostUserDevice::front_end);
    let front_end = front_end.as_ref();
    let owned = |facts: Vec<Fact>| facts.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    let settings = owned(settings_now(device, running, &facts, front_end));
    let direct_io = take_direct_io(&mut facts);
    // Shown with the settings.
    take(&mut facts, Key::Dispatch.row().name);
    let clients =
        running.servers.connections().map(|ConnectionInfo { peer, age, counters, in_flight, .. }| {
            let NbdCounters { requests, errors, read_bytes, written_bytes, .. } = counters;
            client_info(peer, age, [requests, errors, read_bytes, written_bytes], in_flight)
        });
    let guest = front_end.map(|FrontEndInfo { peer, age, counters, in_flight, .. }| {
        let VhostUserCounters { requests, errors, read_bytes, written_bytes, .. } = *counters;
        client_info(peer.clone(), *age, [requests, errors, read_bytes, written_bytes], *in_flight)
    });
    let mut warnings = disk.driver().warnings();
    warnings.extend(device.warnings.iter().cloned());
    let broken = disk.broken();
    warnings.extend(broken.map(|why| format!("all I/O fails: {why}; detach the device and attach it again")));
    warnings.extend(front_end.into_iter().flat_map(rejected_rings));
    warnings.extend(front_end.and_then(unregistered_memory));
    DeviceInfo {
        name: disk.name().to_owned(),
        pid: std::process::id(),
        uptime_seconds: running.uptime_ns() / 1_000_000_000,
        state_directory: device.state_directory.clone(),
        log: log::path().map(Path::to_owned),
        exports: running.exports(),
        clients: clients.chain(guest).collect(),
        image: now.image,
        driver: disk.driver().name().to_owned(),
        size: limits.size_bytes(),
        sector_size: limits.logical_block_bytes,
        physical_sector_size: limits.physical_block_bytes,
        read_only: limits.read_only,
        autoclear: device.is_autoclear(),
        held: disk.held(),
        commit: running.changes.commit(),
        unsafe_flush_ignore: device.flushes_ignored,
        partscan: device.partscan,
        sandbox: device.confinement.clone(),
        direct_io,
        attach_options: now.attach_options,
        capabilities: capabilities(&limits),
        settings,
        driver_facts: owned(facts),
        warnings,
    }
}

/// Also contains facts that are shown with settings. `facts` are those of the driver.
fn settings_now(
    device: &Device,
    running: &Running,
    facts: &[Fact],
    guest: Option<&FrontEndInfo>,
) -> Vec<Fact> {
    let Running { servers, ublk, disk, .. } = running;
    let ceiling = match disk.ceiling() {
        Ceiling::NotSearched => None,
        Ceiling::Unknown => Some("not found yet".to_owned()),
        Ceiling::Found(limits) => Some(limits.to_string()),
    };
    let register_memory = servers.vhost.as_ref().filter(|vhost| vhost.registers_memory());
    let others = [
        ("ceiling", ceiling),
        ("ublk", ublk.as_ref().map(UblkDevice::describe)),
        ("register-memory", register_memory.map(|_| registered_memory(guest))),
        ("metrics", device.metrics_uri()),
    ];
    let keys = ROWS.iter().map(|row| row.key).filter(|key| !SHOWN_ELSEWHERE.contains(key));
    let in_force = keys.filter_map(|key| settings::read_back(device, running, facts, key));
    let in_force = in_force.map(|setting| (setting.name(), setting.value()));
    let others = others.into_iter().filter_map(|(name, value)| Some((name, value?)));
    std::iter::once(("queues", disk.queue_count().to_string())).chain(in_force).chain(others).collect()
}

fn take(facts: &mut Vec<Fact>, name: &str) -> Option<String> {
    let at = facts.iter().position(|(key, _)| *key == name)?;
    Some(facts.remove(at).1)
}

fn take_direct_io(facts: &mut Vec<Fact>) -> DirectIoInfo {
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

fn client_info(peer: String, age: Duration, counters: [u64; 4], in_flight: u64) -> ClientInfo {
    let [requests, errors, read_bytes, written_bytes] = counters;
    ClientInfo { peer, seconds: age.as_secs(), requests, errors, read_bytes, written_bytes, in_flight }
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

pub(super) fn bitmap_info(bitmap: &Bitmap) -> BitmapInfo {
    let (state, dirty) = match bitmap.state() {
        BitmapState::Recording => ("recording", Some(bitmap.dirty_bytes())),
        BitmapState::Disabled => ("disabled", Some(bitmap.dirty_bytes())),
        BitmapState::Inconsistent => ("inconsistent", None),
    };
    let state = state.to_owned();
    BitmapInfo { name: bitmap.name().to_owned(), granularity: bitmap.granularity(), state, dirty }
}
