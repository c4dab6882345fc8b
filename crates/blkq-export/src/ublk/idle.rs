//! When nobody uses a block device any more: the kernel does not tell its server.
//!
//! inotify(7) notifies it when the nodes in /dev are opened and closed, and it scans then. Nothing
//! notifies it of a mount or an unmount: a claimed device is scanned every second.
//! A program that only asks what there is (udev, or mount(8) before it mounts) has it open for less
//! than a second, and is no user.
//!
//! Seeing the open files of all processes takes privileges that the server, which reads what clients
//! send, does not keep. So a process of its own looks: it takes the number of a device and whether to
//! look, and returns nothing but that the device is idle.
//!
//! It also writes back what the kernel holds for the device before a forced end. A server that did so
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

/// How long after an opening or closing is looked.
const SETTLE: Duration = Duration::from_millis(250);
/// How long nobody may use it before that is reported, and how often a claimed device is scanned.
const REST: Duration = Duration::from_secs(1);
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

/// A process that reports, while that is on, when the users of a block device have gone, and writes
/// back what they wrote. It exits when this is dropped, or its server exits.
#[derive(Debug)]
pub struct IdleWatch {
    socket: UnixStream,
    sequence: u32,
    on: bool,
}

impl IdleWatch {
    /// Forks the process. In it `confine` gives up all but reading of `/proc` and `/dev`, and returns
    /// whether that was possible. It writes the event `idle`.
    ///
    /// # Errors
    /// Whatever the kernel says.
    ///
    /// # Safety
    /// This process must have one thread only: the new one has but that, and whatever others held
    /// locked would stay so in it.
    pub unsafe fn fork(idle: &OwnedFd, confine: impl FnOnce() -> bool) -> Result<IdleWatch, Error> {
        // SAFETY: as the caller says.
        unsafe { IdleWatch::fork_in(Path::new("/dev"), idle, confine) }
            .map_err(|e| Error::system("cannot start the process that sees who uses a block device", e))
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
            // It may have died already.
            let orphaned = getppid().is_none_or(|parent| parent.as_raw_nonzero().get() as u32 != server);
            if !orphaned && confine() {
                Watch::new(directory, server, socket.into(), idle).run()?;
            }
            Ok(())
        };
        // SAFETY: as the caller says.
        unsafe { child::fork(child::IDLE_NAME, [other.into(), idle.try_clone()?], body) }?;
        Ok(IdleWatch { socket, sequence: 0, on: false })
    }

    /// Begins to look at the block device `id`. When somebody has used it, from now on or already, and
    /// nobody does any more, the event is written, again every second for as long as that is so.
    ///
    /// # Errors
    /// If the process may not see its node, or is gone.
    pub(super) fn look(&mut self, id: u32) -> io::Result<()> {
        let asked = self.ask(ON, id);
        self.on = asked.is_ok();
        if asked.is_err() {
            // One that answers late would look all the same.
            let _ = self.send(OFF, 0);
        }
        asked
    }

    /// Stops looking; when it returns no look has the device claimed.
    pub(super) fn rest(&mut self) {
        // A process that has exited does not look.
        let _ = self.ask(OFF, 0);
        self.on = false;
    }

    /// Does not claim the device for a look until [`IdleWatch::resume`].
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

    /// Has the kernel write back what it holds for the block device `id`, as far as a moment allows.
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
        _ => io::Error::other("the process that looks was killed"),
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

/// Why it no longer waits.
enum Told {
    Request,
    Nodes,
    Nothing,
}

