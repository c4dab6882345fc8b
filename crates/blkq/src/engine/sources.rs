//! The sources of an engine: those that it serves, and those that it stops.

use crate::bio::Completion;
use crate::error::Error;
use crate::queue::Queue;
use crate::ring::{Cqe, Ring, Token};
use crate::sync::mpsc::{Sender, channel};

use super::source::{EngineHandle, FIRST_SOURCE, Source, SourceContext, SourceId};
use super::worker::Worker;

/// The rest of the engine, borrowed by a source for a call.
pub(super) struct EngineParts<'a> {
    pub ring: &'a mut Ring,
    pub queues: &'a mut [Queue],
    pub handle: &'a EngineHandle,
    pub turn: u64,
    pub exits: bool,
}

/// A source in its place.
struct AttachedSource {
    id: SourceId,
    source: Box<dyn Source>,
}

/// The sources of one engine.
pub(super) struct Sources {
    /// By the owner in their tokens, from [`FIRST_SOURCE`] on.
    attached: Vec<Option<AttachedSource>>,
    /// Those that were asked to stop, and the threads that wait for it.
    stopping: Vec<(SourceId, Sender<()>)>,
    /// How many there were so far.
    generation: u64,
    worker: Worker,
}

impl Sources {
    pub fn new() -> Sources {
        let worker = Worker::new("blkq-worker");
        Sources { attached: Vec::new(), stopping: Vec::new(), generation: 0, worker }
    }

    /// Adds `source` and starts it.
    ///
    /// # Errors
    /// The error of [`Source::start`].
    pub fn add(&mut self, source: Box<dyn Source>, mut parts: EngineParts<'_>) -> Result<SourceId, Error> {
        let index = match self.attached.iter().position(Option::is_none) {
            Some(index) => index,
            None => {
                self.attached.push(None);
                self.attached.len() - 1
            }
        };
        self.generation += 1;
        let id = SourceId { owner: FIRST_SOURCE + index as u16, generation: self.generation };
        self.attached[index] = Some(AttachedSource { id, source });
        let started = self.with(index, &mut parts, |source, cx| source.start(cx));
        if let Some(Err(error)) = started {
            // It may have pushed something before: it stops as others do.
            self.stop(id, false, channel().0, parts);
            self.drop_stopped();
            return Err(error);
        }
        Ok(id)
    }

    /// Calls source `index`, if it is there.
    #[inline]
    fn with<R>(
        &mut self,
        index: usize,
        parts: &mut EngineParts<'_>,
        call: impl FnOnce(&mut dyn Source, &mut SourceContext<'_>) -> R,
    ) -> Option<R> {
        let attached = self.attached.get_mut(index)?.as_mut()?;
        let mut cx = SourceContext {
            ring: &mut *parts.ring,
            queues: &mut *parts.queues,
            id: attached.id,
            handle: parts.handle,
            worker: &mut self.worker,
            turn: parts.turn,
            exits: parts.exits,
        };
        Some(call(&mut *attached.source, &mut cx))
    }

    /// Calls source `id`, unless it was dropped.
    pub fn with_named(
        &mut self,
        id: SourceId,
        mut parts: EngineParts<'_>,
        call: impl FnOnce(&mut dyn Source, &mut SourceContext<'_>),
    ) {
        if self
            .attached
            .get(id.index())
            .is_some_and(|attached| attached.as_ref().is_some_and(|it| it.id == id))
        {
            self.with(id.index(), &mut parts, call);
        }
    }

    /// Passes a completion of the ring to the source with that owner.
    #[inline]
    pub fn on_cqe(&mut self, owner: u16, cqe: Cqe, mut parts: EngineParts<'_>) {
        self.with(usize::from(owner - FIRST_SOURCE), &mut parts, |source, cx| source.on_cqe(cx, cqe));
    }

    /// Passes a completed bio to the source that submitted it.
    #[inline]
    pub fn on_bio(&mut self, mut completion: Completion, mut parts: EngineParts<'_>) {
        let token = Token(completion.user_data);
        completion.user_data = token.payload();
        let index = usize::from(token.owner() - FIRST_SOURCE);
        self.with(index, &mut parts, |source, cx| source.on_bio(cx, completion));
    }

    /// Gives each its turn.
    #[inline]
    pub fn on_turn(&mut self, mut parts: EngineParts<'_>) {
        for index in 0..self.attached.len() {
            self.with(index, &mut parts, |source, cx| source.on_turn(cx));
        }
    }

    /// The client of the bio that was submitted under `token`, for people.
    pub fn client_of(&self, token: Token) -> Option<String> {
        let index = usize::from(token.owner().wrapping_sub(FIRST_SOURCE));
        self.attached.get(index)?.as_ref()?.source.client_of(token.payload())
    }

    /// Whether nobody waits any longer for the bio that was submitted under `token`.
    pub fn is_abandoned(&self, token: Token) -> bool {
        let index = usize::from(token.owner().wrapping_sub(FIRST_SOURCE));
        let attached = self.attached.get(index).and_then(Option::as_ref);
        attached.is_some_and(|attached| attached.source.is_abandoned(token.payload()))
    }

    /// Has source `id` stop; `stopped` is notified when it is dropped.
    pub fn stop(&mut self, id: SourceId, force: bool, stopped: Sender<()>, parts: EngineParts<'_>) {
        self.with_named(id, parts, |source, cx| source.stop(cx, force));
        self.stopping.push((id, stopped));
    }

    /// Has all of them stop, as the engine exits.
    pub fn stop_all(&mut self, mut parts: EngineParts<'_>) {
        for index in 0..self.attached.len() {
            self.with(index, &mut parts, |source, cx| source.stop(cx, true));
        }
    }

    /// Whether all have stopped.
    pub fn are_stopped(&self) -> bool {
        self.attached.iter().flatten().all(|attached| attached.source.is_stopped())
    }

    /// Drops those that were asked to stop, and have.
    pub fn drop_stopped(&mut self) {
        let attached = &mut self.attached;
        self.stopping.retain(|(id, stopped)| {
            let named = |place: &&mut Option<AttachedSource>| place.as_ref().is_some_and(|it| it.id == *id);
            if let Some(place) = attached.get_mut(id.index()).filter(named) {
                if place.as_ref().is_some_and(|attached| !attached.source.is_stopped()) {
                    return true;
                }
                *place = None;
            }
            let _ = stopped.send(());
            false
        });
    }

    /// When one of them wants its turn at the latest, in nanoseconds of the monotonic clock.
    pub fn deadline_ns(&self) -> Option<u64> {
        self.attached.iter().flatten().filter_map(|attached| attached.source.deadline_ns()).min()
    }
}

impl Drop for Sources {
    fn drop(&mut self) {
        for (_, stopped) in self.stopping.drain(..) {
            let _ = stopped.send(());
        }
    }
}
