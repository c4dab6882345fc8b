//! Runs the command in real processes, with a separate state directory per test.
#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]
#![allow(dead_code, reason = "each test file uses its part")]

pub mod client;
pub mod killing;
pub mod qemu;

use blkq::testing::{wait_for, wait_until};
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// Standard error without the lines that a command prints when it takes long: what it waits for, and the progress of a
/// commit.
pub fn without_progress(stderr: Vec<u8>) -> String {
    let text = String::from_utf8(stderr).unwrap();
    let is_progress = |line: &&str| line.contains(": waiting for ") || line.ends_with(" MiB copied\n");
    text.split_inclusive('\n').filter(|line| !is_progress(line)).collect()
}

/// A directory with images and a separate state directory. Dropping it detaches all devices.
pub struct Place {
    pub dir: PathBuf,
}

impl Place {
    pub fn new(test: &str) -> Place {
        // Short, because sockets' paths are.
        let dir = std::env::temp_dir().join(format!("blkq-t-{}-{test}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir(&dir).unwrap();
        Place { dir }
    }

    pub fn state(&self) -> PathBuf {
        self.dir.join("s")
    }

    pub fn image(&self, name: &str, bytes: u64) -> String {
        let path = self.dir.join(name);
        fs::File::create(&path).unwrap().set_len(bytes).unwrap();
        path.to_str().unwrap().to_owned()
    }

    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_blkq"));
        command.args(words).env("BLKQ_STATE_DIR", self.state()).stdin(Stdio::null());
        // Not what this machine's kernel may have: that is for the guests of the lab.
        if words.first() == Some(&"attach")
            && !words.iter().any(|word| ["--export", "--listen"].contains(word))
        {
            command.args(["--export", "nbd"]);
        }
        for name in ["LISTEN_FDS", "LISTEN_PID", "NOTIFY_SOCKET"] {
            command.env_remove(name);
        }
        command
    }

    pub fn run(&self, words: &[&str]) -> Output {
        self.command(words).output().unwrap()
    }

    /// Standard output of a command that must succeed and print nothing else. A command that fails because
    /// clients are connected is repeated: the server notices a little later that they have exited.
    pub fn done(&self, words: &[&str]) -> String {
        let has_clients = |output: &Output| String::from_utf8_lossy(&output.stderr).contains(" connected; ");
        let output = wait_for(&format!("no client is connected: {words:?}"), || {
            Some(self.run(words)).filter(|output| !has_clients(output))
        });
        let errors = without_progress(output.stderr);
        // losetup has no option to choose NBD, and reports what this machine's kernel lacks.
        let is_said = |line: &&str| words[0] == "losetup" && line.contains("served over NBD, without a node");
        let errors: String = errors.lines().filter(|line| !is_said(line)).collect();
        assert_eq!((output.status.code(), errors.as_str()), (Some(0), ""), "{words:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// The line on standard error of a command that must fail.
    pub fn refused(&self, words: &[&str]) -> String {
        let output = self.run(words);
        let line = without_progress(output.stderr);
        assert_eq!(output.status.code(), Some(1), "{words:?}: {line}");
        assert!(output.stdout.is_empty(), "{words:?}");
        assert!(line.starts_with("blkq: ") && line.ends_with('\n') && line.lines().count() == 1, "{line}");
        line
    }

    pub fn json(&self, words: &[&str]) -> Value {
        serde_json::from_str(&self.done(words)).unwrap()
    }

    pub fn pid(&self, name: &str) -> i32 {
        self.json(&["show", name, "--json"])["pid"].as_i64().unwrap().try_into().unwrap()
    }

    /// The files of the state directory, without the directory of journals if that is empty.
    pub fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.state()).into_iter().flatten();
        let journals = self.state().join("journals");
        let is_empty = fs::read_dir(&journals).is_ok_and(|mut journals| journals.next().is_none());
        let entries = entries.filter(|entry| !is_empty || entry.as_ref().unwrap().path() != journals);
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    pub fn ask(&self, name: &str, line: &[u8]) -> String {
        let mut stream = UnixStream::connect(self.state().join(format!("{name}.control"))).unwrap();
        // The daemon may answer and hang up before it has read everything.
        let _ = stream.write_all(line);
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        answer
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = self.run(&["detach", "--all", "--force"]);
        let _ = fs::remove_dir_all(&self.dir);
    }
}

pub fn signal(pid: i32, signal: rustix::process::Signal) {
    rustix::process::kill_process(rustix::process::Pid::from_raw(pid).unwrap(), signal).unwrap();
}

/// Whether a process has exited and released its files. Its parent may not have waited for it yet.
pub fn has_exited(pid: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    !status.lines().any(|line| line.starts_with("State:") && !line.contains('Z'))
}

pub fn kill(pid: i32) {
    signal(pid, rustix::process::Signal::KILL);
    wait_until("the killed daemon exits", || has_exited(pid));
}

/// A client of the device `name` that has completed the handshake.
pub fn session(uri: &str, name: &str) -> UnixStream {
    let mut stream = client(uri);
    let mut hello = b"\0\0\0\x03IHAVEOPT\0\0\0\x01".to_vec();
    hello.extend(u32::try_from(name.len()).unwrap().to_be_bytes());
    hello.extend(name.as_bytes());
    stream.write_all(&hello).unwrap();
    stream.read_exact(&mut [0; 10]).unwrap();
    stream
}

/// Sends `command` (0 read, 1 write, 3 flush) without waiting for the reply.
pub fn request(stream: &mut UnixStream, command: u16, cookie: u64, offset: u64, length: u32) {
    let mut bytes = 0x2560_9513_u32.to_be_bytes().to_vec();
    bytes.extend([0, 0]);
    bytes.extend(command.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(length.to_be_bytes());
    if command == 1 {
        bytes.resize(bytes.len() + length as usize, 7);
    }
    stream.write_all(&bytes).unwrap();
}

/// The error and the cookie of the next reply, which is followed by `content` bytes if it succeeded.
pub fn reply(stream: &mut UnixStream, content: usize) -> (u32, u64) {
    let mut bytes = [0; 16];
    stream.read_exact(&mut bytes).unwrap();
    assert_eq!(bytes[..4], 0x6744_6698_u32.to_be_bytes());
    let error = u32::from_be_bytes(bytes[4..8].try_into().unwrap());
    if error == 0 {
        stream.read_exact(&mut vec![0; content]).unwrap();
    }
    (error, u64::from_be_bytes(bytes[8..].try_into().unwrap()))
}

/// A client that has received the greeting and not answered it: it stays in the handshake.
pub fn client(uri: &str) -> UnixStream {
    let mut stream = UnixStream::connect(uri.trim().strip_prefix("nbd+unix:///?socket=").unwrap()).unwrap();
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
    stream
}
