//! Starts, observes and stops a device.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use blkq::sync::{Mutex, lock};
use blkq::{Disk, EngineHandle, Error, ErrorKind};

use super::control::{Control, close_listener};
use super::notifier::{MEMORY_WAIT, Notifier};
use super::registration::RegistrationLimits;
use super::status::{FrontEndInfo, Paused, Registry, Report, Shared, VhostUserCounters};
use crate::listener::{Listen, Listener, SocketAccess};

/// The options of a device.
#[derive(Clone, Debug, Default)]
pub struct VhostUserOptions {
    /// The serial number. Guests see the first 20 bytes.
    pub serial: String,
    /// The users that may connect to the unix socket.
    pub access: SocketAccess,
    /// A non-blocking eventfd that is written whenever the front end has disconnected.
    pub idle_event: Option<Arc<OwnedFd>>,
    /// A non-blocking eventfd that is written when [`VhostUserDevice::take_reports`] has events. If it is
    /// `None`, no events are collected.
    pub report_event: Option<Arc<OwnedFd>>,
    /// Registers guest memory with the engines' rings, so that direct I/O does not pin its pages each time.
    /// All guest memory is then allocated. A guest that frees memory (balloon) corrupts its data: see
    /// docs/vhost-user.md.
    pub register_memory: Option<RegistrationLimits>,
}

enum State {
    /// Front ends can connect, but are not served yet.
    Listening(Listener),
    Serving(JoinHandle<()>),
    Stopped,
}

/// A running device. Stop it before its engines. If it is dropped, it is stopped by force.
pub struct VhostUserDevice {
    uri: String,
    open_to_all: Option<String>,
    shared: Arc<Shared>,
    state: Mutex<State>,
}

impl VhostUserDevice {
    /// Creates a device that serves `disk` on `engines`, one for each queue, to front ends that connect to
    /// `listen`. They can connect, but are not served until [`VhostUserDevice::serve`].
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if another process listens on the socket, [`ErrorKind::Invalid`] without engines
    /// or if the socket is not a unix socket.
    pub fn listen(
        listen: Listen,
        options: VhostUserOptions,
        disk: &Arc<Disk>,
        engines: &[EngineHandle],
    ) -> Result<VhostUserDevice, Error> {
        let invalid = |what: &str| Error::new(ErrorKind::Invalid, format!("vhost-user: {what}"));
        if engines.is_empty() {
            return Err(invalid("a device needs at least one engine"));
        }
        let listener = listen.listen(options.access)?;
        if listener.tcp_address().is_some() {
            return Err(invalid("memory cannot be shared over TCP; use a unix socket"));
        }
        let uri = match listener.unix_path() {
            Some(path) => format!("vhost-user:{}", path.display()),
            None => "vhost-user on an inherited socket".to_owned(),
        };
        let open_to_all = listener.listen_address.open_to_all.clone();
        let shared = Arc::new(Shared {
            address: rustix::net::getsockname(&listener).ok(),
            registry: Registry::new(options.idle_event, options.report_event),
            register_memory: options.register_memory,
            ..Shared::new(disk, engines.to_vec(), &options.serial)?
        });
        Ok(VhostUserDevice { uri, open_to_all, shared, state: Mutex::new(State::Listening(listener)) })
    }

    /// Creates the io_urings that signal eventfds, for a process that drops the right to create rings before
    /// [`VhostUserDevice::serve`]: one for each of the 64 rings of a guest, and one for errors, each with a
    /// descriptor and 8 KiB of locked memory. Otherwise they are created when needed. Waits for memory for at
    /// most 2 s.
    ///
    /// # Errors
    /// The kernel's error (RLIMIT_MEMLOCK, RLIMIT_NOFILE); the device then rejects the eventfds of the
    /// missing rings. [`ErrorKind::Busy`], with no effect, after [`VhostUserDevice::serve`].
    pub fn prepare(&self) -> Result<(), Error> {
        // The lock on the state keeps `serve` from running meanwhile: an engine whose notifier is locked here
        // would skip a call to its guest. Notifiers are locked after the state, here and nowhere else.
        let state = lock(&self.state);
        if !matches!(*state, State::Listening(_)) {
            return Err(Error::new(ErrorKind::Busy, "vhost-user: the device already serves front ends"));
        }
        let deadline = Instant::now() + MEMORY_WAIT;
        // Prepares all notifiers, even after an error.
        let prepare = |result: Result<(), Error>, notifier: &Notifier| result.and(notifier.prepare(deadline));
        self.shared.calls.iter().chain([&self.shared.errors]).fold(Ok(()), prepare)
    }

