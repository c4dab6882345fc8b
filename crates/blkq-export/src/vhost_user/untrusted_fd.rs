//! Descriptors that a front end passed. Closing one, or asking its file system about it, may take as long as
//! another process likes: the server of a FUSE file may not answer, a socket may linger, an NFS server may be
//! down. So this happens in threads for which no other thread waits without a timeout, until the descriptor
//! is known to be an eventfd, a socket with an empty queue, or a file of a local file system.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::sync_channel;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blkq::{Error, ErrorKind};
use rustix::fs::{AtFlags, StatxFlags, fcntl_get_seals, statx};
use rustix::io::ioctl_fionread;
use rustix::net::{Shutdown, SocketAddrAny, SocketType, getpeername, shutdown, sockopt};

use crate::mapping::check_file_system;
use crate::peer::is_unix;

/// Number of threads of each kind. That number of descriptors may hang before others have to wait.
const THREADS_MAX: usize = 4;
/// Most descriptors that wait to be closed or examined. Beyond that, nothing is received from front ends.
const WAITING_MAX: usize = 256;
/// Time that the file system of a front end's file may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// A descriptor of a front end, or a socket whose queue may contain some. Another thread closes it.
#[derive(Debug)]
pub struct UntrustedFd(Option<OwnedFd>);

impl UntrustedFd {
    pub fn new(file: OwnedFd) -> UntrustedFd {
        UntrustedFd(Some(file))
    }

    /// Returns the descriptor, for which no other thread is needed any longer.
    fn release(mut self) -> OwnedFd {
        let Some(file) = self.0.take() else { unreachable!("only this method takes the descriptor") };
        file
    }

    /// Returns the descriptor if it is an eventfd, else [`ErrorKind::Invalid`].
    pub fn into_event(self) -> Result<OwnedFd, Error> {
        if is_event(&self) { Ok(self.release()) } else { Err(unfit("the descriptor is not an eventfd")) }
    }

    /// Returns an eventfd, or a connected unix stream socket, which user-mode Linux passes instead. The
    /// socket is shut down for reading, because received messages could contain descriptors. Fails with
    /// [`ErrorKind::Invalid`] for anything else, after received data, and as [`UntrustedFd::check_socket`]
    /// does.
    pub fn into_call(self, own: Option<&SocketAddrAny>) -> Result<CallFile, Error> {
        if is_event(&self) {
            return Ok(CallFile::Event(self.release()));
        }
        let is_stream = sockopt::socket_type(&self) == Ok(SocketType::STREAM);
        if !is_stream || self.check_socket(own).is_err() {
            return Err(unfit("the descriptor is neither an eventfd nor a connected unix stream socket"));
        }
        if shutdown(&self, Shutdown::Read).is_err() || ioctl_fionread(&self) != Ok(0) {
            return Err(unfit("the descriptor is a socket that has received data"));
        }
        Ok(CallFile::Socket(self.release()))
    }

    /// Returns a file in memory or on a local file system. Fails with [`ErrorKind::Invalid`] for others, or
    /// if the file system does not answer in time.
    pub fn into_memory(self) -> Result<OwnedFd, Error> {
        // Only files of tmpfs and hugetlbfs have seals, and the kernel answers this without asking a server.
        if fcntl_get_seals(&self).is_ok() {
            return Ok(self.release());
        }
        let (sender, receiver) = sync_channel(1);
        EXAMINERS.run(Box::new(move || {
            let checked = check_file_system(self.as_fd());
            let _ = sender.send(checked.map(|_| self));
        }));
        let no_answer = |_| unfit("the file system of the descriptor does not answer");
        receiver.recv_timeout(ANSWER_TIMEOUT).map_err(no_answer)?.map(UntrustedFd::release)
    }

    /// Fails with [`ErrorKind::Invalid`] for all but a connected unix socket, and for a connection to `own`,
    /// the socket on which the device listens: the device would itself keep such a connection open.
    pub fn check_socket(&self, own: Option<&SocketAddrAny>) -> Result<(), Error> {
        match getpeername(self).ok().filter(|_| is_unix(self)) {
            None => Err(unfit("the descriptor is not a connected unix socket")),
            Some(peer) if peer.is_some() && peer.as_ref() == own => {
                Err(unfit("the descriptor is a connection to the device itself"))
            }
            Some(_) => Ok(()),
        }
    }
}

#[derive(Debug)]
pub enum CallFile {
    Event(OwnedFd),
    Socket(OwnedFd),
}

/// Whether `file` is an eventfd, by the kernel's name of the file, for which no file system is asked.
fn is_event(file: impl AsFd) -> bool {
    match std::fs::read_link(format!("/proc/self/fd/{}", file.as_fd().as_raw_fd())) {
        Ok(name) => name.as_os_str() == "anon_inode:[eventfd]",
        Err(_) => is_anonymous(file),
    }
}

/// Without /proc: whether `file` has no file type, like all anonymous files of the kernel.
fn is_anonymous(file: impl AsFd) -> bool {
    // STATX_DONT_SYNC: the kernel answers from its cache, and does not ask the server of a file system.
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    statx(file, "", flags, StatxFlags::TYPE).is_ok_and(|found| u32::from(found.stx_mode) & libc::S_IFMT == 0)
}

impl AsFd for UntrustedFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        let Some(file) = &self.0 else { unreachable!("only a method that consumes the value takes it") };
        file.as_fd()
    }
}

