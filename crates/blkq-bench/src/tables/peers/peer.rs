//! The peers, and one measurement of a peer: start the server, run fio, read the counters, stop the server.

use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::child::{Child, POLL_INTERVAL};
use super::fio::{self, Job, Length, Target};
use super::kernel_loop::KernelLoop;
use crate::Result;
use crate::bench::{CaseRun, case};
use crate::cache::{cached_bytes, evict};
use crate::interrupt::Undo;
use crate::measurement::Run;
use crate::metric::Metric;
use crate::process::{Usage, forget_resident_max, resident_bytes, resident_max_bytes};

/// How long a server may take to start.
pub(super) const READY_WAIT: Duration = Duration::from_secs(10);
/// How long a server idles before its memory is measured.
const IDLE_TIME: Duration = Duration::from_millis(20);
/// Exists if the kernel supports ublk.
const UBLK_CONTROL: &str = "/dev/ublk-control";
/// The first bytes that an NBD server sends (NBD protocol, "Newstyle negotiation").
const GREETING: &[u8; 16] = b"NBDMAGICIHAVEOPT";

/// The image that the peers serve, and a directory for temporary files.
pub struct Place {
    image: PathBuf,
    bytes: u64,
    scratch: PathBuf,
    /// `None` if another place owns the directory.
    _made: Option<Undo>,
}

impl Place {
    /// A place for serving `image`, which has the size `bytes`.
    pub fn new(image: &Path, bytes: u64) -> Result<Place> {
        let scratch = std::env::temp_dir().join(format!("blkq-bench-{}", std::process::id()));
        let at = scratch.clone();
        let remove = move || drop(std::fs::remove_dir_all(at));
        let (_, made) = Undo::after(|| std::fs::DirBuilder::new().mode(0o700).create(&scratch), remove)
            .map_err(|e| format!("{}: {e}", scratch.display()))?;
        Ok(Place { image: image.to_owned(), bytes, scratch, _made: Some(made) })
    }

