use blkq_export::nbd::{NbdServer, Reason, Rejection};
use blkq_export::vhost_user::{Event, Report, VhostUserDevice};

use super::{Device, events};
use crate::log;

impl Device {
    pub fn log_rejections(&self) {
        events::take(&self.events.rejection);
        let Ok(running) = self.running() else { return };
        let rejections = running.servers.nbd.iter().flat_map(NbdServer::take_rejections);
        let reports = running.servers.vhost.iter().flat_map(VhostUserDevice::take_reports);
        let lines = rejections.map(|rejection| describe(&rejection));
        lines.chain(reports.map(|report| describe_report(&report))).for_each(|line| log::line(&line));
    }
}

fn describe_report(report: &Report) -> String {
    let peer = format!("vhost-user front end ({})", report.peer);
    let event = match &report.event {
        Event::Occupied => format!("rejected {peer}: another front end is connected"),
        Event::Violation(why) => format!("disconnected {peer}: protocol violation: {why}"),
        Event::Refused(why) => format!("refused a request of {peer}: {why}"),
        Event::RingRejected(ring, why) => format!("stopped ring {ring} of {peer}: {why}"),
        Event::MemoryUnregistered(why) => format!("serving {peer} without --register-memory: {why}"),
    };
    event + &not_logged(report.unreported)
}

/// Ends a line before which similar events were not logged.
fn not_logged(events: u64) -> String {
    match events {
        0 => String::new(),
        1 => " (1 earlier event of this kind was not logged)".to_owned(),
        count => format!(" ({count} earlier events of this kind were not logged)"),
    }
}

fn describe(rejection: &Rejection) -> String {
    let (event, why) = match &rejection.reason {
        Reason::TooMany(max) => ("rejected", format!("the limit --max-connections {max} is reached")),
        Reason::NoMemory => ("rejected", "not enough memory".to_owned()),
        Reason::WithoutTls => {
            ("rejected", "the client did not request TLS, which --tls require demands".to_owned())
        }
        Reason::Tls(why) => ("rejected", format!("TLS: {why}")),
        Reason::Handshake => ("disconnected", "protocol violation in the handshake".to_owned()),
        Reason::Request => ("disconnected", "protocol violation in a request".to_owned()),
        Reason::Late => ("disconnected", "timeout in the handshake, of a payload or of a reply".to_owned()),
        other => ("rejected", format!("{other:?}")),
    };
    let before = not_logged(rejection.unreported);
    let after =
        if rejection.last { "; further events of this kind within a minute are not logged" } else { "" };
    format!("{event} NBD client ({}): {why}{before}{after}", rejection.peer)
}
