//! Descriptors that a front end passed. To close one, or to ask its file system about it, may take as
//! long as somebody else likes: a FUSE server that does not answer, a socket that lingers, an NFS
//! server that is down. So that happens on threads that nobody waits for without a limit, until it is
//! known to be an eventfd, a socket with an empty queue or a file of a local file system.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::sync_channel;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blkq::{Error, ErrorKind};
use rustix::fs::{AtFlags, StatxFlags, fcntl_get_seals, statx};
use rustix::io::ioctl_fionread;
use rustix::net::{AddressFamily, Shutdown, SocketAddrAny, SocketType, getpeername, shutdown, sockopt};

use crate::mapping::check_file_system;

/// Threads of a kind: so many descriptors may hang, and others are closed.
const THREADS_MAX: usize = 4;
/// Descriptors that may wait to be closed, or to be examined; with more of them front ends are kept away.
const WAITING_MAX: usize = 256;
/// How long the file system of a front end's file may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a thread without work waits for some before it exits.
const IDLE: Duration = Duration::from_secs(1);

/// A descriptor that a front end passed, or its connection, in whose queue there may be some. Dropped,
/// it is closed by another thread.
#[derive(Debug)]
pub struct Foreign(Option<OwnedFd>);

impl Foreign {
    /// That descriptor.
    pub fn new(file: OwnedFd) -> Foreign {
        Foreign(Some(file))
    }

    /// The descriptor, if it is an eventfd.
    ///
    /// # Errors
    /// That it is something else.
    pub fn into_event(mut self) -> Result<OwnedFd, Error> {
        self.0.take_if(|file| is_event(file)).ok_or_else(|| unfit("its descriptor is no eventfd"))
    }

    /// The descriptor, if it is an eventfd or a unix stream socket, of which user-mode Linux has a pair and
    /// calls it a pipe. From here on the socket receives nothing: in its queue there could be descriptors.
    ///
    /// # Errors
    /// That it is something else, or what [`Foreign::check_socket`] rejects.
    pub fn into_call(mut self, own: Option<&SocketAddrAny>) -> Result<CallFile, Error> {
        let file = self.as_fd();
        let is_event = is_event(file);
        if !is_event {
            let is_stream = sockopt::socket_type(file) == Ok(SocketType::STREAM);
            if !is_stream || self.check_socket(own).is_err() {
                return Err(unfit("its descriptor is neither an eventfd nor a pair of unix stream sockets"));
            }
            if shutdown(file, Shutdown::Read).is_err() || ioctl_fionread(file) != Ok(0) {
                return Err(unfit("its descriptor is a socket that has received something"));
            }
        }
        let file = self.0.take().ok_or_else(|| unfit("its descriptor is closed"))?;
        Ok(if is_event { CallFile::Event(file) } else { CallFile::Socket(file) })
    }

    /// The descriptor, if it is a file of memory, or of a local file system.
    ///
    /// # Errors
    /// That it is not, or that its file system does not say so in time.
    pub fn into_memory(mut self) -> Result<OwnedFd, Error> {
        // Only files of tmpfs and hugetlbfs have seals.
        if let Some(file) = self.0.take_if(|file| fcntl_get_seals(file).is_ok()) {
            return Ok(file);
        }
        let (sender, receiver) = sync_channel(1);
        EXAMINERS.run(Box::new(move || {
            let checked = check_file_system(self.as_fd());
            let _ = sender.send(checked.map(|_| self));
        }));
        let answer = receiver.recv_timeout(ANSWER_TIMEOUT);
        let file = answer.unwrap_or_else(|_| Err(unfit("its file system does not answer")))?.0.take();
        file.ok_or_else(|| unfit("its descriptor is closed"))
    }

    /// Checks that it is a unix socket, and not a connection to `own`, where the device listens: that one
    /// would seem to be connected for as long as the device has it.
    ///
    /// # Errors
    /// That it is something else.
    pub fn check_socket(&self, own: Option<&SocketAddrAny>) -> Result<(), Error> {
        let is_unix = sockopt::socket_domain(self).is_ok_and(|domain| domain == AddressFamily::UNIX);
        let peer = getpeername(self).ok().filter(|_| is_unix);
        match peer {
            None => Err(unfit("its descriptor is no connected unix socket")),
            Some(peer) if peer.is_some() && peer.as_ref() == own => {
                Err(unfit("its descriptor is a connection to the device"))
            }
            Some(_) => Ok(()),
        }
    }
}

