//! The kernel's binary trace format, version 7 (`struct blk_io_trace` in include/uapi/linux/blktrace_api.h),
//! which blkparse(1), btt(1), iowatcher(1) and fio(1) read.

use std::collections::HashSet;

use blkq::trace::{EventKind, TraceClient, TraceEvent};
use blkq::{BioFlags, Operation};
use blkq_export::client_kind::NBD;

use super::item::{Item, ItemKind, client_name, rwbs};

// `BLK_IO_TRACE_MAGIC` and `BLK_IO_TRACE_VERSION`.
const MAGIC: u32 = 0x6561_7400 | 7;
/// The first bytes of each record, and so of a file.
pub const HEAD: [u8; 4] = MAGIC.to_ne_bytes();
/// The device number in the records: 240:0, which is reserved for local use, because the device may have no
/// block device.
const DEVICE: u32 = 240 << 20;

/// Size of a process name (`TASK_COMM_LEN`), including the final NUL.
const COMM_BYTES: usize = 16;
/// Number of process IDs per kind of client. Process IDs of Linux are below 2^22.
const KIND_NUMBERS: u32 = 10_000_000;

/// The process ID that represents a client. For NBD clients this is the number in the log and in `blkq show`.
/// For rings and queues it is their number plus 20,000,000 or 30,000,000. For threads of the daemon it is 0.
fn pid(client: TraceClient) -> u32 {
    match client.kind() {
        0 => 0,
        NBD => client.number(),
        kind => (u32::from(kind) * KIND_NUMBERS).wrapping_add(client.number()),
    }
}

/// Categories (`enum blktrace_cat`), in the upper half of an action.
mod category {
    pub const READ: u32 = 1 << 16;
    pub const WRITE: u32 = 1 << 17;
    pub const FLUSH: u32 = 1 << 18;
    pub const SYNC: u32 = 1 << 19;
    pub const QUEUE: u32 = 1 << 20;
    pub const REQUEUE: u32 = 1 << 21;
    pub const ISSUE: u32 = 1 << 22;
    pub const COMPLETE: u32 = 1 << 23;
    pub const FS: u32 = 1 << 24;
    pub const NOTIFY: u32 = 1 << 26;
    pub const DISCARD: u32 = 1 << 29;
    pub const FUA: u32 = 1 << 31;
}

// `BLK_TN_PROCESS`, `BLK_TN_TIMESTAMP` and `BLK_TN_MESSAGE`.
const PROCESS: u32 = category::NOTIFY;
const TIMESTAMP: u32 = 1 | category::NOTIFY;
const MESSAGE: u32 = 2 | category::NOTIFY;

/// The action (`enum blktrace_act`), without operation and flags.
fn action_of(kind: EventKind) -> u32 {
    match kind {
        EventKind::Queue => 1 | category::QUEUE,
        EventKind::BackMerge => 2 | category::QUEUE,
        EventKind::FrontMerge => 3 | category::QUEUE,
        EventKind::GetRequest => 4 | category::QUEUE,
        EventKind::Requeue => 6 | category::REQUEUE,
        EventKind::Issue => 7 | category::ISSUE,
        EventKind::Complete => 8 | category::COMPLETE,
        EventKind::Plug => 9 | category::QUEUE,
        EventKind::Unplug => 10 | category::QUEUE,
        EventKind::Insert => 12 | category::QUEUE,
        EventKind::Split => 13,
        EventKind::Throttle => MESSAGE,
        // Actions that the format does not define are ignored by other programs.
        _ => 17,
    }
}

/// Operation and flags as categories. The format has no category for write zeroes, which appear as writes.
fn categories_of(event: &TraceEvent) -> u32 {
    let operation = match event.operation {
        Operation::Read => category::READ,
        Operation::Write | Operation::WriteZeroes => category::WRITE,
        Operation::Discard => category::WRITE | category::DISCARD,
        Operation::Flush => category::FLUSH | category::SYNC,
    };
    let flag = |flag, category| if event.flags.contains(flag) { category } else { 0 };
    let flags =
        flag(BioFlags::FUA, category::FUA | category::SYNC) | flag(BioFlags::PREFLUSH, category::FLUSH);
    // Marks a request, in contrast to a bio.
    let request = if event.tag.is_some() { category::FS } else { 0 };
    operation | flags | request
}

/// Encodes records, for a stream of one or several queues.
pub struct Encoder {
    /// The number of the last record of each queue. Readers detect lost events as gaps in these numbers.
    sequences: Vec<u32>,
    named: HashSet<TraceClient>,
}

