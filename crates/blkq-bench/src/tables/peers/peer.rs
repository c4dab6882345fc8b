//! The peers, and one measurement of a peer: start the server, run the client, read the counters, stop the server.

use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::child::{Child, POLL_INTERVAL};
use super::fio::{self, Job};
use super::kernel_loop::KernelLoop;
use crate::bench::{NamedRun, case};
use crate::file::{cached_bytes, evict};
use crate::interrupt::Undo;
use crate::load::vhost::FrontEnd;
use crate::load::{Load, raw, vhost};
use crate::measurement::{Run, mib};
use crate::metric::Metric;
use crate::process::{RESIDENT, RESIDENT_MAX, Usage, forget_resident_max, memory_bytes};
use crate::result::{Comparison, Expected, Table};
use crate::{Result, ensure};

/// How long a server may take to start.
pub const READY_WAIT: Duration = Duration::from_secs(10);
/// How long a server idles before its memory is measured.
const IDLE_TIME: Duration = Duration::from_millis(20);
/// Exists if the kernel supports ublk.
const UBLK_CONTROL: &str = "/dev/ublk-control";
/// The first bytes that an NBD server sends (NBD protocol, "Newstyle negotiation").
const GREETING: &[u8; 16] = b"NBDMAGICIHAVEOPT";

/// The image that the peers serve, and a directory for temporary files.
pub struct Place {
    pub image: PathBuf,
    /// Size of the image's device.
    pub bytes: u64,
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
    pub fn of(&self, image: &Path, bytes: u64) -> Place {
        Place { image: image.to_owned(), bytes, scratch: self.scratch.clone(), _made: None }
    }

    /// A command of this program, which keeps its state at this place.
    fn blkq(&self, words: &str) -> Result<Command> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(words.split(' ')).env("BLKQ_STATE_DIR", self.scratch.join("state"));
        Ok(command)
    }
}

/// How a client reaches the image.
#[derive(Clone, Copy)]
pub enum Way {
    /// fio directly on the image file.
    Raw,
    /// fio on a loop device of the kernel, with or without direct I/O.
    Loop { direct: bool },
    /// fio and an NBD server.
    Nbd,
    /// fio on the block device whose path the server prints.
    Device,
    /// io_uring of this process on the image file, with one call for all I/Os that are submitted together, or one call per
    /// I/O.
    Ring { one_by_one: bool },
    /// io_uring of this process on a loop device with direct I/O.
    RingOnLoop,
    /// The front end in [`crate::load::vhost`] with this number of queues, and a vhost-user-blk server.
    Vhost { queues: usize },
}

/// A server, or another way to the image, that is measured.
#[derive(Clone, Copy)]
pub struct Peer {
    pub name: &'static str,
    pub quick: bool,
    way: Way,
    /// The command line that starts the server in the foreground; empty without a server. It is split at spaces; {image},
    /// {bytes} and {socket} are replaced. `blkq` as first word represents `blkq attach --name disk --foreground` of this
    /// program.
    words: &'static str,
}

/// The base of the comparisons.
pub const RAW: &str = "raw io_uring";
pub const BLKQ: &str = "blkq nbd";
/// blkq over NBD, with the null driver.
pub const BLKQ_NULL: &str = "blkq nbd null";
/// The kernel's loop device with direct I/O.
pub const LOOP_DIRECT: &str = "kernel loop, direct";
/// blkq over NBD, on a raw file.
pub const BLKQ_NBD: Peer = Peer::nbd(BLKQ, "blkq {image} --direct-io on --export nbd --listen unix:{socket}");

/// The peers that can be measured on this machine with `job`. Adds the reasons for the others to `table`.
pub fn present(
    peers: &'static [Peer],
    quick: bool,
    place: &Place,
    job: &Job,
    table: &mut Table,
) -> Vec<&'static Peer> {
    let mut peers: Vec<_> = peers.iter().filter(|peer| peer.quick || !quick).collect();
    peers.retain(|peer| {
        let lack = peer.lacks(place, job);
        table.left_out.extend(lack.clone());
        lack.is_none()
    });
    peers
}

