//! Detects that a block device has no users any more, which the kernel does not report to its server.
//!
//! inotify(7) notifies it when the nodes in /dev are opened and closed, and it scans then. Nothing
//! notifies it of a mount or an unmount: a claimed device is scanned every second.
//! A program that only asks what there is (udev, or mount(8) before it mounts) has it open for less
//! than a second, and is no user.
//!
//! Seeing the open files of all processes takes privileges that the server, which reads what clients
//! send, does not keep. So a process of its own scans: it takes the number of a device and whether to
//! scan, and returns nothing but that the device is idle.
//!
//! It also has the kernel write back cached data of the device before a forced stop. A server that did so
//! itself could not be killed while its image hangs: its thread would wait for its own I/O, which the
//! kernel aborts only when the last of its threads has exited.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use blkq::Error;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::process::getppid;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use super::child;
use super::usage::{self, Use};

/// How long after an open or close the device is scanned.
const SETTLE: Duration = Duration::from_millis(250);
/// How long nobody may use it before that is reported, and how often a claimed device is scanned.
const IDLE_INTERVAL: Duration = Duration::from_secs(1);
/// How long the process may take to answer, which it does after a scan, to write back, and to exit.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Room for a few events.
const EVENT_BYTES: usize = 4096;

/// Requests to the process.
const OFF: u32 = 0;
const ON: u32 = 1;
const PAUSE: u32 = 2;
const RESUME: u32 = 3;
const WRITE_BACK: u32 = 4;

/// A request to the process.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Request {
    what: u32,
    /// The number of the device.
    id: u32,
    sequence: u32,
}

/// Its answer to the request of that number.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Reply {
    sequence: u32,
    /// 0, or why not.
    errno: i32,
}

/// A process that reports, while that is on, when the last user of a block device has closed it, and writes
/// back what they wrote. It exits when this is dropped, or its server exits.
#[derive(Debug)]
pub struct IdleWatch {
    socket: UnixStream,
    sequence: u32,
    on: bool,
}

impl IdleWatch {
    /// Forks the process. In it `confine` drops all but reading of `/proc` and `/dev`, and returns
    /// whether that was possible. It writes the event `idle`.
    ///
    /// # Errors
    /// The kernel's error.
    ///
    /// # Safety
    /// This process must have one thread only: the new one has but that, and what others had
    /// locked would stay so in it.
    pub unsafe fn fork(idle: &OwnedFd, confine: impl FnOnce() -> bool) -> Result<IdleWatch, Error> {
        // SAFETY: as the caller guarantees.
        unsafe { IdleWatch::fork_in(Path::new("/dev"), idle, confine) }.map_err(|e| {
            Error::system("cannot start the process that watches the users of a block device", e)
        })
    }

    /// # Safety
    /// As of [`IdleWatch::fork`].
    unsafe fn fork_in(
        directory: &Path,
        idle: &OwnedFd,
        confine: impl FnOnce() -> bool,
    ) -> io::Result<IdleWatch> {
        let (socket, other) = UnixStream::pair()?;
        socket.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        let server = std::process::id();
        let body = |[socket, idle]: [OwnedFd; 2]| {
            // It may have exited already.
            let orphaned = getppid().is_none_or(|parent| parent.as_raw_nonzero().get() as u32 != server);
            if !orphaned && confine() {
                Watch::new(directory, server, socket.into(), idle).run()?;
            }
            Ok(())
        };
        // SAFETY: as the caller guarantees.
        unsafe { child::fork(child::IDLE_NAME, [other.into(), idle.try_clone()?], body) }?;
        Ok(IdleWatch { socket, sequence: 0, on: false })
    }

    /// Begins to watch the block device `id`. When it has been used, from now on or already, and
    /// is not in use any more, the event is written, again every second for as long as that is so.
    ///
    /// # Errors
    /// If the process may not see its node, or has exited.
    pub(super) fn start(&mut self, id: u32) -> io::Result<()> {
        let asked = self.ask(ON, id);
        self.on = asked.is_ok();
        if asked.is_err() {
            // A process that replies late would scan all the same.
            let _ = self.send(OFF, 0);
        }
        asked
    }

