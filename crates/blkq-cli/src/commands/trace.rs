//! `blkq trace`: traces each I/O of a device. The daemon writes events into rings in shared memory, which
//! this command polls.

use std::io::IsTerminal;
use std::ops::Bound;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use blkq::clock::monotonic_ns;
use blkq::trace::{MEMORY_MAX_BYTES, PAGE_BYTES, RING_BYTES_MIN};
use blkq::units::{format_bytes, parse_bytes};
use blkq_protocol::control::{Dialogue, is_readable};
use blkq_protocol::failure::{Failure, Outcome, print_error};
use blkq_protocol::system::signals::DAEMON;

use super::signals::{Stop, stop_on_signals};
use crate::devices::DeviceArg;
use crate::output::Progress;
use crate::trace::filter::{Filter, Filtered};
use crate::trace::io_tracker::IoTracker;
use crate::trace::item::{Item, ItemKind};
use crate::trace::output::{Output, Stopped, TraceStart};
use crate::trace::rings::Rings;
use crate::usage::seconds;

/// The daemon does not notify this command of new events, because that would slow the device down.
const POLL: Duration = Duration::from_millis(5);
const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);

#[derive(clap::Args, Debug)]
#[command(after_help = "\
Without --output and --chrome, the trace is written to standard output, one event per line. Ctrl-C
(SIGINT) stops the trace. A summary on standard error states how many events were recorded, and how
many were overwritten before they were read.

The events are those of blktrace(8). A queue of the device takes the role of a CPU, and a client
(`nbd 3`, `vring 0`) that of a process.

Events:
  Q     a bio was submitted
  X     a bio was split
  G     a bio got a tag and became a request
  M, F  a bio or request was merged to the back, or to the front
  P, U  the plug got its first request; the plug was flushed
  I     a request was inserted into the scheduler
  D, R  a request was given to the driver; the driver was busy and it was requeued
  m     a request waits for a limit
  C     a request completed

Examples:
  blkq trace disk.img
  blkq trace disk.img --filter 'op=write,latency>10ms'
  blkq trace disk.img --output /tmp/run --for 10 && blkparse -i /tmp/run
  blkq trace disk.img | grep ' C '
  blkq trace disk.img --output - | blkparse -i -
  blkq trace disk.img --chrome trace.json --for 5     # for ui.perfetto.dev")]
pub struct Args {
    #[command(flatten)]
    device: DeviceArg,
    /// Write the events to standard output, one per line, in addition to --output or --chrome
    #[arg(long)]
    follow: bool,
    /// Write binary files for blkparse(1), PREFIX.blktrace.N for each queue
    ///
    /// If PREFIX is a directory, the files get the name of the device. If it is -, one binary stream is
    /// written to standard output.
    #[arg(long, short, value_name = "PREFIX")]
    output: Option<PathBuf>,
    /// Write a timeline for Perfetto to FILE, as trace events in JSON
    ///
    /// Each request is a slice, which contains a slice for each stage.
    #[arg(long, value_name = "FILE")]
    chrome: Option<PathBuf>,
    /// Stop after SECONDS
    #[arg(long = "for", value_name = "SECONDS", value_parser = seconds((Bound::Excluded(0.0), Bound::Unbounded), "must be a number of seconds, such as 10 or 0.5"))]
    duration: Option<Duration>,
    /// Trace only I/Os that meet all CONDITIONS, separated by commas
    ///
    /// The conditions are op=NAME, size>BYTES, size<BYTES, latency>TIME and latency<TIME. The size is that of
    /// the largest bio or request of the I/O. The latency is the time from the submission of its first bio to
    /// its completion.
    #[arg(long, value_name = "CONDITIONS")]
    filter: Option<Filter>,
    /// Set the size of the event buffer of each queue, which the daemon allocates while it traces
    #[arg(long, value_name = "SIZE", default_value = "16M", value_parser = parse_bytes)]
    buffer: u64,
}

pub fn run(args: Args) -> Outcome {
    let buffer = args.buffer;
    if !(RING_BYTES_MIN..=MEMORY_MAX_BYTES).contains(&buffer) {
        let [least, most, given] = [RING_BYTES_MIN, MEMORY_MAX_BYTES, buffer].map(format_bytes);
        return Err(Failure::new(format!("--buffer must be {least} to {most}, not {given}")));
    }
    if args.follow && args.is_stream() {
        return Err(Failure::new("--follow and --output - both write to standard output; omit one of them"));
    }
    let (dir, name) = args.device.find()?;
    let notice = "stopped immediately; only the files that the summary names are complete";
    let stop = stop_on_signals(&DAEMON, notice.to_owned())?;
    let (dialogue, rings) = Rings::open(&dir, &name, buffer - buffer % PAGE_BYTES)
        .map_err(|e| e.during(format_args!("trace {}", args.device.word)))?;
    let recorded = args.record(&name, &dialogue, rings, &stop);
    // The files are complete, or `recorded` says why not. A second signal exits the process during this wait.
    dialogue.end();
    recorded
}

