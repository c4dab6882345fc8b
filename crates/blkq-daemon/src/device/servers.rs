use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use blkq::{Disk, Driver, EngineHandle};
use blkq_export::nbd::{
    ConnectionInfo, NbdExport, NbdOptions, NbdServer, NbdSwitches, Paused, RangeLock, Reason, Rejection,
    StoppingServer, TlsOptions,
};
use blkq_export::vhost_user::{self, Event, Report, StoppingDevice, VhostUserDevice, VhostUserOptions};
use blkq_export::{Listen, SocketAccess};
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::options::{AttachOptions, Mechanism};
use rustix::event::{EventfdFlags, eventfd};

use super::image::RELEASE_WAIT;
use super::limits::{clients_max, memory_limits, reserve};
use super::listen::{Sockets, no_server, socket_access};
use crate::log;

const CONNECTIONS: u16 = 64;
const HANDSHAKE_TIMEOUT_S: u16 = 10;

pub(super) struct ServerContext<'a> {
    pub(super) options: &'a AttachOptions,
    pub(super) disk: &'a Arc<Disk>,
    pub(super) engines: &'a [EngineHandle],
    /// A name that other processes understand.
    pub(super) image: &'a str,
    pub(super) tls: Option<TlsOptions>,
    /// NBD clients may access parts of a block.
    pub(super) serves_bytes: bool,
    /// Whether the previous daemon of the device may have been killed.
    pub(super) is_after: bool,
    pub(super) events: &'a Events,
}

/// Running servers, in the order in which they stop.
pub(super) struct Servers {
    pub(super) nbd: Vec<NbdServer>,
    pub(super) vhost: Option<VhostUserDevice>,
    /// Serializes accesses to the same blocks, if the NBD servers serve parts of blocks.
    pub(super) unaligned: Option<Arc<RangeLock>>,
    pub(super) switches: Arc<NbdSwitches>,
}

/// Keeps clients away until it is dropped.
#[allow(dead_code, reason = "dropped to let clients connect again")]
pub(super) struct PausedServers<'a>(Vec<Paused<'a>>, Option<vhost_user::Paused<'a>>);

impl Servers {
    /// Also returns warnings. Fails if a server cannot listen; then no server is left.
    pub(super) fn start(sockets: Sockets, context: ServerContext) -> Outcome<(Servers, Vec<String>)> {
        let ServerContext { options, disk, engines, is_after, .. } = context;
        let access = socket_access(options.socket_mode, options.socket_group.as_deref())?;
        let closed = sockets.warn_of_closed_directories(access);
        let vhost_options = VhostUserOptions {
            serial: disk.name().to_owned(),
            access,
            idle_event: Some(context.events.idle.clone()),
            report_event: Some(context.events.rejection.clone()),
            register_memory: options.register_memory.then(|| memory_limits(options.sandbox)),
        };
        let vhost = sockets.vhost.map(|listen| VhostUserDevice::listen(listen, vhost_options, disk, engines));
        let vhost = vhost.transpose()?;
        // The vhost-user rings must be created now, because a confined process cannot create them. The
        // reserved file descriptors keep enough free for the rest of the daemon; clients get what is left.
        let reserved = reserve();
        let prepared = vhost.iter().filter(|_| options.sandbox).try_for_each(VhostUserDevice::prepare);
        drop(reserved);
        let connections_wanted = usize::from(options.max_connections.unwrap_or(CONNECTIONS));
        let connections_max = clients_max(connections_wanted, sockets.nbd.len());
        let nbd_options = nbd_options(connections_max, access, context);
        let (unaligned, switches) = (nbd_options.unaligned.clone(), nbd_options.switches.clone());
        let mut servers = Servers { nbd: Vec::new(), vhost, unaligned, switches };
        for listen in sockets.nbd {
            // A unix socket is not waited for if its process is known to be running. A TCP address may belong to any
            // server.
            let waits = is_after || matches!(listen, Listen::Unix(_));
            let address_wait = if waits { RELEASE_WAIT } else { Duration::ZERO };
            match NbdServer::start(listen, NbdOptions { address_wait, ..nbd_options.clone() }, engines) {
                Ok(server) => servers.nbd.push(server),
                Err(error) => {
                    servers.close();
                    return Err(no_server(error));
                }
            }
        }
        let mut warnings = Vec::new();
        if connections_max < connections_wanted && !servers.nbd.is_empty() {
            warnings.push(format!(
                "at most {connections_max} clients at a time, because the limit of open files is too low (ulimit -n)"
            ));
        }
        let unserved = prepared.err();
        warnings.extend(
            unserved.map(|error| format!("some or all queues of virtual machines are not served: {error}")),
        );
        warnings.extend(servers.warn_of_access(options, &nbd_options));
        warnings.extend(nbd_options.tls.iter().flat_map(|tls| tls.certificates.warnings()));
        warnings.extend(closed);
        Ok((servers, warnings))
    }

