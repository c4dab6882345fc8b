//! Hang warnings, statistics and metrics, as a user sees them.

use blkq::testing::{assert_stays, wait_until};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::exposition::{Exposition, check};
use crate::place::*;

/// The time after which the metrics endpoint closes a connection.
const SLOW_CLIENT: Duration = Duration::from_secs(5);

fn log(place: &Place, name: &str) -> String {
    fs::read_to_string(place.state().join(format!("{name}.log"))).unwrap_or_default()
}

fn lines_with(place: &Place, what: &str) -> Vec<String> {
    log(place, "ram").lines().filter(|line| line.contains(what)).map(str::to_owned).collect()
}

// Contract: errors
#[test]
fn a_hang_is_logged_with_its_client_and_its_completion() {
    let place = Place::new("hang");
    let fault = "stuck,op=write,range=8K-12K";
    let words = ["attach", "ram:1M", "--hang-warning", "0.2", "--depth", "2", "--fault", fault, "--no-merge"];
    let uri = String::from_utf8(place.run(&words).stdout).unwrap();
    let mut client = session(&uri, "ram");
    request(&mut client, 1, 0xabc, 8192, 4096);
    request(&mut client, 1, 0xabd, 8192, 512);
    // Both tags are taken now.
    request(&mut client, 0, 0xabe, 0, 512);
    wait_until("three lines", || lines_with(&place, " hang: #").len() == 3);
    let lines = lines_with(&place, " hang: #");
    for (line, parts) in lines.iter().zip([
        ["#0.1 write sector 16 + 8, queue 0, tag ", "stuck by a fault rule", "cookie 0xabc"],
        ["#0.2 write sector 16 + 1, queue 0, tag ", "stuck by a fault rule", "cookie 0xabd"],
        ["#0.3 read sector 0 + 1, queue 0, no tag", "waiting for a tag, first in line", "cookie 0xabe"],
    ]) {
        let client = format!("nbd client 1 (pid {}, uid ", std::process::id());
        assert!(line.contains(&client) && parts.iter().all(|part| line.contains(part)), "{line}");
    }
    assert_stays("each is logged once", || lines_with(&place, " hang: #").len() == 3);
    let stat = place.json(&["stat", "ram", "--json"]);
    assert_eq!((&stat["hangs"]["now"], &stat["hangs"]["found"]), (&3.into(), &3.into()));
    assert_eq!(stat["hangs"]["warning_seconds"], 0.2);
    place.done(&["set", "ram", "fault=none"]);
    let mut cookies: Vec<u64> = [0, 0, 512]
        .map(|content| reply(&mut client, content))
        .map(|(error, cookie)| {
            assert_eq!(error, 0);
            cookie
        })
        .into();
    cookies.sort_unstable();
    assert_eq!(cookies, [0xabc, 0xabd, 0xabe]);
    wait_until("three completions", || lines_with(&place, " hang over: #").len() == 3);
    assert!(lines_with(&place, " hang over: #").iter().all(|line| line.contains("completed after ")));
    assert_eq!(place.json(&["stat", "ram", "--json"])["hangs"]["now"], 0);
}

#[test]
fn the_warning_is_a_live_setting_and_works_without_statistics() {
    let place = Place::new("hangset");
    let words = ["attach", "ram:1M", "--hang-warning", "0", "--no-iostats", "--fault", "stuck,op=flush"];
    let uri = String::from_utf8(place.run(&words).stdout).unwrap();
    assert_eq!(place.json(&["show", "ram", "--json"])["settings"]["hang-warning"], 0);
    let mut client = session(&uri, "ram");
    // Flushes of a device in memory do not reach the driver, so reads get stuck instead.
    place.done(&["set", "ram", "fault=stuck,op=read"]);
    request(&mut client, 0, 5, 0, 512);
    assert_stays("the warning is off", || lines_with(&place, "hang:").is_empty());
    for bad in ["hang-warning=x", "hang-warning=-1", "hang-warning=0.01", "hang-warning=1e9"] {
        assert!(place.refused(&["set", "ram", bad]).contains("must be 0.1 to 86400 seconds"));
    }
    place.done(&["set", "ram", "hang-warning=0.1"]);
    assert_eq!(place.json(&["show", "ram", "--json"])["settings"]["hang-warning"], 0.1);
    wait_until("a line", || lines_with(&place, " hang: #").len() == 1);
    let stat = place.json(&["stat", "ram", "--json"]);
    assert_eq!((&stat["counters"]["clock-reads"], &stat["hangs"]["found"]), (&0.into(), &1.into()));
    place.done(&["set", "ram", "fault=none"]);
    assert_eq!(reply(&mut client, 512), (0, 5));
    wait_until("its completion", || lines_with(&place, " hang over: #").len() == 1);
    for bad in [["--hang-warning", "-1"], ["--hang-warning", "nan"], ["--metrics", "http://a"]] {
        let output = place.run(&[&["attach", "ram:1M"], &bad[..]].concat());
        assert_eq!(output.status.code(), Some(2), "{bad:?}");
    }
}

