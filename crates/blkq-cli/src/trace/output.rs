//! The outputs of a trace: lines, binary files or a binary stream, and slices for Perfetto.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use blkq::output;
use blkq::trace::TraceEvent;
use blkq_protocol::failure::{Failure, Outcome};
use serde_json::{Value, json};

use super::blktrace::{self, Encoder};
use super::io_tracker::CompletedRequest;
use super::item::{Item, client_name, line};

pub struct TraceStart<'a> {
    pub name: &'a str,
    pub queues: usize,
    /// Time of the trace's clock.
    pub time_ns: u64,
    /// The time of day at that moment, since 1970.
    pub since_epoch: Duration,
}

/// Why a trace stopped before the user or --for stopped it.
pub enum Stopped {
    DaemonExited,
    /// The reader of standard output has closed it.
    OutputClosed,
    Failed(Failure),
}

/// Appends an item to the encoded bytes.
type Encode = Box<dyn FnMut(&Item, &mut Vec<u8>)>;

pub enum Output {
    /// Lines or a binary stream on standard output.
    Stdout {
        encode: Encode,
        /// Encoded items that have not been written yet.
        bytes: Vec<u8>,
    },
    /// A binary file per queue.
    Files(Vec<(PathBuf, BufWriter<File>, Encoder)>),
    /// A file of slices, which needs completed requests.
    Chrome(PathBuf, ChromeWriter<BufWriter<File>>),
}

/// Creates `path`. An existing file is replaced only if it is an earlier output, which begins with `head`.
fn create(path: &Path, head: &[u8]) -> Outcome<BufWriter<File>> {
    let file = output::create(path, |found| found.starts_with(head)).map_err(|e| failure(path, &e))?;
    Ok(BufWriter::with_capacity(1 << 18, file))
}

/// Removes the binary file of an earlier trace.
fn remove_earlier(path: &Path) -> Outcome {
    // A pipe or a link there is not a trace's.
    if !fs::symlink_metadata(path).is_ok_and(|found| found.is_file()) {
        return Ok(());
    }
    output::check(path, |found| found.starts_with(&blktrace::HEAD))
        .and_then(|()| fs::remove_file(path))
        .map_err(|e| failure(path, &e))
}

impl Output {
    pub fn lines(start: &TraceStart<'_>) -> Output {
        let since_ns = start.time_ns;
        Output::Stdout { encode: Box::new(move |item, out| line(item, since_ns, out)), bytes: Vec::new() }
    }

    pub fn stream(start: &TraceStart<'_>) -> Output {
        let (mut encoder, mut bytes) = (Encoder::new(start.queues), Vec::new());
        encoder.begin(0, start.time_ns, start.since_epoch, &mut bytes);
        Output::Stdout { encode: Box::new(move |item, out| encoder.encode(item, out)), bytes }
    }

    /// Creates the files `PREFIX.blktrace.0` and so on, one per queue. `place` is the prefix, or a directory
    /// for files with the name of the device.
    pub fn files(place: &Path, start: &TraceStart<'_>) -> Outcome<Output> {
        let prefix = if place.is_dir() { place.join(start.name) } else { place.to_owned() };
        let path_of = |queue: usize| {
            let mut path = prefix.clone().into_os_string();
            path.push(format!(".blktrace.{queue}"));
            PathBuf::from(path)
        };
        // blkparse reads all files up to the first missing one. So the next file of an earlier trace with
        // more queues must be removed.
        remove_earlier(&path_of(start.queues))?;
        let open = |queue: usize| -> Outcome<_> {
            let (path, mut encoder, mut bytes) = (path_of(queue), Encoder::new(start.queues), Vec::new());
            let mut file = create(&path, &blktrace::HEAD)?;
            encoder.begin(queue, start.time_ns, start.since_epoch, &mut bytes);
            file.write_all(&bytes).map_err(|e| failure(&path, &e))?;
            Ok((path, file, encoder))
        };
        (0..start.queues).map(open).collect::<Outcome<_>>().map(Output::Files)
    }

    /// Creates a file of slices.
    pub fn chrome(path: &Path, start: &TraceStart<'_>) -> Outcome<Output> {
        let writer = ChromeWriter::new(create(path, HEAD)?, start.name, start.queues, start.time_ns);
        writer.map(|writer| Output::Chrome(path.to_owned(), writer)).map_err(|e| failure(path, &e))
    }