/// A case for each peer, in which the peer serves `place` for `job`.
pub fn visits<'a>(peers: &[&'a Peer], place: &'a Place, job: Job) -> Vec<NamedRun<'a>> {
    peers.iter().map(|&peer| case(peer.name, move |length| peer.visit(place, &job, length))).collect()
}

/// Adds to `comparison` the ratio of `feature` to each other peer that serves the image, in each of `metrics`. Adds to
/// `table` the `targets` of this comparison: its title, the base, and the bound of the ratio in the first metric. A target
/// whose base was not measured is omitted.
pub fn relate(
    table: &mut Table,
    comparison: &mut Comparison,
    feature: &str,
    metrics: &[Metric],
    targets: &[(&str, &str, Expected)],
) {
    let names: Vec<String> = comparison.cases.iter().map(|case| case.name.clone()).collect();
    for base in names.iter().filter(|name| ![feature, BLKQ_NULL].contains(&name.as_str())) {
        for metric in metrics {
            comparison.effect(format!("{feature} relative to {base}"), base, feature, *metric, None);
        }
    }
    for (_, base, wanted) in targets.iter().filter(|(title, ..)| *title == comparison.title) {
        if let Some(effect) = comparison.effects.iter().find(|effect| effect.base == *base) {
            let name = format!("{}: {}, {feature} / {base}", comparison.title, effect.metric.label());
            table.target(name, effect.ratio, *wanted);
        }
    }
}

/// How a client reaches the running server, or the file.
enum Access {
    /// fio, with the arguments that select its target.
    Fio(Vec<String>),
    /// io_uring of this process on the file or device.
    Ring(PathBuf),
    Guest(FrontEnd),
}

/// A started peer: how to reach it, its server, and its loop device, which stays attached while this exists.
type Ready = (Access, Option<Child>, Option<KernelLoop>);

impl Peer {
    /// A peer with the command line of its server, which is empty without a server.
    pub const fn new(name: &'static str, way: Way, words: &'static str) -> Peer {
        Peer { name, quick: true, way, words }
    }

    pub const fn nbd(name: &'static str, words: &'static str) -> Peer {
        Peer::new(name, Way::Nbd, words)
    }

    /// This peer, omitted from quick runs.
    pub const fn not_quick(self) -> Peer {
        Peer { quick: false, ..self }
    }

    /// The reason why the peer cannot do `job` on this machine. Starts the peer to find out.
    fn lacks(&self, place: &Place, job: &Job) -> Option<String> {
        match self.start(place, job) {
            Ok((access, server, _device)) => {
                drop(access);
                server.map(Child::stop);
                None
            }
            Err(error) => Some(not_there(self.name, self.package(), &error)),
        }
    }

    fn is_blkq(&self) -> bool {
        self.words.starts_with("blkq ")
    }

