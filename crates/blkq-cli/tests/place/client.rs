//! NBD clients that write blocks filled with one byte value, and helpers for tests of images.

use blkq::testing::wait_until;
use std::fs;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread::JoinHandle;

use super::{Place, kill, reply, request, session};

pub const BLOCK: usize = 4096;

pub fn run(program: &str, words: &[&str]) -> String {
    let output = Command::new(program).args(words).output().unwrap();
    assert!(output.status.success(), "{program} {words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// Kills the daemon `pid` and waits until `images` are unlocked. The kernel releases the files of a ring, and their
/// locks, only some time after the process has exited.
pub fn kill_and_wait(pid: i32, images: &[&str]) {
    kill(pid);
    for image in images {
        let file = fs::File::open(image).unwrap();
        wait_until("the image is released", || is_free(&file));
    }
}

/// Whether no other open file description locks the file.
pub fn is_free(file: &fs::File) -> bool {
    let (l_type, l_whence) = (libc::F_WRLCK as libc::c_short, libc::SEEK_SET as libc::c_short);
    let mut lock = libc::flock { l_type, l_whence, l_start: 0, l_len: 0, l_pid: 0 };
    // SAFETY: the descriptor is open, the structure lives through the call.
    assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) }, 0);
    i32::from(lock.l_type) == libc::F_UNLCK
}

/// A client with one request in flight. Each block is filled with one byte value.
pub struct Client {
    pub stream: UnixStream,
}

impl Client {
    pub fn new(uri: &str, name: &str) -> Client {
        Client { stream: session(uri, name) }
    }

    pub fn write(&mut self, block: u64, byte: u8) {
        let mut bytes = 0x2560_9513_u32.to_be_bytes().to_vec();
        bytes.extend([0, 0, 0, 1]);
        bytes.extend(block.to_be_bytes());
        bytes.extend((block * BLOCK as u64).to_be_bytes());
        bytes.extend((BLOCK as u32).to_be_bytes());
        bytes.extend([byte; BLOCK]);
        self.stream.write_all(&bytes).unwrap();
        assert_eq!(reply(&mut self.stream, 0), (0, block));
    }

    pub fn read(&mut self, block: u64) -> u8 {
        request(&mut self.stream, 0, block, block * BLOCK as u64, BLOCK as u32);
        assert_eq!(reply(&mut self.stream, 0), (0, block));
        let mut bytes = [0; BLOCK];
        self.stream.read_exact(&mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "block {block} is torn");
        bytes[0]
    }

    pub fn flush(&mut self) {
        request(&mut self.stream, 3, 9, 0, 0);
        assert_eq!(reply(&mut self.stream, 0), (0, 9));
    }
}

/// A client that writes random blocks and reads others back until it is stopped.
pub struct RandomWriter {
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    thread: Option<JoinHandle<Vec<u8>>>,
}

impl RandomWriter {
    /// Starts a client of a device of `blocks` blocks, which are all zeroes.
    pub fn start(uri: &str, name: &'static str, blocks: u64) -> RandomWriter {
        let (stop, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, written, uri) = (stop.clone(), rounds.clone(), uri.to_owned());
        let write = move || {
            let mut client = Client::new(&uri, name);
            let mut expected = vec![0; blocks as usize];
            let mut seed = 1u64;
            while !stopped.load(SeqCst) {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let (block, other, byte) = ((seed >> 33) % blocks, (seed >> 20) % blocks, (seed >> 50) as u8);
                client.write(block, byte);
                expected[block as usize] = byte;
                assert_eq!(client.read(other), expected[other as usize], "block {other}");
                written.fetch_add(1, SeqCst);
            }
            client.flush();
            expected
        };
        RandomWriter { stop, rounds, thread: Some(std::thread::spawn(write)) }
    }

    /// Waits until the client has written `blocks` more blocks.
    pub fn wait(&self, blocks: u64) {
        let seen = self.rounds.load(SeqCst);
        let is_finished = || self.thread.as_ref().is_none_or(JoinHandle::is_finished);
        wait_until("the writer writes", || self.rounds.load(SeqCst) > seen + blocks || is_finished());
    }

    /// Flushes and stops the client. Returns the byte value of each block.
    pub fn finish(mut self) -> Vec<u8> {
        self.stop.store(true, SeqCst);
        self.thread.take().unwrap().join().unwrap()
    }
}

impl Drop for RandomWriter {
    /// Stops the client, also when the test panics.
    fn drop(&mut self) {
        self.stop.store(true, SeqCst);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Panics unless each block of `found` is filled with its byte value of `expected`.
pub fn assert_blocks(found: &[u8], expected: &[u8]) {
    for (block, byte) in expected.iter().enumerate() {
        assert_eq!(found[block * BLOCK..][..BLOCK], [*byte; BLOCK], "block {block}");
    }
}

pub fn state(place: &Place, file: &str) -> serde_json::Value {
    serde_json::from_slice(&fs::read(place.state().join(file)).unwrap()).unwrap()
}

/// The image that the next daemon of the device would serve.
pub fn kept_image(place: &Place, name: &str) -> String {
    let number = &state(place, &format!("{name}.json"))["number"];
    let options = state(place, &format!("{name}.options"));
    let image = options["images"].as_array().unwrap().iter().find(|image| image["number"] == *number);
    image.unwrap()["path"].as_str().unwrap().to_owned()
}

/// Records an image for the next daemon, as a command does. Returns the number of the record.
pub fn record_image(place: &Place, name: &str, path: &str, options: &serde_json::Value) -> usize {
    let mut file = state(place, &format!("{name}.options"));
    let images = file["images"].as_array_mut().unwrap();
    let number = images.len();
    images.push(serde_json::json!({"number": number, "path": path, "options": options}));
    fs::write(place.state().join(format!("{name}.options")), file.to_string()).unwrap();
    number
}

/// The state files of a device, to be restored after its daemon has removed them.
pub struct KeptState(Vec<(std::path::PathBuf, Vec<u8>, fs::Permissions)>);

pub fn keep_state(place: &Place, name: &str) -> KeptState {
    let files = [".json", ".options"].map(|suffix| place.state().join(format!("{name}{suffix}")));
    KeptState(
        files
            .map(|path| (path.clone(), fs::read(&path).unwrap(), path.metadata().unwrap().permissions()))
            .into(),
    )
}

impl KeptState {
    pub fn restore(self) {
        for (path, text, permissions) in self.0 {
            fs::write(&path, text).unwrap();
            fs::set_permissions(path, permissions).unwrap();
        }
    }
}
