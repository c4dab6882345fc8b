//! The device as it is, for `show` and `list`.

use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;

use blkq::QueueLimits;
use blkq::throttle::{Ceiling, LimitMode};
use blkq_export::nbd::ConnectionInfo;
use blkq_export::vhost_user::{FrontEndInfo, VhostUserDevice};

use super::Device;
use super::background::BackgroundThreads;
use crate::failure::Outcome;
use crate::info::{ClientInfo, DeviceInfo, DirectIoInfo};
use crate::log;
use crate::settings::Setting;

impl Device {
    /// The device as it is now, with notes for the user that attached it.
    ///
    /// # Errors
    /// If it has stopped.
    pub fn info_at_attach(&self) -> Outcome<DeviceInfo> {
        let mut info = self.info()?;
        let fallback = |why| format!("served over NBD, without a node in /dev: {why}");
        info.warnings.extend(self.attached.fallback.as_ref().map(fallback));
        Ok(info)
    }

    /// The device as it is now.
    ///
    /// # Errors
    /// If it has stopped.
    pub fn info(&self) -> Outcome<DeviceInfo> {
        let running = self.running()?;
        let now = self.served().clone();
        let disk = &running.disk;
        let (limits, settings) = (disk.limits(), disk.settings());
        let mut facts = disk.driver().describe();
        let mut fact = |name: &str| {
            let at = facts.iter().position(|(key, _)| *key == name)?;
            Some(facts.remove(at).1)
        };
        let direct_io = match (fact("direct-io-requested"), fact("direct-io"), fact("direct-io-reason")) {
            (Some(requested), Some(effective), Some(reason)) => DirectIoInfo { requested, effective, reason },
            _ => DirectIoInfo {
                requested: "auto".to_owned(),
                effective: "off".to_owned(),
                reason: "there is no file behind the device".to_owned(),
            },
        };
        let dispatch = fact("dispatch").map(|dispatch| ("dispatch", dispatch));
        let front_end = running.servers.vhost.as_ref().and_then(VhostUserDevice::front_end);
        let register_memory = running.servers.vhost.as_ref().filter(|vhost| vhost.registers_memory());
        let register_memory =
            register_memory.map(|_| ("register-memory", registered_memory(front_end.as_ref())));
        let ublk = running.ublk.as_ref().map(|ublk| ("ublk", ublk.describe()));
        let queues = ("queues", disk.queue_count().to_string());
        let ceiling = disk.ceiling();
        let settings = [
            Setting::Depth(settings.depth),
            Setting::Scheduler(settings.scheduler),
            Setting::Merge(settings.merge),
            Setting::EarlySubmission(settings.early_submission),
            Setting::Batching(settings.batching),
            Setting::Iostats(settings.iostats),
            Setting::Clock(settings.clock),
            Setting::Limit(match ceiling {
                Ceiling::NotSearched => LimitMode::Fixed(disk.rate_limits()),
                _ => LimitMode::Auto,
            }),
            Setting::OnError(disk.error_policy()),
        ];
        let ceiling = match ceiling {
            Ceiling::NotSearched => None,
            Ceiling::Unknown => Some(("ceiling", "not found yet".to_owned())),
            Ceiling::Found(limits) => Some(("ceiling", limits.to_string())),
        };
        let member = disk.group_member();
        let group = self.attached.group_name().map(|group| ("group", group.to_owned()));
        let weight = member.map(|member| Setting::Weight(member.weight()));
        let served = !running.servers.nbd.is_empty();
        let of_nbd = [
            Setting::Pacing(running.servers.switches.pacing.load(Relaxed)),
            Setting::ReceiveBackoff(running.servers.switches.receive_backoff.load(Relaxed)),
            Setting::SplitReads(running.servers.switches.split_reads.load(Relaxed)),
        ]
        .into_iter()
        .filter(|_| served);
        let watching = self.background().as_ref().map(BackgroundThreads::describe).unwrap_or_default();
        let owned = |(name, value): (&'static str, String)| (name.to_owned(), value);
        Ok(DeviceInfo {
            name: self.attached.name.clone(),
            pid: std::process::id(),
            uptime_seconds: self.meter.uptime_ns() / 1_000_000_000,
            state_directory: self.attached.state_directory.clone(),
            log: log::path().map(Path::to_owned),
            exports: running.exports(),
            clients: running
                .servers
                .connections()
                .map(client_info)
                .chain(front_end.as_ref().map(guest_info))
                .collect(),
            image: now.image,
            driver: disk.driver().name().to_owned(),
            size: limits.size_bytes(),
            sector_size: limits.logical_block_bytes,
            physical_sector_size: limits.physical_block_bytes,
            read_only: limits.read_only,
            autoclear: self.autoclear.is_on(),
            held: disk.held(),
            commit: self.commit_info(),
            unsafe_flush_ignore: self.attached.flushes_ignored,
            partscan: self.attached.partscan,
            sandbox: self.sandbox.confinement().clone(),
            direct_io,
            attach_options: now.attach_options,
            capabilities: capabilities(&limits),
            settings: std::iter::once(queues)
                .chain(
                    settings
                        .into_iter()
                        .chain(of_nbd)
                        .chain(weight)
                        .map(|setting| (setting.key(), setting.value())),
                )
                .chain(ceiling)
                .chain(group)
                .chain(dispatch)
                .chain(ublk)
                .chain(register_memory)
                .chain(watching)
                .map(owned)
                .collect(),
            driver_facts: facts.into_iter().map(owned).collect(),
            warnings: disk
                .driver()
                .warnings()
                .into_iter()
                .chain(self.attached.warnings.iter().cloned())
                .chain(
                    disk.broken().map(|why| format!("all I/O fails: {why}; detach it, and attach it again")),
                )
                .chain(front_end.iter().flat_map(rejected_rings))
                .chain(front_end.iter().filter_map(unregistered_memory))
                .collect(),
        })
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

/// The front end of a virtual machine.
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

/// The rings that are stopped because of their contents, in words.
fn rejected_rings(front_end: &FrontEndInfo) -> impl Iterator<Item = String> {
    front_end.rings.iter().filter_map(|ring| {
        let reason = ring.rejected.as_ref()?;
        Some(format!("ring {} of the virtual machine was stopped: {reason}; reset its device", ring.index))
    })
}

/// How much of a virtual machine's memory is registered, in words.
fn registered_memory(front_end: Option<&FrontEndInfo>) -> String {
    match front_end.and_then(|front_end| front_end.registered_memory.as_ref()) {
        None => "on, without a virtual machine yet".to_owned(),
        Some(Ok(bytes)) => format!("on, {} MiB with each engine", bytes >> 20),
        Some(Err(_)) => "on, but it does not fit".to_owned(),
    }
}

/// Why the memory of a virtual machine is not registered, in words.
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