/// A descriptor by which a front end is called.
#[derive(Debug)]
pub enum CallFile {
    /// An eventfd.
    Event(OwnedFd),
    /// A connected unix stream socket.
    Socket(OwnedFd),
}

impl AsFd for CallFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        let (CallFile::Event(file) | CallFile::Socket(file)) = self;
        file.as_fd()
    }
}

/// Whether it is an eventfd: the kernel's name of it says so, for which no file system is asked.
fn is_event(file: impl AsFd) -> bool {
    match std::fs::read_link(format!("/proc/self/fd/{}", file.as_fd().as_raw_fd())) {
        Ok(name) => name.as_os_str() == "anon_inode:[eventfd]",
        Err(_) => is_anonymous(file),
    }
}

/// Where there is no /proc: whether it has no type, as the kernel's anonymous files.
fn is_anonymous(file: impl AsFd) -> bool {
    // A file system does not ask a server for what it has not read before.
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    statx(file, "", flags, StatxFlags::TYPE).is_ok_and(|found| u32::from(found.stx_mode) & libc::S_IFMT == 0)
}

impl AsFd for Foreign {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.0 {
            Some(file) => file.as_fd(),
            None => unreachable!("taken only by methods that consume it"),
        }
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        if let Some(file) = self.0.take() {
            CLOSERS.run(Box::new(move || drop(file)));
        }
    }
}

/// Whether descriptors that can be neither closed nor examined are so many that no more should be received.
pub fn are_too_many() -> bool {
    [&CLOSERS, &EXAMINERS].iter().any(|threads| threads.state().jobs.len() > WAITING_MAX)
}

fn unfit(why: &str) -> Error {
    Error::new(ErrorKind::Invalid, why)
}

type Job = Box<dyn FnOnce() + Send>;

static CLOSERS: Threads = Threads::new("blkq-close");
static EXAMINERS: Threads = Threads::new("blkq-examine");

/// Threads that exist while there is work, each of which may hang.
struct Threads {
    name: &'static str,
    state: Mutex<State>,
    work: Condvar,
}

struct State {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
}

impl Threads {
    const fn new(name: &'static str) -> Threads {
        let state = State { jobs: VecDeque::new(), threads: 0, idle: 0 };
        Threads { name, state: Mutex::new(state), work: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a thread run `job`, and does not wait.
    fn run(&'static self, job: Job) {
        if is_alone() {
            return job();
        }
        let mut state = self.state();
        state.jobs.push_back(job);
        if state.jobs.len() <= state.idle || state.threads >= THREADS_MAX {
            self.work.notify_one();
            return;
        }
        state.threads += 1;
        drop(state);
        let thread = std::thread::Builder::new().name(self.name.into()).spawn(|| self.work());
        if thread.is_err() {
            // Without a thread the job waits for the next one that can be started.
            self.state().threads -= 1;
        }
    }

    fn work(&self) {
        let mut state = self.state();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                job();
                state = self.state();
                continue;
            }
            state.idle += 1;
            let (woken, timeout) =
                self.work.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.idle -= 1;
            if timeout.timed_out() && state.jobs.is_empty() {
                state.threads -= 1;
                return;
            }
        }
    }
}

