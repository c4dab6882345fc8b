//! Process behaviour of the daemon: signals, inherited descriptors, socket activation, its name in ps.

use blkq::testing::wait_until;
use std::fs;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::place::*;
use rustix::process::Signal;

/// Numbers and names of the threads of a process, without io_uring workers (`iou-*`), which block all
/// signals.
fn threads(pid: i32) -> Vec<(i32, String)> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten();
    let thread = |task: io::Result<fs::DirEntry>| {
        let path = task.ok()?.path();
        let name = fs::read_to_string(path.join("comm")).ok()?.trim().to_owned();
        Some((path.file_name()?.to_str()?.parse().ok()?, name))
    };
    tasks.filter_map(thread).filter(|(_, name)| !name.starts_with("iou-")).collect()
}

/// Sends a signal to one thread. Ignores the error if the thread has exited.
fn signal_thread(pid: i32, thread: i32, signal: Signal) {
    // SAFETY: only sends a signal, to a child of this process or its child.
    unsafe { libc::syscall(libc::SYS_tgkill, pid, thread, signal.as_raw()) };
}

fn foreground(place: &Place, words: &[&str]) -> Child {
    let mut command = place.command(&[&["attach", "ram:1M", "--foreground", "--name", "d"], words].concat());
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

fn wait_for_exit(child: &mut Child, what: &str) {
    wait_until(what, || child.try_wait().unwrap().is_some());
}

// Contract: detach
#[test]
fn a_signal_stops_a_daemon_whichever_thread_gets_it() {
    let place = Place::new("threads");
    let count = || threads(place.pid("d")).len();
    let words = ["attach", "ram:1M", "--name", "d", "--queues", "2"];
    place.done(&words);
    let names: Vec<String> = threads(place.pid("d")).into_iter().map(|(_, name)| name).collect();
    assert!(names.iter().filter(|name| name.starts_with("blkq-queue-")).count() == 2, "{names:?}");
    let mut at = 0;
    for stop in [Signal::TERM, Signal::INT] {
        for index in 0..count() {
            at += 1;
            let pid = place.pid("d");
            // The daemon starts and ends control threads, so the list may be shorter now.
            if let Some((thread, name)) = threads(pid).get(index) {
                signal_thread(pid, *thread, stop);
                wait_until(&format!("{stop:?} to {name} stops the daemon"), || has_exited(pid));
                assert!(place.files().is_empty(), "{stop:?} to {name}: {:?}", place.files());
                place.done(&words);
            }
        }
    }
    assert!(at >= 6, "{at}");
}

// Contract: detach
#[test]
fn a_signal_stops_a_daemon_at_any_moment() {
    let place = Place::new("moments");
    for round in 0..40 {
        let mut child = foreground(&place, &["--queues", "2"]);
        let pid = i32::try_from(child.id()).unwrap();
        std::thread::sleep(Duration::from_micros(1500 * round));
        let threads = threads(pid);
        // Each round signals another thread, the newest first.
        if let Some((thread, _)) = threads.iter().rev().nth(round as usize % threads.len().max(1)) {
            signal_thread(pid, *thread, [Signal::TERM, Signal::INT][round as usize % 2]);
        }
        wait_for_exit(&mut child, &format!("the daemon of round {round} exits: signalled {threads:?}"));
        assert!(place.files().is_empty(), "round {round}: {:?}", place.files());
    }
}

/// Makes `command` start with SIGHUP ignored, and with SIGTERM, SIGINT and SIGHUP blocked.
fn block_signals(command: &mut Command) {
    let ignore = || {
        // SAFETY: calls that may be made between fork and exec; zeroes are an empty set.
        unsafe {
            let mut set = std::mem::zeroed();
            for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
                libc::sigaddset(&mut set, signal);
            }
            libc::sigprocmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
            libc::signal(libc::SIGHUP, libc::SIG_IGN);
        }
        Ok(())
    };
    // SAFETY: see above.
    unsafe { command.pre_exec(ignore) };
}

#[test]
fn a_daemon_ignores_inherited_signal_masks_and_nohup() {
    let place = Place::new("deaf");
    for stop in [Signal::TERM, Signal::INT] {
        let mut command = place.command(&["attach", "ram:1M"]);
        block_signals(&mut command);
        assert!(command.stdout(Stdio::null()).status().unwrap().success());
        let pid = place.pid("ram");
        signal(pid, stop);
        wait_until(&format!("{stop:?} stops the daemon"), || has_exited(pid));
    }
}

#[test]
fn sighup_stops_no_daemon_whichever_thread_gets_it() {
    let place = Place::new("hangup");
    place.done(&["attach", "ram:1M", "--name", "d"]);
    let pid = place.pid("d");
    let log = || fs::read_to_string(place.state().join("d.log")).unwrap();
    let reported = |log: &str| log.matches("SIGHUP: no certificates to reload").count();
    // Without the threads that answer commands, which may exit at any time.
    let threads = threads(pid).into_iter().filter(|(_, name)| name != "blkq-control");
    for (at, (thread, name)) in threads.enumerate() {
        signal_thread(pid, thread, Signal::HUP);
        wait_until(&format!("SIGHUP to {name} is logged"), || reported(&log()) == at + 1);
    }
    assert_eq!(place.pid("d"), pid);
}

