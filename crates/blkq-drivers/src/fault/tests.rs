use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use blkq::random::Random;
use blkq::testing::wait_until;
use blkq::{BioFlags, Busy, Cqe, DriverContext, Operation, Status, Tag, Taken};

use super::*;
use crate::r#loop::{Dispatch, DriverOptions, LoopDevice, LoopSetting};
use crate::model::{Model, ModelOptions};
use blkq::drivers::ram::Ram;
use blkq::testing::harness::{CountWakes, Harness, filled, pattern};

const SIZE: u64 = 1 << 20;

fn device(spec: &str) -> Fault {
    let ram = Ram::new(SIZE, 512, false).unwrap();
    Fault::new(Arc::new(ram), spec.parse().unwrap()).unwrap()
}

fn faults(spec: &str) -> FaultSpec {
    spec.parse().unwrap()
}

fn open(spec: &str) -> (Fault, Harness) {
    let device = device(spec);
    let harness = Harness::open(&device).unwrap();
    (device, harness)
}

fn fill(device: &Fault, h: &mut Harness, spec: &str) -> Vec<u8> {
    device.set(&FaultSpec::default()).unwrap();
    let content = pattern(SIZE as usize, 1);
    let expected = content.to_vec();
    let tag = h.write(0, vec![content]);
    assert_eq!(h.run(tag).0, Ok(()));
    device.set(&faults(spec)).unwrap();
    expected
}

fn write(h: &mut Harness, offset: u64, value: u8) -> blkq::IoResult {
    let tag = h.write(offset, vec![filled(4096, value), filled(4096, value)]);
    h.run(tag).0
}

fn read(h: &mut Harness, offset: u64) -> (blkq::IoResult, Vec<u8>) {
    let tag = h.read(offset, &[512, 4096, 3584]);
    h.run(tag)
}

#[test]
fn without_rules_the_device_behaves_as_the_wrapped_one() {
    let (device, mut h) = open("none");
    let expected = fill(&device, &mut h, "none");
    assert_eq!(read(&mut h, 512), (Ok(()), expected[512..512 + 8192].to_vec()));
    let discard = h.bare(Operation::Discard, BioFlags::empty(), 0, 65536);
    let flush = h.bare(Operation::Flush, BioFlags::empty(), 0, 0);
    h.start(&[discard, flush]);
    assert_eq!((h.wait(discard).0, h.wait(flush).0), (Ok(()), Ok(())));
    assert_eq!(read(&mut h, 0), (Ok(()), vec![0; 8192]));
}

#[test]
fn an_error_rule_fails_matching_requests_without_executing_them() {
    let (device, mut h) = open("none");
    let spec = "error=ENOSPC,op=write,range=64K-128K,after=1,count=2";
    let expected = fill(&device, &mut h, spec);
    assert_eq!(write(&mut h, 0, 9), Ok(()));
    let at = 65536;
    let results: Vec<_> = (0..4).map(|_| write(&mut h, at, 9)).collect();
    assert_eq!(results, [Ok(()), Err(Status::NoSpace), Err(Status::NoSpace), Ok(())]);
    assert!(device.describe().contains(&("fault-hits", "2".to_owned())));
    device.set(&faults("error=EIO")).unwrap();
    assert_eq!(read(&mut h, 0).0, Err(Status::Io));
    let tag = h.write(2 * at, vec![filled(4096, 1)]);
    assert_eq!(h.run(tag).0, Err(Status::Io));
    device.set(&FaultSpec::default()).unwrap();
    assert_eq!(read(&mut h, 2 * at).1, expected[131_072..131_072 + 8192]);
}

#[test]
fn the_same_seed_leads_to_the_same_faults() {
    let run = |seed: u64| {
        let (_, mut h) = open(&format!("seed={seed};error=EIO,rate=30%"));
        (0..200).map(|n| write(&mut h, n * 512, 1).is_err()).collect::<Vec<_>>()
    };
    assert_eq!(run(5), run(5));
    assert_ne!(run(5), run(6));
    let hits = run(5).iter().filter(|hit| **hit).count();
    assert!((30..90).contains(&hits), "{hits} of 200");
}