    /// Warns about servers that more clients can reach than the user may expect.
    fn warn_of_access(&self, options: &AttachOptions, nbd_options: &NbdOptions) -> Vec<String> {
        let servers = &self.nbd;
        let required = nbd_options.tls.as_ref().filter(|tls| tls.required);
        let verified = required.is_some_and(|tls| tls.certificates.verifies_clients());
        let mut warnings = Vec::new();
        if required.is_some() && !verified {
            warnings.extend(servers.iter().filter_map(NbdServer::beyond_this_machine).map(|address| {
                format!("every machine that can reach {address} can use the device, because no client needs a certificate; add ca-cert.pem to the certificate directory, or restrict access with a firewall")
            }));
        }
        let hint = match options.socket_mode {
            Some(_) => "use --socket-group and --socket-mode 660",
            None => "set SocketMode=0600 in the socket unit",
        };
        let open_to_all = servers.iter().filter_map(NbdServer::open_to_all_users);
        let open_to_all = open_to_all.chain(self.vhost.as_ref().and_then(VhostUserDevice::open_to_all_users));
        warnings.extend(open_to_all.map(|socket| format!("any local user can connect to {socket}; {hint}")));
        if !(options.insecure || verified) {
            warnings.extend(servers.iter().filter_map(NbdServer::on_loopback).map(|address| {
                format!("any local user can connect to {address}; use a unix socket, or TLS with client certificates (ca-cert.pem), or --insecure to accept this")
            }));
        }
        warnings
    }

    pub(super) fn connections(&self) -> impl Iterator<Item = ConnectionInfo> {
        self.nbd.iter().flat_map(NbdServer::connections)
    }

    /// Counts a virtual machine as one client.
    pub(super) fn client_count(&self) -> usize {
        let nbd = self.nbd.iter().map(NbdServer::connection_count).sum::<usize>();
        nbd + self.vhost.as_ref().map_or(0, VhostUserDevice::connection_count)
    }

    pub(super) fn uris(&self) -> impl Iterator<Item = String> {
        let vhost = self.vhost.iter().map(VhostUserDevice::uri);
        vhost.chain(self.nbd.iter().map(NbdServer::uri)).map(str::to_owned)
    }

    pub(super) fn log_rejections(&self) {
        let rejections = self.nbd.iter().flat_map(NbdServer::take_rejections);
        let reports = self.vhost.iter().flat_map(VhostUserDevice::take_reports);
        rejections.for_each(|rejection| log::line(&describe(&rejection)));
        reports.for_each(|report| log::line(&describe_report(&report)));
    }

    /// Keeps NBD clients away until the returned guard is dropped. Fails if NBD clients are connected.
    pub(super) fn pause_nbd(&self) -> Result<PausedServers<'_>, Connected> {
        let paused = self.nbd.iter().map(NbdServer::pause_if_empty).collect::<Option<_>>();
        let paused = paused.ok_or_else(|| Connected(self.connections().count().max(1)))?;
        Ok(PausedServers(paused, None))
    }

    /// As [`Servers::pause_nbd`], and also keeps virtual machines away.
    pub(super) fn pause(&self) -> Result<PausedServers<'_>, Connected> {
        let mut paused = self.pause_nbd()?;
        let guest = self.vhost.as_ref().map(|vhost| vhost.pause_if_empty().ok_or(Connected(1)));
        paused.1 = guest.transpose()?;
        Ok(paused)
    }

    /// Starts to stop all servers, without waiting. Unless `force` is set, fails if clients are connected;
    /// all servers keep running. Once one server stops, the others are forced: a client that connects to them
    /// in between is disconnected.
    pub(super) fn begin_stop(&self, mut force: bool) -> Outcome<StoppingServers<'_>> {
        let mut stopping = StoppingServers { nbd: Vec::new(), vhost: None };
        if let Some(vhost) = &self.vhost {
            stopping.vhost = Some(vhost.begin_stop(force).map_err(|_| Connected(1).unless_forced())?);
            force = true;
        }
        for server in &self.nbd {
            let connected = |_| Connected(server.connection_count().max(1)).unless_forced();
            stopping.nbd.push(server.begin_stop(force).map_err(connected)?);
            force = true;
        }
        Ok(stopping)
    }

    /// Disconnects clients that are connected.
    pub(super) fn close(&self) {
        // A forced stop does not fail.
        if let Ok(stopping) = self.begin_stop(true) {
            stopping.wait();
        }
    }
}

