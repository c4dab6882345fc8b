//! TLS below an NBD server, with a real client, and an attacker in between who drops, changes, repeats, reorders and forges
//! records. The server must not panic, and must use bounded memory. It must receive a prefix of what the client sent, and
//! all of it without attacks. It must receive nothing from a client without the required certificate.
//!
//! Input: the kinds of client and server, then steps in the format of `arbitrary`.
// Contract: bounded-input

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, AtomicIsize, Ordering::Relaxed};
use std::sync::{Arc, LazyLock};

use crate::nbd_session::nbd::pki::Pki;
use arbitrary::{Arbitrary, Result, Unstructured};
use blkq::random::mix;
use blkq_export::nbd::TlsCertificates;
use blkq_export::nbd::fuzzing::{Outgoing, StreamEnd, Tls};
use rustls::client::Resumption;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::version::{TLS12, TLS13};
use rustls::{ClientConfig, ClientConnection, RootCertStore};

const ACTS_MAX: usize = 96;
/// rustls closes a session after this number of key updates by the peer.
const REKEYS_MAX: usize = 32;
/// Size of a piece of an answer. The longest answers have more bytes than the server side may hold.
const ANSWER_PIECE_BYTES: usize = 16;
/// Maximum memory of the server side of a connection, in bytes: its buffers of 128 and 144 KiB, and the memory of rustls.
const SERVER_BYTES_MAX: isize = 512 << 10;

/// Counts the memory of the server side.
struct Counted;

static OF_SERVER: AtomicBool = AtomicBool::new(false);
static HELD: AtomicIsize = AtomicIsize::new(0);

fn count(bytes: isize) {
    if OF_SERVER.load(Relaxed) {
        let held = HELD.fetch_add(bytes, Relaxed) + bytes;
        // A panic would allocate memory.
        if held > SERVER_BYTES_MAX {
            OF_SERVER.store(false, Relaxed);
            eprintln!("the server's side holds {held} bytes");
            std::process::abort();
        }
    }
}

// SAFETY: forwards to the system's allocator.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counted = Counted;

fn of_server<T>(job: impl FnOnce() -> T) -> T {
    OF_SERVER.store(true, Relaxed);
    let result = job();
    OF_SERVER.store(false, Relaxed);
    result
}

/// Servers with and without required certificates; clients of both TLS versions, with and without a certificate.
struct World {
    servers: [TlsCertificates; 2],
    clients: [[Arc<ClientConfig>; 2]; 2],
}

static WORLD: LazyLock<World> = LazyLock::new(|| {
    let pki = Pki::new();
    let own = [("server-cert.pem", "server-cert.pem"), ("server-key.pem", "server-key.pem")];
    let open = pki.gather("open", &own);
    let asking = pki.gather("asking", &[&own[..], &[("ca-cert.pem", "ca-cert.pem")]].concat());
    let certificate = |name| CertificateDer::from_pem_file(pki.file(name)).expect("a certificate");
    let client = |version, known: bool| {
        let mut roots = RootCertStore::empty();
        roots.add(certificate("ca-cert.pem")).expect("an authority");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[version])
            .expect("a version")
            .with_root_certificates(roots);
        let mut config = match known {
            true => {
                let key = PrivateKeyDer::from_pem_file(pki.file("client-key.pem")).expect("a key");
                config.with_client_auth_cert(vec![certificate("client-cert.pem")], key).expect("a pair")
            }
            false => config.with_no_client_auth(),
        };
        config.resumption = Resumption::disabled();
        Arc::new(config)
    };
    World {
        servers: [open, asking].map(|directory| TlsCertificates::load(&directory).expect("certificates")),
        clients: [&TLS12, &TLS13].map(|version| [false, true].map(|known| client(version, known))),
    }
});

#[derive(Arbitrary, Debug)]
enum Act {
    /// The client sends this number of bytes.
    Send(u16),
    /// This number of bytes arrives, and is decrypted into pieces of the given size.
    Carry(u16, u16),
    /// All bytes on the way arrive.
    CarryAll,
    /// The server answers with this number of pieces of [`ANSWER_PIECE_BYTES`].
    Answer(u16),
    Rekey,
    Bye,
    Meddle(Meddle),
}

/// Attacks on records on the way to the server.
#[derive(Arbitrary, Debug)]
enum Meddle {
    /// Inverts one bit of a record.
    Flip {
        record: u8,
        at: u16,
        bit: u8,
    },
    Drop(u8),
    Repeat(u8),
    Swap(u8, u8),
    Cut {
        record: u8,
        at: u16,
    },
    /// Inserts forged bytes: a record if `kind` is even, otherwise arbitrary bytes.
    Insert {
        record: u8,
        kind: u8,
        bytes: Vec<u8>,
    },
}

/// The byte of the request, and of the answer, at a position of the stream.
fn pattern(at: usize) -> u8 {
    mix(at as u64) as u8
}