    /// Writes items, or the completed requests if the output consists of slices.
    pub fn write(&mut self, items: &[Item], requests: &[(usize, CompletedRequest)]) -> Result<(), Stopped> {
        match self {
            Output::Stdout { encode, bytes } => {
                items.iter().for_each(|item| encode(item, bytes));
                to_stdout(&std::mem::take(bytes))
            }
            Output::Files(files) => {
                let mut bytes = Vec::new();
                for item in items {
                    let (path, file, encoder) = &mut files[item.queue];
                    encoder.encode(item, &mut bytes);
                    file.write_all(&bytes).map_err(|e| failed(path, &e))?;
                    bytes.clear();
                }
                // Flush, so that readers see recent events, and a kill loses few.
                files.iter_mut().try_for_each(|(path, file, _)| file.flush().map_err(|e| failed(path, &e)))
            }
            Output::Chrome(path, writer) => {
                let mut requests = requests.iter();
                let written = requests.try_for_each(|(queue, request)| writer.request(*queue, request));
                written.map_err(|e| failed(path, &e))
            }
        }
    }

    /// Completes the output. Returns the paths of its files.
    pub fn finish(self) -> Result<Vec<PathBuf>, Stopped> {
        match self {
            Output::Stdout { bytes, .. } => to_stdout(&bytes).map(|()| Vec::new()),
            Output::Files(files) => {
                let finish = |(path, mut file, _): (PathBuf, BufWriter<File>, Encoder)| {
                    file.flush().map_err(|e| failed(&path, &e)).map(|()| path)
                };
                files.into_iter().map(finish).collect()
            }
            Output::Chrome(path, writer) => {
                writer.finish().map_err(|e| failed(&path, &e)).map(|()| vec![path])
            }
        }
    }
}

fn failed(path: &Path, error: &io::Error) -> Stopped {
    Stopped::Failed(failure(path, error))
}

fn failure(path: &Path, error: &io::Error) -> Failure {
    Failure::new(format!("cannot write {}: {error}", path.display()))
}

fn to_stdout(bytes: &[u8]) -> Result<(), Stopped> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Err(Stopped::OutputClosed),
        Err(e) => Err(Stopped::Failed(Failure::new(format!("cannot write standard output: {e}")))),
    }
}

/// The process ID that represents the device in the file.
const PROCESS: u32 = 1;

/// How a file of [`ChromeWriter`] begins.
pub const HEAD: &[u8] = b"[\n{\"args\":{\"name\":\"blkq ";

/// Writes trace events as JSON, which Perfetto and chrome://tracing open. Each request is a slice that
/// contains a slice per stage.
pub struct ChromeWriter<W: Write> {
    out: W,
    since_ns: u64,
    requests: u64,
}

impl<W: Write> ChromeWriter<W> {
    /// Begins a file for the device `name` with the given number of queues. Times in the file are relative to
    /// `since_ns`.
    pub fn new(mut out: W, name: &str, queues: usize, since_ns: u64) -> io::Result<ChromeWriter<W>> {
        let name_of = |what: &str, thread: usize, name: &str| json!({"ph": "M", "name": what, "pid": PROCESS, "tid": thread, "args": {"name": name}});
        write!(out, "[\n{}", name_of("process_name", 0, &format!("blkq {name}")))?;
        for queue in 0..queues {
            write!(out, ",\n{}", name_of("thread_name", queue, &format!("queue {queue}")))?;
        }
        Ok(ChromeWriter { out, since_ns, requests: 0 })
    }

    /// Writes a request of `queue`: a slice for its whole duration, and within it a slice per stage.
    pub fn request(&mut self, queue: usize, request: &CompletedRequest) -> io::Result<()> {
        let Some((_, begin_ns)) = request.stages.first() else { return Ok(()) };
        self.requests += 1;
        let TraceEvent { operation, sector, bytes, client, status, time_ns, .. } = request.completion;
        let mut slice = |phase: char, name: &Value, ns: u64, args: Option<Value>| {
            let us = ns.saturating_sub(self.since_ns) as f64 / 1e3;
            let mut event = json!({
                "ph": phase, "cat": "request", "id": self.requests, "pid": PROCESS, "tid": queue, "name": name, "ts": us,
            });
            if let Some(args) = args {
                event["args"] = args;
            }
            write!(self.out, ",\n{event}")
        };
        let name = json!(format!("{} {} + {}", operation.name(), sector.0, bytes >> 9));
        let arguments = json!({
            "sector": sector.0,
            "bytes": bytes,
            "client": client_name(client),
            "error": status.map(|status| status.to_string()),
        });
        slice('b', &name, *begin_ns, Some(arguments))?;
        let ends = request.stages[1..].iter().map(|(_, ns)| *ns).chain([time_ns]);
        for ((stage, begin_ns), end_ns) in request.stages.iter().zip(ends) {
            slice('b', &json!(stage), *begin_ns, None)?;
            slice('e', &json!(stage), end_ns, None)?;
        }
        slice('e', &name, time_ns, None)
    }

