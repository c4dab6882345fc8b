//! The control socket of a real daemon with arbitrary clients. The daemon must answer each request with one line of JSON,
//! close the connection, and continue to serve the device.
//!
//! Input: a byte that selects the size of the pieces in which the request is sent, then the request. If the byte is
//! even, the request is in the input as it is sent; if the byte is odd, the input contains the settings of a well-formed
//! `set`, one per line. The byte 255 is an exception: choices follow, from which requests are generated, some valid and
//! some with a defect, and the device must then have the expected settings. A command that would stop the daemon is not
//! sent.
// Contract: bounded-input

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

use arbitrary::{Result, Unstructured};
use blkq_cli::commands::attach::Args;
use blkq_daemon::process::Daemon;
use blkq_protocol::control::{LINE_BYTES_MAX, REPLY_BYTES_MAX, Reply, Request, parse_request};
use blkq_protocol::daemon::{Parent, Serve, Start};
use blkq_protocol::info::DeviceInfo;
use serde_json::{Value, json};

/// Settings that `show` reports, with valid values in the format of `show`, then invalid values.
const SETTINGS: [(&str, &[&str], &[&str]); 8] = [
    ("scheduler", &["none", "mq-deadline", "kyber"], &["", "deadline", "None"]),
    ("depth", &["1", "2", "64", "128"], &["0", "-1", "65536", "x"]),
    ("merge", &["on", "off"], &["yes", ""]),
    ("batching", &["on", "off"], &["1"]),
    ("iostats", &["on", "off"], &["0"]),
    ("clock", &["cached", "precise"], &["fast"]),
    ("hang-warning", &["0", "0.5", "30", "86400"], &["-1", "NaN", "inf", "1e9", ""]),
    ("nonsense", &[], &["on", ""]),
];
/// Settings that are reported elsewhere, or not at all.
const OTHERS: [(&str, &[&str], &[&str]); 3] = [
    ("read-only", &["on", "off"], &["", "true"]),
    ("autoclear", &["off"], &["", "never"]),
    ("fault", &["none", "error=EIO,op=write,rate=1%", "delay=2ms,p99=20ms;seed=7"], &["error=", "delay=1"]),
];

/// A daemon in this process, with its control socket.
static SOCKET: LazyLock<PathBuf> = LazyLock::new(|| {
    let directory = std::env::temp_dir().join(format!("blkq-fuzz-control-{}", std::process::id()));
    // SAFETY: no other thread reads or writes the environment yet.
    unsafe { std::env::set_var(blkq_protocol::state::STATE_DIR_VARIABLE, &directory) };
    // A confined process could not continue to fuzz.
    let words =
        ["ram:1M", "--name", "fuzz", "--export", "nbd", "--fault", "none", "--queues", "2", "--no-sandbox"];
    let options = Args::options_from_words(&words.map(Into::into)).expect("good words");
    let daemon = Daemon::start(Start::New(&options), Vec::new(), &mut Parent::none()).expect("a daemon");
    std::thread::spawn(move || daemon.run());
    directory.join("fuzz.control")
});

fn ask(request: &[u8], piece_bytes: usize) -> Vec<u8> {
    let mut stream = UnixStream::connect(&*SOCKET).expect("the daemon listens");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
    for piece in request.chunks(piece_bytes) {
        // The daemon may have stopped reading.
        if stream.write_all(piece).is_err() {
            break;
        }
    }
    let _ = stream.shutdown(Shutdown::Write);
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        // The daemon closed the connection before it read the whole request.
        Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => {}
        end => drop(end.expect("an answer in time")),
    }
    answer
}

/// Returns the daemon's answer, if it sent one.
fn answered<T: serde::de::DeserializeOwned>(request: &Value, piece_bytes: usize) -> Option<Reply<T>> {
    let mut line = serde_json::to_vec(request).expect("JSON");
    line.push(b'\n');
    let answer = ask(&line, piece_bytes);
    (!answer.is_empty()).then(|| serde_json::from_slice(&answer).expect("a reply"))
}

fn show() -> DeviceInfo {
    match answered(&json!({ "command": "show" }), usize::MAX) {
        Some(Reply::Ok(info)) => info,
        reply => panic!("show: {reply:?}"),
    }
}

/// Sends several settings in one `set`, and checks that exactly those before the first invalid one take effect.
fn set(u: &mut Unstructured<'_>, piece_bytes: usize) -> Result<()> {
    let all = [&SETTINGS[..], &OTHERS].concat();
    let (mut settings, mut done) = (Vec::new(), None);
    for number in 0..u.int_in_range(1..=6)? {
        let (key, good, bad) = *u.choose(&all)?;
        let is_good = !good.is_empty() && u.ratio(7, 8)?;
        settings.push((key, *u.choose(if is_good { good } else { bad })?));
        if !is_good && done.is_none() {
            done = Some(number);
        }
    }
    let before = show();
    let reply: Option<Reply<()>> = answered(&json!({ "command": "set", "settings": settings }), piece_bytes);
    assert_eq!(matches!(reply, Some(Reply::Ok(()))), done.is_none(), "{settings:?}: {reply:?}");
    let after = show();
    let settings = &settings[..done.unwrap_or(settings.len())];
    let last = |key: &str| settings.iter().rev().find(|(other, _)| *other == key).map(|(_, value)| *value);
    for ((key, is), (_, was)) in after.settings.iter().zip(&before.settings) {
        assert_eq!(is, last(key).unwrap_or(was), "{key} after {settings:?}");
    }
    assert_eq!(after.read_only, last("read-only").map_or(before.read_only, |value| value == "on"));
    Ok(())
}

