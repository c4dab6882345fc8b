//! When nobody uses a block device any more: the kernel does not tell its server.
//!
//! That its nodes in /dev are opened and closed is told by inotify(7), and then it is looked at.
//! That a file system is mounted or unmounted is not told: what is claimed is looked at every second.
//! A program that only asks what there is (udev, or mount(8) before it mounts) has it open for less
//! than a second, and is no user.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use blkq::Error;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};

use super::usage::{self, Use};

/// How long after an opening or closing is looked.
const SETTLE: Duration = Duration::from_millis(250);
/// How long nobody may use it before that is told, and how often what is claimed is looked at.
const REST: Duration = Duration::from_secs(1);
/// Room for a few events.
const EVENT_BYTES: usize = 4096;

/// What a watch is to do.
const REST_NOW: u8 = 0;
const LOOK: u8 = 1;
const END: u8 = 2;

/// Tells when the users of a block device have gone, while it is on, until it is dropped.
#[derive(Debug)]
pub struct IdleWatch {
    orders: Arc<Orders>,
    thread: Option<JoinHandle<()>>,
}

/// What a watch is told to do, and an event that says that this is news.
#[derive(Debug)]
struct Orders {
    what: AtomicU8,
    news: OwnedFd,
}

impl Orders {
    fn give(&self, what: u8) {
        self.what.store(what, Ordering::SeqCst);
        // Full, it is readable.
        let _ = rustix::io::write(&self.news, &1u64.to_ne_bytes());
    }

    fn take(&self) -> u8 {
        let _ = rustix::io::read(&self.news, &mut [0; 8]);
        self.what.load(Ordering::SeqCst)
    }
}

impl IdleWatch {
    /// Watches the block device `path`. When somebody has used it, from now on or already, and nobody
    /// does any more, the event `idle` is written, again every second for as long as that is so.
    /// `looking` is held while the device is claimed for a look. While the watch is not `on`, nobody
    /// looks, and what happens then is no use.
    ///
    /// # Errors
    /// If the process has no descriptor or thread left.
    pub(super) fn start(
        path: &str,
        looking: Arc<Mutex<()>>,
        idle: Arc<OwnedFd>,
        on: bool,
    ) -> Result<IdleWatch, Error> {
        let refuse = |e: io::Error| Error::system(format!("cannot watch who uses {path}"), e);
        let news =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|e| refuse(e.into()))?;
        let orders = Arc::new(Orders { what: AtomicU8::new(REST_NOW), news });
        let watch = Watch { nodes: Nodes::new(path).map_err(refuse)?, looking, idle, orders: orders.clone() };
        let thread = std::thread::Builder::new().name("blkq-idle".into()).spawn(move || watch.run());
        let watch = IdleWatch { orders, thread: Some(thread.map_err(refuse)?) };
        watch.set(on);
        Ok(watch)
    }

    /// Begins to look, or ceases.
    pub fn set(&self, on: bool) {
        self.orders.give(if on { LOOK } else { REST_NOW });
    }
}

