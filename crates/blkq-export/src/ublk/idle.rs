//! Detects that a block device has no users any longer, which the kernel does not report to its server.
//!
//! inotify(7) reports opens and closes of the device's nodes in /dev; each starts a scan for users. Mounts
//! cause no event, so a claimed device is scanned every second. A program that only inspects the device
//! (udev, or mount(8) before it mounts) has it open for less than a second and is no user.
//!
//! A scan must see the open files of all processes. The server drops that privilege, because it parses what
//! clients send. So a separate process scans, and returns only that the device is idle.
//!
//! The process also makes the kernel write back cached data before a forced stop. While the storage hangs, a
//! server that did this itself could not be killed: it would wait for I/O that the server itself serves,
//! which the kernel aborts only when the server's last thread has exited.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use blkq::Error;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};

use super::abi::DeviceInfo;
use super::child::{self, ServerEnd, receive, reply};
use super::usage::{self, Use};
use crate::reports::signal;

/// Delay between an open or a close and the scan. Events often come in groups.
const SETTLE: Duration = Duration::from_millis(250);
/// How long a device must be unused before that is reported, and the interval of scans of a claimed device.
const IDLE_INTERVAL: Duration = Duration::from_secs(1);
/// How long the process may take to reply, which it does after a running scan, to write back, and to exit.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Buffer for inotify events, whose size depends on the name of the file.
const EVENT_BYTES: usize = 4096;

const TASK: &str = "scans for users";

// Requests to the process.
const OFF: u32 = 0;
const ON: u32 = 1;
const PAUSE: u32 = 2;
const RESUME: u32 = 3;
const WRITE_BACK: u32 = 4;

/// A process that reports when the last user of a block device has closed it, while that is switched on, and
/// that writes back what the users wrote. It exits when this is dropped or the server exits.
#[derive(Debug)]
pub struct IdleWatch {
    socket: ServerEnd,
    on: bool,
}

impl IdleWatch {
    /// Forks the process, which writes the event `idle`. There, `confine` drops all privileges but reading
    /// `/proc` and `/dev`, and returns whether that succeeded; if not, the process exits.
    ///
    /// # Safety
    /// This process must have only one thread: the new process contains only a copy of the forking thread,
    /// and a lock that another thread holds would stay locked in it.
    pub unsafe fn fork(idle: &OwnedFd, confine: impl FnOnce() -> bool) -> Result<IdleWatch, Error> {
        // SAFETY: as the caller guarantees.
        unsafe { IdleWatch::fork_in(Path::new("/dev"), idle, confine) }.map_err(|e| {
            Error::system("cannot start the process that watches the users of a block device", e)
        })
    }

    /// # Safety
    /// As for [`IdleWatch::fork`].
    unsafe fn fork_in(
        directory: &Path,
        idle: &OwnedFd,
        confine: impl FnOnce() -> bool,
    ) -> io::Result<IdleWatch> {
        let server = std::process::id();
        let body = |socket| {
            // If the server has exited before this line, another process is the parent.
            if child::is_child_of(server) && confine() {
                Watch { directory, server, socket, idle, nodes: None, paused: false, used: false }.run()?;
            }
            Ok(())
        };
        // SAFETY: as the caller guarantees.
        let socket =
            unsafe { ServerEnd::fork(child::IDLE_NAME, (TASK, ANSWER_TIMEOUT), &[idle.as_fd()], body) }?;
        Ok(IdleWatch { socket, on: false })
    }

    /// Watches the block device `id`. When it has had a user, now or later, and is unused, the process writes
    /// the event, and again every second. Fails if the process cannot read the node, or was killed.
    pub(super) fn start(&mut self, id: u32) -> io::Result<()> {
        let started = self.ask(ON, id);
        self.on = started.is_ok();
        // A process that has not replied in time may still start to scan.
        started.inspect_err(|_| _ = self.socket.send(OFF, DeviceInfo::default()))
    }

    /// Stops watching. When this returns, no scan claims the device.
    pub(super) fn stop(&mut self) {
        // An error means that the process has exited, and so does not scan.
        let _ = self.ask(OFF, 0);
        self.on = false;
    }

    /// Makes scans stop until [`IdleWatch::resume`], so that none claims the device.
    pub(super) fn pause(&mut self) {
        if self.on {
            let _ = self.ask(PAUSE, 0);
        }
    }

    pub(super) fn resume(&mut self) {
        if self.on {
            let _ = self.socket.send(RESUME, DeviceInfo::default());
        }
    }

    /// Makes the kernel write back cached data, for at most [`ANSWER_TIMEOUT`].
    pub(super) fn write_back(&mut self, id: u32) {
        let _ = self.ask(WRITE_BACK, id);
    }

    fn ask(&mut self, what: u32, id: u32) -> io::Result<()> {
        self.socket.ask(what, DeviceInfo { dev_id: id, ..DeviceInfo::default() }).map(drop)
    }
}