struct Session {
    client: ClientConnection,
    tls: Option<Tls>,
    welcome: bool,
    /// Records on the way to the server; the start of the first may have arrived.
    wire: VecDeque<Vec<u8>>,
    meddled: bool,
    sent: usize,
    received: usize,
    /// Number of bytes that the server sent as answers.
    answered: usize,
    /// Number of bytes that the client decrypted.
    taken: usize,
    rekeys: usize,
    bye: bool,
    end: Option<StreamEnd>,
    /// Whether the client has stopped reading.
    deaf: bool,
}

impl Session {
    fn begin(mode: u8) -> Session {
        let world = &*WORLD;
        let (asks, known) = (usize::from(mode & 1), usize::from(mode >> 1 & 1));
        let config = world.clients[usize::from(mode >> 2 & 1)][known].clone();
        let name = ServerName::try_from("localhost").expect("a name");
        HELD.store(0, Relaxed);
        let mut session = Session {
            client: ClientConnection::new(config, name).expect("a client"),
            tls: Some(of_server(|| Tls::new(&world.servers[asks]).expect("memory"))),
            welcome: asks <= known,
            wire: VecDeque::new(),
            meddled: false,
            sent: 0,
            received: 0,
            answered: 0,
            taken: 0,
            rekeys: 0,
            bye: false,
            end: None,
            deaf: false,
        };
        session.collect();
        session
    }

    /// Moves the output of the client to the records on the way.
    fn collect(&mut self) {
        let mut bytes = Vec::new();
        while self.client.wants_write() {
            self.client.write_tls(&mut bytes).expect("memory");
        }
        let mut rest = &bytes[..];
        while let [_, _, _, high, low, ..] = *rest {
            let (record, others) = rest.split_at(5 + usize::from(u16::from_be_bytes([high, low])));
            self.wire.push_back(record.to_vec());
            rest = others;
        }
        assert!(rest.is_empty(), "a client sends whole records");
    }

    /// Delivers up to `most` bytes, as far as there is room, and lets the server side process them.
    fn carry(&mut self, mut most: usize, piece: usize) {
        if let Some(tls) = self.tls.as_mut().filter(|_| self.end.is_none()) {
            let room = of_server(|| tls.room());
            let (mut filled, space) = (0, room.len());
            most = most.min(space);
            while let Some(record) = self.wire.front_mut().filter(|_| filled < most) {
                let bytes = record.len().min(most - filled);
                room[filled..filled + bytes].copy_from_slice(&record[..bytes]);
                filled += bytes;
                record.drain(..bytes);
                if record.is_empty() {
                    self.wire.pop_front();
                }
            }
            assert_eq!(of_server(|| tls.received(filled)), filled < space);
            self.receive(piece);
        }
        self.send(0);
    }

    fn receive(&mut self, piece: usize) {
        let mut plain = vec![0; piece.max(1)];
        while let (Some(tls), None) = (&mut self.tls, self.end) {
            match of_server(|| tls.read(&mut plain)) {
                Ok(0) => break,
                Ok(bytes) => {
                    assert!(self.welcome, "data of a client without a certificate was received");
                    let all =
                        plain[..bytes].iter().zip(self.received..).all(|(byte, at)| *byte == pattern(at));
                    self.received += bytes;
                    assert!(all && self.received <= self.sent, "received what was not sent");
                }
                Err(end) => self.end = Some(end),
            }
        }
        // Before the server has received data, an attacker can forge a close.
        if self.end == Some(StreamEnd::Closed) && self.received > 0 {
            assert!(self.bye && self.received == self.sent, "cut off in silence");
        }
        assert!(
            self.meddled || !self.welcome || self.end != Some(StreamEnd::Broken),
            "the connection broke without a cause"
        );
    }

    /// Sends `bytes` of an answer, and the other output of the server side, to the client.
    fn send(&mut self, bytes: usize) {
        let Some(tls) = &mut self.tls else { return };
        let mut answer = Outgoing::default();
        let range = self.answered..self.answered + bytes;
        answer.append(|headers| headers.extend(range.map(pattern)));
        if bytes > 0 {
            answer.prepare();
        } else if !tls.wants_send() {
            return;
        }
        self.answered += bytes;
        loop {
            if tls.unsent().is_empty() && of_server(|| tls.encrypt(&mut answer)).is_err() {
                // The TLS session of the server has failed.
                self.end = Some(StreamEnd::Broken);
                assert!(self.meddled || !self.welcome, "the connection broke without a cause");
                return;
            }
            let mut piece = tls.unsent();
            let length = piece.len();
            while !piece.is_empty() && !self.deaf {
                let got = self.client.read_tls(&mut piece).is_ok_and(|bytes| bytes > 0);
                self.deaf = !got || self.client.process_new_packets().is_err();
                self.taken = take(&mut self.client, self.taken, self.answered);
            }
            assert!(!self.deaf || self.meddled || !self.welcome, "the client received something wrong");
            of_server(|| tls.sent(length));
            if tls.unsent().is_empty() && answer.next(1).is_empty() {
                break;
            }
        }
        // The client's reply, such as the rest of the handshake.
        self.collect();
    }