impl Drop for IdleWatch {
    fn drop(&mut self) {
        self.orders.give(END);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Watch {
    nodes: Nodes,
    looking: Arc<Mutex<()>>,
    idle: Arc<OwnedFd>,
    orders: Arc<Orders>,
}

/// Why a watch no longer waits.
enum Told {
    Orders,
    Nodes,
    Nothing,
}

impl Watch {
    fn run(&self) {
        let mut on = false;
        // Who writes has used it; who reads, if a look finds him.
        let mut used = false;
        // Since when each scan has found it open.
        let mut open_since: Option<Instant> = None;
        let mut last_event = Instant::now();
        let mut wait = None;
        loop {
            match self.wait(wait) {
                Told::Orders => {
                    match self.orders.take() {
                        END => return,
                        what => on = what == LOOK,
                    }
                    used = false;
                    (last_event, wait) = (Instant::now(), on.then_some(SETTLE));
                    continue;
                }
                Told::Nodes => {
                    let events = self.nodes.take_events();
                    used |= on && was_written(&events);
                    (last_event, wait) = (Instant::now(), on.then_some(SETTLE));
                    continue;
                }
                Told::Nothing => {}
            }
            let Scan { found, undisturbed, written } = self.scan();
            used |= written || matches!(found, Use::Claimed);
            // On a slow machine a moment may be longer than SETTLE.
            open_since = matches!(found, Use::Open).then(|| open_since.unwrap_or_else(Instant::now));
            used |= open_since.is_some_and(|since| since.elapsed() >= REST);
            wait = match found {
                Use::Gone => return,
                Use::Claimed | Use::Unknown => Some(REST),
                Use::Open if !used => Some(REST),
                // Its end is told.
                Use::Open => None,
                Use::Nobody if !used => None,
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

    /// Waits for orders and for events of the nodes, for `time` at most.
    fn wait(&self, time: Option<Duration>) -> Told {
        let mut fds =
            [PollFd::new(&self.orders.news, PollFlags::IN), PollFd::new(&self.nodes.inotify, PollFlags::IN)];
        let time = time.map(|time| rustix::event::Timespec {
            tv_sec: time.as_secs() as i64,
            tv_nsec: i64::from(time.subsec_nanos()),
        });
        match poll(&mut fds, time.as_ref()) {
            Ok(0) => Told::Nothing,
            Ok(_) if !fds[0].revents().is_empty() => Told::Orders,
            // Interrupted: looks for events, of which there may be none.
            _ => Told::Nodes,
        }
    }

    /// Scans for users.
    fn scan(&self) -> Scan {
        let _held = self.looking.lock().unwrap_or_else(PoisonError::into_inner);
        // First the scan, which takes its time and opens nothing: the kernel merges equal events, so
        // that the opening of the probe would hide another that comes meanwhile.
        let open = usage::is_open(&self.nodes.path);
        let mut events = self.nodes.take_events();
        let undisturbed = events.is_empty();
        let found = match usage::probe(&self.nodes.path) {
            Use::Nobody if open => Use::Open,
            found => found,
        };
        let probing = self.nodes.take_events();
        // Those of the probe itself.
        let own = [ReadFlags::OPEN, ReadFlags::CLOSE_NOWRITE];
        let undisturbed = undisturbed && (probing.is_empty() || probing == own);
        events.extend(probing);
        Scan { found, undisturbed, written: was_written(&events) }
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
    fn new(path: &str) -> io::Result<Nodes> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        let nodes = Nodes { path: path.to_owned(), inotify };
        nodes.add(Path::new(path))?;
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

    /// What has happened to the nodes.
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

    // Contract: detach
    #[test]
    fn the_end_of_the_last_user_is_told_and_a_look_at_it_is_no_use() {
        let directory = std::env::temp_dir().join(format!("blkq-idle-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let path = directory.join("ublkb1");
        fs::write(&path, "").unwrap();
        let idle = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap());
        let watch = IdleWatch::start(path.to_str().unwrap(), Arc::default(), idle.clone(), true).unwrap();
        drop(File::open(&path).unwrap());
        assert!(!told(&idle, REST * 2), "somebody only asked what there is");
        let partition = directory.join("ublkb1p1");
        fs::write(directory.join("ublkb10"), "").unwrap();
        fs::write(&partition, "").unwrap();
        // Whoever makes the node writes it: only from then on it is watched.
        let mut child = user(File::open(&partition).unwrap());
        assert!(!told(&idle, REST * 2), "it is in use");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(told(&idle, Duration::from_secs(20)), "nobody uses it any more");
        assert!(told(&idle, Duration::from_secs(20)), "and that is told again");
        watch.set(false);
        while told(&idle, SETTLE) {}
        drop(OpenOptions::new().write(true).open(&path).unwrap());
        assert!(!told(&idle, REST * 2), "nobody looks");
        watch.set(true);
        assert!(!told(&idle, REST * 2), "who has used it before does not count");
        drop(OpenOptions::new().write(true).open(&path).unwrap());
        assert!(told(&idle, Duration::from_secs(20)), "who writes for a moment does");
        drop(watch);
        fs::remove_dir_all(&directory).unwrap();
    }
}