// Contract: detach
#[test]
fn detach_reports_what_it_waits_for() {
    let place = Place::new("waits");
    let image = place.image("disk.img", 1 << 20);
    place.run(&["attach", &image, "--name", "d", "--fault", "stuck=6s,op=flush"]);
    let detached = place.run(&["detach", "d", "--force"]);
    let errors = String::from_utf8(detached.stderr).unwrap();
    let lines: Vec<&str> = errors.lines().collect();
    // The flush counts as a request once the driver has it.
    let remaining =
        ["1 request in flight", "the last flush"].map(|what| format!("blkq: d: waiting for {what}"));
    assert!(remaining.contains(&lines[0].to_owned()), "{errors}");
    assert!(lines[1].contains("data may be lost"), "{errors}");
    assert_eq!((lines.len(), detached.status.code()), (2, Some(1)));
}

/// The panic is on an engine's thread, with I/O in flight and the sandbox active.
// Contract: detach
#[test]
fn a_panic_aborts_the_daemon_and_is_in_the_log() {
    let place = Place::new("panic");
    let image = place.image("disk.img", 1 << 20);
    let words = ["attach", &image, "--name", "d", "--queues", "2"];
    let mut attach = place.command(&words);
    attach.args(["--fault", "stuck,op=read;panic,op=write"]);
    let uri = String::from_utf8(attach.output().unwrap().stdout).unwrap();
    let pid = place.pid("d");
    let mut clients = [session(&uri, "d"), session(&uri, "d")];
    for (number, client) in clients.iter_mut().enumerate() {
        request(client, 0, number as u64, 0, 4096);
    }
    request(&mut clients[0], 1, 9, 4096, 4096);
    wait_until("the daemon has exited", || has_exited(pid));
    for client in &mut clients {
        client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let closed = client.read(&mut [0; 1]);
        assert!(
            matches!(&closed, Ok(0)) || closed.is_err_and(|e| e.kind() == io::ErrorKind::ConnectionReset)
        );
    }
    let log = fs::read_to_string(place.state().join("d.log")).unwrap();
    let line = log.lines().last().unwrap();
    for part in [
        "Z panic: thread blkq-queue-0 at crates/blkq-drivers/src/fault/",
        ": a fault rule injected this panic; ",
    ] {
        assert!(line.contains(part), "{log}");
    }
    let shown = String::from_utf8(place.run(&["show", "d"]).stdout).unwrap();
    assert!(shown.contains("state   dead") && shown.contains("a fault rule injected this panic"), "{shown}");
    // The dead daemon left nothing that prevents another attach.
    place.done(&words);
    place.done(&["detach", "d"]);
    assert!(place.files().is_empty());
}

#[test]
fn a_daemon_is_found_by_its_name() {
    let place = Place::new("comm");
    let image = place.image("disk.img", 1 << 20);
    place.done(&["attach", &image]);
    let process = |file: &str| fs::read_to_string(format!("/proc/{}/{file}", place.pid("disk.img"))).unwrap();
    assert_eq!(process("comm"), "blkq\n");
    assert_eq!(process("cmdline"), "blkq\0daemon\0--\0disk.img\0");
}