impl Watch<'_> {
    fn new(directory: &Path, server: u32, socket: UnixStream, idle: OwnedFd) -> Watch<'_> {
        Watch { directory, server, socket, idle, nodes: None, paused: false, used: false }
    }

    /// Runs until the server is gone.
    fn run(mut self) -> io::Result<()> {
        // Since when each scan has found it open.
        let mut open_since: Option<Instant> = None;
        let mut last_event = Instant::now();
        let mut wait = None;
        loop {
            match self.wait(wait) {
                Told::Request => {
                    self.serve()?;
                    (last_event, wait) = (Instant::now(), Some(SETTLE));
                    continue;
                }
                Told::Nodes => {
                    self.used |= self.nodes().is_some_and(|nodes| was_written(&nodes.take_events()));
                    (last_event, wait) = (Instant::now(), Some(SETTLE));
                    continue;
                }
                Told::Nothing => {}
            }
            let Some(nodes) = self.nodes() else {
                wait = None;
                continue;
            };
            let Scan { found, undisturbed, written } = nodes.scan(self.server);
            self.used |= written || matches!(found, Use::Claimed);
            // On a slow machine a moment may be longer than SETTLE.
            open_since = matches!(found, Use::Open).then(|| open_since.unwrap_or_else(Instant::now));
            self.used |= open_since.is_some_and(|since| since.elapsed() >= REST);
            wait = match found {
                Use::Gone => {
                    self.nodes = None;
                    None
                }
                Use::Claimed | Use::Unknown => Some(REST),
                Use::Open if !self.used => Some(REST),
                // inotify(7) reports the close.
                Use::Open => None,
                Use::Nobody if !self.used => None,
                Use::Nobody => {
                    let rest = REST.saturating_sub(last_event.elapsed());
                    if rest.is_zero() {
                        let _ = rustix::io::write(&self.idle, &1u64.to_ne_bytes());
                    }
                    Some(if rest.is_zero() { REST } else { rest })
                }
            };
            if !undisturbed {
                (last_event, wait) = (Instant::now(), Some(SETTLE));
            }
        }
    }

    /// Those that are to be looked at now.
    fn nodes(&self) -> Option<&Nodes> {
        self.nodes.as_ref().filter(|_| !self.paused)
    }

    /// Waits for a request and for events of the nodes, for `time` at most.
    fn wait(&self, time: Option<Duration>) -> Told {
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
            Ok(0) => Told::Nothing,
            Ok(_) if !request.is_empty() => Told::Request,
            // Interrupted: looks for events, of which there may be none.
            _ => Told::Nodes,
        }
    }

    /// Does what is asked next.
    ///
    /// # Errors
    /// If the server is gone.
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
            // Gone again, it is not used.
            let _ = self.add(path);
        }
    }

    /// Scans for users other than `server`.
    fn scan(&self, server: u32) -> Scan {
        // First the scan, which takes its time and opens nothing: the kernel merges equal events, so
        // that the opening of the probe would hide another that comes meanwhile.
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
    use std::fs::{File, OpenOptions};
    use std::process::{Child, Command, Stdio};

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    fn user(file: File) -> Child {
        Command::new("sleep").arg("60").stdin(Stdio::from(file)).spawn().unwrap()
    }

    fn told(idle: &OwnedFd, within: Duration) -> bool {
        let until = Instant::now() + within;
        while Instant::now() < until {
            if rustix::io::read(idle, &mut [0; 8]).is_ok() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        false
    }

    fn event() -> OwnedFd {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
    }

    // Contract: detach
    #[test]
    fn the_end_of_the_last_user_is_told_and_a_look_at_it_is_no_use() {
        let directory = std::env::temp_dir().join(format!("blkq-idle-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let path = directory.join("ublkb1");
        fs::write(&path, "").unwrap();
        let idle = event();
        // SAFETY: the copy runs the code of the watch only, which takes no lock of another thread.
        let mut watch = unsafe { IdleWatch::fork_in(&directory, &idle, || true) }.unwrap();
        assert_eq!(watch.look(2).unwrap_err().kind(), io::ErrorKind::NotFound);
        watch.look(1).unwrap();
        drop(File::open(&path).unwrap());
        assert!(!told(&idle, REST * 2), "somebody only asked what there is");
        let partition = directory.join("ublkb1p1");
        fs::write(directory.join("ublkb10"), "").unwrap();
        fs::write(&partition, "").unwrap();
        // The maker of a node writes it: only from then on it is watched.
        let mut child = user(File::open(&partition).unwrap());
        assert!(!told(&idle, REST * 2), "it is in use");
        watch.pause();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!told(&idle, REST * 2), "it is not looked at");
        watch.resume();
        assert!(told(&idle, Duration::from_secs(20)), "nobody uses it any more");
        assert!(told(&idle, Duration::from_secs(20)), "and that is reported again");
        watch.rest();
        while told(&idle, SETTLE) {}
        drop(OpenOptions::new().write(true).open(&path).unwrap());
        assert!(!told(&idle, REST * 2), "nobody looks");
        watch.look(1).unwrap();
        assert!(!told(&idle, REST * 2), "who has used it before does not count");
        drop(OpenOptions::new().write(true).open(&path).unwrap());
        assert!(told(&idle, Duration::from_secs(20)), "who writes for a moment does");
        drop(watch);
        fs::remove_dir_all(&directory).unwrap();
    }

    // Contract: detach
    #[test]
    fn late_answers_and_a_dead_process_are_known_as_such() {
        let (socket, mut other) = UnixStream::pair().unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let mut watch = IdleWatch { socket, sequence: 0, on: false };
        assert_eq!(watch.look(0).unwrap_err().kind(), io::ErrorKind::TimedOut);
        for (sequence, errno) in [(1, libc::ENOENT), (2, 0), (3, 0)] {
            other.write_all(Reply { sequence, errno }.as_bytes()).unwrap();
        }
        watch.look(0).unwrap();
        drop(other);
        assert!(watch.look(0).unwrap_err().to_string().contains("killed"));
        watch.rest();
    }
}