struct Watch<'a> {
    /// Directory of the device nodes: /dev, but for tests.
    directory: &'a Path,
    /// Process ID of the server, which does not count as a user.
    server: u32,
    socket: UnixStream,
    idle: &'a OwnedFd,
    /// The watched nodes; `None` while watching is off.
    nodes: Option<Nodes>,
    paused: bool,
    /// There was a user: a writer, a claim, or an open that lasted for [`IDLE_INTERVAL`].
    used: bool,
}

impl Watch<'_> {
    fn run(mut self) -> io::Result<()> {
        // The first of the consecutive scans that found the device open.
        let mut open_since: Option<Instant> = None;
        let mut last_event = Instant::now();
        let mut wait = None;
        loop {
            if self.wait(wait)? {
                (last_event, wait) = (Instant::now(), Some(SETTLE));
                continue;
            }
            let Some(nodes) = self.nodes() else {
                wait = None;
                continue;
            };
            let Scan { found, undisturbed, written } = nodes.scan(self.server);
            self.used |= written || matches!(found, Use::Claimed);
            // Compares times and not the number of scans: on a slow machine, a program that only inspects the
            // device may have it open for longer than SETTLE.
            open_since = matches!(found, Use::Open).then(|| open_since.unwrap_or_else(Instant::now));
            self.used |= open_since.is_some_and(|since| since.elapsed() >= IDLE_INTERVAL);
            wait = match found {
                Use::Removed => {
                    self.nodes = None;
                    None
                }
                // inotify(7) will report the close.
                Use::Open if self.used => None,
                Use::Claimed | Use::Open | Use::Unknown => Some(IDLE_INTERVAL),
                Use::Unused if !self.used => None,
                Use::Unused => {
                    let rest = IDLE_INTERVAL.saturating_sub(last_event.elapsed());
                    if rest.is_zero() {
                        signal(self.idle);
                    }
                    Some(if rest.is_zero() { IDLE_INTERVAL } else { rest })
                }
            };
            if !undisturbed {
                (last_event, wait) = (Instant::now(), Some(SETTLE));
            }
        }
    }

    fn nodes(&self) -> Option<&Nodes> {
        self.nodes.as_ref().filter(|_| !self.paused)
    }

    /// Waits for a request or an event of the nodes, for at most `time`, and handles it. Returns whether there
    /// was one. Fails if the server has exited.
    fn wait(&mut self, time: Option<Duration>) -> io::Result<bool> {
        let time = time.and_then(|time| Timespec::try_from(time).ok());
        let mut fds = vec![PollFd::new(&self.socket, PollFlags::IN)];
        fds.extend(self.nodes().map(|nodes| PollFd::new(&nodes.inotify, PollFlags::IN)));
        match poll(&mut fds, time.as_ref()) {
            Ok(0) => return Ok(false),
            Ok(_) if !fds[0].revents().is_empty() => self.serve()?,
            // If poll(2) was interrupted, there may be no events, and reading them is harmless.
            _ => self.used |= self.nodes().is_some_and(|nodes| was_written(&nodes.take_events())),
        }
        Ok(true)
    }

    /// Executes the next request. Fails if the server has exited.
    fn serve(&mut self) -> io::Result<()> {
        let request = receive(&mut self.socket)?;
        let path = self.directory.join(format!("ublkb{}", request.info.dev_id)).display().to_string();
        let mut done = Ok(());
        match request.code {
            ON => {
                self.used = false;
                done = Nodes::new(path).map(|nodes| self.nodes = Some(nodes));
            }
            WRITE_BACK => usage::write_back(&path),
            PAUSE => self.paused = true,
            RESUME => self.paused = false,
            _ => self.nodes = None,
        }
        reply(&mut self.socket, request.sequence, done.map(|()| request.info))
    }
}

struct Scan {
    found: Use,
    /// No process opened or closed a node during the scan.
    undisturbed: bool,
    /// A process that could write closed a node during the scan.
    written: bool,
}

fn was_written(events: &[ReadFlags]) -> bool {
    events.iter().any(|event| event.contains(ReadFlags::CLOSE_WRITE))
}

/// The nodes of a device and its partitions, watched by inotify.
struct Nodes {
    path: String,
    inotify: OwnedFd,
}