impl Args {
    /// Writes the events until the trace ends, and then a summary.
    fn record(&self, name: &str, dialogue: &Dialogue, rings: Rings, stop: &Stop) -> Outcome {
        let start = TraceStart {
            name,
            queues: rings.queue_count(),
            time_ns: monotonic_ns(),
            since_epoch: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(),
        };
        let has_file = self.output.is_some() || self.chrome.is_some();
        let shows_progress = std::io::stderr().is_terminal() && !self.follow && has_file;
        let mut tracing = Tracing {
            outputs: self.outputs(&start)?,
            trackers: (0..start.queues).map(|_| IoTracker::default()).collect(),
            filtered: self.filter.clone().map(Filtered::new),
            progress: shows_progress.then(|| Progress::new(PROGRESS_INTERVAL)),
            begun: Instant::now(),
            duration: self.duration.unwrap_or(Duration::MAX),
            events: 0,
            lost: 0,
        };
        let stopped = tracing.follow(dialogue, rings, stop);
        dialogue.give_up();
        let finished = tracing.finish();
        let seconds = tracing.begun.elapsed().as_secs_f64();
        let mut line = format!("{name}: {} events in {seconds:.1} s, {} lost", tracing.events, tracing.lost);
        let omitted = tracing.filtered.as_ref().map_or(0, |filtered| filtered.discarded);
        if omitted > 0 {
            line.push_str(&format!(", {omitted} omitted because their I/Os took too long for the filter"));
        }
        let (recorded, files) = match (stopped, finished) {
            (Err(Stopped::Failed(failure)), _) | (_, Err(Stopped::Failed(failure))) => {
                (Err(failure), Vec::new())
            }
            (Err(Stopped::DaemonExited), files) => {
                let closed = Failure::new(format!("{name}: the daemon closed the connection"));
                (Err(closed), files.unwrap_or_default())
            }
            (_, files) => (Ok(()), files.unwrap_or_default()),
        };
        if !files.is_empty() {
            let files: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
            line.push_str(&format!("; written to {}", files.join(" ")));
        }
        print_error(&Failure::new(line));
        recorded
    }

    fn is_stream(&self) -> bool {
        self.output.as_deref().is_some_and(|place| place.as_os_str() == "-")
    }

    fn outputs(&self, start: &TraceStart<'_>) -> Outcome<Vec<Output>> {
        let mut outputs = Vec::new();
        if self.follow || self.output.is_none() && self.chrome.is_none() {
            outputs.push(Output::lines(start));
        }
        if self.is_stream() {
            outputs.push(Output::stream(start));
        } else if let Some(place) = &self.output {
            outputs.push(Output::files(place, start)?);
        }
        if let Some(path) = &self.chrome {
            outputs.push(Output::chrome(path, start)?);
        }
        Ok(outputs)
    }
}

/// Items go from the rings through the tracker and the filter to the outputs.
struct Tracing {
    outputs: Vec<Output>,
    /// One for each queue.
    trackers: Vec<IoTracker>,
    filtered: Option<Filtered>,
    progress: Option<Progress>,
    begun: Instant,
    duration: Duration,
    events: u64,
    lost: u64,
}

impl Tracing {
    /// Returns when the user stops the trace, or the time of --for is over.
    fn follow(&mut self, dialogue: &Dialogue, mut rings: Rings, stop: &Stop) -> Result<(), Stopped> {
        let mut more = false;
        let reason = loop {
            let left = self.duration.saturating_sub(self.begun.elapsed()).min(POLL);
            let over = stop.is_requested() || left.is_zero();
            let timeout = if over || more { Duration::ZERO } else { left };
            // The daemon sends nothing, so readable means closed.
            let closed = is_readable(dialogue, Some(Instant::now() + timeout));
            more = self.write_batch(&mut rings, monotonic_ns())?;
            if let Some(progress) = &mut self.progress {
                let seconds = self.begun.elapsed().as_secs();
                progress.show(|| Some(format!("{seconds} s, {} events, {} lost", self.events, self.lost)));
            }
            if over || closed {
                break if over { Ok(()) } else { Err(Stopped::DaemonExited) };
            }
        };
        self.progress.iter().for_each(Progress::clear);
        // The shared memory still contains the events that were written before the connection was closed.
        let now_ns = monotonic_ns();
        while self.write_batch(&mut rings, now_ns)? {}
        self.write(rings.finish())?;
        reason
    }

    /// Writes a batch of the events before `now_ns` (monotonic clock). Returns whether there are more.
    fn write_batch(&mut self, rings: &mut Rings, now_ns: u64) -> Result<bool, Stopped> {
        let (items, more) = rings.read(now_ns);
        self.write(items).map(|()| more)
    }

    /// Writes the items, without those that the filter drops, and the requests that they complete.
    fn write(&mut self, mut items: Vec<Item>) -> Result<(), Stopped> {
        let has_slices = self.outputs.iter().any(|output| matches!(output, Output::Chrome(..)));
        let tracks_ios = self.filtered.is_some() || has_slices;
        let mut requests = Vec::new();
        for item in &items {
            match item.kind {
                ItemKind::Event(_) => self.events += 1,
                ItemKind::Lost(events) => self.lost += events,
            }
            if tracks_ios {
                let effects = self.trackers[item.queue].observe(item);
                match &mut self.filtered {
                    Some(filtered) => filtered.push(*item, effects),
                    None => requests.extend(effects.request.map(|request| (item.queue, request))),
                }
            }
        }
        if let Some(filtered) = &mut self.filtered {
            (requests, items) = (filtered.take_requests(), filtered.take());
        }
        // An output that fails does not keep the others from getting the last events.
        let written: Vec<_> = self.outputs.iter_mut().map(|output| output.write(&items, &requests)).collect();
        written.into_iter().collect()
    }

    /// Writes the remaining items, of I/Os that have not completed. Returns the files written.
    fn finish(&mut self) -> Result<Vec<PathBuf>, Stopped> {
        self.trackers.iter_mut().for_each(IoTracker::forget);
        let written = self.write(Vec::new());
        let mut files = Vec::new();
        for output in self.outputs.drain(..) {
            files.extend(output.finish()?);
        }
        written.map(|()| files)
    }
}