/// The fields that differ between records.
#[derive(Clone, Copy, Default)]
struct Record<'a> {
    queue: usize,
    time_ns: u64,
    sector: u64,
    bytes: u32,
    action: u32,
    pid: u32,
    error: i32,
    payload: &'a [u8],
}

impl Encoder {
    /// For events of queues with an index below `queues`.
    pub fn new(queues: usize) -> Encoder {
        Encoder { sequences: vec![0; queues], named: HashSet::new() }
    }

    /// Writes the first record: the time of day at `time_ns` of the trace's clock.
    pub fn begin(&mut self, queue: usize, time_ns: u64, since_epoch: std::time::Duration, out: &mut Vec<u8>) {
        let payload = [since_epoch.as_secs() as u32, since_epoch.subsec_nanos()].map(u32::to_ne_bytes);
        let payload = payload.as_flattened();
        self.record(&Record { queue, time_ns, action: TIMESTAMP, payload, ..Record::default() }, out);
    }

    /// Appends the records of `item`: none for a gap, one or two for an event.
    pub fn encode(&mut self, item: &Item, out: &mut Vec<u8>) {
        let event = match &item.kind {
            ItemKind::Event(event) => event,
            ItemKind::Lost(events) => {
                self.sequences[item.queue] = self.sequences[item.queue].wrapping_add(*events as u32);
                return;
            }
        };
        let (queue, time_ns, pid) = (item.queue, event.time_ns, pid(event.client));
        let of_event = Record { queue, time_ns, pid, ..Record::default() };
        if self.named.insert(event.client) {
            let mut comm = client_name(event.client).into_bytes();
            comm.truncate(COMM_BYTES - 1);
            comm.resize(COMM_BYTES, 0);
            self.record(&Record { action: PROCESS, payload: &comm, ..of_event }, out);
        }
        if event.kind == EventKind::Throttle {
            let text = format!("throttled {} {} + {}", rwbs(event), event.sector.0, event.bytes >> 9);
            self.record(&Record { action: MESSAGE, payload: text.as_bytes(), ..of_event }, out);
            return;
        }
        let is_plug = matches!(event.kind, EventKind::Plug | EventKind::Unplug);
        let payload = match event.kind {
            EventKind::Unplug => Some(u64::from(event.other)),
            EventKind::Split => Some(event.sector.0.saturating_add(u64::from(event.bytes >> 9))),
            _ => None,
        };
        let payload = payload.map(u64::to_be_bytes);
        let record = Record {
            sector: event.sector.0,
            bytes: event.bytes,
            action: action_of(event.kind) | if is_plug { 0 } else { categories_of(event) },
            error: event.status.map_or(0, |status| -status.errno()),
            payload: payload.as_ref().map_or(&[], |bytes| &bytes[..]),
            ..of_event
        };
        self.record(&record, out);
    }

    fn record(&mut self, record: &Record<'_>, out: &mut Vec<u8>) {
        let Record { queue, time_ns, sector, bytes, action, pid, error, payload } = *record;
        let sequence = &mut self.sequences[queue];
        *sequence = sequence.wrapping_add(1);
        out.extend(HEAD);
        out.extend(sequence.to_ne_bytes());
        out.extend([time_ns, sector].map(u64::to_ne_bytes).as_flattened());
        out.extend([bytes, action, pid, DEVICE, queue as u32].map(u32::to_ne_bytes).as_flattened());
        // As in the kernel, the negative errno is truncated to 16 bits.
        out.extend([error as u16, payload.len() as u16].map(u16::to_ne_bytes).as_flattened());
        out.extend(payload);
    }
}

#[cfg(test)]
mod tests {
    use blkq::{Sector, Status, Tag};
    use proptest::prelude::*;

    use super::super::item::tests::{event, item};
    use super::*;

    /// Size of a record in bytes, without its payload.
    const RECORD_BYTES: usize = 48;

    #[derive(PartialEq, Debug)]
    struct Read {
        sequence: u32,
        time_ns: u64,
        sector: u64,
        bytes: u32,
        action: u32,
        pid: u32,
        cpu: u32,
        error: u16,
        payload: Vec<u8>,
    }

    fn read(mut bytes: &[u8]) -> Vec<Read> {
        let mut records = Vec::new();
        while !bytes.is_empty() {
            let word = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
            let long = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
            let half = |at: usize| u16::from_ne_bytes(bytes[at..at + 2].try_into().unwrap());
            assert_eq!((word(0), word(36)), (0x6561_7407, 240 << 20));
            let end = RECORD_BYTES + usize::from(half(46));
            records.push(Read {
                sequence: word(4),
                time_ns: long(8),
                sector: long(16),
                bytes: word(24),
                action: word(28),
                pid: word(32),
                cpu: word(40),
                error: half(44),
                payload: bytes[RECORD_BYTES..end].to_vec(),
            });
            bytes = &bytes[end..];
        }
        records
    }