    /// Stops watching; when it returns no scan has the device claimed.
    pub(super) fn stop(&mut self) {
        // A process that has exited does not scan.
        let _ = self.ask(OFF, 0);
        self.on = false;
    }

    /// Does not claim the device for a scan until [`IdleWatch::resume`].
    pub(super) fn pause(&mut self) {
        if self.on {
            let _ = self.ask(PAUSE, 0);
        }
    }

    /// See [`IdleWatch::pause`].
    pub(super) fn resume(&mut self) {
        if self.on {
            let _ = self.send(RESUME, 0);
        }
    }

    /// Has the kernel write back cached data of the block device `id`, as far as a moment allows.
    pub(super) fn write_back(&mut self, id: u32) {
        let _ = self.ask(WRITE_BACK, id);
    }

    /// Sends a request, and waits for the answer.
    fn ask(&mut self, what: u32, id: u32) -> io::Result<()> {
        self.send(what, id)?;
        loop {
            let mut reply = Reply::new_zeroed();
            self.socket.read_exact(reply.as_mut_bytes()).map_err(no_answer)?;
            // Others are late answers to earlier requests.
            if reply.sequence == self.sequence {
                return match reply.errno {
                    0 => Ok(()),
                    errno => Err(io::Error::from_raw_os_error(errno)),
                };
            }
        }
    }

    fn send(&mut self, what: u32, id: u32) -> io::Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let request = Request { what, id, sequence: self.sequence };
        self.socket.write_all(request.as_bytes()).map_err(no_answer)
    }
}

fn no_answer(error: io::Error) -> io::Error {
    match error.kind() {
        // A socket's timeout is reported as EAGAIN.
        io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
        _ => io::Error::other("the process that watches its users was killed"),
    }
}

impl Drop for IdleWatch {
    fn drop(&mut self) {
        // Without its socket it exits; its side of the socket is the last that it closes.
        let _ = self.socket.shutdown(Shutdown::Write);
        // Late replies come first.
        while self.socket.read(&mut [0; size_of::<Reply>()]).is_ok_and(|bytes| bytes > 0) {}
    }
}

/// The process.
struct Watch<'a> {
    /// Where the nodes of devices are.
    directory: &'a Path,
    /// The process of the server, which is no user.
    server: u32,
    socket: UnixStream,
    idle: OwnedFd,
    /// Of the device, while it is on.
    nodes: Option<Nodes>,
    paused: bool,
    /// Set by any writer, and by a reader that a scan finds.
    used: bool,
}

/// Why the process woke.
enum Wake {
    Request,
    Nodes,
    Timeout,
}

