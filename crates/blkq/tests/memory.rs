//! Memory that bios carry: drivers are shown what was checked, and nothing else.
#![allow(clippy::unwrap_used, reason = "a test")]

mod common;

use blkq::{Bio, Operation, QueueLimits, Sector, Status};
use common::{Behaviour, Device, filled, plain_limits, run};

#[test]
fn operations_without_data_that_carry_memory_are_refused() {
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
            let end = run(&mut queue, bio);
            assert_eq!(end.result, Err(Status::Invalid), "{operation:?}");
            assert_eq!(end.data.into_buffer().map(|buffer| buffer.len()), Some(512), "it is handed back");
            assert_eq!(device.log().len(), seen, "the driver never sees it");
        }
        device.assert_legal();
    }
}
