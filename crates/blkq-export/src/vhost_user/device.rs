//! The device as its owner sees it: start, observe, stop.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use blkq::{Disk, EngineHandle, Error, ErrorKind};

use super::control::{Control, close_listener};
use super::notifier::{MEMORY_WAIT, Notifier};
use super::registration::RegistrationLimits;
use super::shared::Shared;
use super::status::{FrontEnd, FrontEndInfo, Paused, Registry, Report, VhostUserCounters};
use crate::nbd::{Listen, Listener, SocketAccess};

/// Options of a device.
#[derive(Clone, Debug, Default)]
pub struct VhostUserOptions {
    /// The serial number that guests see: its first 20 bytes.
    pub serial: String,
    /// The users that may connect to the unix socket.
    pub access: SocketAccess,
    /// An eventfd that does not block, written whenever the front end has disconnected.
    pub idle_event: Option<Arc<OwnedFd>>,
    /// An eventfd that does not block, written whenever [`VhostUserDevice::take_reports`] has some;
    /// without one there are none.
    pub report_event: Option<Arc<OwnedFd>>,
    /// Register guest memory with the engines' rings, so that direct I/O need not pin its pages each time.
    /// All of it is then taken, and what the guest frees (a balloon, free page reporting) is lost to
    /// it: see docs/vhost-user.md.
    pub register_memory: Option<RegistrationLimits>,
}

enum State {
    /// Front ends may connect, and wait.
    Listening(Listener),
    Serving(JoinHandle<()>),
    Stopped,
}

/// A running device. Stop it before its engines; dropped, it is stopped by force.
pub struct VhostUserDevice {
    uri: String,
    open_to_all: Option<String>,
    shared: Arc<Shared>,
    state: Mutex<State>,
}

impl VhostUserDevice {
    /// Serves `disk` on `engines`, one for each of its queues, to the front end that connects to
    /// `listen`. It can connect when this returns.
    ///
    /// # Errors
    /// As [`VhostUserDevice::listen`] and [`VhostUserDevice::serve`].
    pub fn start(
        listen: Listen,
        options: VhostUserOptions,
        disk: &Arc<Disk>,
        engines: &[EngineHandle],
    ) -> Result<VhostUserDevice, Error> {
        let device = VhostUserDevice::listen(listen, options, disk, engines)?;
        device.serve()?;
        Ok(device)
    }

    /// As [`VhostUserDevice::start`], but front ends that connect wait until
    /// [`VhostUserDevice::serve`].
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if another process listens there already, [`ErrorKind::Invalid`] for a socket that is
    /// not of unix, or without engines, and the errors of the system.
    pub fn listen(
        listen: Listen,
        options: VhostUserOptions,
        disk: &Arc<Disk>,
        engines: &[EngineHandle],
    ) -> Result<VhostUserDevice, Error> {
        let invalid = |what: &str| Error::new(ErrorKind::Invalid, format!("vhost-user: {what}"));
        if engines.is_empty() {
            return Err(invalid("there is no engine"));
        }
        if matches!(listen, Listen::Tcp(..)) {
            return Err(invalid("memory cannot be shared over TCP; give a unix socket"));
        }
        let listener = listen.listen_as(options.access)?;
        if listener.tcp_address().is_some() {
            return Err(invalid("memory cannot be shared over TCP; give a unix socket"));
        }
        let uri = match listener.unix_path() {
            Some(path) => format!("vhost-user:{}", path.display()),
            None => "vhost-user on an inherited socket".to_owned(),
        };
        let open_to_all = listener.open_to_all_users();
        let shared = Arc::new(Shared {
            address: rustix::net::getsockname(&listener).ok(),
            registry: Registry::new(options.idle_event, options.report_event),
            register_memory: options.register_memory,
            ..Shared::new(disk, engines.to_vec(), &options.serial)?
        });
        Ok(VhostUserDevice { uri, open_to_all, shared, state: Mutex::new(State::Listening(listener)) })
    }

    /// Makes the rings of the kernel that signal eventfds, for a process that gives up the right to make
    /// rings before [`VhostUserDevice::serve`]: one for each of the 64 rings that a guest may have, and one
    /// more, with a descriptor and 8 KiB of locked memory each. Otherwise they are made when front ends need
    /// them. Waits for memory for at most 2 s.
    ///
    /// # Errors
    /// That there is no room for all (RLIMIT_MEMLOCK, RLIMIT_NOFILE): eventfds of the last rings are
    /// rejected then. [`ErrorKind::Busy`] if front ends are served already, or were, and nothing is made.
    pub fn prepare(&self) -> Result<(), Error> {
        // An engine that found its ring in use here would lose a call.
        let state = self.state();
        if !matches!(*state, State::Listening(_)) {
            return Err(Error::new(ErrorKind::Busy, "vhost-user: front ends are served already"));
        }
        let deadline = Instant::now() + MEMORY_WAIT;
        let calls = self.shared.calls.iter().map(Arc::as_ref);
        // Each is tried: one that was not would be made later.
        let prepare = |result: Result<(), Error>, notifier: &Notifier| result.and(notifier.prepare(deadline));
        calls.chain([&self.shared.errors]).fold(Ok(()), prepare)
    }