    /// A place with the same directory for `image`, whose device has the size `bytes`.
    pub(super) fn of(&self, image: &Path, bytes: u64) -> Place {
        Place { image: image.to_owned(), bytes, scratch: self.scratch.clone(), _made: None }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn image(&self) -> &Path {
        &self.image
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.scratch.join(name)
    }

    fn socket(&self) -> PathBuf {
        self.file("socket")
    }
}

/// How fio reaches the image.
#[derive(Clone, Copy)]
enum Way {
    /// I/O directly on the image file.
    Raw,
    /// Through a loop device of the kernel, with or without direct I/O.
    Loop { direct: bool },
    /// Through an NBD server that runs in the foreground. The command line is split at spaces; {image}, {bytes} and
    /// {socket} are replaced. `blkq` as first word is this program.
    Nbd(&'static str),
    /// Through a server that runs in the foreground and prints the path of its block device.
    Device(&'static str),
}

/// A server, or another way to the image, that is measured.
pub struct Peer {
    pub name: &'static str,
    /// The Debian package that contains the server.
    package: &'static str,
    pub quick: bool,
    way: Way,
}

/// The base of the comparisons.
pub const RAW: &str = "raw io_uring";
pub const BLKQ: &str = "blkq nbd";
/// blkq over NBD, with the null driver.
pub const BLKQ_NULL: &str = "blkq nbd null";
/// The kernel's loop device with direct I/O.
pub const LOOP_DIRECT: &str = "kernel loop, direct";
pub const QEMU_NBD: &str = "qemu-nbd";

/// Peers that serve the file, without the page cache if they can.
pub const OVER_FILE: [Peer; 8] = [
    Peer { name: RAW, package: "", quick: true, way: Way::Raw },
    Peer { name: LOOP_DIRECT, package: "", quick: true, way: Way::Loop { direct: true } },
    Peer { name: "kernel loop, buffered", package: "", quick: false, way: Way::Loop { direct: false } },
    Peer {
        name: QEMU_NBD,
        package: "qemu-utils",
        quick: true,
        way: Way::Nbd(
            "qemu-nbd -f raw -t -e 8 --cache=none --aio=io_uring -x disk -k {socket} \
             {image}",
        ),
    },
    Peer {
        name: "qemu-storage-daemon",
        package: "qemu-system-common",
        quick: false,
        way: Way::Nbd(
            "qemu-storage-daemon --blockdev \
             driver=file,node-name=disk,filename={image},cache.direct=on,aio=io_uring \
             --nbd-server addr.type=unix,addr.path={socket},max-connections=8 --export \
             type=nbd,id=export,node-name=disk,name=disk,writable=on",
        ),
    },
    Peer {
        name: "nbdkit file, cache=none",
        package: "nbdkit",
        quick: false,
        way: Way::Nbd("nbdkit -f -e disk -U {socket} file {image} cache=none"),
    },
    Peer {
        name: BLKQ,
        package: "",
        quick: true,
        way: Way::Nbd(
            "blkq attach {image} --name disk --foreground --direct-io on --export nbd \
             --listen unix:{socket}",
        ),
    },
    Peer {
        name: "blkq ublk",
        package: "",
        quick: true,
        way: Way::Device("blkq attach {image} --name disk --foreground --direct-io on --export ublk"),
    },
];

/// Peers that serve a null device, which shows the cost of serving.
pub const OVER_NOTHING: [Peer; 3] = [
    Peer {
        name: "qemu-nbd null-co",
        package: "qemu-utils",
        quick: true,
        way: Way::Nbd("qemu-nbd -t -e 8 -x disk -k {socket} --image-opts driver=null-co,size={bytes}"),
    },
    Peer {
        name: "nbdkit null",
        package: "nbdkit",
        quick: false,
        way: Way::Nbd("nbdkit -f -e disk -U {socket} null {bytes}"),
    },
    Peer {
        name: BLKQ_NULL,
        package: "",
        quick: true,
        way: Way::Nbd(
            "blkq attach null:{bytes} --name disk --foreground --export nbd --listen \
             unix:{socket}",
        ),
    },
];

/// The items of a quick run, or all.
pub(super) fn chosen<T>(all: &[T], quick: bool, is_quick: fn(&T) -> bool) -> impl Iterator<Item = &T> {
    all.iter().filter(move |one| is_quick(one) || !quick)
}

/// A case for each peer, in which the peer serves `place` for `job`.
pub(super) fn visits<'a>(peers: &[&'a Peer], place: &'a Place, job: Job) -> Vec<(String, CaseRun<'a>)> {
    peers.iter().map(|&peer| case(peer.name, move |length| peer.visit(place, &job, length))).collect()
}

struct Ready {
    target: Target,
    child: Option<Child>,
    /// Keeps the loop device attached.
    _device: Option<KernelLoop>,
}

impl Peer {
    /// An NBD server of this program, with its command line.
    pub(super) const fn of_blkq(name: &'static str, words: &'static str) -> Peer {
        Peer { name, package: "", quick: true, way: Way::Nbd(words) }
    }

    /// An NBD server of a Debian package, with its command line.
    pub(super) const fn of_package(name: &'static str, package: &'static str, words: &'static str) -> Peer {
        Peer { name, package, quick: true, way: Way::Nbd(words) }
    }

    /// The reason why the peer cannot be measured on this machine. Starts the peer to find out.
    pub fn lacks(&self, place: &Place) -> Option<String> {
        let error = match self.start(place) {
            Ok(ready) => {
                if let Some(child) = ready.child {
                    child.stop();
                }
                return None;
            }
            Err(error) => error,
        };
        Some(not_there(self.name, self.package, &error))
    }

    /// Whether a quick check finds what the peer requires; [`Peer::lacks`] is the full check.
    pub fn may_be_there(&self) -> bool {
        !matches!(self.way, Way::Device(_)) || Path::new(UBLK_CONTROL).exists()
    }

    /// Whether the peer is this program as NBD server.
    fn is_blkq_nbd(&self) -> bool {
        matches!(self.way, Way::Nbd(words) if words.starts_with("blkq "))
    }