impl Nodes {
    fn new(path: String) -> io::Result<Nodes> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        let nodes = Nodes { path, inotify };
        nodes.add(Path::new(&nodes.path))?;
        inotify::add_watch(&nodes.inotify, nodes.directory(), WatchFlags::CREATE)?;
        for entry in fs::read_dir(nodes.directory())?.flatten() {
            nodes.add_partition(&entry.path());
        }
        Ok(nodes)
    }

    fn directory(&self) -> &Path {
        Path::new(&self.path).parent().unwrap_or(Path::new("/"))
    }

    fn add(&self, path: &Path) -> io::Result<()> {
        let events = WatchFlags::OPEN | WatchFlags::CLOSE_WRITE | WatchFlags::CLOSE_NOWRITE;
        inotify::add_watch(&self.inotify, path, events)?;
        Ok(())
    }

    fn add_partition(&self, path: &Path) {
        if path != Path::new(&self.path) && usage::is_part_of(path, &self.path) {
            // A failure means that the partition was removed again, and so is not in use.
            let _ = self.add(path);
        }
    }

    fn scan(&self, server: u32) -> Scan {
        // The scan of /proc comes first: it takes long and causes no events. The kernel merges equal
        // consecutive events, so an open by the probe before it could hide an open by another process.
        let open = usage::is_open(&self.path, server);
        let mut events = self.take_events();
        let undisturbed = events.is_empty();
        let found = match usage::probe(&self.path) {
            Use::Unused if open => Use::Open,
            found => found,
        };
        let probing = self.take_events();
        // The events that the probe itself causes.
        let own = [ReadFlags::OPEN, ReadFlags::CLOSE_NOWRITE];
        let undisturbed = undisturbed && (probing.is_empty() || probing == own);
        events.extend(probing);
        Scan { found, undisturbed, written: was_written(&events) }
    }

    /// Reads the events that have happened, and adds new partitions to the watch.
    fn take_events(&self) -> Vec<ReadFlags> {
        let mut memory = [MaybeUninit::uninit(); EVENT_BYTES];
        let mut reader = inotify::Reader::new(self.inotify.as_fd(), &mut memory);
        let mut happened = Vec::new();
        // The descriptor does not block: reading fails when all events are read.
        while let Ok(event) = reader.next() {
            if event.events().contains(ReadFlags::CREATE) {
                let name = event.file_name().unwrap_or_default();
                self.add_partition(&self.directory().join(OsStr::from_bytes(name.to_bytes())));
            } else {
                happened.push(event.events());
            }
        }
        happened
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};
    use std::fs::{File, OpenOptions};
    use std::process::{Child, Command, Stdio};

    use super::*;
    use blkq::testing::{assert_stays_for, wait_until};

    fn user(file: File) -> Child {
        Command::new("sleep").arg("60").stdin(Stdio::from(file)).spawn().unwrap()
    }

    fn is_notified(idle: &OwnedFd) -> bool {
        rustix::io::read(idle, &mut [0; 8]).is_ok()
    }

    fn assert_never_notified(idle: &OwnedFd, why: &str) {
        assert_stays_for(IDLE_INTERVAL * 2, why, || !is_notified(idle));
    }

    fn event() -> OwnedFd {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
    }

    // Contract: detach
    #[test]
    fn the_last_close_is_reported_and_a_short_open_is_not_a_use() {
        let directory = std::env::temp_dir().join(format!("blkq-idle-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let path = directory.join("ublkb1");
        fs::write(&path, "").unwrap();
        let idle = event();
        // SAFETY: the child runs only the code of the watch, which takes no lock that another thread may
        // hold.
        let mut watch = unsafe { IdleWatch::fork_in(&directory, &idle, || true) }.unwrap();
        assert_eq!(watch.start(2).unwrap_err().kind(), io::ErrorKind::NotFound);
        watch.start(1).unwrap();
        drop(File::open(&path).unwrap());
        assert_never_notified(&idle, "a short open is not a use");
        let partition = directory.join("ublkb1p1");
        fs::write(directory.join("ublkb10"), "").unwrap();
        fs::write(&partition, "").unwrap();
        // `fs::write` opens the new node for writing before the watch is added, so only the next open counts.
        let mut child = user(File::open(&partition).unwrap());
        assert_never_notified(&idle, "a process has the partition open");
        watch.pause();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_never_notified(&idle, "the watch is paused");
        watch.resume();
        wait_until("the device has no users", || is_notified(&idle));
        wait_until("the unused device is reported again", || is_notified(&idle));
        watch.stop();
        // Discards a report from before the stop.
        is_notified(&idle);
        drop(OpenOptions::new().write(true).open(&path).unwrap());
        assert_never_notified(&idle, "the watch is off");
        watch.start(1).unwrap();
        assert_never_notified(&idle, "users from before the start do not count");
        drop(OpenOptions::new().write(true).open(&path).unwrap());
        wait_until("a short open for writing counts as a use", || is_notified(&idle));
        drop(watch);
        fs::remove_dir_all(&directory).unwrap();
    }

    // Contract: detach
    #[test]
    fn late_replies_and_a_killed_process_are_recognized() {
        let (socket, mut other) = ServerEnd::pair(TASK, Duration::from_millis(50)).unwrap();
        let mut watch = IdleWatch { socket, on: false };
        assert_eq!(watch.start(0).unwrap_err().kind(), io::ErrorKind::TimedOut);
        reply(&mut other, 1, Err(io::ErrorKind::NotFound.into())).unwrap();
        for sequence in [2, 3] {
            reply(&mut other, sequence, Ok(DeviceInfo::default())).unwrap();
        }
        watch.start(0).unwrap();
        drop(other);
        assert!(watch.start(0).unwrap_err().to_string().contains("killed"));
        watch.stop();
    }
}