#[must_use = "the servers have stopped only after `wait`"]
pub(super) struct StoppingServers<'a> {
    nbd: Vec<StoppingServer<'a>>,
    vhost: Option<StoppingDevice<'a>>,
}

impl StoppingServers<'_> {
    /// Waits until all clients are disconnected and the sockets are removed.
    pub(super) fn wait(self) {
        self.nbd.into_iter().for_each(StoppingServer::wait);
        self.vhost.into_iter().for_each(StoppingDevice::wait);
    }
}

/// The number of connected clients, because of which a command is refused.
pub(super) struct Connected(pub(super) usize);

impl Connected {
    pub(super) fn unless_forced(self) -> Failure {
        self.refusal("", ", or use --force")
    }

    pub(super) fn not_handed_over(self) -> Failure {
        self.refusal(" and cannot be handed to another daemon", "")
    }

    fn refusal(self, why: &str, otherwise: &str) -> Failure {
        let (are, them) = if self.0 == 1 { ("client is", "it") } else { ("clients are", "them") };
        Failure::new(format!("{} {are} connected{why}; disconnect {them} first{otherwise}", self.0))
    }
}

fn nbd_options(connections_max: usize, access: SocketAccess, context: ServerContext) -> NbdOptions {
    let ServerContext { options, disk, image, tls, serves_bytes, events, .. } = context;
    let export = NbdExport {
        name: options.export_name.clone().unwrap_or_else(|| disk.name().to_owned()),
        description: format!("{} {image}", disk.driver().name()),
        queue: 0,
    };
    NbdOptions {
        exports: vec![export],
        connections_max,
        handshake_timeout_s: u64::from(options.handshake_timeout.unwrap_or(HANDSHAKE_TIMEOUT_S)),
        tls,
        insecure: options.insecure,
        access,
        named_in_uri: options.export_name.is_some(),
        unaligned: serves_bytes.then(Arc::default),
        idle_event: Some(events.idle.clone()),
        rejection_event: Some(events.rejection.clone()),
        switches: Arc::new(NbdSwitches {
            receive_backoff: (!options.without.includes(Mechanism::ReceiveBackoff)).into(),
            split_reads: (!options.without.includes(Mechanism::SplitReads)).into(),
        }),
        ..NbdOptions::default()
    }
}

/// Nonblocking eventfds for which the daemon of a device polls.
pub struct Events {
    /// The last client has disconnected, whether or not the device detaches with it.
    pub idle: Arc<OwnedFd>,
    /// The kernel rejected a command of the block device's queues.
    pub failure: Arc<OwnedFd>,
    /// The size of the image may have changed.
    pub size: Arc<OwnedFd>,
    /// A client was rejected or disconnected.
    pub rejection: Arc<OwnedFd>,
}

impl Events {
    /// `idle` comes from [`new_event`]. Fails if no file descriptor is left.
    pub(super) fn new(idle: Arc<OwnedFd>, driver: &dyn Driver) -> Outcome<Events> {
        let size = match driver.size_event() {
            Some(event) => {
                let cloned = event.try_clone_to_owned();
                Arc::new(cloned.map_err(|e| Failure::new(format!("cannot duplicate an eventfd: {e}")))?)
            }
            None => new_event()?,
        };
        Ok(Events { idle, failure: new_event()?, size, rejection: new_event()? })
    }
}

pub(super) fn new_event() -> Outcome<Arc<OwnedFd>> {
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
    event.map(Arc::new).map_err(|e| Failure::new(format!("cannot create an eventfd: {e}")))
}

/// A failed read is ignored: another thread may have reset the event.
pub fn take(event: impl AsFd) {
    let _ = rustix::io::read(event, &mut [0; 8]);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_upgrade_does_not_recommend_force() {
        let upgrade = Connected(2).not_handed_over().to_string();
        assert_eq!(
            upgrade,
            "2 clients are connected and cannot be handed to another daemon; disconnect them first"
        );
        assert!(
            Connected(1)
                .unless_forced()
                .to_string()
                .contains("1 client is connected; disconnect it first, or")
        );
    }
}