impl Drop for UntrustedFd {
    fn drop(&mut self) {
        if let Some(file) = self.0.take() {
            CLOSERS.run(Box::new(move || drop(file)));
        }
    }
}

pub fn are_too_many() -> bool {
    [&CLOSERS, &EXAMINERS].iter().any(|threads| threads.state().jobs.len() > WAITING_MAX)
}

fn unfit(why: &str) -> Error {
    Error::new(ErrorKind::Invalid, why)
}

type Job = Box<dyn FnOnce() + Send>;

static CLOSERS: Threads = Threads::new("blkq-close");
static EXAMINERS: Threads = Threads::new("blkq-examine");

/// A pool of threads, each of which may hang. Threads exist only while there is work.
struct Threads {
    name: &'static str,
    state: Mutex<State>,
}

struct State {
    jobs: VecDeque<Job>,
    /// Number of threads, each of which runs until no jobs wait.
    threads: usize,
}

impl Threads {
    const fn new(name: &'static str) -> Threads {
        Threads { name, state: Mutex::new(State { jobs: VecDeque::new(), threads: 0 }) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&'static self, job: Job) {
        if runs_on_caller() {
            return job();
        }
        let mut state = self.state();
        state.jobs.push_back(job);
        if state.threads >= THREADS_MAX {
            return;
        }
        state.threads += 1;
        drop(state);
        let thread = std::thread::Builder::new().name(self.name.into()).spawn(|| self.work());
        if thread.is_err() {
            // The job stays in the queue until a later job starts a thread.
            self.state().threads -= 1;
        }
    }

    fn work(&self) {
        let mut state = self.state();
        while let Some(job) = state.jobs.pop_front() {
            drop(state);
            job();
            state = self.state();
        }
        state.threads -= 1;
    }
}

/// Whether jobs run on the calling thread, as in simulations and models, where descriptors never hang.
fn runs_on_caller() -> bool {
    #[cfg(any(simulation, fuzz_interface))]
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

    fn untrusted(file: impl Into<OwnedFd>) -> UntrustedFd {
        UntrustedFd::new(file.into())
    }

    #[test]
    fn eventfds_and_stream_sockets_are_accepted_and_nothing_else() {
        let event = || eventfd(0, EventfdFlags::empty()).unwrap();
        assert!(untrusted(event()).into_event().is_ok());
        assert!(matches!(untrusted(event()).into_call(None), Ok(CallFile::Event(_))));
        assert!(is_anonymous(event()));
        let epoll = || epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        assert!(untrusted(epoll()).into_event().is_err() && untrusted(epoll()).into_call(None).is_err());
        let (one, mut other) = UnixStream::pair().unwrap();
        assert!(untrusted(one.try_clone().unwrap()).into_event().is_err());
        assert!(matches!(untrusted(one).into_call(None), Ok(CallFile::Socket(_))));
        assert!(other.write_all(&[0]).is_err(), "the socket no longer receives");
        let (one, mut other) = UnixStream::pair().unwrap();
        other.write_all(&[0]).unwrap();
        assert!(untrusted(one).into_call(None).is_err());
        assert!(untrusted(UnixDatagram::pair().unwrap().0).into_call(None).is_err());
        assert!(untrusted(std::net::UdpSocket::bind("127.0.0.1:0").unwrap()).into_call(None).is_err());
        assert!(untrusted(rustix::pipe::pipe().unwrap().1).into_call(None).is_err());
        for path in ["/dev/null", "/proc/self/exe", "/tmp"] {
            let file = std::fs::File::open(path).unwrap();
            assert!(!is_anonymous(&file) && untrusted(file).into_call(None).is_err(), "{path}");
        }
    }

    #[test]
    fn memory_must_be_on_a_local_file_system() {
        let memory = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        assert!(untrusted(memory).into_memory().is_ok());
        let path = std::env::current_dir().unwrap().join(format!("memory-{}", std::process::id()));
        let file = std::fs::File::create_new(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(untrusted(file).into_memory().is_ok(), "the file system of this directory");
        let refusal = untrusted(std::fs::File::open("/proc/self/exe").unwrap()).into_memory();
        assert!(refusal.is_ok(), "a local file, although it cannot be mapped for writing");
        let refusal = untrusted(std::fs::File::open("/proc/self/maps").unwrap()).into_memory().unwrap_err();
        assert!(refusal.to_string().contains("file system of type"), "{refusal}");
    }

    #[test]
    fn a_connection_to_the_device_is_rejected_as_a_socket() {
        let path = std::env::temp_dir().join(format!("blkq-untrusted-{}.sock", std::process::id()));
        let listener = UnixListener::bind(&path).unwrap();
        let own = rustix::net::getsockname(&listener).unwrap();
        let connected = UnixStream::connect(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(untrusted(connected.try_clone().unwrap()).into_call(Some(&own)).is_err());
        assert!(untrusted(connected).check_socket(Some(&own)).is_err());
        let (one, other) = UnixStream::pair().unwrap();
        assert!(untrusted(one).check_socket(Some(&own)).is_ok());
        drop(other);
        assert!(untrusted(listener).check_socket(Some(&own)).is_err());
        assert!(untrusted(eventfd(0, EventfdFlags::empty()).unwrap()).check_socket(None).is_err());
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
        wait_until("the descriptors are examined", || !are_too_many());
    }

    #[test]
    fn jobs_run_while_all_threads_but_one_hang() {
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
