//! The Prometheus endpoint of a real daemon with arbitrary clients. A complete request must get one answer; an incomplete
//! one may get none; then the connection must be closed. Answers must be bounded and contain their length. A well-formed
//! request must get the right status, and the metrics must be in the exposition format and count all previous requests.
//!
//! Input, in the format of `arbitrary`: the number of other connections, the size of the pieces that are sent, then a
//! request in parts, or bytes.
// Contract: bounded-input

#[path = "../../crates/blkq-cli/tests/exposition/mod.rs"]
mod exposition;

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use arbitrary::{Arbitrary, Result, Unstructured};
use blkq_cli::commands::attach::Args;
use blkq_daemon::metrics::fuzzing::{Asked, HEAD_BYTES_MAX, Rejection, parse};
use blkq_daemon::process::Daemon;
use blkq_protocol::daemon::{Parent, Serve, Start};

const ANSWER_BYTES_MAX: usize = 128 << 10;
/// After this number of pieces, the rest is sent as one piece.
const PIECES_MAX: usize = 32;

/// A daemon in this process, with the address of its metrics.
static SOCKET: LazyLock<PathBuf> = LazyLock::new(|| {
    let directory = std::env::temp_dir().join(format!("blkq-fuzz-metrics-{}", std::process::id()));
    // SAFETY: no other thread reads or writes the environment yet.
    unsafe { std::env::set_var(blkq_protocol::state::STATE_DIR_VARIABLE, &directory) };
    std::fs::create_dir(&directory).expect("a directory");
    let socket = directory.join("metrics");
    let address = format!("unix:{}", socket.display());
    // A confined process could not continue to fuzz.
    let words = ["ram:1M", "--name", "fuzz", "--export", "nbd", "--no-sandbox", "--metrics", &address];
    let options = Args::options_from_words(&words.map(Into::into)).expect("good words");
    let daemon = Daemon::start(Start::New(&options), Vec::new(), &mut Parent::none()).expect("a daemon");
    std::thread::spawn(move || daemon.run());
    socket
});

/// Number of answers so far: with metrics, and with a rejection.
static ANSWERED: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

#[derive(Arbitrary, Debug)]
enum Field {
    Host(Vec<u8>),
    Other(u8, Vec<u8>),
    Long(u16),
    /// A line that is not a field.
    Wrong(u8),
}

#[derive(Arbitrary, Debug)]
struct Request {
    method: u8,
    target: u8,
    version: u8,
    fields: Vec<Field>,
    content: Vec<u8>,
}

impl Request {
    /// The bytes of the request, and the status that it must get.
    fn write(&self) -> (Vec<u8>, u16) {
        let (method, known) =
            [("GET", true), ("HEAD", true), ("POST", false), ("get", false)][usize::from(self.method % 4)];
        let (target, found) = [
            ("/metrics", true),
            ("/metrics?name[]=x", true),
            ("http://host:1/metrics", true),
            ("/metrics#here", true),
            ("/", false),
            ("/metrics/", false),
            ("http://host", false),
            ("*", false),
        ][usize::from(self.target % 8)];
        let (version, of_version) =
            [("HTTP/1.1", 0), ("HTTP/1.0", 0), ("HTTP/2", 505), ("ICY", 400)][usize::from(self.version % 4)];
        let mut bytes = format!("{method} {target} {version}\r\n").into_bytes();
        let (mut hosts, mut wrong) = (0, false);
        let text = |value: &[u8]| -> Vec<u8> {
            value.iter().map(|byte| if byte.is_ascii_control() { b'\t' } else { *byte }).collect()
        };
        for field in &self.fields {
            match field {
                Field::Host(value) => {
                    hosts += 1;
                    bytes.extend([b"hOsT: ", &text(value)[..]].concat());
                }
                Field::Other(name, value) => {
                    let name = ["Accept", "X", "Content-Length", "!#$%"][usize::from(name % 4)];
                    bytes.extend([name.as_bytes(), b":", &text(value)].concat());
                }
                Field::Long(length) => {
                    bytes.extend([b"Y: ", &vec![b'y'; usize::from(length % 9000)][..]].concat());
                }
                Field::Wrong(kind) => {
                    wrong = true;
                    let line = ["no colon", ": no name", "a name : x", " folded: x"][usize::from(kind % 4)];
                    bytes.extend(line.as_bytes());
                }
            }
            bytes.extend(b"\r\n");
        }
        bytes.extend(b"\r\n");
        let status = match () {
            () if bytes.len() > HEAD_BYTES_MAX => 431,
            () if wrong => 400,
            () if of_version != 0 => of_version,
            () if version == "HTTP/1.1" && hosts != 1 => 400,
            () if !known => 405,
            () if !found => 404,
            () => 200,
        };
        bytes.extend(&self.content);
        (bytes, status)
    }
}

