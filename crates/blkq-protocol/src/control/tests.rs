use std::io::{BufRead, BufReader};

use super::*;

#[test]
fn requests_survive_encoding_and_parsing() {
    let options = Record::new(&crate::harness::options(&["d", "--format", "qcow2"])).unwrap();
    for request in [
        Request::Ping {},
        Request::Show {},
        Request::Stat {},
        Request::Set { settings: vec![("depth".into(), "64".into())] },
        Request::Resize { size: None, grow_by: None, force: false, user: None },
        Request::Resize {
            size: Some(1 << 40),
            grow_by: None,
            force: true,
            user: Some("process 1 (a)".into()),
        },
        Request::Resize { size: None, grow_by: Some(512), force: false, user: None },
        Request::Resume { fail: true },
        Request::Bitmaps {},
        Request::BitmapFile {},
        Request::Bitmap { change: BitmapChange::Add { name: "a b".into(), granularity: 512 } },
        Request::Bitmap { change: BitmapChange::Remove { name: "b".into() } },
        Request::Bitmap { change: BitmapChange::Clear { name: "b".into() } },
        Request::Bitmap { change: BitmapChange::Enable { name: "b".into() } },
        Request::Bitmap { change: BitmapChange::Disable { name: "b".into() } },
        Request::Bitmap { change: BitmapChange::Merge { from: vec!["a".into()], into: "b".into() } },
        Request::Trace { ring_bytes: 1 << 24 },
        Request::Apply { settings: vec![("depth".into(), "64".into())] },
        Request::ReloadCertificates {},
        Request::Snapshot { options, image: Some(3) },
        Request::Commit { image: Some(3) },
        Request::Leave {},
        Request::Detach { force: true },
    ] {
        let line = serde_json::to_vec(&request).unwrap();
        assert_eq!(parse_request(&line).unwrap(), request);
    }
    assert_eq!(
        parse_request(br#"{"command":"detach","force":false}"#).unwrap(),
        Request::Detach { force: false }
    );
    // Clients and daemons of older versions do not have the newer fields.
    let line = br#"{"command":"resize","size":512}"#;
    let resize = Request::Resize { size: Some(512), grow_by: None, force: false, user: None };
    assert_eq!(parse_request(line).unwrap(), resize);
    assert_eq!(serde_json::to_vec(&resize).unwrap(), line);
}

#[test]
fn the_hint_for_a_daemon_of_an_older_program_is_upgrade() {
    for line in [&br#"{"command":"join-hands"}"#[..], br#"{"command":"resize","size":1,"shape":2}"#] {
        let unknown = parse_request(line).unwrap_err().to_string();
        let why = refused("a", &unknown).to_string();
        assert!(
            why.contains("is older than this program") && why.contains("`blkq upgrade a`"),
            "{unknown}: {why}"
        );
    }
    assert_eq!(refused("a", "it is busy").to_string(), "it is busy");
}

#[test]
fn a_rejected_client_gets_the_reason() {
    let (client, daemon) = UnixStream::pair().unwrap();
    (&daemon).write_all(&reply_line::<()>(Err(Failure::new("too many commands")))).unwrap();
    drop(daemon);
    send(&client, &Request::Ping {}).unwrap();
    let reply = receive::<()>(&client, ANSWER_TIMEOUT).unwrap();
    assert_eq!(reply, Reply::Error("too many commands".to_owned()));
    // A daemon that was killed has sent nothing.
    let (client, daemon) = UnixStream::pair().unwrap();
    drop(daemon);
    send(&client, &Request::Ping {}).unwrap();
    assert!(is_cut_off(&receive::<()>(&client, ANSWER_TIMEOUT).unwrap_err()));
}

// Contract: detach
#[test]
fn a_forced_stop_reports_what_it_waits_for_and_is_bounded() {
    let dir = crate::harness::scratch("bounded");
    // A daemon whose storage does not respond: it accepts the command and reports its statistics.
    let daemon = std::os::unix::net::UnixListener::bind(dir.control_socket("a")).unwrap();
    let serve = std::thread::spawn(move || {
        let mut kept = Vec::new();
        for _ in 0..3 {
            let (mut stream, _) = daemon.accept().unwrap();
            let mut line = String::new();
            BufReader::new(&stream).read_line(&mut line).unwrap();
            if line.contains("stat") {
                stream.write_all(&reply_line(Ok(&Statistics::default()))).unwrap();
            }
            kept.push(stream);
        }
    });
    let timeouts = [Duration::from_millis(50), Duration::from_millis(200)];
    let mut reported = String::new();
    let forced = Request::Detach { force: true };
    let report = |what: &str| reported.push_str(what);
    let failure = call_with::<()>(&dir, "a", &forced, timeouts, report).unwrap_err().to_string();
    assert_eq!(reported, "the last flush");
    let own = format!("kill -9 {}", std::process::id());
    assert!(failure.contains("still waiting for the last flush") && failure.contains(&own), "{failure}");
    serve.join().unwrap();
    std::fs::remove_dir_all(dir.path()).unwrap();
}

// Contract: detach
#[test]
fn a_stop_that_waits_for_a_client_names_it() {
    let dir = crate::harness::scratch("waits-for-client");
    let daemon = std::os::unix::net::UnixListener::bind(dir.control_socket("a")).unwrap();
    let serve = std::thread::spawn(move || {
        let client = |peer: &str, in_flight: u64| {
            let (peer, seconds) = (peer.to_owned(), 0);
            let (requests, errors, read_bytes, written_bytes) = (9, 0, 0, 0);
            ClientInfo { peer, seconds, requests, errors, read_bytes, written_bytes, in_flight }
        };
        let clients = [client("idle", 0), client("pid 7, uid 0", 1), client("pid 8, uid 0", 2)];
        let mut kept = Vec::new();
        while kept.len() < 5 {
            let (mut stream, _) = daemon.accept().unwrap();
            let mut line = String::new();
            BufReader::new(&stream).read_line(&mut line).unwrap();
            let nbd = crate::control::statistics::Nbd { connected: 3, ..Default::default() };
            if line.contains("stat") {
                let mut statistics = Statistics::default();
                statistics.nbd = Some(nbd);
                stream.write_all(&reply_line(Ok(statistics))).unwrap();
            } else if line.contains("show") {
                stream.write_all(&reply_line(Ok(serde_json::json!({ "clients": clients })))).unwrap();
            }
            kept.push(stream);
        }
    });
    let timeouts = [Duration::from_millis(50), Duration::from_millis(200)];
    let mut reported = String::new();
    let forced = Request::Detach { force: true };
    let report = |what: &str| reported.push_str(what);
    let failure = call_with::<()>(&dir, "a", &forced, timeouts, report).unwrap_err().to_string();
    assert_eq!(reported, "the NBD client (pid 7, uid 0) and 1 more to take their replies");
    assert!(failure.contains(&reported) && !failure.contains("does not respond"), "{failure}");
    serve.join().unwrap();
    std::fs::remove_dir_all(dir.path()).unwrap();
}

// Contract: detach
#[test]
fn a_stop_that_waits_for_held_requests_prints_a_hint() {
    let dir = crate::harness::scratch("waits-for-held");
    let daemon = std::os::unix::net::UnixListener::bind(dir.control_socket("a")).unwrap();
    let serve = std::thread::spawn(move || {
        let (mut asker, _) = daemon.accept().unwrap();
        // The last requests are in flight first, and held later.
        for (held, in_flight) in [(0, 1), (2, 2), (2, 2)] {
            let (mut stream, _) = daemon.accept().unwrap();
            BufReader::new(&stream).read_line(&mut String::new()).unwrap();
            let mut statistics = serde_json::to_value(Statistics::default()).unwrap();
            statistics["held"] = held.into();
            statistics["in_flight"] = vec![0, in_flight].into();
            stream.write_all(&reply_line(Ok(statistics))).unwrap();
        }
        asker.write_all(&reply_line(Ok(()))).unwrap();
    });
    let stream = dir.connect("a", ANSWER_TIMEOUT).unwrap();
    let mut reported = Vec::new();
    let report = |what: &str| reported.push(what.to_owned());
    wait_for_stop(&dir, "a", &stream, Duration::from_millis(50), None, report).unwrap();
    let held =
        "2 requests held after I/O errors; `blkq resume a` reissues them, `blkq resume --fail a` fails them";
    assert_eq!(reported, ["1 request in flight", held]);
    serve.join().unwrap();
    std::fs::remove_dir_all(dir.path()).unwrap();
}

#[test]
fn malformed_requests_are_rejected() {
    for line in [
        "",
        "null",
        "[]",
        "{",
        "\u{0}",
        r#"{"command":"reboot"}"#,
        r#"{"command":"ping","force":true}"#,
        r#"{"command":"detach"}"#,
        r#"{"command":"detach","force":1}"#,
        r#"{"command":"resize","size":-1}"#,
        r#"{"command":"resize","size":1,"force":"no"}"#,
        r#"{"command":"set","settings":[["a"]]}"#,
        r#"{"command":"ping"} {}"#,
    ] {
        assert!(parse_request(line.as_bytes()).is_err(), "{line}");
    }
    assert!(parse_request(&[0xff, 0xfe]).is_err());
    assert!(parse_request("[".repeat(LINE_BYTES_MAX).as_bytes()).is_err());
}

#[test]
fn a_reply_is_one_bounded_line() {
    let long = reply_line(Ok("x".repeat(REPLY_BYTES_MAX)));
    assert!(long.len() < 200 && long.ends_with(b"\n"));
    assert!(matches!(serde_json::from_slice(&long).unwrap(), Reply::<String>::Error(_)));
    let lines = reply_line(Ok("two\nlines"));
    assert_eq!(lines.iter().filter(|b| **b == b'\n').count(), 1);
    assert_eq!(serde_json::from_slice::<Reply<()>>(&reply_line(Ok(()))).unwrap(), Reply::Ok(()));
}
