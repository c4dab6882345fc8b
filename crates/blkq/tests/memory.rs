//! Memory that bios carry: drivers are shown what was checked, and nothing else.
#![allow(clippy::unwrap_used, reason = "a test")]

mod common;

use std::os::unix::process::ExitStatusExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use blkq::{
    Bio, Disk, Driver, DriverContext, DriverQueue, Error, OpenContext, Operation, QueueLimits, Sector,
    Status, Tag, Taken,
};
use common::{Behaviour, Device, filled, plain_limits, run};

#[test]
fn operations_without_data_that_carry_memory_are_rejected() {
    let emulated =
        QueueLimits { max_write_zeroes_bytes: 0, max_write_zeroes_no_unmap_bytes: 0, ..plain_limits() };
    for limits in [plain_limits(), emulated] {
        let device = Device::new(limits, Behaviour::default());
        let (_disk, mut queue) = device.open();
        for operation in [Operation::Discard, Operation::WriteZeroes, Operation::Flush] {
            let sectors = if operation == Operation::Flush { 0 } else { 64 };
            let plain = Bio { operation, sectors, ..Bio::flush(0) };
            assert_eq!(run(&mut queue, plain).result, Ok(()), "{operation:?}");
            let seen = device.log().len();
            // The memory is a 64th of the range.
            let bio = Bio { operation, sectors, ..Bio::write(Sector(0), filled(512, 7), 0) };
            let completion = run(&mut queue, bio);
            assert_eq!(completion.result, Err(Status::Invalid), "{operation:?}");
            assert_eq!(
                completion.data.into_buffer().map(|buffer| buffer.len()),
                Some(512),
                "it is handed back"
            );
            assert_eq!(device.log().len(), seen, "the driver never sees it");
        }
        device.assert_legal();
    }
}

/// Keeps what it takes, and panics as soon as it is to.
#[derive(Clone, Default)]
struct Panicking {
    taken: Arc<AtomicBool>,
    panics: Arc<AtomicBool>,
}

impl Driver for Panicking {
    fn name(&self) -> &'static str {
        "panicking"
    }

    fn limits(&self) -> QueueLimits {
        plain_limits()
    }

    fn open_queue(&self, _cx: OpenContext<'_>) -> Result<Box<dyn DriverQueue>, Error> {
        Ok(Box::new(self.clone()))
    }
}

// SAFETY: nothing uses the memory of a request, and none completes.
unsafe impl DriverQueue for Panicking {
    fn queue_requests(&mut self, _: &mut DriverContext<'_>, _: &[Tag]) -> Taken {
        self.taken.store(true, SeqCst);
        Taken::All
    }

    fn poll(&mut self, _: &mut DriverContext<'_>) {
        assert!(!self.panics.load(SeqCst), "as it is to");
    }
}

const CHILD: &str = "BLKQ_MEMORY_CHILD";
/// The exit code of a child in which memory that was in flight went back to its owner.
const RETURNED: i32 = 77;

#[test]
#[ignore = "run by the test below, in a process of its own"]
fn a_queue_is_dropped_by_a_panic_with_lent_memory_in_flight() {
    assert!(std::env::var_os(CHILD).is_some());
    let driver = Panicking::default();
    let disk = Disk::builder(Box::new(driver.clone())).build().unwrap();
    let mut queue = disk.open_queue(0).unwrap();
    let mut submitter = disk.submitter();
    let reader = std::thread::spawn(move || {
        let mut memory = vec![0; 512];
        let _ = submitter.read_at(&mut memory, 0);
        drop(memory);
        std::process::exit(RETURNED);
    });
    while !driver.taken.load(SeqCst) {
        queue.poll();
    }
    driver.panics.store(true, SeqCst);
    let _ = catch_unwind(AssertUnwindSafe(|| drop(queue)));
    let _ = reader.join();
}

#[test]
fn memory_of_a_caller_never_returns_while_it_is_in_flight() {
    let mut child = Command::new(std::env::current_exe().unwrap());
    let name = "a_queue_is_dropped_by_a_panic_with_lent_memory_in_flight";
    let output = child.args(["--exact", name, "--ignored", "--nocapture"]).env(CHILD, "1").output().unwrap();
    assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{output:?}");
}
