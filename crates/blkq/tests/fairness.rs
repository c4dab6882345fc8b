//! No source of work keeps other sources from using the device, or a thread from its other work.
// Contract: non-blocking

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::{Sender, channel};

use crate::common::{self, Behaviour, Device, Finish, filled, plain_limits};
use blkq::testing::within_limit;
use blkq::{
    Bio, Completion, Cqe, EngineThread, Error, LocalQueue, QueueLimits, Sector, Source, SourceContext,
    TURN_BUDGET,
};

fn held(limits: QueueLimits) -> Device {
    Device::new(limits, Behaviour { finish: Finish::Held, ..Behaviour::default() })
}

/// A read that is not adjacent to any other.
fn read(mark: u64) -> Bio {
    Bio::read(Sector(mark * 2 % 2048), filled(512, 0), mark)
}

fn keep(queue: &mut LocalQueue, count: usize, marks: &mut u64) {
    while queue.in_flight() < count {
        *marks += 1;
        queue.submit(read(*marks)).unwrap();
    }
}

#[test]
fn other_threads_get_tags_while_the_owner_submits() {
    for shared in [false, true] {
        for bio in [Bio::flush(0), read(0), Bio::discard(Sector(0), 8, 0)] {
            let device = held(QueueLimits { write_cache: true, ..plain_limits() });
            let disk = device.builder().depth(4).shared_tags(shared).build().unwrap();
            let mut queue = disk.open_queue(0).unwrap();
            let mut marks = 0;
            keep(&mut queue, 32, &mut marks);
            queue.poll();
            let operation = bio.operation;
            let done = Arc::new(AtomicBool::new(false));
            let is_done = done.clone();
            disk.submitter().submit(bio, move |result, _| {
                assert_eq!(result, Ok(()));
                is_done.store(true, SeqCst);
            });
            let begin = marks;
            while !done.load(SeqCst) {
                if marks - begin > 500 {
                    device.release_all();
                    panic!("{operation:?}, shared tags {shared}: it starves");
                }
                device.release(1);
                queue.poll();
                queue.completions().for_each(|completion| assert_eq!(completion.result, Ok(())));
                keep(&mut queue, 32, &mut marks);
            }
            device.release_all();
            common::drain(&mut queue);
            device.assert_legal();
        }
    }
}

#[test]
fn the_owner_gets_tags_while_other_threads_submit() {
    let device = held(plain_limits());
    let disk = device.builder().depth(4).build().unwrap();
    let mut queue = disk.open_queue(0).unwrap();
    let (staged, completed) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let mut submitter = disk.submitter();
    let mut stage = |marks: &mut u64| {
        while staged.load(SeqCst) - completed.load(SeqCst) < 4 {
            *marks += 1;
            let completed = completed.clone();
            let callback = Box::new(move |_, _| _ = completed.fetch_add(1, SeqCst));
            if submitter.try_submit(read(*marks), callback).is_err() {
                break;
            }
            staged.fetch_add(1, SeqCst);
        }
    };
    let mut marks = 1;
    stage(&mut marks);
    queue.poll();
    queue.submit(read(0)).unwrap();
    while queue.completions().count() == 0 {
        if completed.load(SeqCst) > 500 {
            device.release_all();
            panic!("it starves");
        }
        device.release(1);
        queue.poll();
        stage(&mut marks);
    }
    device.release_all();
    common::drain(&mut queue);
    device.assert_legal();
}

/// Discards all of a disk with one bio, and counts the turns of its engine until the bio has completed.
struct Discards {
    turns: u64,
    completed: Option<Sender<u64>>,
}

// SAFETY: the source reports that it is stopped only when its bio has completed.
unsafe impl Source for Discards {
    fn start(&mut self, cx: &mut SourceContext<'_>) -> Result<(), Error> {
        cx.submit(0, Bio::discard(Sector(0), 2048, 1)).unwrap();
        Ok(())
    }

    fn on_cqe(&mut self, _: &mut SourceContext<'_>, _: Cqe) {}

    fn on_bio(&mut self, _: &mut SourceContext<'_>, completion: Completion) {
        assert_eq!(completion.result, Ok(()));
        self.completed.take().unwrap().send(self.turns).unwrap();
    }

    fn on_turn(&mut self, _: &mut SourceContext<'_>) {
        self.turns += 1;
    }

    fn stop(&mut self, _: &mut SourceContext<'_>, _: bool) {}

    fn is_stopped(&self) -> bool {
        self.completed.is_none()
    }
}

#[test]
fn a_bio_of_many_parts_takes_several_turns() {
    within_limit(|| {
        let limits = QueueLimits { max_discard_bytes: 512, ..plain_limits() };
        let device = Device::new(limits, Behaviour::default());
        let disk = device.builder().build().unwrap();
        let engine = EngineThread::spawn("fairness", vec![(disk, 0)]).unwrap();
        let (completed, turns) = channel();
        let source = Discards { turns: 0, completed: Some(completed) };
        engine.handle().add_source(move || Box::new(source)).unwrap();
        let turns = turns.recv().unwrap();
        assert!(turns >= 2048 / TURN_BUDGET.items as u64 / 2, "{turns} turns for 2048 parts");
        drop(engine);
        assert_eq!(device.log().len(), 2048);
        device.assert_legal();
    });
}

#[test]
fn a_poll_does_no_more_than_the_budget_of_a_turn() {
    let limits = QueueLimits { max_discard_bytes: 512, ..plain_limits() };
    let device = Device::new(limits, Behaviour::default());
    let (_disk, mut queue) = device.open();
    queue.submit(Bio::discard(Sector(0), 2048, 1)).unwrap();
    queue.poll();
    // The submission and each of the two halves of a poll run at least one round.
    assert!(device.log().len() <= 2 * TURN_BUDGET.items + 64, "{} parts", device.log().len());
    queue.wait(1);
    assert_eq!(queue.take_completion().unwrap().result, Ok(()));
    assert_eq!(device.log().len(), 2048);
}
