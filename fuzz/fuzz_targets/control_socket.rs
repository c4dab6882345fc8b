//! The control socket of a real daemon under arbitrary clients: whatever comes, one line of JSON
//! answers, the connection ends, and the device is still there.
//!
//! Input: the number of bytes that are sent at once, then the request: as it is if that number is
//! even, else settings, one in a line, for a well-formed `set`. What ends the daemon is not sent.

#![no_main]

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

use blkq_cli::commands::attach::Args;
use blkq_cli::control::{LINE_BYTES_MAX, Reply, Request, parse_request};
use blkq_cli::daemon::{Daemon, Parent};
use libfuzzer_sys::fuzz_target;

/// A daemon in this process, and its control socket.
static SOCKET: LazyLock<PathBuf> = LazyLock::new(|| {
    let directory = std::env::temp_dir().join(format!("blkq-fuzz-control-{}", std::process::id()));
    // SAFETY: nothing else runs yet.
    unsafe { std::env::set_var(blkq_cli::state::STATE_DIR_VARIABLE, &directory) };
    // Confined, this process could not go on fuzzing.
    let words = ["ram:1M", "--name", "fuzz", "--export", "nbd", "--fault", "none", "--queues", "2", "--no-sandbox"];
    let args = Args::from_words(&words.map(Into::into)).expect("good words");
    let daemon = Daemon::start(&args, &mut Parent::none()).expect("a daemon");
    std::thread::spawn(move || daemon.run());
    directory.join("fuzz.control")
});

fn ask(request: &[u8], at_once: usize) -> Vec<u8> {
    let mut stream = UnixStream::connect(&*SOCKET).expect("the daemon listens");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
    for piece in request.chunks(at_once) {
        // It may have heard enough.
        if stream.write_all(piece).is_err() {
            break;
        }
    }
    let _ = stream.shutdown(Shutdown::Write);
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        // Closed before all of the request was read.
        Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => {}
        end => drop(end.expect("an answer in time")),
    }
    answer
}

fuzz_target!(|data: &[u8]| {
    let Some((choice, rest)) = data.split_first() else { return };
    let mut request = rest.to_vec();
    if choice % 2 == 1 {
        let settings = String::from_utf8_lossy(rest)
            .lines()
            .filter_map(|line| line.split_once('='))
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect();
        request = serde_json::to_vec(&Request::Set { settings }).expect("strings");
        request.push(b'\n');
    }
    let line = request.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let parsed = parse_request(line);
    if let Ok(request) = &parsed {
        // It is understood in the same way again.
        let again = serde_json::to_vec(request).expect("a request");
        assert_eq!(parse_request(&again).as_ref(), Ok(request));
    }
    if let Err(failure) = &parsed {
        assert!(!failure.to_string().contains('\n'));
    }
    match &parsed {
        Ok(Request::Detach { .. } | Request::Leave {}) => return,
        // More than this machine's memory would be its owner's own doing.
        Ok(Request::Resize { size: Some(size) }) if (64 << 20..=i64::MAX as u64).contains(size) => return,
        _ => {}
    }
    let at_once = 1 + usize::from(*choice) * 16;
    let answer = ask(&request, at_once);
    assert!(answer.len() <= LINE_BYTES_MAX);
    let cut_off = request.len() > LINE_BYTES_MAX || line.len() < request.len();
    assert!(cut_off || answer.ends_with(b"\n"), "{:?}", String::from_utf8_lossy(&answer));
    if !answer.is_empty() {
        let reply: Reply<serde_json::Value> = serde_json::from_slice(&answer).expect("JSON");
        let complete = request.contains(&b'\n') && line.len() < LINE_BYTES_MAX;
        assert!(complete && parsed.is_ok() || matches!(reply, Reply::Error(_)), "{reply:?}");
    }
    let alive = serde_json::from_slice::<Reply<()>>(&ask(b"{\"command\":\"ping\"}\n", usize::MAX));
    assert_eq!(alive.expect("JSON"), Reply::Ok(()));
});