    /// Starts the thread that serves front ends; with the rights of the thread that calls this. Does
    /// nothing if it has been started, or the device has stopped.
    ///
    /// # Errors
    /// [`ErrorKind::System`] if there can be no more threads; the device has stopped then.
    pub fn serve(&self) -> Result<(), Error> {
        let mut state = self.state();
        let listener = match std::mem::replace(&mut *state, State::Stopped) {
            State::Listening(listener) => listener,
            other => {
                *state = other;
                return Ok(());
            }
        };
        let control = Control::new(self.shared.clone(), listener);
        let thread = std::thread::Builder::new().name("blkq-vhost".into()).spawn(|| control.run());
        let thread = thread.map_err(|e| Error::system("vhost-user: cannot start a thread", e))?;
        *state = State::Serving(thread);
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where front ends connect: `vhost-user:/run/blkq/disk.vhost`.
    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// The unix socket, if all users of this machine may connect to it.
    pub fn open_to_all_users(&self) -> Option<String> {
        self.open_to_all.clone()
    }

    /// The front end, if one is connected.
    pub fn front_end(&self) -> Option<FrontEndInfo> {
        self.shared.registry.front_end()
    }

    /// Whether guest memory is registered, where it fits.
    pub fn registers_memory(&self) -> bool {
        self.shared.register_memory.is_some()
    }

    /// Front ends connected: 0 or 1.
    pub fn connection_count(&self) -> usize {
        self.shared.registry.is_connected().into()
    }

    /// Counters of all front ends since the device started.
    pub fn counters(&self) -> VhostUserCounters {
        self.shared.registry.counters()
    }

    /// Events of front ends and their rings since the last call: a few a minute of each kind, if
    /// [`VhostUserOptions::report_event`] is set.
    pub fn take_reports(&self) -> Vec<Report> {
        self.shared.registry.take_reports()
    }

    /// The disk has another size, or other limits: the guest is notified, if its front end can be.
    pub fn resized(&self) {
        self.shared.change_config();
    }

    /// Turns front ends away that connect, until what this returns is dropped; `None`, and nothing has
    /// changed, if one is connected.
    pub fn pause_if_empty(&self) -> Option<Paused<'_>> {
        self.shared.registry.pause_if_empty()
    }

    /// Stops the device: its socket is removed when this returns. With `force` the front end is dropped when
    /// its requests in flight have completed.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if a front end is connected and `force` is not set; the device goes on.
    pub fn stop(&self, force: bool) -> Result<(), Error> {
        self.begin_stop(force)?.wait();
        Ok(())
    }

    /// As [`VhostUserDevice::stop`], but does not wait: so that servers of several kinds stop to serve together.
    ///
    /// # Errors
    /// As [`VhostUserDevice::stop`].
    pub fn begin_stop(&self, force: bool) -> Result<StoppingDevice<'_>, Error> {
        if force {
            self.shared.registry.close();
        } else if !self.shared.registry.close_if(|front_end| front_end.is_none()) {
            return Err(Error::new(ErrorKind::Busy, "a front end is connected"));
        }
        // The control thread stops the rings of the front end that there is.
        self.shared.stop();
        Ok(StoppingDevice(self))
    }

    /// Stops the device for another daemon that goes on with it: as [`VhostUserDevice::stop`] with force,
    /// but the front end that is connected must keep a record of its requests in flight.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if it keeps none; the device goes on.
    pub fn stop_for_next(&self) -> Result<(), Error> {
        let may_close = |front_end: Option<&FrontEnd>| front_end.is_none_or(FrontEnd::is_recorded);
        if !self.shared.registry.close_if(may_close) {
            return Err(Error::new(ErrorKind::Busy, "the front end keeps no record of requests in flight"));
        }
        self.shared.stop();
        StoppingDevice(self).wait();
        Ok(())
    }
}

/// A device that is stopping ([`VhostUserDevice::begin_stop`]).
#[must_use = "the device has stopped once this was waited for"]
pub struct StoppingDevice<'a>(&'a VhostUserDevice);

impl StoppingDevice<'_> {
    /// Waits until the front end is dropped, and its requests in flight have completed.
    pub fn wait(self) {
        let state = std::mem::replace(&mut *self.0.state(), State::Stopped);
        match state {
            State::Listening(listener) => close_listener(listener),
            State::Serving(thread) => {
                let _ = thread.join();
            }
            State::Stopped => {}
        }
    }
}

impl Drop for VhostUserDevice {
    fn drop(&mut self) {
        // Forced, it does not refuse.
        let _ = self.stop(true);
    }
}