/// Makes `command` inherit the pipe's `end` as descriptor 9.
fn inherit(command: &mut Command, end: &OwnedFd) {
    let raw = end.as_raw_fd();
    let inherit = move || {
        // SAFETY: a call that may be made between fork and exec; the pipe is open until then.
        match unsafe { libc::dup2(raw, 9) } {
            9 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    // SAFETY: see above.
    unsafe { command.pre_exec(inherit) };
}

fn assert_closed(reader: &OwnedFd, process: &str) {
    assert_eq!(rustix::io::read(reader, &mut [0; 1]), Ok(0), "{process} has the pipe open");
}

fn pipe() -> (OwnedFd, OwnedFd) {
    use rustix::pipe::{PipeFlags, pipe_with};
    pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap()
}

fn descriptors(pid: i32) -> Vec<String> {
    let open = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let target = |fd: fs::DirEntry| fs::read_link(fd.path()).unwrap_or_default();
    open.map(target).map(|path| path.display().to_string()).collect()
}

#[test]
fn a_daemon_inherits_no_descriptors() {
    let place = Place::new("fds");
    let image = place.image("disk.img", 1 << 20);
    let (reader, writer) = pipe();
    let mut attach = place.command(&["attach", &image, "--name", "d"]);
    inherit(&mut attach, &writer);
    assert!(attach.stdout(Stdio::null()).status().unwrap().success());
    drop(writer);
    assert_closed(&reader, "the daemon");
    // Of files, the daemon has only the image and those in its state directory open.
    let open = descriptors(place.pid("d"));
    let known = [image.as_str(), "/dev/null", "/proc/", "anon_inode:", "socket:", "pipe:"];
    let state = place.state().display().to_string();
    let strange = open.iter().filter(|path| !known.iter().any(|known| path.starts_with(known)));
    let strange: Vec<_> = strange.filter(|path| !path.starts_with(&state)).collect();
    assert!(strange.is_empty(), "{strange:?}");
}

/// `blkq attach` with `words` and a listening socket at `path` as descriptor 3 (systemd socket activation).
fn activated(place: &Place, path: &Path, words: &[&str]) -> Command {
    let mut command = Command::new("sh");
    command
        .args(["-c", "exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec \"$0\" attach --name d \"$@\""])
        .arg(place.command(&[]).get_program())
        .args(words)
        .env("BLKQ_STATE_DIR", place.state())
        .stdin(OwnedFd::from(UnixListener::bind(path).unwrap()))
        .stdout(Stdio::null());
    command
}

#[test]
fn socket_activation_with_create_creates_the_image() {
    let place = Place::new("create-sd");
    let (path, image) = (place.dir.join("a.sock"), place.dir.join("new.img"));
    let words = [image.to_str().unwrap(), "--create=1M"];
    let mut child = activated(&place, &path, &words).spawn().unwrap();
    drop(client(&format!("nbd+unix:///?socket={}", path.display())));
    // The name is in use, so a second attach fails.
    place.refused(&["attach", "ram:1M", "--name", "d"]);
    signal(child.id().try_into().unwrap(), Signal::TERM);
    wait_for_exit(&mut child, "SIGTERM stops it");
    assert_eq!(fs::metadata(&image).unwrap().len(), 1 << 20);

    // If the daemon cannot start, it removes the image that it created.
    fs::remove_file(&image).unwrap();
    fs::remove_file(&path).unwrap();
    let words = [words[0], words[1], "--listen=unix:/nowhere/a.sock"];
    let mut child = activated(&place, &path, &words).stderr(Stdio::null()).spawn().unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(1));
    assert!(!image.exists());
}

#[test]
fn a_server_of_an_inherited_socket_has_no_other_descriptors() {
    let place = Place::new("fds-sd");
    let path = place.dir.join("a.sock");
    let (reader, writer) = pipe();
    let mut command = activated(&place, &path, &["ram:1M"]);
    inherit(&mut command, &writer);
    let mut child = command.spawn().unwrap();
    drop(writer);
    drop(client(&format!("nbd+unix:///?socket={}", path.display())));
    assert_closed(&reader, "the server");
    signal(child.id().try_into().unwrap(), Signal::TERM);
    wait_for_exit(&mut child, "SIGTERM stops it");
}

#[test]
fn a_full_log_pipe_does_not_block_the_daemon() {
    let place = Place::new("unread");
    let (_reader, writer) = rustix::pipe::pipe().unwrap();
    let flags = rustix::fs::fcntl_getfl(&writer).unwrap();
    rustix::fs::fcntl_setfl(&writer, flags | rustix::fs::OFlags::NONBLOCK).unwrap();
    while rustix::io::write(&writer, &[b'x'; 4096]).is_ok() {}
    rustix::fs::fcntl_setfl(&writer, flags).unwrap();
    let mut command = place.command(&["attach", "ram:1M", "--foreground", "--name", "d"]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::from(writer)).spawn().unwrap();
    wait_until("the device is served", || place.run(&["show", "d"]).status.success());
    let pid = i32::try_from(child.id()).unwrap();
    // The daemon logs a line for each signal.
    signal(pid, Signal::HUP);
    signal(pid, Signal::TERM);
    wait_for_exit(&mut child, "SIGTERM stops it");
    assert!(place.files().is_empty(), "{:?}", place.files());
}

#[test]
fn attach_does_not_block_on_a_socket_with_a_full_backlog() {
    let place = Place::new("backlog");
    let path = std::env::temp_dir().join(format!("blkq-backlog-{}", std::process::id()));
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let _waiting = std::os::unix::net::UnixStream::connect(&path).unwrap();
    let line = place.refused(&["attach", "ram:1M", "--listen", &format!("unix:{}", path.display())]);
    assert!(line.contains("another server is listening"), "{line}");
    fs::remove_file(&path).unwrap();
}

#[test]
fn a_daemon_gets_and_keeps_typed_options() {
    let place = Place::new("typed");
    let image = place.image("disk.img", 1 << 20);
    let (directory, file) = image.rsplit_once('/').unwrap();
    let mut command = place.command(&["attach", file, "--export=nbd", "--depth=64", "--pid-file=pid"]);
    assert!(command.current_dir(directory).status().unwrap().success());
    let pid = place.pid("disk.img");
    assert_eq!(fs::read_link(format!("/proc/{pid}/fd/0")).unwrap().to_str(), Some("/dev/null"));

    let text = fs::read(place.state().join("disk.img.options")).unwrap();
    let state: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let record = &state["images"][0]["options"];
    assert_eq!(record["version"], 1);
    let options = &record["options"];
    assert_eq!((&options["depth"], options["image"].as_str()), (&64.into(), Some(image.as_str())));
    assert_eq!(options["pid_file"], format!("{directory}/pid"));
    assert_eq!(&place.json(&["show", "disk.img", "--json"])["attach_options"], record);
    place.done(&["detach", "disk.img"]);
}