    /// The Debian package that contains the server.
    fn package(&self) -> &'static str {
        match self.words.split(' ').next() {
            Some("qemu-nbd") => "qemu-utils",
            Some("qemu-storage-daemon") => "qemu-system-common",
            Some("nbdkit") => "nbdkit",
            _ => "",
        }
    }

    /// The socket of a server at `place`. The command chooses that of blkq's vhost-user export.
    fn socket(&self, place: &Place) -> PathBuf {
        let is_chosen = self.is_blkq() && matches!(self.way, Way::Vhost { .. });
        place.scratch.join(if is_chosen { "state/disk.vhost" } else { "socket" })
    }

    fn start(&self, place: &Place, job: &Job) -> Result<Ready> {
        let socket = self.socket(place);
        // A server that was killed has not removed its socket.
        let _ = std::fs::remove_file(&socket);
        let serve = |stdout| Child::start(command(self.words, place, &socket)?, stdout);
        let on_file = |path: &Path| Access::Fio(fio::on_path(path, place.bytes));
        let device = match self.way {
            Way::Loop { direct } => Some(KernelLoop::attach(&place.image, direct)?),
            Way::RingOnLoop => Some(KernelLoop::attach(&place.image, true)?),
            _ => None,
        };
        let path = device.as_ref().map_or(&place.image, |device| &device.path);
        let (access, server) = match self.way {
            Way::Raw | Way::Loop { .. } => (on_file(path), None),
            Way::Ring { .. } | Way::RingOnLoop => (Access::Ring(path.clone()), None),
            Way::Nbd => {
                let mut server = serve(Stdio::null())?;
                await_server(&mut server, || check_greeting(&socket))?;
                (Access::Fio(fio::on_nbd(&socket, place.bytes)), Some(server))
            }
            Way::Device => {
                ensure(Path::new(UBLK_CONTROL).exists(), || {
                    format!("{UBLK_CONTROL} does not exist; load the module ublk_drv")
                })?;
                let mut server = serve(Stdio::piped())?;
                let mut line = String::new();
                if let Some(stdout) = server.process.stdout.take() {
                    BufReader::new(stdout).read_line(&mut line)?;
                }
                ensure(!line.is_empty(), || server.exit_message())?;
                (on_file(line.trim().as_ref()), Some(server))
            }
            Way::Vhost { queues } => {
                let mut server = serve(Stdio::null())?;
                // A server may accept only one client, which a trial connection would use up.
                let guest = await_server(&mut server, || FrontEnd::connect(&socket, &job.load(), queues))?;
                (Access::Guest(guest), Some(server))
            }
        };
        Ok((access, server, device))
    }

    /// Starts the peer, lets the client do `job` for `length`, and stops the peer.
    pub fn visit(&self, place: &Place, job: &Job, length: Duration) -> Result<Run> {
        let image = File::open(&place.image)?;
        evict(&image)?;
        let began = Instant::now();
        let (mut access, server, _device) = self.start(place, job)?;
        let start_ms = began.elapsed().as_secs_f64() * 1e3;
        let end = server.map(|server| self.watch(place, job, server, &access)).transpose()?;
        // With fio: its usage, and the processor time of the rest of the machine during the run.
        let (mut run, fio) = match &mut access {
            Access::Fio(target) => {
                let machine = machine_cpu()?;
                let report = fio::run(target, job, Some(length), &place.scratch)?;
                let rest = machine_cpu()?.saturating_sub(machine).saturating_sub(report.process.cpu);
                (report.run, Some((report.client, rest)))
            }
            Access::Guest(front_end) => (vhost::run(front_end, &job.load(), length)?, None),
            Access::Ring(path) => {
                let one_by_one = matches!(self.way, Way::Ring { one_by_one: true });
                let load = Load { one_by_one, ..job.load() };
                return Ok(raw::run(path, true, &load, length)?.of_client(load.depth));
            }
        };
        let cached = cached_bytes(&image)?;
        if let Some(end) = end {
            run = end(run, access)?;
        } else if let (Way::Loop { .. }, Some((_, rest))) = (self.way, fio) {
            // The kernel's loop workers serve other devices too, and have no process.
            run = run.per_io(Metric::ServerCpuNsPerIo, rest.as_nanos() as u64);
        }
        if let Some((client, _)) = fio {
            run = run
                .per_io(Metric::ClientCpuNsPerIo, client.cpu.as_nanos() as u64)
                .per_io(Metric::ClientSwitchesPerIo, client.context_switches);
        }
        // Raw I/O starts no server, and fio's direct I/O does not use the page cache.
        if let Way::Raw = self.way {
            return Ok(run);
        }
        Ok(run.with(Metric::StartMs, start_ms).with(Metric::CachedMib, mib(cached)))
    }

    /// Warms `server` up if the job requires that, and reads its counters. The result is called after the run: it stops the
    /// server, and adds its metrics to the run.
    fn watch<'a>(
        &'a self,
        place: &'a Place,
        job: &Job,
        server: Child,
        access: &Access,
    ) -> Result<impl FnOnce(Run, Access) -> Result<Run> + use<'a>> {
        // A guest's memory would be part of the resident memory of the server.
        let (mut resident, mut counted) = (None, vec![0; NBD_COUNTERS.len()]);
        if let Access::Fio(target) = access {
            std::thread::sleep(IDLE_TIME);
            resident = Some(memory_bytes(server.pid(), RESIDENT)?);
            if job.warms_up() {
                fio::run(target, job, None, &place.scratch)?;
                evict(&File::open(&place.image)?)?;
                counted = self.nbd_counters(place)?;
            }
        }
        forget_resident_max(server.pid())?;
        let used = Usage::of(server.pid())?;
        Ok(move |mut run: Run, access| {
            let mut resident_max = memory_bytes(server.pid(), RESIDENT_MAX)?;
            let cpu = Usage::of(server.pid())?.since(used).cpu;
            let counted = self.nbd_counters(place)?.into_iter().zip(counted);
            for ((metric, _), (now, before)) in NBD_COUNTERS.into_iter().zip(counted) {
                run = run.per_io(metric, now.saturating_sub(before));
            }
            if let Access::Guest(front_end) = &access {
                // The server maps the guest's memory, so its pages count for the server, too.
                resident_max = resident_max.saturating_sub(front_end.memory.len() as u64);
            }
            drop(access);
            let switches = server.stop().since(used).context_switches;
            run = run
                .per_io(Metric::ServerCpuNsPerIo, cpu.as_nanos() as u64)
                .per_io(Metric::ServerSwitchesPerIo, switches);
            if let Some(resident) = resident {
                run = run.with(Metric::ResidentMib, mib(resident));
            }
            Ok(run.with(Metric::ResidentMaxMib, mib(resident_max)))
        })
    }

    /// The values of [`NBD_COUNTERS`] so far; empty unless the peer is blkq as NBD server.
    fn nbd_counters(&self, place: &Place) -> Result<Vec<u64>> {
        if !(self.is_blkq() && matches!(self.way, Way::Nbd)) {
            return Ok(Vec::new());
        }
        let output = place.blkq("stat disk --json")?.output()?;
        ensure(output.status.success(), || String::from_utf8_lossy(&output.stderr).trim().into())?;
        let report: Value = serde_json::from_slice(&output.stdout)?;
        let value = |name: &str| {
            let value = report["nbd"][name].as_u64();
            value.ok_or_else(|| format!("blkq stat --json contains no nbd.{name}").into())
        };
        NBD_COUNTERS.iter().map(|(_, name)| value(name)).collect()
    }
}

