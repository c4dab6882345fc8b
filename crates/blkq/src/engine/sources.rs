use std::fmt;

use crate::bio::Completion;
use crate::error::Error;
use crate::ring::{Cqe, Token};
use crate::sync::mpsc::{Sender, channel};

use super::source::{EngineParts, FIRST_SOURCE, Source, SourceContext, SourceId};
use super::worker::Worker;

struct AttachedSource {
    id: SourceId,
    source: Box<dyn Source>,
}

pub(super) struct Sources {
    /// Indexed by the owner in the source's tokens, minus [`FIRST_SOURCE`].
    attached: Vec<Option<AttachedSource>>,
    /// The sources that are being stopped, and a channel to the thread that waits for each.
    stopping: Vec<(SourceId, Sender<()>)>,
    /// The number of sources that were ever added.
    generation: u64,
    worker: Worker,
}

impl Sources {
    pub fn new() -> Sources {
        let worker = Worker::new("blkq-worker");
        Sources { attached: Vec::new(), stopping: Vec::new(), generation: 0, worker }
    }

    pub fn add(&mut self, source: Box<dyn Source>, parts: &mut EngineParts) -> Result<SourceId, Error> {
        let index = self.attached.iter().position(Option::is_none).unwrap_or(self.attached.len());
        if index == self.attached.len() {
            self.attached.push(None);
        }
        self.generation += 1;
        let id = SourceId { owner: FIRST_SOURCE + index as u16, generation: self.generation };
        self.attached[index] = Some(AttachedSource { id, source });
        let started = self.with(index, parts, |source, cx| source.start(cx));
        if let Some(Err(error)) = started {
            // The source may have pushed operations before it failed, so it has to be stopped like any other
            // source.
            self.stop(id, false, channel().0, parts);
            self.drop_stopped();
            return Err(error);
        }
        Ok(id)
    }

    #[inline]
    fn with<R>(
        &mut self,
        index: usize,
        parts: &mut EngineParts,
        call: impl FnOnce(&mut dyn Source, &mut SourceContext<'_>) -> R,
    ) -> Option<R> {
        let attached = self.attached.get_mut(index)?.as_mut()?;
        let mut cx = SourceContext { parts, id: attached.id, worker: &mut self.worker };
        Some(call(&mut *attached.source, &mut cx))
    }

    pub fn with_id(
        &mut self,
        id: SourceId,
        parts: &mut EngineParts,
        call: impl FnOnce(&mut dyn Source, &mut SourceContext<'_>),
    ) {
        let attached = self.attached.get(id.index()).and_then(Option::as_ref);
        if attached.is_some_and(|attached| attached.id == id) {
            self.with(id.index(), parts, call);
        }
    }

    #[inline]
    pub fn on_cqe(&mut self, owner: u16, cqe: Cqe, parts: &mut EngineParts) {
        self.with(usize::from(owner - FIRST_SOURCE), parts, |source, cx| source.on_cqe(cx, cqe));
    }

    #[inline]
    pub fn on_bio(&mut self, mut completion: Completion, parts: &mut EngineParts) {
        let token = Token(completion.user_data);
        completion.user_data = token.payload();
        let index = usize::from(token.owner() - FIRST_SOURCE);
        self.with(index, parts, |source, cx| source.on_bio(cx, completion));
    }

    #[inline]
    pub fn on_turn(&mut self, parts: &mut EngineParts) {
        for index in 0..self.attached.len() {
            self.with(index, parts, |source, cx| source.on_turn(cx));
        }
    }

    /// The source to which the token of a bio belongs, if any does.
    fn owner_of(&self, token: Token) -> Option<&dyn Source> {
        let index = usize::from(token.owner().wrapping_sub(FIRST_SOURCE));
        self.attached.get(index)?.as_ref().map(|attached| &*attached.source)
    }

    pub fn write_client(&self, token: Token, text: &mut dyn fmt::Write) {
        if let Some(source) = self.owner_of(token) {
            // The buffer may truncate the name.
            let _ = source.write_client(token.payload(), text);
        }
    }

    pub fn is_abandoned(&self, token: Token) -> bool {
        self.owner_of(token).is_some_and(|source| source.is_abandoned(token.payload()))
    }

    /// Starts to stop source `id`. `stopped` is notified when the source is dropped.
    pub fn stop(&mut self, id: SourceId, force: bool, stopped: Sender<()>, parts: &mut EngineParts) {
        self.with_id(id, parts, |source, cx| source.stop(cx, force));
        self.stopping.push((id, stopped));
    }

    pub fn stop_all(&mut self, parts: &mut EngineParts) {
        for index in 0..self.attached.len() {
            self.with(index, parts, |source, cx| source.stop(cx, true));
        }
    }

    pub fn are_stopped(&self) -> bool {
        self.attached.iter().flatten().all(|attached| attached.source.is_stopped())
    }

    pub fn drop_stopped(&mut self) {
        let attached = &mut self.attached;
        self.stopping.retain(|(id, stopped)| {
            let has_id = |place: &&mut Option<AttachedSource>| place.as_ref().is_some_and(|it| it.id == *id);
            if let Some(place) = attached.get_mut(id.index()).filter(has_id) {
                if place.as_ref().is_some_and(|attached| !attached.source.is_stopped()) {
                    return true;
                }
                *place = None;
            }
            let _ = stopped.send(());
            false
        });
    }

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