impl Watch<'_> {
    fn new(directory: &Path, server: u32, socket: UnixStream, idle: OwnedFd) -> Watch<'_> {
        Watch { directory, server, socket, idle, nodes: None, paused: false, used: false }
    }

    /// Runs until the server exits.
    fn run(mut self) -> io::Result<()> {
        // Since when each scan has found it open.
        let mut open_since: Option<Instant> = None;
        let mut last_event = Instant::now();
        let mut wait = None;
        loop {
            match self.wait(wait) {
                Wake::Request => {
                    self.serve()?;
                    (last_event, wait) = (Instant::now(), Some(SETTLE));
                    continue;
                }
                Wake::Nodes => {
                    self.used |= self.nodes().is_some_and(|nodes| was_written(&nodes.take_events()));
                    (last_event, wait) = (Instant::now(), Some(SETTLE));
                    continue;
                }
                Wake::Timeout => {}
            }
            let Some(nodes) = self.nodes() else {
                wait = None;
                continue;
            };
            let Scan { found, undisturbed, written } = nodes.scan(self.server);
            self.used |= written || matches!(found, Use::Claimed);
            // On a slow machine a moment may be longer than SETTLE.
            open_since = matches!(found, Use::Open).then(|| open_since.unwrap_or_else(Instant::now));
            self.used |= open_since.is_some_and(|since| since.elapsed() >= IDLE_INTERVAL);
            wait = match found {
                Use::Removed => {
                    self.nodes = None;
                    None
                }
                Use::Claimed | Use::Unknown => Some(IDLE_INTERVAL),
                Use::Open if !self.used => Some(IDLE_INTERVAL),
                // inotify(7) reports the close.
                Use::Open => None,
                Use::Nobody if !self.used => None,
                Use::Nobody => {
                    let rest = IDLE_INTERVAL.saturating_sub(last_event.elapsed());
                    if rest.is_zero() {
                        let _ = rustix::io::write(&self.idle, &1u64.to_ne_bytes());
                    }
                    Some(if rest.is_zero() { IDLE_INTERVAL } else { rest })
                }
            };
            if !undisturbed {
                (last_event, wait) = (Instant::now(), Some(SETTLE));
            }
        }
    }

    /// The nodes to watch now.
    fn nodes(&self) -> Option<&Nodes> {
        self.nodes.as_ref().filter(|_| !self.paused)
    }

    /// Waits for a request and for events of the nodes, for `time` at most.
    fn wait(&self, time: Option<Duration>) -> Wake {
        let time = time.map(|time| rustix::event::Timespec {
            tv_sec: time.as_secs() as i64,
            tv_nsec: i64::from(time.subsec_nanos()),
        });
        let request = PollFd::new(&self.socket, PollFlags::IN);
        let (ready, request) = match self.nodes() {
            Some(nodes) => {
                let mut fds = [request, PollFd::new(&nodes.inotify, PollFlags::IN)];
                (poll(&mut fds, time.as_ref()), fds[0].revents())
            }
            None => {
                let mut fds = [request];
                (poll(&mut fds, time.as_ref()), fds[0].revents())
            }
        };
        match ready {
            Ok(0) => Wake::Timeout,
            Ok(_) if !request.is_empty() => Wake::Request,
            // Interrupted: checks for events, of which there may be none.
            _ => Wake::Nodes,
        }
    }

    /// Carries out the next request.
    ///
    /// # Errors
    /// If the server has exited.
    fn serve(&mut self) -> io::Result<()> {
        let mut request = Request::new_zeroed();
        self.socket.read_exact(request.as_mut_bytes())?;
        let path = self.directory.join(format!("ublkb{}", request.id)).to_string_lossy().into_owned();
        let done = match request.what {
            ON => {
                self.used = false;
                Nodes::new(path).map(|nodes| self.nodes = Some(nodes))
            }
            WRITE_BACK => {
                usage::write_back(&path);
                Ok(())
            }
            PAUSE => {
                self.paused = true;
                Ok(())
            }
            RESUME => {
                self.paused = false;
                Ok(())
            }
            _ => {
                self.nodes = None;
                Ok(())
            }
        };
        let errno = done.err().map_or(0, |e| e.raw_os_error().unwrap_or(libc::EIO));
        self.socket.write_all(Reply { sequence: request.sequence, errno }.as_bytes())
    }
}

/// The result of a scan for users.
struct Scan {
    found: Use,
    /// Nobody opened or closed a node meanwhile.
    undisturbed: bool,
    /// A writer closed one meanwhile.
    written: bool,
}

fn was_written(events: &[ReadFlags]) -> bool {
    events.iter().any(|event| event.contains(ReadFlags::CLOSE_WRITE))
}