    fn start(&self, place: &Place) -> Result<Ready> {
        match self.way {
            Way::Raw => Ok(Ready { target: Target::Path(place.image.clone()), child: None, _device: None }),
            Way::Loop { direct } => {
                let device = KernelLoop::attach(&place.image, direct)?;
                let target = Target::Path(device.path().to_owned());
                Ok(Ready { target, child: None, _device: Some(device) })
            }
            Way::Nbd(words) => {
                let socket = place.socket();
                // A server that was killed has not removed its socket.
                let _ = std::fs::remove_file(&socket);
                let mut child = Child::start(command(words, place)?, Stdio::null())?;
                await_greeting(&socket, &mut child)?;
                let target = Target::Uri(format!("nbd+unix:///disk?socket={}", socket.display()));
                Ok(Ready { target, child: Some(child), _device: None })
            }
            Way::Device(words) => {
                if !self.may_be_there() {
                    return Err(format!("{UBLK_CONTROL} does not exist; load the module ublk_drv").into());
                }
                let mut child = Child::start(command(words, place)?, Stdio::piped())?;
                let mut line = String::new();
                if let Some(stdout) = child.stdout.take() {
                    BufReader::new(stdout).read_line(&mut line)?;
                }
                if line.is_empty() {
                    return Err(child.exit_message().into());
                }
                let target = Target::Path(PathBuf::from(line.trim()));
                Ok(Ready { target, child: Some(child), _device: None })
            }
        }
    }

    /// Starts the peer, lets fio do `job` for `length`, and stops the peer.
    pub fn visit(&self, place: &Place, job: &Job, length: Duration) -> Result<Run> {
        let image = std::fs::File::open(&place.image)?;
        evict(&image)?;
        let began = Instant::now();
        let Ready { target, child, _device } = self.start(place)?;
        let start_ms = began.elapsed().as_secs_f64() * 1e3;
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let pid = child.as_ref().map(Child::pid);
        let mut before = Usage::default();
        let mut counted_before = [0; NBD_COUNTERS.len()];
        let mut resident = 0;
        if let Some(pid) = pid {
            std::thread::sleep(IDLE_TIME);
            resident = resident_bytes(&pid.to_string())?;
            if job.warms_up() {
                fio::run(&target, job, place.bytes, Length::Once, &place.scratch)?;
                evict(&image)?;
                if self.is_blkq_nbd() {
                    counted_before = nbd_counters(place)?;
                }
            }
            forget_resident_max(&pid.to_string())?;
            before = Usage::of(pid)?;
        }
        let machine = machine_cpu()?;
        let report = fio::run(&target, job, place.bytes, Length::Time(length), &place.scratch)?;
        let machine = machine_cpu()?.saturating_sub(machine);
        let cached = cached_bytes(&image)?;
        let mut run = Run { ios: report.ios, values: Vec::new() }.with(Metric::Iops, report.iops);
        run = run.with(Metric::LatencyMeanUs, report.mean_us);
        let percentiles = [Metric::LatencyP50Us, Metric::LatencyP99Us, Metric::LatencyP999Us];
        for (metric, value) in percentiles.into_iter().zip(report.percentiles_us) {
            run = run.with(metric, value);
        }
        if let (Some(child), Some(pid)) = (child, pid) {
            let resident_max = resident_max_bytes(&pid.to_string())?;
            let cpu = Usage::of(pid)?.since(before).cpu;
            if self.is_blkq_nbd() {
                let counted = nbd_counters(place)?;
                let counts =
                    std::array::from_fn(|index| counted[index].saturating_sub(counted_before[index]));
                run = with_nbd_counts(run, counts);
            }
            let switches = child.stop().since(before).context_switches;
            run = run
                .per_io(Metric::ServerCpuNsPerIo, cpu.as_nanos() as u64)
                .per_io(Metric::ServerSwitchesPerIo, switches)
                .with(Metric::ResidentMib, mib(resident))
                .with(Metric::ResidentMaxMib, mib(resident_max));
        } else if let Way::Loop { .. } = self.way {
            // The kernel's loop workers serve other devices too and have no process: takes the time of the whole
            // machine without fio.
            let rest = machine.saturating_sub(report.process.cpu);
            run = run.per_io(Metric::ServerCpuNsPerIo, rest.as_nanos() as u64);
        }
        run = run
            .per_io(Metric::ClientCpuNsPerIo, report.client.cpu.as_nanos() as u64)
            .per_io(Metric::ClientSwitchesPerIo, report.client.context_switches);
        if !matches!(self.way, Way::Raw) {
            run = run.with(Metric::StartMs, start_ms);
        }
        Ok(run.with(Metric::CachedMib, mib(cached)))
    }
}

/// Counters in `nbd` of `blkq stat --json`.
const NBD_COUNTERS: [&str; 3] = ["receives", "sends", "receive_backoffs"];

fn nbd_counters(place: &Place) -> Result<[u64; NBD_COUNTERS.len()]> {
    let output = command("blkq stat disk --json", place)?.output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).trim().into());
    }
    let report: Value = serde_json::from_slice(&output.stdout)?;
    let mut counters = [0; NBD_COUNTERS.len()];
    for (counter, name) in counters.iter_mut().zip(NBD_COUNTERS) {
        *counter =
            report["nbd"][name].as_u64().ok_or_else(|| format!("blkq stat --json contains no nbd.{name}"))?;
    }
    Ok(counters)
}

