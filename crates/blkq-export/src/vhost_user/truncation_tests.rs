//! Tests of memory whose file the front end truncates while it is used. Each case may kill its process, so it
//! runs in a process of its own: this test program, with the case in an environment variable.

use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::sync::Arc;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap};

use blkq::Data;

use crate::vhost_user::chain::{Chain, RingError};
use crate::vhost_user::harness::{Driver, Guest};
use crate::vhost_user::request::{Action, Parser};
use crate::vhost_user::ring::Ring;

const RINGS: u64 = 0x10_0000;
const DATA: u64 = 0x20_0000;
const CASE: &str = "BLKQ_SIGBUS_CASE";

fn ring_on_truncated_memory() {
    for packed in [false, true] {
        let guest = Guest::new(&[(RINGS, Driver::BYTES), (DATA, 0x10000)]);
        let other = Guest::new(&[(RINGS, Driver::BYTES), (DATA, 0x10000)]);
        let mut driver = Driver::new(&guest, RINGS, 8, packed, true);
        let mut ring = Ring::new(Arc::clone(&guest.memory), &driver.spec, None).unwrap();
        let (mut chain, mut parser) = (Chain::new(), Parser::new(""));
        guest.write(DATA, &[0; 16]);
        guest.write(DATA + 4096, &[7; 512]);
        driver.add(&guest, &[(DATA, 16, false), (DATA + 4096, 513, true)], false);
        let head = ring.pop(&mut chain).unwrap().unwrap();
        let request = parser.parse(&chain, &guest.memory).unwrap();
        let Action::Transfer { gathered, .. } = request.action else { panic!() };
        let Data::Segments(owner) = gathered.data else { panic!() };
        assert!(!ring.is_broken());

        ftruncate(&guest.file, 0).unwrap();
        // The device and the driver must still work, on zeroes, and notice the truncation.
        for segment in owner.segments() {
            // SAFETY: the segment stays mapped as long as its owner, to zeroes if necessary.
            let byte = unsafe { segment.ptr.read_volatile() };
            assert_eq!(byte, 0);
            // SAFETY: as above.
            unsafe { segment.ptr.write_volatile(1) };
        }
        assert!(ring.is_broken() && guest.memory.is_broken());
        parser.write_status(&guest.memory, request.status, 0);
        ring.push_used(head, 513);
        ring.publish();
        ring.enable_kicks();
        let _ = ring.pop(&mut chain);
        assert!(!other.memory.is_broken(), "the memory of another device");
        other.write(DATA, b"fine");
        other.assert_intact();
        drop((ring, owner, parser, guest));
        // A new mapping may reuse the entry of the old one in the table of the handler, and must not be
        // broken.
        let next = Guest::new(&[(RINGS, Driver::BYTES)]);
        assert!(!next.memory.is_broken());
    }
    assert!(RingError::MemoryLost.to_string().contains("truncated"));
}

fn many_threads_at_once() {
    let guest = Arc::new(Guest::new(&[(RINGS, 0x10_0000), (DATA, 0x10_0000)]));
    let threads: Vec<_> = (0..4u64)
        .map(|thread| {
            let guest = Arc::clone(&guest);
            std::thread::spawn(move || {
                for round in 0..20_000u64 {
                    let address = RINGS + (round * 4099 + thread * 0x4_0000) % 0xf_ff00;
                    guest.write(address, &round.to_le_bytes());
                    let _: [u8; 8] = guest.read(DATA + (address - RINGS));
                }
            })
        })
        .collect();
    for bytes in (0..32u64).rev() {
        ftruncate(&guest.file, bytes << 16).unwrap();
        std::thread::yield_now();
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    let _: [u8; 8] = guest.read(RINGS);
    assert!(guest.memory.is_broken());
}

fn fault_elsewhere() {
    let guest = Guest::new(&[(RINGS, 0x1000)]);
    let file = File::from(memfd_create("other", MemfdFlags::CLOEXEC).unwrap());
    ftruncate(&file, 4096).unwrap();
    // SAFETY: the kernel chooses the address of the new mapping.
    let memory =
        unsafe { mmap(std::ptr::null_mut(), 4096, ProtFlags::READ, MapFlags::SHARED, &file, 0).unwrap() };
    ftruncate(&file, 0).unwrap();
    let _: [u8; 1] = guest.read(RINGS);
    // SAFETY: the address is mapped, although the file no longer has this page.
    std::hint::black_box(unsafe { memory.cast::<u8>().read_volatile() });
}

fn signal_that_was_sent() {
    let _guest = Guest::new(&[(RINGS, 0x1000)]);
    for _ in 0..3 {
        // SAFETY: raise only sends a signal to this thread.
        unsafe { libc::raise(libc::SIGBUS) };
    }
    many_threads_at_once();
}

fn run(case: &str) -> ExitStatus {
    let test = "vhost_user::truncation_tests::truncated_memory_is_noticed_and_kills_no_process";
    let mut command = Command::new(std::env::current_exe().unwrap());
    // A sanitizer with its own handler would report the fault.
    command.args([test, "--exact", "--nocapture"]).env(CASE, case).env("ASAN_OPTIONS", "handle_sigbus=0");
    let output = command.output().unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    println!("{case}: {}\n{text}", output.status);
    output.status
}

// Contract: bounded-input
#[test]
fn truncated_memory_is_noticed_and_kills_no_process() {
    let cases: [(&str, fn()); 4] = [
        ("ring", ring_on_truncated_memory),
        ("threads", many_threads_at_once),
        ("elsewhere", fault_elsewhere),
        ("sent", signal_that_was_sent),
    ];
    if let Ok(name) = std::env::var(CASE) {
        let (_, case) = cases.iter().find(|(case, _)| *case == name).unwrap();
        // Without a core dump, which could take long.
        let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: setrlimit reads one valid structure.
        unsafe { libc::setrlimit(libc::RLIMIT_CORE, &none) };
        return case();
    }
    assert!(run("ring").success());
    assert!(run("threads").success());
    // A fault that has another cause has its usual effect.
    assert_eq!(run("elsewhere").signal(), Some(libc::SIGBUS));
    // The handler of the standard library ignores the first such signal.
    assert!(run("sent").success());
}