#[test]
fn a_short_transfer_fails_and_a_torn_one_does_not() {
    for (spec, result) in [("seed=3;short=EIO", Err(Status::Io)), ("seed=3;torn", Ok(()))] {
        let (device, mut h) = open("none");
        let expected = fill(&device, &mut h, spec);
        let mut torn = 0;
        for round in 0..20 {
            let at = round * 8192;
            assert_eq!(write(&mut h, at, 0xAA), result, "{spec}");
            device.set(&FaultSpec::default()).unwrap();
            let (_, bytes) = read(&mut h, at);
            let done = bytes.iter().position(|byte| *byte != 0xAA).unwrap_or(bytes.len());
            assert!(done.is_multiple_of(512) && done < 8192, "{spec}: {done}");
            assert_eq!(bytes[done..], expected[at as usize + done..at as usize + 8192]);
            torn += usize::from(done > 0);
            device.set(&faults(spec)).unwrap();
        }
        assert!(torn > 0);
    }
    let (device, mut h) = open("none");
    let expected = fill(&device, &mut h, "seed=9;torn");
    let (result, bytes) = read(&mut h, 0);
    assert_eq!(result, Ok(()));
    let done = bytes.iter().zip(&expected).take_while(|(a, b)| a == b).count();
    assert!(bytes[done.next_multiple_of(512)..].iter().all(|byte| *byte == 0));
    assert!(done < 8192);
}

#[test]
fn a_misdirected_write_changes_another_place_of_the_device() {
    let (device, mut h) = open("none");
    let expected = fill(&device, &mut h, "seed=1;misdirect,op=write");
    assert_eq!(write(&mut h, 4096, 0xAA), Ok(()));
    device.set(&FaultSpec::default()).unwrap();
    let now = h.read_back(0, SIZE as usize);
    assert_eq!(now[4096..4608], expected[4096..4608]);
    let changed: Vec<usize> = (0..SIZE as usize).filter(|at| now[*at] != expected[*at]).collect();
    let (first, last) = (changed[0], *changed.last().unwrap());
    assert!(last - first < 8192 && changed.iter().all(|at| now[*at] == 0xAA));
}

#[test]
fn settings_of_the_wrapped_driver_pass_through() {
    let serial = LoopSetting::Dispatch(Dispatch::Serial);
    let path = std::env::temp_dir().join(format!("blkq-fault-settings-{}", std::process::id()));
    std::fs::write(&path, vec![1; SIZE as usize]).unwrap();
    let image = LoopDevice::open(&DriverOptions::new(&path)).unwrap();
    std::fs::remove_file(&path).unwrap();
    let device = Fault::new(Arc::new(image), faults("error=EIO,op=read")).unwrap();
    assert_eq!(device.prepare_set(&serial).unwrap(), Change::Frozen);
    device.set(&serial).unwrap();
    assert!(device.describe().contains(&("dispatch", "serial".to_owned())));
    for read_only in [true, false] {
        device.prepare_read_only(read_only).unwrap();
        device.set_read_only(read_only).unwrap();
        assert_eq!(device.limits().read_only, read_only);
    }
    assert_eq!(device.prepare_set(&faults("error=EIO")).unwrap(), Change::Live);
    let error = self::device("none").set(&serial).unwrap_err();
    assert_eq!(error.to_string(), "the ram driver has no setting dispatch");
}

