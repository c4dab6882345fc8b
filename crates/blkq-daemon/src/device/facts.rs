//! The state of a device, for `blkq show` and `blkq list`.

use std::time::Duration;

use blkq::QueueLimits;
use blkq::bitmap::{Bitmap, BitmapState};
use blkq::throttle::Ceiling;
use blkq_export::nbd::{ConnectionInfo, NbdCounters};
use blkq_export::ublk::UblkDevice;
use blkq_export::vhost_user::{FrontEndInfo, VhostUserCounters};
use blkq_protocol::control::BitmapInfo;
use blkq_protocol::info::{ClientInfo, DirectIoInfo};
use blkq_protocol::options::{Key, ROWS};

use super::running::Running;
use super::settings::{Fact, LiveSettings};

/// Settings that have fields of `DeviceInfo`, or are among the facts of the driver.
const SHOWN_ELSEWHERE: [Key; 4] = [Key::Autoclear, Key::DirectIo, Key::Fault, Key::ReadOnly];

pub(super) fn owned(facts: Vec<Fact>) -> Vec<(String, String)> {
    facts.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

pub(super) fn clients(running: &Running, front_end: Option<&FrontEndInfo>) -> Vec<ClientInfo> {
    let clients =
        running.servers.connections().map(|ConnectionInfo { peer, age, counters, in_flight, .. }| {
            let NbdCounters { requests, errors, read_bytes, written_bytes, .. } = counters;
            client_info(peer, age, [requests, errors, read_bytes, written_bytes], in_flight)
        });
    let guest = front_end.map(|FrontEndInfo { peer, age, counters, in_flight, .. }| {
        let VhostUserCounters { requests, errors, read_bytes, written_bytes, .. } = *counters;
        client_info(peer.clone(), *age, [requests, errors, read_bytes, written_bytes], *in_flight)
    });
    clients.chain(guest).collect()
}

/// `of_device` are the warnings that do not depend on the driver and the clients.
pub(super) fn warnings(
    running: &Running,
    of_device: &[String],
    front_end: Option<&FrontEndInfo>,
) -> Vec<String> {
    let mut warnings = running.disk.driver().warnings();
    warnings.extend(of_device.iter().cloned());
    let broken = running.disk.broken();
    warnings.extend(broken.map(|why| format!("all I/O fails: {why}; detach the device and attach it again")));
    warnings.extend(front_end.into_iter().flat_map(rejected_rings));
    warnings.extend(front_end.and_then(unregistered_memory));
    warnings
}

/// The settings in force. Also contains facts that are shown with settings. `facts` are those of the driver.
pub(super) fn settings(
    live: &LiveSettings,
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
        ("metrics", live.metrics_uri()),
    ];
    let keys = ROWS.iter().map(|row| row.key).filter(|key| !SHOWN_ELSEWHERE.contains(key));
    let in_force = keys.filter_map(|key| live.read_back(running, facts, key));
    let in_force = in_force.map(|setting| (setting.name(), setting.value()));
    let others = others.into_iter().filter_map(|(name, value)| Some((name, value?)));
    std::iter::once(("queues", disk.queue_count().to_string())).chain(in_force).chain(others).collect()
}

pub(super) fn take(facts: &mut Vec<Fact>, name: &str) -> Option<String> {
    let at = facts.iter().position(|(key, _)| *key == name)?;
    Some(facts.remove(at).1)
}

pub(super) fn take_direct_io(facts: &mut Vec<Fact>) -> DirectIoInfo {
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

pub(super) fn capabilities(limits: &QueueLimits) -> Vec<String> {
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