    fn records(encoder: &mut Encoder, items: &[Item]) -> Vec<Read> {
        let mut bytes = Vec::new();
        items.iter().for_each(|item| encoder.encode(item, &mut bytes));
        read(&bytes)
    }

    #[test]
    fn a_client_is_named_before_its_first_event() {
        let client = TraceClient::new(blkq_export::client_kind::NBD, 7);
        let event = TraceEvent { client, ..event(EventKind::Queue, 5) };
        let mut encoder = Encoder::new(2);
        let records = records(&mut encoder, &[item(1, event), item(1, event)]);
        let numbers: Vec<u32> = records.iter().map(|record| record.sequence).collect();
        assert_eq!((numbers, records[0].action), (vec![1, 2, 3], PROCESS));
        assert_eq!(records[0].payload, b"nbd 7\0\0\0\0\0\0\0\0\0\0\0");
        assert!(records.iter().all(|record| (record.pid, record.cpu) == (7, 1)));
    }

    #[test]
    fn a_throttled_request_is_a_message() {
        let throttled = TraceEvent { sector: Sector(8), bytes: 4096, ..event(EventKind::Throttle, 2) };
        let records = records(&mut Encoder::new(1), &[item(0, throttled)]);
        let message = records.last().unwrap();
        assert_eq!((message.action, message.bytes, message.sector), (MESSAGE, 0, 0));
        assert_eq!(message.payload, b"throttled R 8 + 8");
    }

    #[test]
    fn payloads_and_errors_are_as_the_kernel_writes_them() {
        let unplug = TraceEvent { other: 3, ..event(EventKind::Unplug, 1) };
        let split = TraceEvent { sector: Sector(8), bytes: 4096, ..event(EventKind::Split, 2) };
        let failed = TraceEvent { status: Some(Status::Io), ..event(EventKind::Complete, 3) };
        let items = [unplug, split, failed].map(|event| item(0, event));
        let records = records(&mut Encoder::new(1), &items);
        assert_eq!(records[1].payload, 3u64.to_be_bytes());
        assert_eq!(records[2].payload, 16u64.to_be_bytes());
        assert_eq!(records[3].error, (-libc::EIO) as u16);
    }

    #[test]
    fn lost_events_are_a_gap_in_the_sequence() {
        let event = event(EventKind::Issue, 5);
        let lost = Item { queue: 0, time_ns: 5, kind: ItemKind::Lost(10) };
        let records = records(&mut Encoder::new(1), &[item(0, event), lost, item(0, event)]);
        assert_eq!(records.iter().map(|record| record.sequence).collect::<Vec<_>>(), [1, 2, 13]);
    }

    #[test]
    fn operations_have_the_categories_that_blkparse_shows() {
        let categories = |operation, flags| {
            let event = TraceEvent { operation, flags, ..event(EventKind::Queue, 1) };
            let records = records(&mut Encoder::new(1), &[item(0, event)]);
            records[1].action & !(category::QUEUE | 0xffff)
        };
        let none = BioFlags::empty();
        assert_eq!(categories(Operation::Read, none), category::READ);
        assert_eq!(categories(Operation::WriteZeroes, none), category::WRITE);
        assert_eq!(categories(Operation::Discard, none), category::WRITE | category::DISCARD);
        assert_eq!(categories(Operation::Flush, none), category::FLUSH | category::SYNC);
        let durable = category::WRITE | category::FUA | category::SYNC;
        assert_eq!(categories(Operation::Write, BioFlags::FUA), durable);
        assert_eq!(categories(Operation::Write, BioFlags::PREFLUSH), category::WRITE | category::FLUSH);
    }

    proptest! {
        #[test]
        fn each_event_is_one_record_with_its_fields(
            kind in 0..EventKind::ALL.len(), sector: u64, bytes: u32, tag: u16, time_ns: u64, queue in 0..4_usize,
        ) {
            let sector = sector >> 10;
            let of = event(EventKind::ALL[kind], time_ns);
            let of = TraceEvent { sector: Sector(sector), bytes, tag: Some(Tag(tag)), ..of };
            let records = records(&mut Encoder::new(4), &[item(queue, of)]);
            let record = &records[1];
            let is_message = of.kind == EventKind::Throttle;
            let place = if is_message { (0, 0) } else { (sector, bytes) };
            prop_assert_eq!((record.sector, record.bytes), place);
            prop_assert_eq!(record.time_ns, time_ns);
            prop_assert_eq!((record.cpu as usize, record.action & 0xffff), (queue, action_of(of.kind) & 0xffff));
        }
    }
}