/// Whether the thread is the only one, or one of a model: then descriptors do not hang.
fn is_alone() -> bool {
    #[cfg(any(simulation, fuzzing))]
    if blkq::simulation::is_one_thread() {
        return true;
    }
    cfg!(model_check)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};

    use rustix::event::{EventfdFlags, epoll, eventfd};

    use super::*;
    use blkq::testing::wait_until;

    fn foreign(file: impl Into<OwnedFd>) -> Foreign {
        Foreign::new(file.into())
    }

    #[test]
    fn eventfds_and_stream_sockets_are_accepted_and_nothing_else() {
        let event = || eventfd(0, EventfdFlags::empty()).unwrap();
        assert!(foreign(event()).into_event().is_ok());
        assert!(matches!(foreign(event()).into_call(None), Ok(CallFile::Event(_))));
        assert!(is_anonymous(event()));
        let epoll = || epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        assert!(foreign(epoll()).into_event().is_err() && foreign(epoll()).into_call(None).is_err());
        let (one, mut other) = UnixStream::pair().unwrap();
        assert!(foreign(one.try_clone().unwrap()).into_event().is_err());
        assert!(matches!(foreign(one).into_call(None), Ok(CallFile::Socket(_))));
        assert!(other.write_all(&[0]).is_err(), "nothing comes into its queue");
        let (one, mut other) = UnixStream::pair().unwrap();
        other.write_all(&[0]).unwrap();
        assert!(foreign(one).into_call(None).is_err());
        assert!(foreign(UnixDatagram::pair().unwrap().0).into_call(None).is_err());
        assert!(foreign(std::net::UdpSocket::bind("127.0.0.1:0").unwrap()).into_call(None).is_err());
        assert!(foreign(rustix::pipe::pipe().unwrap().1).into_call(None).is_err());
        for path in ["/dev/null", "/proc/self/exe", "/tmp"] {
            let file = std::fs::File::open(path).unwrap();
            assert!(!is_anonymous(&file) && foreign(file).into_call(None).is_err(), "{path}");
        }
    }

    #[test]
    fn memory_is_of_local_file_systems() {
        let memory = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        assert!(foreign(memory).into_memory().is_ok());
        let path = std::env::current_dir().unwrap().join(format!("memory-{}", std::process::id()));
        let file = std::fs::File::create_new(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(foreign(file).into_memory().is_ok(), "the file system of this directory");
        let refusal = foreign(std::fs::File::open("/proc/self/exe").unwrap()).into_memory();
        assert!(refusal.is_ok(), "a file of a local file system, that cannot be mapped for writing");
        let refusal = foreign(std::fs::File::open("/proc/self/maps").unwrap()).into_memory().unwrap_err();
        assert!(refusal.to_string().contains("file system of type"), "{refusal}");
    }

    #[test]
    fn a_connection_to_the_device_is_no_socket_for_requests() {
        let path = std::env::temp_dir().join(format!("blkq-foreign-{}.sock", std::process::id()));
        let listener = UnixListener::bind(&path).unwrap();
        let own = rustix::net::getsockname(&listener).unwrap();
        let connected = UnixStream::connect(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(foreign(connected.try_clone().unwrap()).into_call(Some(&own)).is_err());
        assert!(foreign(connected).check_socket(Some(&own)).is_err());
        let (one, other) = UnixStream::pair().unwrap();
        assert!(foreign(one).check_socket(Some(&own)).is_ok());
        drop(other);
        assert!(foreign(listener).check_socket(Some(&own)).is_err());
        assert!(foreign(eventfd(0, EventfdFlags::empty()).unwrap()).check_socket(None).is_err());
    }

    #[test]
    fn descriptors_that_wait_to_be_examined_are_limited() {
        let (release, hangs) = std::sync::mpsc::channel::<()>();
        let hangs = std::sync::Arc::new(Mutex::new(hangs));
        assert!(!are_too_many());
        for _ in 0..THREADS_MAX + WAITING_MAX + 1 {
            let hangs = hangs.clone();
            EXAMINERS.run(Box::new(move || assert!(hangs.lock().unwrap().recv().is_err())));
        }
        assert!(are_too_many());
        drop(release);
        wait_until("they are examined", || !are_too_many());
    }

    #[test]
    fn as_many_hang_as_there_are_threads_and_others_wait() {
        static HANGING: Threads = Threads::new("hanging");
        let (release, hangs) = std::sync::mpsc::channel::<()>();
        let hangs = std::sync::Arc::new(Mutex::new(hangs));
        let (done, did) = std::sync::mpsc::channel();
        for _ in 0..THREADS_MAX - 1 {
            let hangs = hangs.clone();
            HANGING.run(Box::new(move || assert!(hangs.lock().unwrap().recv().is_err())));
        }
        for number in 0..100 {
            let done = done.clone();
            HANGING.run(Box::new(move || done.send(number).unwrap()));
        }
        assert_eq!(did.iter().take(100).collect::<Vec<_>>(), (0..100).collect::<Vec<_>>());
        drop(release);
        wait_until("idle threads exit", || HANGING.state().threads == 0);
    }
}
