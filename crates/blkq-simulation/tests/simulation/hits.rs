//! Accounts for the fault driver: it reports which requests it hits, and how. All other requests must behave as if there
//! were no fault driver.

use std::rc::Rc;

use blkq::Operation;
use blkq_drivers::fault::Effect;
use blkq_export::nbd::proto::NbdError;
use blkq_simulation::{Hit, Injection, SECTOR_BYTES};

use super::client::{Client, Common};
use super::model::{Model, Wrong};

/// How late the fault driver may notice that a trigger file was removed: it polls at this interval.
const FILES_INTERVAL_NS: u64 = 20_000_000;

/// Number of effects that are counted, in the order of [`kind`].
pub const KINDS: usize = 7;

fn kind(effect: Effect) -> usize {
    match effect {
        Effect::Error(_) => 0,
        Effect::Short(_) => 1,
        Effect::Torn => 2,
        Effect::Misdirect => 3,
        Effect::Corrupt => 4,
        Effect::Lose => 5,
        Effect::Stuck(_) => 6,
        Effect::Delay { .. } => unreachable!("a delay changes nothing"),
        Effect::Panic => unreachable!("no rule of the simulation panics"),
    }
}

/// A hit of the fault driver that clients may notice.
#[derive(Debug)]
pub struct Noticed {
    pub hit: Hit,
    /// For each sector of a read: the number of unanswered reads that may have been hit.
    candidates: Vec<u32>,
    /// The request may be held, and succeed when it is reissued.
    may_be_held: bool,
}

impl Noticed {
    pub fn touches(&self, sector: u64) -> bool {
        (self.hit.offset >> 9..(self.hit.offset + self.hit.bytes) >> 9).contains(&sector)
    }

    /// Whether only one read of `sector` can have been hit.
    pub fn is_sure(&self, sector: u64) -> bool {
        self.candidates[(sector - (self.hit.offset >> 9)) as usize] == 1
    }

    pub fn explains(&self, error: u32) -> bool {
        match self.hit.effect {
            Effect::Error(status) | Effect::Short(status) => NbdError::from(status) as u32 == error,
            Effect::Stuck(_) => error == NbdError::Io as u32,
            _ => false,
        }
    }

    pub fn check_read<'a>(
        &self,
        model: &'a Model,
        sector: u64,
        since: u64,
        bytes: &[u8],
    ) -> Result<(), Wrong<'a>> {
        let Hit { at, offset, .. } = self.hit;
        match self.hit.effect {
            Effect::Torn if sector << 9 >= offset + at => match bytes.iter().all(|byte| *byte == 0) {
                true => Ok(()),
                false => {
                    let text = format!("sector {sector} is beyond the end of a torn read and not zero");
                    Err(Wrong::Other(text))
                }
            },
            Effect::Misdirect => model.check_read(sector - (offset >> 9) + (at >> 9), since, bytes),
            Effect::Corrupt if (offset + at / 8) >> 9 == sector => {
                model.check_read(sector, since, &turned(bytes, at))
            }
            Effect::Torn | Effect::Corrupt => model.check_read(sector, since, bytes),
            _ if self.may_be_held => model.check_read(sector, since, bytes),
            effect => {
                Err(Wrong::Other(format!("a read of sector {sector} succeeded in spite of {effect:?}")))
            }
        }
    }
}

/// A sector with bit `at` of the request inverted.
fn turned(bytes: &[u8], at: u64) -> Box<[u8]> {
    let mut bytes: Box<[u8]> = bytes.into();
    bytes[(at / 8) as usize % SECTOR_BYTES] ^= 1 << (at % 8);
    bytes
}

impl Common {
    /// Processes the events of the fault driver in a turn.
    pub fn note(&mut self, injections: Vec<Injection>, clients: &mut [Client]) {
        for injection in injections {
            match injection {
                Injection::Hit(hit) => self.hit(hit, clients),
                Injection::Armed(file, at_ns) => {
                    self.triggered += 1;
                    let late_ns = self.trigger_removed_ns.map(|removed_ns| at_ns.saturating_sub(removed_ns));
                    assert!(late_ns.is_none_or(|ns| ns <= FILES_INTERVAL_NS), "hit without {file:?}");
                }
                Injection::Completed(request, result) => {
                    let now = self.tick();
                    if let Some((stray, sectors, fua)) = self.astray.remove(&request) {
                        let done = result.is_ok();
                        self.model.complete(stray, sectors, done, done && fua, now);
                    }
                }
            }
        }
    }

    fn hit(&mut self, hit: Hit, clients: &mut [Client]) {
        self.hits[kind(hit.effect)] += 1;
        // When rules are removed, delayed requests continue as without rules. Effects that have begun still happen: a
        // read is corrupted when it completes.
        let at_its_end = hit.effect == Effect::Corrupt && hit.operation == Operation::Read;
        assert!(self.has_rules || at_its_end, "hit without a rule: {hit:?}");
        let now = self.tick();
        let sectors = hit.offset >> 9..(hit.offset + hit.bytes) >> 9;
        if hit.effect == Effect::Misdirect {
            let end = (hit.at + hit.bytes) >> 9;
            assert!(self.sectors.may(now, |sectors| sectors >= end), "misdirected beyond the end: {hit:?}");
        }
        let mut candidates =
            vec![0; if hit.operation == Operation::Read { sectors.clone().count() } else { 0 }];
        for read in self.ghosts.iter().cloned().chain(clients.iter().flat_map(Client::reads)) {
            for (sector, count) in sectors.clone().zip(&mut candidates) {
                *count += u32::from(read.contains(&sector));
            }
        }
        let fails = matches!(hit.effect, Effect::Error(_) | Effect::Short(_) | Effect::Stuck(_));
        let may_be_held = fails && self.holding.is_some();
        if hit.operation.is_write() && !may_be_held {
            self.hit_write(&hit, now);
        }
        let noticed = Rc::new(Noticed { hit, candidates, may_be_held });
        clients.iter_mut().for_each(|client| client.notice(&noticed));
    }

    fn hit_write(&mut self, hit: &Hit, now: u64) {
        let first = hit.offset >> 9;
        let zeroes = [0; SECTOR_BYTES];
        let content = |index: u64| match hit.data.is_empty() {
            true => &zeroes[..],
            false => &hit.data[(index as usize) << 9..(index as usize + 1) << 9],
        };
        let all = 0..hit.bytes >> 9;
        let undone = match hit.effect {
            // The block layer may write zeroes instead.
            Effect::Error(blkq::Status::NotSupported) if hit.operation == Operation::WriteZeroes => 0..0,
            Effect::Short(_) | Effect::Torn => hit.at >> 9..all.end,
            Effect::Corrupt => {
                let index = hit.at >> 12;
                let bytes = content(index);
                self.model.alter(first + index, bytes, &turned(bytes, hit.at));
                0..0
            }
            _ => all.clone(),
        };
        for index in undone {
            let request = self.model.undo(first + index, content(index));
            let fails = match hit.effect {
                // A trim that fails leaves the content unknown.
                Effect::Error(blkq::Status::NotSupported) => hit.operation == Operation::Write,
                Effect::Error(_) | Effect::Short(_) | Effect::Stuck(_) => true,
                _ => false,
            };
            self.must_fail.extend(request.filter(|_| fails));
        }
        if hit.effect == Effect::Misdirect {
            let sectors = hit.at >> 9..(hit.at + hit.bytes) >> 9;
            let request = self.model.stray(sectors.start, &hit.data, now);
            self.astray.insert(hit.request, (request, sectors, hit.fua));
        }
    }
}