// Contract: statistics
#[test]
fn stat_shows_all_that_is_counted() {
    let place = Place::new("statall");
    let image = place.image("d", 1 << 20);
    let uri = place.done(&["attach", &image, "--name", "d"]);
    let mut client = session(&uri, "d");
    for n in 0..20u64 {
        request(&mut client, 1, n, n * 8192, 4096);
        assert_eq!(reply(&mut client, 0), (0, n));
    }
    request(&mut client, 3, 99, 0, 0);
    assert_eq!(reply(&mut client, 0).0, 0);
    request(&mut client, 0, 1, 2 << 20, 512);
    assert_eq!(reply(&mut client, 0).0, 22, "beyond the end");
    let page = place.done(&["stat", "d", "--histogram"]);
    let lines: Vec<&str> = page.lines().collect();
    let operations: Vec<&str> =
        lines[2..4].iter().filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(operations, ["write", "flush"], "{page}");
    assert!(lines[1..4].iter().all(|line| line.len() == lines[1].len()), "{page}");
    assert!(page.contains("totals     write 20 (0.08 MB), flush 1\n"), "{page}");
    assert!(page.contains("flushes    1 requested, 1 sent, 0 coalesced\n"), "{page}");
    assert!(page.contains("nbd        1 connected, 1 connections, 0 rejected"), "{page}");
    assert!(page.contains("22 requests, 1 errors, 1 invalid requests\n"), "{page}");
    assert!(
        page.contains("\nwrite: 20 latencies (from, to, count, share)\n") && !page.contains("\nread: "),
        "{page}"
    );
    let stat = place.json(&["stat", "d", "--json", "--histogram"]);
    let bars = stat["write"]["histogram"].as_array().unwrap();
    assert_eq!(bars.iter().map(|bar| bar["count"].as_u64().unwrap()).sum::<u64>(), 20);
    let write = |name: &str| stat["write"][name].as_f64().unwrap();
    let percentiles =
        ["latency_p50_us", "latency_p90_us", "latency_p99_us", "latency_p999_us", "latency_max_us"];
    let values = percentiles.map(write);
    assert!(values[0] > 0.0 && values.is_sorted(), "{values:?}");
}

/// The answer of the endpoint at `uri` to `request`.
fn answer(uri: &str, request: &[u8]) -> String {
    let mut answer = Vec::new();
    match uri.strip_prefix("http+unix://") {
        Some(path) => talk(UnixStream::connect(path).unwrap(), request, &mut answer),
        None => {
            let address = uri.strip_prefix("http://").unwrap().strip_suffix("/metrics").unwrap();
            talk(TcpStream::connect(address).unwrap(), request, &mut answer);
        }
    }
    String::from_utf8(answer).unwrap()
}

fn talk(mut stream: impl Read + Write, request: &[u8], answer: &mut Vec<u8>) {
    // The server may answer and close before it has read everything.
    let _ = stream.write_all(request);
    let _ = stream.read_to_end(answer);
}