#[test]
fn on_a_device_that_shrank_misdirected_writes_stay_inside() {
    let path = std::env::temp_dir().join(format!("blkq-fault-smaller-{}", std::process::id()));
    std::fs::write(&path, vec![1; SIZE as usize]).unwrap();
    let image = LoopDevice::open(&DriverOptions::new(&path)).unwrap();
    let device = Fault::new(Arc::new(image), "seed=1;misdirect,op=write".parse().unwrap()).unwrap();
    let mut h = Harness::open(&device).unwrap();
    device.resize(Some(SIZE / 16)).unwrap();
    h.reload();
    for _ in 0..20 {
        assert_eq!(write(&mut h, 0, 0xAA), Ok(()));
    }
    let now = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let (inside, beyond) = now.split_at((SIZE / 16) as usize);
    assert!(inside.contains(&0xAA) && !beyond.contains(&0xAA));
}

#[test]
fn corruption_flips_one_bit_but_not_in_the_callers_memory() {
    let (device, mut h) = open("none");
    let expected = fill(&device, &mut h, "corrupt,op=read");
    let different = |now: &[u8], expected: &[u8]| -> u32 {
        now.iter().zip(expected).map(|(a, b)| (a ^ b).count_ones()).sum()
    };
    let (result, bytes) = read(&mut h, 0);
    assert_eq!((result, different(&bytes, &expected[..8192])), (Ok(()), 1));
    device.set(&faults("corrupt,op=write")).unwrap();
    let tag = h.write(0, vec![filled(4096, 0x55), filled(4096, 0x55)]);
    let (result, given_back) = h.run(tag);
    assert_eq!((result, given_back), (Ok(()), vec![0x55; 8192]));
    device.set(&FaultSpec::default()).unwrap();
    assert_eq!(different(&read(&mut h, 0).1, &[0x55; 8192]), 1);
}

#[test]
fn lost_writes_and_flushes_complete_without_error() {
    let model = Model::new(ModelOptions::new(SIZE)).unwrap();
    let device = Fault::new(Arc::new(model), "lose,op=flush+discard".parse().unwrap()).unwrap();
    let mut h = Harness::open(&device).unwrap();
    let flush = h.bare(Operation::Flush, BioFlags::empty(), 0, 0);
    assert_eq!(h.run(flush).0, Ok(()));
    let facts = device.describe();
    let fact = |name| facts.iter().find(|(key, _)| *key == name).unwrap().1.as_str();
    assert_eq!((fact("flushes"), fact("fault-hits"), fact("fault-driver")), ("0", "1", "model"));
    let (device, mut h) = open("none");
    let expected = fill(&device, &mut h, "lose,op=write");
    assert_eq!(write(&mut h, 0, 0xAA), Ok(()));
    assert_eq!(read(&mut h, 0).1, expected[..8192]);
}

#[test]
fn delays_wait_for_their_time_and_add_up() {
    let (_, mut h) = open("delay=3ms;delay=2ms");
    let begin = Instant::now();
    let tag = h.read(0, &[512]);
    h.start(&[tag]);
    assert!(!h.has_completed(tag) && h.deadline_ns().is_some());
    assert_eq!(h.wait(tag).0, Ok(()));
    assert!(begin.elapsed() >= Duration::from_millis(5));
    assert_eq!(h.deadline_ns(), None);
}

#[test]
fn delays_have_the_requested_mean_and_percentile() {
    let mut random = Random::new(1);
    let mut delays: Vec<u64> =
        (0..100_000).map(|_| super::queue::delay_ns(1_000_000, Some(5_000_000), &mut random)).collect();
    delays.sort_unstable();
    let mean = delays.iter().sum::<u64>() / 100_000;
    assert!((900_000..1_100_000).contains(&mean), "{mean}");
    assert!((4_500_000..5_500_000).contains(&delays[99_000]), "{}", delays[99_000]);
}