/// Checks that a device in memory cannot be resized.
fn resize(u: &mut Unstructured<'_>, piece_bytes: usize) -> Result<()> {
    let size: Option<u64> = u.arbitrary()?;
    let reply: Option<Reply<u64>> = answered(&json!({ "command": "resize", "size": size }), piece_bytes);
    assert!(matches!(reply, Some(Reply::Error(_))), "{size:?}: {reply:?}");
    assert_eq!(show().size, 1 << 20);
    Ok(())
}

/// A request in which a field is missing, has another type, exists twice, or is added.
fn broken(u: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    let commands = ["ping", "show", "stat", "set", "resize", "leave", "detach", "reboot", ""];
    let mut fields = vec![("command".to_owned(), json!(u.choose(&commands)?))];
    for _ in 0..u.int_in_range(0..=3)? {
        let name = *u.choose(&["settings", "size", "force", "command", "name", ""])?;
        let value = match u.int_in_range(0..=7)? {
            0 => Value::Null,
            1 => json!(u.arbitrary::<bool>()?),
            2 => json!(u.arbitrary::<i64>()?),
            3 => json!(u.arbitrary::<f64>()?),
            4 => json!(u.arbitrary::<&str>()?),
            5 => json!([["depth", "64"], u.arbitrary::<&str>()?]),
            6 => json!([[u.arbitrary::<&str>()?, u.arbitrary::<&str>()?]]),
            _ => json!({ "depth": u.arbitrary::<u16>()? }),
        };
        fields.push((name.to_owned(), value));
    }
    // Formats the request by hand, because an object of serde_json contains each name only once.
    let fields: Vec<String> = fields.iter().map(|(name, value)| format!("{}:{value}", json!(name))).collect();
    let mut line = format!("{{{}}}", fields.join(",")).into_bytes();
    if u.ratio(1, 8)? {
        line.truncate(u.int_in_range(0..=line.len())?);
    }
    if u.ratio(7, 8)? {
        line.push(b'\n');
    }
    Ok(line)
}

fn send_generated(u: &mut Unstructured<'_>) -> Result<()> {
    for _ in 0..u.int_in_range(1..=4)? {
        let piece_bytes = if u.ratio(1, 2)? { usize::MAX } else { u.int_in_range(1..=64)? };
        match u.int_in_range(0..=3)? {
            0 => set(u, piece_bytes)?,
            1 => resize(u, piece_bytes)?,
            2 => {
                let reply: Option<Reply<Value>> = answered(&json!({ "command": "stat" }), piece_bytes);
                assert!(matches!(reply, Some(Reply::Ok(Value::Object(_)))), "{reply:?}");
            }
            _ => request(&broken(u)?, piece_bytes),
        }
    }
    Ok(())
}

/// Sends `request`, unless it would stop the daemon, and checks the reply.
fn request(request: &[u8], piece_bytes: usize) {
    let line = request.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let parsed = parse_request(line);
    if let Ok(request) = &parsed {
        // The request must keep its meaning after it was formatted again.
        let again = serde_json::to_vec(request).expect("a request");
        assert_eq!(parse_request(&again).as_ref(), Ok(request));
    }
    if let Err(failure) = &parsed {
        assert!(!failure.to_string().contains('\n'));
    }
    match &parsed {
        // The connection of a trace stays open.
        Ok(Request::Detach { .. } | Request::Leave {} | Request::Trace { .. }) => return,
        // The owner of the socket may exhaust the memory of the machine; the fuzzer must not.
        Ok(Request::Resize { size: Some(size), .. }) if (64 << 20..=i64::MAX as u64).contains(size) => return,
        _ => {}
    }
    let answer = ask(request, piece_bytes);
    assert!(answer.len() <= REPLY_BYTES_MAX);
    let cut_off = request.len() > LINE_BYTES_MAX || line.len() < request.len();
    assert!(cut_off || answer.ends_with(b"\n"), "{:?}", String::from_utf8_lossy(&answer));
    if !answer.is_empty() {
        let reply: Reply<serde_json::Value> = serde_json::from_slice(&answer).expect("JSON");
        let complete = request.contains(&b'\n') && line.len() < LINE_BYTES_MAX;
        assert!(complete && parsed.is_ok() || matches!(reply, Reply::Error(_)), "{reply:?}");
    }
    let alive = serde_json::from_slice::<Reply<()>>(&ask(b"{\"command\":\"ping\"}\n", usize::MAX));
    assert_eq!(alive.expect("JSON"), Reply::Ok(()));
}

/// Checks one input.
pub fn check(data: &[u8]) {
    let Some((choice, rest)) = data.split_first() else { return };
    if *choice == u8::MAX {
        // The requests stop when the choices are used up.
        let _ = send_generated(&mut Unstructured::new(rest));
        return;
    }
    let mut line = rest.to_vec();
    if choice % 2 == 1 {
        let settings = String::from_utf8_lossy(rest)
            .lines()
            .filter_map(|line| line.split_once('='))
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect();
        line = serde_json::to_vec(&Request::Set { settings }).expect("strings");
        line.push(b'\n');
    }
    request(&line, 1 + usize::from(*choice) * 16);
}