/// Counters in `nbd` of `blkq stat --json`, and their metrics.
const NBD_COUNTERS: [(Metric, &str); 3] = [
    (Metric::ReceivesPerIo, "receives"),
    (Metric::SendsPerIo, "sends"),
    (Metric::ReceiveBackoffsPerIo, "receive_backoffs"),
];

/// The line about a peer that did not start, with its package if the program does not exist.
pub fn not_there(name: &str, package: &str, error: &crate::Error) -> String {
    let missing = error.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == ErrorKind::NotFound);
    if missing && !package.is_empty() {
        format!("{name}: not installed; install the package {package}")
    } else {
        format!("{name}: {error}")
    }
}

/// Builds the command from the command line of a peer.
fn command(words: &str, place: &Place, socket: &Path) -> Result<Command> {
    let fill = |word: &str| {
        word.replace("{image}", &place.image.to_string_lossy())
            .replace("{bytes}", &place.bytes.to_string())
            .replace("{socket}", &socket.to_string_lossy())
    };
    let (program, words) = words.split_once(' ').unwrap_or((words, ""));
    let mut command = match program {
        "blkq" => place.blkq("attach --name disk --foreground")?,
        other => Command::new(other),
    };
    command.args(words.split_whitespace().map(fill));
    Ok(command)
}

/// Tries `connect` again while it fails with a [`std::io::Error`], because the server does not listen yet. Fails if the
/// server exits, or after [`READY_WAIT`].
fn await_server<T>(server: &mut Child, connect: impl Fn() -> Result<T>) -> Result<T> {
    let until = Instant::now() + READY_WAIT;
    while Instant::now() < until {
        server.check()?;
        match connect() {
            Err(error) if error.is::<std::io::Error>() => std::thread::sleep(POLL_INTERVAL),
            connected => return connected,
        }
    }
    Err(format!("the server did not start within {READY_WAIT:?}").into())
}

/// Connects to the NBD server at `socket`, and checks its greeting.
fn check_greeting(socket: &Path) -> Result {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(READY_WAIT))?;
    let mut greeting = [0; GREETING.len()];
    stream.read_exact(&mut greeting)?;
    if greeting == *GREETING { Ok(()) } else { Err(std::io::Error::from(ErrorKind::InvalidData).into()) }
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