    /// Starts the thread that serves front ends, with the privileges of the calling thread, unless it was
    /// started or the device has stopped. Fails with [`ErrorKind::System`]; the device has then stopped.
    pub fn serve(&self) -> Result<(), Error> {
        let mut state = lock(&self.state);
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

    /// The address for front ends, such as `vhost-user:/run/blkq/disk.vhost`.
    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// The path of the unix socket if all users of this machine can connect to it, else `None`.
    pub fn open_to_all_users(&self) -> Option<String> {
        self.open_to_all.clone()
    }

    /// The connected front end, if there is one.
    pub fn front_end(&self) -> Option<FrontEndInfo> {
        self.shared.registry.front_end()
    }

    /// Whether guest memory is registered if it fits the limits.
    pub fn registers_memory(&self) -> bool {
        self.shared.register_memory.is_some()
    }

    /// Number of connected front ends: 0 or 1.
    pub fn connection_count(&self) -> usize {
        self.shared.registry.is_connected().into()
    }

    /// Counters of all front ends since the device started.
    pub fn counters(&self) -> VhostUserCounters {
        self.shared.registry.counters()
    }

    /// Events of front ends and their rings since the last call: at most 8 of each kind per minute, and only
    /// if [`VhostUserOptions::report_event`] is set.
    pub fn take_reports(&self) -> Vec<Report> {
        self.shared.registry.take_reports()
    }

    /// Notifies the guest of a new size or limits of the disk, if its front end supports that.
    pub fn resized(&self) {
        self.shared.change_config();
    }

    /// Rejects all front ends until the returned value is dropped. Returns `None` if a front end is
    /// connected.
    pub fn pause_if_empty(&self) -> Option<Paused<'_>> {
        self.shared.registry.pause_if_empty()
    }

    /// Stops the device and removes its socket. With `force`, a connected front end is disconnected after its
    /// requests in flight have completed. Without `force`, this fails with [`ErrorKind::Busy`] if a front end
    /// is connected, and the device continues to run.
    pub fn stop(&self, force: bool) -> Result<(), Error> {
        self.begin_stop(force)?.wait();
        Ok(())
    }

    /// As [`VhostUserDevice::stop`], but does not wait, so that several servers can stop together.
    pub fn begin_stop(&self, force: bool) -> Result<StoppingDevice<'_>, Error> {
        self.stop_if(|front_end| force || front_end.is_none(), "a front end is connected")
    }

    /// Stops with force for another daemon that will serve the front end. Fails with [`ErrorKind::Busy`] if
    /// the front end does not track its requests in flight; the device continues to run.
    pub fn stop_for_next(&self) -> Result<(), Error> {
        let obstacle = "the front end does not track requests in flight";
        self.stop_if(|front_end| front_end.is_none_or(|it| it.recorded), obstacle)?.wait();
        Ok(())
    }

    fn stop_if(
        &self,
        may_stop: impl FnOnce(Option<&FrontEndInfo>) -> bool,
        obstacle: &str,
    ) -> Result<StoppingDevice<'_>, Error> {
        if !self.shared.registry.close_if(may_stop) {
            return Err(Error::new(ErrorKind::Busy, obstacle));
        }
        // The control thread also stops the rings of a connected front end.
        self.shared.stop();
        Ok(StoppingDevice(self))
    }
}

/// A device that is stopping ([`VhostUserDevice::begin_stop`]).
#[must_use = "the device has stopped when `wait` returns"]
pub struct StoppingDevice<'a>(&'a VhostUserDevice);

impl StoppingDevice<'_> {
    /// Waits until the front end is disconnected and its requests in flight have completed.
    pub fn wait(self) {
        let state = std::mem::replace(&mut *lock(&self.0.state), State::Stopped);
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
        // With force, only an internal error could be returned.
        let _ = self.stop(true);
    }
}