fn with_nbd_counts(run: Run, counts: [u64; NBD_COUNTERS.len()]) -> Run {
    let [receives, sends, receive_backoffs] = counts;
    run.per_io(Metric::ReceivesPerIo, receives)
        .per_io(Metric::SendsPerIo, sends)
        .per_io(Metric::ReceiveBackoffsPerIo, receive_backoffs)
}

/// The line about a peer that did not start, with its package if the program does not exist.
pub(super) fn not_there(name: &str, package: &str, error: &crate::Error) -> String {
    let missing = error.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == ErrorKind::NotFound);
    if missing && !package.is_empty() {
        format!("{name}: not installed; install the package {package}")
    } else {
        format!("{name}: {error}")
    }
}

/// Builds the command from a command line of [`Way`].
pub(super) fn command(words: &str, place: &Place) -> Result<Command> {
    let fill = |word: &str| {
        word.replace("{image}", &place.image.to_string_lossy())
            .replace("{bytes}", &place.bytes.to_string())
            .replace("{socket}", &place.socket().to_string_lossy())
    };
    let mut words = words.split_whitespace();
    let mut command = match words.next() {
        None | Some("blkq") => Command::new(std::env::current_exe()?),
        Some(other) => Command::new(other),
    };
    command.args(words.map(fill)).env("BLKQ_STATE_DIR", place.scratch.join("state"));
    Ok(command)
}

/// Waits until the server at `socket` greets a client.
fn await_greeting(socket: &Path, child: &mut Child) -> Result {
    let until = Instant::now() + READY_WAIT;
    while Instant::now() < until {
        if child.has_exited() {
            return Err(child.exit_message().into());
        }
        let mut greeting = [0; GREETING.len()];
        if let Ok(mut stream) = UnixStream::connect(socket) {
            stream.set_read_timeout(Some(READY_WAIT))?;
            if stream.read_exact(&mut greeting).is_ok() && greeting == *GREETING {
                return Ok(());
            }
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Err(format!("the server did not start within {READY_WAIT:?}").into())
}

/// Processor time that all processors have used, without idle, iowait and steal (proc_stat(5)). The kernel reports ticks
/// of 10 ms.
fn machine_cpu() -> Result<Duration> {
    let stat = std::fs::read_to_string("/proc/stat")?;
    let fields = stat.lines().next().unwrap_or_default().split_whitespace().skip(1);
    let ticks: Vec<u64> = fields.filter_map(|field| field.parse().ok()).collect();
    let [user, nice, system, _idle, _iowait, irq, softirq, ..] = ticks[..] else {
        return Err("/proc/stat: cannot read the line of all processors".into());
    };
    Ok(Duration::from_millis(10 * (user + nice + system + irq + softirq)))
}