/// The nodes of a device and of its partitions.
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
            // Removed again, it is not used.
            let _ = self.add(path);
        }
    }

    /// Scans for users other than `server`.
    fn scan(&self, server: u32) -> Scan {
        // First the scan, which takes long and opens nothing: the kernel merges equal events, so
        // that the open of the probe would hide another at that time.
        let open = usage::is_open(&self.path, server);
        let mut events = self.take_events();
        let undisturbed = events.is_empty();
        let found = match usage::probe(&self.path) {
            Use::Nobody if open => Use::Open,
            found => found,
        };
        let probing = self.take_events();
        // Those of the probe itself.
        let own = [ReadFlags::OPEN, ReadFlags::CLOSE_NOWRITE];
        let undisturbed = undisturbed && (probing.is_empty() || probing == own);
        events.extend(probing);
        Scan { found, undisturbed, written: was_written(&events) }
    }

    /// The events of the nodes so far.
    fn take_events(&self) -> Vec<ReadFlags> {
        let mut memory = [MaybeUninit::uninit(); EVENT_BYTES];
        let mut reader = inotify::Reader::new(self.inotify.as_fd(), &mut memory);
        let mut happened = Vec::new();
        // Until there is none.
        while let Ok(event) = reader.next() {
            if event.events().contains(ReadFlags::CREATE) {
                let name = event.file_name().map(|name| OsString::from_vec(name.to_bytes().to_vec()));
                self.add_partition(&self.directory().join(PathBuf::from(name.unwrap_or_default())));
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

    /// Nothing is reported for longer than idle nodes have to be idle.
    fn assert_never_notified(idle: &OwnedFd, why: &str) {
        assert_stays_for(IDLE_INTERVAL * 2, why, || !is_notified(idle));
    }

    fn event() -> OwnedFd {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
    }

    // Contract: detach
    #[test]
    fn the_last_close_is_reported_and_a_probe_is_no_use() {
        let directory = std::env::temp_dir().join(format!("blkq-idle-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let path = directory.join("ublkb1");
        fs::write(&path, "").unwrap();
        let idle = event();
        // SAFETY: the copy runs the code of the watch only, which takes no lock of another thread.
        let mut watch = unsafe { IdleWatch::fork_in(&directory, &idle, || true) }.unwrap();
        assert_eq!(watch.start(2).unwrap_err().kind(), io::ErrorKind::NotFound);
        watch.start(1).unwrap();
        drop(File::open(&path).unwrap());
        assert_never_notified(&idle, "a probe is no use");
        let partition = directory.join("ublkb1p1");
        fs::write(directory.join("ublkb10"), "").unwrap();
        fs::write(&partition, "").unwrap();
        // The maker of a node writes it: only from then on it is watched.
        let mut child = user(File::open(&partition).unwrap());
        assert_never_notified(&idle, "it is in use");
        watch.pause();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_never_notified(&idle, "it is paused");
        watch.resume();
        wait_until("nobody uses it any more", || is_notified(&idle));
        wait_until("and that is reported again", || is_notified(&idle));
        watch.stop();
        // It may have been reported once more before.
        is_notified(&idle);
        drop(OpenOptions::new().write(true).open(&path).unwrap());
        assert_never_notified(&idle, "it is not watched");
        watch.start(1).unwrap();
        assert_never_notified(&idle, "earlier users do not count");
        drop(OpenOptions::new().write(true).open(&path).unwrap());
        wait_until("a short write does", || is_notified(&idle));
        drop(watch);
        fs::remove_dir_all(&directory).unwrap();
    }

    // Contract: detach
    #[test]
    fn late_replies_and_a_dead_process_are_recognized() {
        let (socket, mut other) = UnixStream::pair().unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let mut watch = IdleWatch { socket, sequence: 0, on: false };
        assert_eq!(watch.start(0).unwrap_err().kind(), io::ErrorKind::TimedOut);
        for (sequence, errno) in [(1, libc::ENOENT), (2, 0), (3, 0)] {
            other.write_all(Reply { sequence, errno }.as_bytes()).unwrap();
        }
        watch.start(0).unwrap();
        drop(other);
        assert!(watch.start(0).unwrap_err().to_string().contains("killed"));
        watch.stop();
    }
}