fn scrape(uri: &str) -> Exposition {
    let answer = answer(uri, b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n");
    let (head, text) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(head.contains("Content-Type: text/plain; version=0.0.4"), "{head}");
    check(text).unwrap()
}

fn metrics_uri(place: &Place, name: &str) -> String {
    place.json(&["show", name, "--json"])["settings"]["metrics"].as_str().unwrap().to_owned()
}

// Contract: statistics
#[test]
fn metrics_are_well_formed_and_count_what_happens() {
    let place = Place::new("metrics");
    let image = place.image("d", 1 << 20);
    let socket = place.dir.join("m.sock");
    let at = format!("unix:{}", socket.display());
    let uri = place.done(&["attach", &image, "--name", "d", "--metrics", &at]);
    assert_eq!(fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    let metrics = metrics_uri(&place, "d");
    let before = scrape(&metrics);
    let mut client = session(&uri, "d");
    for n in 0..10u64 {
        request(&mut client, 1, n, n * 8192, 4096);
        assert_eq!(reply(&mut client, 0), (0, n));
    }
    request(&mut client, 3, 99, 0, 0);
    assert_eq!(reply(&mut client, 0).0, 0);
    let after = scrape(&metrics);
    let write = [("op", "write"), ("device", "d")];
    let rose = |name: &str, labels: &[(&str, &str)]| {
        after.value(name, labels).unwrap() - before.value(name, labels).unwrap()
    };
    assert_eq!(rose("blkq_ios_total", &write), 10.0);
    assert_eq!(rose("blkq_transferred_bytes_total", &write), 40960.0);
    assert_eq!(rose("blkq_latency_seconds_count", &write), 10.0);
    assert!(rose("blkq_latency_seconds_sum", &write) > 0.0);
    assert_eq!(rose("blkq_flushes_sent_total", &[]), 1.0);
    assert_eq!(
        (rose("blkq_nbd_connections_total", &[]), rose("blkq_nbd_written_bytes_total", &[])),
        (1.0, 40960.0)
    );
    assert_eq!(
        (after.value("blkq_in_flight", &[("direction", "other")]), after.value("blkq_size_bytes", &[])),
        (Some(0.0), Some(1048576.0))
    );
    assert_eq!(after.value("blkq_hang_warning_seconds", &[]), Some(30.0));
    assert_eq!(after.value("blkq_metrics_answered_total", &[]), Some(2.0));
    // No counter ever decreases.
    for family in after.families.iter().filter(|family| family.kind != "gauge") {
        for sample in &family.samples {
            let labels: Vec<(&str, &str)> =
                sample.labels.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
            assert!(sample.value >= before.value(&sample.name, &labels).unwrap(), "{sample:?}");
        }
    }
    drop(client);
    place.done(&["detach", "d", "--force"]);
    assert!(!socket.exists());
}

// Contract: bounded-input
#[test]
fn metrics_are_for_this_machine_unless_said_otherwise() {
    let place = Place::new("loopback-metrics");
    let refused = place.refused(&["attach", "ram:1M", "--export", "nbd", "--metrics", "tcp:0.0.0.0:0"]);
    assert!(refused.contains("other machines can read") && refused.contains("--insecure"), "{refused}");
    assert!(place.files().is_empty(), "nothing is left of it");
    let output = place.run(&["attach", "ram:1M", "--metrics", "tcp:0.0.0.0:0", "--insecure"]);
    assert_eq!(output.status.code(), Some(0));
    assert!(String::from_utf8(output.stderr).unwrap().contains("can read the metrics"));
    scrape(&metrics_uri(&place, "ram").replace("0.0.0.0", "127.0.0.1"));
    // A server that listens already keeps the address, and the device is not attached.
    let taken = metrics_uri(&place, "ram").replace("http://", "tcp:").replace("/metrics", "");
    let other = place.refused(&["attach", "ram:1M", "--export", "nbd", "--metrics", &taken, "--insecure"]);
    assert!(other.contains("--metrics: cannot listen on"), "{other}");
    assert_eq!(place.json(&["list", "--json"]).as_array().unwrap().len(), 1);
    // The stale socket of a killed daemon does not prevent an attach.
    let at = format!("unix:{}", place.dir.join("m.sock").display());
    place.done(&["attach", "ram:1M", "--name", "k", "--metrics", &at]);
    kill(place.pid("k"));
    place.done(&["attach", "ram:1M", "--name", "k", "--metrics", &at]);
    scrape(&metrics_uri(&place, "k"));
}

// Contract: bounded-input
#[test]
fn hostile_http_clients_are_shed_and_the_device_is_not_slowed() {
    let place = Place::new("http");
    let uri = place.done(&["attach", "ram:1M", "--metrics", "tcp:127.0.0.1:0"]);
    let metrics = metrics_uri(&place, "ram");
    let address = metrics.strip_prefix("http://").unwrap().strip_suffix("/metrics").unwrap().to_owned();
    for (request, status) in [
        (&b"POST /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc"[..], "405 "),
        (b"GET /etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n", "404 "),
        (b"GET /metrics HTTP/3.0\r\nHost: a\r\n\r\n", "505 "),
        (b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03", "400 "),
        (&[b'x'; 1 << 20], "431 "),
        (&[0; 100_000], "400 "),
    ] {
        let answered = answer(&metrics, request);
        assert!(answered.starts_with(&format!("HTTP/1.1 {status}")), "{answered}");
    }
    let serve = || {
        scrape(&metrics);
        let mut client = session(&uri, "ram");
        request(&mut client, 0, 1, 0, 4096);
        assert_eq!(reply(&mut client, 4096), (0, 1));
    };
    assert_eq!(scrape(&metrics).value("blkq_metrics_refused_total", &[]), Some(6.0));
    // A busy machine may need more than one attempt to be faster than the time that a slow client has.
    let in_time = |what: &str, attempt: &mut dyn FnMut()| {
        wait_until(what, || {
            let begin = Instant::now();
            attempt();
            begin.elapsed() < SLOW_CLIENT
        });
    };
    // Clients that send nothing, or too slowly, do not block others.
    let mut slow = Vec::new();
    in_time("others are served while slow clients are connected", &mut || {
        slow = (0..100).map(|_| TcpStream::connect(&address).unwrap()).collect::<Vec<_>>();
        slow.iter_mut().for_each(|stream| _ = stream.write_all(b"GET /met"));
        serve();
    });
    let page = scrape(&metrics);
    assert!(page.value("blkq_metrics_shed_total", &[]).unwrap() >= 80.0, "84 had no place");
    // A slow client is disconnected after five seconds, and not earlier.
    let begin = Instant::now();
    let mut late = TcpStream::connect(&address).unwrap();
    late.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    assert_eq!(late.read(&mut [0]).unwrap(), 0);
    assert!(begin.elapsed() >= SLOW_CLIENT, "{:?}", begin.elapsed());
    // A client that does not read its answer occupies a place, not a thread.
    let mut greedy = Vec::new();
    in_time("others are served while answers are not read", &mut || {
        greedy = (0..16)
            .map(|_| {
                let mut stream = TcpStream::connect(&address).unwrap();
                stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
                stream
            })
            .collect::<Vec<_>>();
        serve();
    });
    drop((slow, greedy));
    // The daemon has kept no descriptors of them.
    let descriptors = || fs::read_dir(format!("/proc/{}/fd", place.pid("ram"))).unwrap().count();
    wait_until("all are closed", || descriptors() < 40);
    assert_eq!(log(&place, "ram").lines().count(), 1, "{}", log(&place, "ram"));
    place.done(&["detach", "ram"]);
    in_time("a device with a slow client is detached", &mut || {
        place.done(&["attach", "ram:1M", "--metrics", "tcp:127.0.0.1:0"]);
        let metrics = metrics_uri(&place, "ram");
        let address = metrics.strip_prefix("http://").unwrap().strip_suffix("/metrics").unwrap();
        let _held = TcpStream::connect(address).unwrap();
        place.done(&["detach", "ram"]);
    });
}

// Contract: errors
#[test]
fn a_failed_write_is_logged_with_its_client() {
    let place = Place::new("failed");
    let words = ["attach", "ram:1M", "--hang-warning", "0", "--fault", "error=EIO,op=write"];
    let uri = String::from_utf8(place.run(&words).stdout).unwrap();
    let mut client = session(&uri, "ram");
    for number in 0..3 {
        request(&mut client, 1, 0xabc + number, 8192, 4096);
        assert_eq!(reply(&mut client, 0), (5, 0xabc + number));
    }
    wait_until("a line", || !lines_with(&place, "I/O error: ").is_empty());
    let line = lines_with(&place, "I/O error: ").remove(0);
    let client = format!("; client: nbd client 1 (pid {}, uid ", std::process::id());
    assert!(line.contains(" I/O error: write at sector 16, 8 sectors: ") && line.contains(&client), "{line}");
    assert!(line.contains("cookie 0xabc"), "{line}");
    let printed = place.done(&["log", "ram"]);
    assert!(printed.contains(&line) && printed.ends_with('\n'), "{printed}");
}

#[test]
fn a_log_is_followed_until_the_device_is_detached() {
    let place = Place::new("follow");
    place.done(&["attach", "ram:1M"]);
    let mut follow = place.command(&["log", "ram", "--follow"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(follow.stdout.take().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().contains(" Serving "));
    place.done(&["set", "ram", "depth=4"]);
    assert!(lines.next().unwrap().unwrap().ends_with(" set depth=4"));
    place.done(&["detach", "ram"]);
    assert_eq!((follow.wait().unwrap().code(), lines.filter(Result::is_err).count()), (Some(0), 0));
    assert!(place.refused(&["log", "ram"]).contains("ram: no such device"));
    let mut foreground = place.command(&["attach", "ram:1M", "--foreground"]).spawn().unwrap();
    wait_until("it is served", || place.run(&["show", "ram"]).status.success());
    assert!(place.refused(&["log", "ram"]).contains("writes its log to standard error"));
    place.done(&["detach", "ram"]);
    foreground.wait().unwrap();
}

#[test]
fn a_trace_to_a_pipe_is_text() {
    let place = Place::new("trace-text");
    let uri = place.done(&["attach", "ram:1M"]);
    let mut client = session(&uri, "ram");
    for (words, is_text) in [(&["trace", "ram"][..], true), (&["trace", "ram", "--output", "-"], false)] {
        let traced = || log(&place, "ram").matches(" trace: started by ").count();
        let before = traced();
        let mut trace = place.command(words);
        let trace = trace.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        wait_until("it is traced", || traced() > before);
        request(&mut client, 1, 1, 8192, 4096);
        assert_eq!(reply(&mut client, 0), (0, 1));
        signal(trace.id().try_into().unwrap(), rustix::process::Signal::INT);
        let output = trace.wait_with_output().unwrap().stdout;
        let lines = String::from_utf8_lossy(&output);
        assert_eq!(lines.lines().any(|line| line.contains(" C W") && line.contains(" 16 + 8")), is_text);
        assert_eq!(output.contains(&0), !is_text);
    }
}