fn status(asked: Asked) -> u16 {
    match asked {
        Asked::Metrics { .. } => 200,
        Asked::Rejected(Rejection(status, ..)) => status,
    }
}

fn connect(socket: &Path) -> UnixStream {
    let stream = UnixStream::connect(socket).expect("the endpoint listens");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
    stream
}

fn ask(pieces: &[&[u8]]) -> Vec<u8> {
    let mut stream = connect(&SOCKET);
    for piece in pieces {
        // The daemon may have stopped reading.
        if stream.write_all(piece).is_err() {
            break;
        }
    }
    let _ = stream.shutdown(Shutdown::Write);
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        // The daemon closed the connection before it read the whole request.
        Err(e) if e.kind() == ErrorKind::ConnectionReset => {}
        end => drop(end.expect("an answer in time")),
    }
    answer
}

/// Returns the status of an answer, after checking that the answer is complete and well-formed.
fn check_answer(answer: &[u8], head_only: bool) -> u16 {
    assert!(answer.len() <= ANSWER_BYTES_MAX);
    let answer = std::str::from_utf8(answer).expect("text");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    let mut lines = head.split("\r\n");
    let first = lines.next().and_then(|line| line.strip_prefix("HTTP/1.1 ")).expect("a status line");
    let status: u16 = first[..3].parse().expect("a status");
    let fields: Vec<(&str, &str)> = lines.map(|line| line.split_once(": ").expect("a field")).collect();
    let field = |name: &str| {
        let mut found = fields.iter().filter(|(of, _)| *of == name).map(|(_, value)| *value);
        (found.next(), found.next())
    };
    let (Some(length), None) = field("Content-Length") else { panic!("no length, or two") };
    let length: usize = length.parse().expect("a number");
    assert_eq!(field("Connection"), (Some("close"), None));
    assert!(field("Content-Type").0.is_some_and(|kind| kind.starts_with("text/plain; ")));
    assert_eq!(field("Allow").0.is_some(), status == 405);
    let counted = ANSWERED[usize::from(status != 200)].fetch_add(1, Relaxed) + 1;
    if status == 200 && head_only {
        assert!(body.is_empty() && length > 1000);
        return status;
    }
    assert_eq!(body.len(), length);
    if status == 200 {
        let page = exposition::check(body).expect("metrics in the format");
        let value = |name| page.value(name, &[("device", "fuzz")]).map(|value| value as u64);
        assert_eq!(value("blkq_metrics_answered_total"), Some(counted));
        assert_eq!(value("blkq_metrics_refused_total"), Some(ANSWERED[1].load(Relaxed)));
    }
    status
}

fn run(data: &[u8]) -> Result<()> {
    let mut u = Unstructured::new(data);
    // Most inputs have no other connections.
    let others = u.arbitrary::<u8>()?.saturating_sub(230);
    let at_once = 1 + usize::from(u.arbitrary::<u16>()?);
    let (bytes, made) = match u.arbitrary::<bool>()? {
        true => {
            let (bytes, status) = u.arbitrary::<Request>()?.write();
            (bytes, Some(status))
        }
        false => (u.take_rest().to_vec(), None),
    };
    let mut pieces: Vec<&[u8]> = bytes.chunks(at_once).collect();
    if pieces.len() > PIECES_MAX {
        let rest = at_once * (PIECES_MAX - 1);
        pieces.truncate(PIECES_MAX - 1);
        pieces.push(&bytes[rest..]);
    }
    // The daemon may decide after only some of the pieces.
    let mut decided = Vec::new();
    let mut arrived = 0;
    for piece in &pieces {
        arrived += piece.len();
        decided.extend(parse(&bytes[..arrived]).map(status));
    }
    if bytes.len() > HEAD_BYTES_MAX {
        decided.extend(parse(&bytes[..HEAD_BYTES_MAX]).map(status));
    }
    let _others: Vec<UnixStream> = (0..others).map(|_| connect(&SOCKET)).collect();
    let answer = ask(&pieces);
    if answer.is_empty() {
        assert!(decided.is_empty() && made.is_none(), "no answer");
        return Ok(());
    }
    let status = check_answer(&answer, bytes.starts_with(b"HEAD "));
    assert!(decided.contains(&status), "{status}, not one of {decided:?}");
    assert!(made.is_none_or(|made| made == status), "{status}, not {made:?}");
    Ok(())
}

/// Checks one input.
pub fn check(data: &[u8]) {
    let _ = run(data);
}
