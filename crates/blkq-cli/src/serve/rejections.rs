//! Clients that were turned away, in words for the log.

use std::os::fd::OwnedFd;

use blkq_export::nbd::{NbdServer, Reason, Rejection};
use blkq_export::vhost_user::{Event, Report, VhostUserDevice};

use super::{Device, events};
use crate::log;

impl Device {
    /// Becomes readable when there is something for [`Device::log_rejections`].
    pub fn rejection_event(&self) -> &OwnedFd {
        &self.events.rejection
    }

    /// Logs the clients that were turned away or dropped since the last call.
    pub fn log_rejections(&self) {
        events::take(&self.events.rejection);
        let Ok(running) = self.running() else { return };
        running.servers.nbd.iter().flat_map(NbdServer::take_rejections).for_each(|rejection| {
            log::line(&describe(&rejection));
        });
        running.servers.vhost.iter().flat_map(VhostUserDevice::take_reports).for_each(|report| {
            log::line(&describe_report(&report));
        });
    }
}

fn describe_report(report: &Report) -> String {
    let event = match &report.event {
        Event::Occupied => "turned away: another one is connected, and a device has one".to_owned(),
        Event::Violation(why) => format!("dropped: it broke the protocol: {why}"),
        Event::Refused(why) => format!("was refused a request: {why}"),
        Event::RingRejected(ring, why) => format!("has ring {ring} stopped: {why}"),
        Event::MemoryUnregistered(why) => format!("is served without --register-memory: {why}"),
    };
    let before = match report.unreported {
        0 => String::new(),
        count => format!(" ({count} more like this before it were only counted)"),
    };
    format!("vhost-user front end ({}) {event}{before}", report.peer)
}

fn describe(rejection: &Rejection) -> String {
    let why = match &rejection.reason {
        Reason::TooMany(max) => {
            format!("turned away: {max} clients are connected, which is --max-connections")
        }
        Reason::NoMemory => "turned away: there is no memory for one more client".to_owned(),
        Reason::WithoutTls => "turned away: it did not ask for TLS, which --tls require demands".to_owned(),
        Reason::Tls(why) => format!("turned away: TLS: {why}"),
        Reason::Handshake => "dropped: it broke the protocol in the handshake".to_owned(),
        Reason::Request => "dropped: it broke the protocol with a request".to_owned(),
        Reason::Late => {
            "dropped: it took too long to finish the handshake, send a payload or take replies".to_owned()
        }
        other => format!("turned away: {other:?}"),
    };
    let before = match rejection.unreported {
        0 => String::new(),
        count => format!(" ({count} more like this before it were only counted)"),
    };
    let after = if rejection.last { "; more like this within a minute are only counted" } else { "" };
    format!("nbd client ({}) {why}{before}{after}", rejection.peer)
}