    fn act(&mut self, act: Act) {
        match act {
            Act::Send(bytes) if !self.bye && !self.deaf => {
                let words: Vec<u8> = (self.sent..self.sent + usize::from(bytes)).map(pattern).collect();
                self.sent += self.client.writer().write(&words).expect("memory");
                self.collect();
            }
            Act::Carry(bytes, piece) => self.carry(usize::from(bytes), usize::from(piece)),
            Act::CarryAll => self.carry_all(),
            // A server that has received nothing sends no answers.
            Act::Answer(pieces) if self.received > 0 && self.end.is_none() => {
                self.send(usize::from(pieces) * ANSWER_PIECE_BYTES);
            }
            Act::Rekey
                if !self.client.is_handshaking() && !self.bye && !self.deaf && self.rekeys < REKEYS_MAX =>
            {
                self.rekeys += 1;
                // TLS 1.2 has no key updates, and their number is limited.
                let _ = self.client.refresh_traffic_keys();
                self.collect();
            }
            Act::Bye if !self.client.is_handshaking() && !self.deaf => {
                self.client.send_close_notify();
                self.bye = true;
                self.collect();
            }
            Act::Meddle(how) => self.meddle(how),
            _ => {}
        }
    }

    fn meddle(&mut self, how: Meddle) {
        let records = self.wire.len();
        let chosen = |record: u8| if records == 0 { 0 } else { usize::from(record) % records };
        match how {
            Meddle::Insert { record, kind, mut bytes } => {
                if kind % 2 == 0 {
                    let length = (bytes.len() as u16).to_be_bytes();
                    let head = [20 + (kind >> 1) % 6, 3, 1 + (kind >> 4) % 4, length[0], length[1]];
                    bytes.splice(..0, head);
                }
                self.meddled |= !bytes.is_empty();
                self.wire.insert(chosen(record), bytes);
            }
            Meddle::Flip { record, at, bit } if records > 0 => {
                let record = &mut self.wire[chosen(record)];
                let length = record.len().max(1);
                if let Some(byte) = record.get_mut(usize::from(at) % length) {
                    *byte ^= 1 << (bit % 8);
                    self.meddled = true;
                }
            }
            Meddle::Cut { record, at } if records > 0 => {
                let record = &mut self.wire[chosen(record)];
                record.truncate(usize::from(at) % (record.len() + 1));
                self.meddled = true;
            }
            Meddle::Drop(record) if records > 0 => {
                self.wire.remove(chosen(record));
                self.meddled = true;
            }
            Meddle::Repeat(record) if records > 0 => {
                let again = self.wire[chosen(record)].clone();
                self.wire.insert(chosen(record), again);
                self.meddled = true;
            }
            Meddle::Swap(one, other) if records > 0 => {
                self.wire.swap(chosen(one), chosen(other));
                self.meddled |= chosen(one) != chosen(other);
            }
            _ => {}
        }
    }

    fn carry_all(&mut self) {
        while !self.wire.is_empty() && self.end.is_none() {
            self.carry(usize::MAX, 1 << 16);
        }
    }

    fn finish(mut self) {
        self.carry_all();
        if !self.meddled && self.welcome {
            assert!(!self.client.is_handshaking() && self.received == self.sent, "not all was received");
            assert_eq!(self.end, self.bye.then_some(StreamEnd::Closed));
            assert_eq!(self.taken, self.answered, "not all was answered");
        }
        let tls = self.tls.take();
        of_server(|| drop(tls));
        assert_eq!(HELD.load(Relaxed), 0, "the server's side has left something");
    }
}

/// Checks the bytes that the client decrypted after the first `taken` bytes. Returns their total number.
fn take(client: &mut ClientConnection, mut taken: usize, answered: usize) -> usize {
    let mut plain = [0; 4096];
    loop {
        match client.reader().read(&mut plain) {
            Ok(0) => return taken,
            Ok(bytes) => {
                assert!(plain[..bytes].iter().zip(taken..).all(|(byte, at)| *byte == pattern(at)));
                taken += bytes;
                assert!(taken <= answered);
            }
            // No decrypted bytes are left for now, or the connection is closed.
            Err(_) => return taken,
        }
    }
}

fn run(data: &[u8]) -> Result<()> {
    let mut u = Unstructured::new(data);
    let mut session = Session::begin(u.arbitrary()?);
    let mut acts = 0;
    while !u.is_empty() && acts < ACTS_MAX {
        session.act(u.arbitrary()?);
        acts += 1;
    }
    session.finish();
    Ok(())
}

/// Checks one input.
pub fn check(data: &[u8]) {
    let _ = run(data);
}