#[test]
fn stuck_requests_complete_in_time_or_when_the_rules_change() {
    let device = device("stuck=20ms");
    let wake = Arc::new(CountWakes::default());
    let mut h = Harness::open_waking(&device, 0, wake.clone()).unwrap();
    let begin = Instant::now();
    let tag = h.read(0, &[512]);
    assert_eq!(h.run(tag).0, Err(Status::Timeout));
    assert!(begin.elapsed() >= Duration::from_millis(20));
    device.set(&faults("stuck")).unwrap();
    let tag = h.read(0, &[512]);
    h.start(&[tag]);
    h.turn();
    assert!(!h.has_completed(tag));
    let woken = wake.0.load(Ordering::Relaxed);
    device.set(&FaultSpec::default()).unwrap();
    assert!(wake.0.load(Ordering::Relaxed) > woken);
    assert_eq!(h.wait(tag).0, Ok(()));
}

#[test]
fn a_rule_with_a_file_applies_while_the_file_exists() {
    let directory = std::env::temp_dir().join(format!("blkq-fault-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let file = directory.join("on");
    let (_, mut h) = open(&format!("error=EIO,file={}", file.display()));
    assert_eq!(write(&mut h, 0, 1), Ok(()));
    let until = |h: &mut Harness, expected| {
        wait_until("the rule follows its file", || write(h, 0, 1) == expected);
    };
    std::fs::write(&file, "").unwrap();
    until(&mut h, Err(Status::Io));
    std::fs::remove_file(&file).unwrap();
    until(&mut h, Ok(()));
    std::fs::remove_dir(&directory).unwrap();
}

#[test]
fn requests_that_a_busy_wrapped_device_rejects_are_reissued() {
    let mut options = ModelOptions::new(SIZE);
    options.busy_resource_every = 3;
    let device = Fault::new(Arc::new(Model::new(options).unwrap()), "none".parse().unwrap()).unwrap();
    let mut h = Harness::open(&device).unwrap();
    let tags: Vec<_> = (0..20).map(|n| h.read(n * 4096, &[512])).collect();
    h.start(&tags);
    for tag in tags {
        assert_eq!(h.wait(tag).0, Ok(()));
    }
}

/// A driver that takes one request at a time, and submits it in `commit`.
struct OneByOne {
    accepted: Option<Tag>,
    is_submitted: bool,
}

impl Driver for OneByOne {
    fn name(&self) -> &'static str {
        "one by one"
    }

    fn limits(&self) -> QueueLimits {
        QueueLimits { capacity_bytes: SIZE, ..QueueLimits::default() }
    }

    fn uses_ring(&self) -> bool {
        true
    }

    fn open_queue(&self, _cx: OpenContext<'_>) -> Result<Box<dyn DriverQueue>, Error> {
        Ok(Box::new(OneByOne { accepted: None, is_submitted: false }))
    }
}

// SAFETY: nothing uses the memory of a request.
unsafe impl DriverQueue for OneByOne {
    fn queue_requests(&mut self, _cx: &mut DriverContext<'_>, tags: &[Tag]) -> Taken {
        if self.accepted.is_some() {
            return Taken::First(0, Busy::UntilCompletion);
        }
        self.accepted = Some(tags[0]);
        Taken::First(1, Busy::UntilCompletion)
    }

    fn commit(&mut self, cx: &mut DriverContext<'_>) {
        if self.accepted.is_some() && !std::mem::replace(&mut self.is_submitted, true) {
            // SAFETY: a NOP uses no memory.
            unsafe { cx.push(io_uring::opcode::Nop::new().build(), 0) };
        }
    }

    fn complete_cqe(&mut self, cx: &mut DriverContext<'_>, _cqe: Cqe) {
        self.is_submitted = false;
        cx.complete(self.accepted.take().expect("a request was submitted"), Ok(()));
    }
}

#[test]
fn requests_offered_after_a_completion_are_committed() {
    let device = OneByOne { accepted: None, is_submitted: false };
    let device = Fault::new(Arc::new(device), "none".parse().unwrap()).unwrap();
    let mut h = Harness::open(&device).unwrap();
    let tags: Vec<_> = (0..4).map(|n| h.read(n * 4096, &[512])).collect();
    h.start(&tags);
    for tag in tags {
        assert_eq!(h.wait(tag).0, Ok(()));
    }
}