    pub fn finish(mut self) -> io::Result<()> {
        self.out.write_all(b"\n]\n")?;
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use blkq::trace::EventKind;
    use blkq::{Operation, Sector, Status};

    use super::super::io_tracker::Stage;
    use super::*;

    #[test]
    fn files_of_an_earlier_trace_are_not_part_of_the_next() {
        let dir = blkq_protocol::harness::scratch("trace-files");
        let mut start = TraceStart { name: "a", queues: 3, time_ns: 1, since_epoch: Duration::ZERO };
        let names = |start: &TraceStart<'_>| -> Vec<String> {
            let Ok(files) = Output::files(dir.path(), start).unwrap().finish() else { panic!("written") };
            let name = |file: &PathBuf| file.file_name().unwrap().to_str().unwrap().to_owned();
            assert!(files.iter().all(|file| file.exists()));
            files.iter().map(name).collect()
        };
        assert_eq!(names(&start), ["a.blktrace.0", "a.blktrace.1", "a.blktrace.2"]);
        start.queues = 1;
        assert_eq!(names(&start), ["a.blktrace.0"]);
        assert!(!dir.path().join("a.blktrace.1").exists());
        // Nothing else is replaced or removed.
        for name in ["a.blktrace.0", "a.blktrace.1", "a.json"] {
            let path = dir.path().join(name);
            fs::write(&path, [0; 512]).unwrap();
            assert!(Output::files(dir.path(), &start).is_err() || Output::chrome(&path, &start).is_err());
            assert_eq!(fs::read(&path).unwrap(), [0; 512]);
            fs::remove_file(&path).unwrap();
        }
        let link = dir.path().join("a.blktrace.1");
        std::os::unix::fs::symlink("/dev/null", &link).unwrap();
        assert_eq!(names(&start), ["a.blktrace.0"]);
        assert!(link.is_symlink());
        let slices = dir.path().join("a.json");
        for _ in 0..2 {
            assert!(Output::chrome(&slices, &start).unwrap().finish().is_ok());
        }
        std::fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn the_stages_of_a_request_lie_inside_of_its_slice() {
        let mut bytes = Vec::new();
        let mut writer = ChromeWriter::new(&mut bytes, "a", 2, 1000).unwrap();
        let completion = TraceEvent {
            operation: Operation::Write,
            sector: Sector(8),
            bytes: 4096,
            status: Some(Status::Io),
            ..TraceEvent::of_plug(EventKind::Complete, 0, 9000)
        };
        let request =
            CompletedRequest { stages: vec![(Stage::Queued, 2000), (Stage::Driver, 3500)], completion };
        writer.request(1, &request).unwrap();
        writer.finish().unwrap();
        assert!(bytes.starts_with(HEAD));
        let events: Vec<Value> = serde_json::from_slice(&bytes).unwrap();
        let slices: Vec<_> = events.iter().filter(|event| event["ph"] != "M").collect();
        let found: Vec<_> = slices
            .iter()
            .map(|event| (&event["ph"], &event["name"], event["ts"].as_f64().unwrap()))
            .collect();
        let (begin, end, name) = (json!("b"), json!("e"), json!("write 8 + 8"));
        let (queued, driver) = (json!("queued"), json!("driver"));
        let expected = [
            (&begin, &name, 1.0),
            (&begin, &queued, 1.0),
            (&end, &queued, 2.5),
            (&begin, &driver, 2.5),
            (&end, &driver, 8.0),
            (&end, &name, 8.0),
        ];
        assert_eq!(found, expected);
        assert_eq!(slices[0]["args"]["error"], "I/O error");
    }
}
