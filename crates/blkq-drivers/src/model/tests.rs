use blkq::{BioFlags, ErrorKind};

use super::*;
use blkq::testing::harness::{Harness, filled};

fn device(change: impl FnOnce(&mut ModelOptions)) -> Model {
    let mut options = ModelOptions::new(1 << 30);
    change(&mut options);
    Model::new(options).unwrap()
}

fn counter(model: &Model, name: &str) -> u64 {
    model.describe().iter().find(|(of, _)| *of == name).unwrap().1.parse().unwrap()
}

#[test]
fn requests_complete_immediately_and_are_counted() {
    let model = device(|_| {});
    let mut h = Harness::open(&model).unwrap();
    let tags = [h.read(0, &[4096]), h.write(4096, vec![filled(512, 1), filled(512, 2)])];
    let flush = h.bare(Operation::Flush, BioFlags::empty(), 0, 0);
    h.start(&[tags[0], tags[1], flush]);
    assert!(h.has_completed(tags[0]) && h.has_completed(tags[1]) && h.has_completed(flush));
    let (result, bytes) = h.wait(tags[0]);
    assert_eq!((result, bytes), (Ok(()), vec![0; 4096]));
    assert_eq!(["requests", "flushes", "seeks"].map(|name| counter(&model, name)), [3, 1, 0]);
}

#[test]
fn without_zero_reads_the_memory_stays_unchanged() {
    let mut h = Harness::open(&device(|o| o.zero_reads = false)).unwrap();
    assert_eq!(h.read_back(0, 512), vec![0xEE; 512]);
}

#[test]
fn a_timer_delays_the_completion() {
    let mut h = Harness::open(&device(|o| o.completion = ModelCompletion::Timer(3_000_000))).unwrap();
    let tag = h.read(0, &[512]);
    let begin = monotonic_ns();
    h.start(&[tag]);
    let deadline = h.deadline_ns().unwrap();
    assert!(deadline >= begin + 3_000_000);
    h.turn();
    assert!(h.has_completed(tag) == (monotonic_ns() >= deadline));
    assert_eq!(h.wait(tag).0, Ok(()));
    assert!(monotonic_ns() >= deadline);
    assert_eq!(h.deadline_ns(), None);
}

#[test]
fn random_delays_stay_in_range_and_repeat() {
    let deadlines = || {
        let model = device(|o| o.completion = ModelCompletion::Random(1_000_000..=2_000_000, 9));
        let mut h = Harness::open(&model).unwrap();
        let mut spread = Vec::new();
        for _ in 0..8 {
            let tag = h.read(0, &[512]);
            let before = monotonic_ns();
            h.start(&[tag]);
            let after = monotonic_ns();
            let due = h.deadline_ns().unwrap();
            assert!(due >= before + 1_000_000 && due <= after + 2_000_000);
            spread.push((due - before) / 200_000);
            assert_eq!(h.wait(tag).0, Ok(()));
        }
        spread
    };
    let spread = deadlines();
    assert!(spread.iter().any(|s| *s != spread[0]), "{spread:?}");
}

#[test]
fn a_modelled_disk_does_one_request_at_a_time_and_has_one_queue() {
    let model = SeekModel { command_ns: 500_000, ..SeekModel::default() };
    let model = device(|o| o.completion = ModelCompletion::Disk(model));
    let mut h = Harness::open(&model).unwrap();
    let tags = [h.read(0, &[512]), h.read(512, &[512]), h.read(1024, &[512])];
    let begin = monotonic_ns();
    h.start(&tags);
    let (first, last) = (tags[0], tags[2]);
    assert_eq!(h.wait(first).0, Ok(()));
    assert!(monotonic_ns() - begin >= 500_000);
    assert_eq!(h.wait(last).0, Ok(()));
    assert!(monotonic_ns() - begin >= 1_500_000);
    assert_eq!(counter(&model, "seeks"), 0, "each begins where the last one ended");
    let back = h.read(0, &[512]);
    h.start(&[back]);
    assert_eq!(h.wait(back).0, Ok(()));
    assert_eq!(counter(&model, "seeks"), 1);
    assert_eq!(Harness::open(&model).err().unwrap().kind(), ErrorKind::Invalid);
}

#[test]
fn busy_requests_are_requeued_and_complete_once() {
    let model = device(|o| {
        o.busy_resource_every = 3;
        o.completion = ModelCompletion::Timer(1);
    });
    let mut h = Harness::open(&model).unwrap();
    let tags: Vec<Tag> = (0..16).map(|i| h.read(i * 512, &[512])).collect();
    let (mut done, mut kinds) = (0, Vec::new());
    while done < tags.len() {
        match h.queue(&tags[done..]) {
            Taken::All => done = tags.len(),
            Taken::First(count, busy) => {
                done += count;
                kinds.push(busy);
            }
        }
    }
    assert!(!kinds.is_empty() && kinds.iter().all(|busy| *busy == Busy::Resource), "{kinds:?}");
    for tag in tags {
        assert_eq!(h.wait(tag).0, Ok(()));
    }
    assert_eq!(counter(&model, "requests"), 16);
}

#[test]
fn contradictory_limits_are_rejected() {
    let mut options = ModelOptions::new(1000);
    assert_eq!(Model::new(options.clone()).err().unwrap().kind(), ErrorKind::Invalid);
    options.limits.capacity_bytes = 1024;
    assert!(Model::new(options).is_ok());
}

#[test]
fn continuing_the_last_request_costs_no_seek() {
    let model = SeekModel::default();
    let follow = model.cost_ns(4096, 4096, 4096, 1 << 30);
    assert_eq!(follow, model.command_ns + 4096 * 1_000_000_000 / model.bytes_per_second);
    let near = model.cost_ns(4096, 12288, 4096, 1 << 30);
    let far = model.cost_ns(4096, 1 << 29, 4096, 1 << 30);
    assert!(follow < near && near < far, "{follow} {near} {far}");
}

#[test]
fn one_merged_write_costs_less_than_its_parts() {
    let model = SeekModel::default();
    let merged = model.cost_ns(0, 1 << 20, 128 << 10, 1 << 30);
    let scattered: u64 = (0..32).map(|i| model.cost_ns(0, (1 << 20) + i * 4096, 4096, 1 << 30)).sum();
    assert!(scattered > 10 * merged);
}
