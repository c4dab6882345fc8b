//! The model of the device: for every sector, the versions that a read may return, and those that may remain after a
//! power failure. Times are those of the clients, so the model allows exactly what they can observe.

use std::fmt;
use std::ops::Range;

use blkq::random::mix;
use blkq_simulation::SECTOR_BYTES;

#[derive(Clone, Debug)]
pub enum Content {
    Zero,
    /// The data of the write with this number.
    Write(u64),
    /// Bytes that were found after a power failure, or that a fault made of the data of a write.
    Bytes(Box<[u8]>),
}

impl Content {
    fn byte(&self, sector: u64, at: usize) -> u8 {
        match self {
            Content::Zero => 0,
            Content::Write(number) => stamp(*number, sector)[at % 8],
            Content::Bytes(bytes) => bytes[at],
        }
    }

    /// Whether `bytes` are the content of this version of `sector`.
    fn is(&self, sector: u64, bytes: &[u8]) -> bool {
        match self {
            Content::Zero => bytes.iter().all(|byte| *byte == 0),
            Content::Write(number) => {
                let stamp = stamp(*number, sector);
                bytes.chunks(8).all(|chunk| chunk == stamp)
            }
            Content::Bytes(own) => **own == *bytes,
        }
    }
}

/// Eight bytes that identify the write and the sector.
fn stamp(number: u64, sector: u64) -> [u8; 8] {
    (mix(number << 20 | sector) | 1).to_le_bytes()
}

/// The data of write `number` to `sectors`.
pub fn payload(number: u64, sectors: Range<u64>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for sector in sectors {
        bytes.extend_from_slice([stamp(number, sector); SECTOR_BYTES / 8].as_flattened());
    }
    bytes
}

#[derive(Debug)]
pub struct Version {
    content: Content,
    request: u64,
    submitted: u64,
    /// `u64::MAX` while the request is in flight.
    completed: u64,
    /// Whether the request certainly took effect, so that earlier data is overwritten.
    done: bool,
    /// Whether the version must survive a power failure.
    promised: bool,
    /// A sync failed in the process that wrote this version, so no later sync makes the version durable.
    doubtful: bool,
    /// The request may have had no effect although it succeeded: a fault hit either this request or another one with
    /// the same data.
    uncertain: bool,
}

impl Version {
    fn begun(content: Content, request: u64, now: u64) -> Version {
        let (submitted, completed) = (now, u64::MAX);
        let (done, promised, doubtful, uncertain) = (false, false, false, false);
        Version { content, request, submitted, completed, done, promised, doubtful, uncertain }
    }
}

/// Numbers from here on belong to misdirected writes, which no client requested.
const STRAY: u64 = 1 << 48;

pub struct Model {
    sectors: Vec<Vec<Version>>,
}

impl Model {
    /// A device of durable zeroes.
    pub fn new(sectors: usize) -> Model {
        Model { sectors: (0..sectors).map(|_| vec![first(Content::Zero)]).collect() }
    }

    pub fn sectors(&self) -> u64 {
        self.sectors.len() as u64
    }

    /// A request that changes `sectors` was sent.
    pub fn begin(&mut self, request: u64, sectors: Range<u64>, content: &Content, now: u64) {
        for versions in &mut self.sectors[sectors.start as usize..sectors.end as usize] {
            versions.push(Version::begun(content.clone(), request, now));
        }
    }

    /// The request completed. `done`: it changed all of its sectors; `promised`: the change is durable.
    pub fn complete(&mut self, request: u64, sectors: Range<u64>, done: bool, promised: bool, now: u64) {
        for versions in &mut self.sectors[sectors.start as usize..sectors.end as usize] {
            for version in versions.iter_mut().filter(|version| version.request == request) {
                version.completed = now;
                (version.done, version.promised) =
                    (done && !version.uncertain, promised && !version.uncertain);
            }
        }
    }

    /// The request changed nothing, and never will.
    pub fn reject(&mut self, request: u64, sectors: Range<u64>) {
        for versions in &mut self.sectors[sectors.start as usize..sectors.end as usize] {
            versions.retain(|version| version.request != request);
        }
    }

    /// Requests in flight that write `bytes` to `sector`, as indices of their versions.
    fn writes_in_flight(&self, sector: u64, bytes: &[u8]) -> Vec<usize> {
        let versions = self.sectors[sector as usize].iter().enumerate();
        let found = versions.filter(|(_, version)| {
            version.completed == u64::MAX && version.request < STRAY && version.content.is(sector, bytes)
        });
        let found: Vec<usize> = found.map(|(index, _)| index).collect();
        assert!(!found.is_empty(), "the driver has a write to sector {sector} that no client sent");
        found
    }

    /// A request that writes `bytes` to `sector` will not take effect. Returns its number if only one matches.
    pub fn undo(&mut self, sector: u64, bytes: &[u8]) -> Option<u64> {
        let found = self.writes_in_flight(sector, bytes);
        let versions = &mut self.sectors[sector as usize];
        if let [only] = found[..] {
            return Some(versions.remove(only).request);
        }
        found.into_iter().for_each(|index| versions[index].uncertain = true);
        None
    }

    /// A fault changes a request that writes `bytes` to `sector`: it writes `instead`.
    pub fn alter(&mut self, sector: u64, bytes: &[u8], instead: &[u8]) {
        let found = self.writes_in_flight(sector, bytes);
        let versions = &mut self.sectors[sector as usize];
        let content = Content::Bytes(instead.into());
        if let [only] = found[..] {
            versions[only].content = content;
            return;
        }
        for index in found {
            versions[index].uncertain = true;
            let Version { request, submitted, .. } = versions[index];
            let content = content.clone();
            versions.push(Version { uncertain: true, ..Version::begun(content, request, submitted) });
        }
    }

    /// Adds a misdirected write at sector `first`. Returns its number.
    pub fn stray(&mut self, first: u64, bytes: &[u8], now: u64) -> u64 {
        let request = STRAY + now;
        for (versions, bytes) in self.sectors[first as usize..].iter_mut().zip(bytes.chunks(SECTOR_BYTES)) {
            versions.push(Version::begun(Content::Bytes(bytes.into()), request, now));
        }
        request
    }

    /// A flush that was sent at `submitted` succeeded.
    pub fn flushed(&mut self, submitted: u64) {
        for versions in &mut self.sectors {
            for version in versions.iter_mut() {
                version.promised |= version.done && !version.doubtful && version.completed < submitted;
            }
        }
    }

    /// Nothing is in flight: each request that did not complete has taken effect by now, or never will.
    pub fn settle(&mut self, now: u64) {
        for versions in &mut self.sectors {
            for version in versions.iter_mut().filter(|version| version.completed == u64::MAX) {
                version.completed = now;
            }
            forget(versions);
        }
    }

    /// The process in which a sync failed has exited. Syncs of later processes do not report that failure.
    pub fn doubt(&mut self) {
        self.sectors.iter_mut().flatten().for_each(|version| version.doubtful = true);
    }

    /// Checks the bytes of `sector` that a read returned. The client sent the read at `submitted`.
    pub fn check_read(&self, sector: u64, submitted: u64, bytes: &[u8]) -> Result<(), Wrong<'_>> {
        let versions = &self.sectors[sector as usize];
        let overwritten = |old: &Version| {
            versions.iter().any(|new| new.done && new.submitted > old.completed && new.completed < submitted)
        };
        check(versions, overwritten, sector, bytes)
    }

    /// Checks the data after a power failure, which becomes the only version.
    pub fn check_after_power_cut(&mut self, sector: u64, bytes: &[u8]) -> Result<(), String> {
        let versions = &mut self.sectors[sector as usize];
        check(versions, |old| is_lost(versions, old), sector, bytes).map_err(|wrong| wrong.to_string())?;
        *versions = vec![first(Content::Bytes(bytes.into()))];
        Ok(())
    }
}

fn first(content: Content) -> Version {
    Version { completed: 0, done: true, promised: true, ..Version::begun(content, 0, 0) }
}

/// Whether `old` cannot be read again, because a later version is durable.
fn is_lost(versions: &[Version], old: &Version) -> bool {
    versions.iter().any(|new| new.promised && new.submitted > old.completed)
}

fn forget(versions: &mut Vec<Version>) {
    let lost: Vec<bool> = versions.iter().map(|old| is_lost(versions, old)).collect();
    let mut lost = lost.into_iter();
    versions.retain(|_| !lost.next().unwrap_or(false));
}

/// Why a sector has the wrong bytes. Most are dropped without being printed: bytes that a fault may have changed are
/// compared with several possibilities.
#[derive(Debug)]
pub enum Wrong<'a> {
    /// A byte is of none of the versions that are possible.
    Byte {
        sector: u64,
        at: usize,
        byte: u8,
        versions: &'a [Version],
        possible: Vec<&'a Version>,
    },
    Other(String),
}

impl fmt::Display for Wrong<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Wrong::Byte { sector, at, byte, versions, possible } => {
                let whose = versions.iter().find(|version| version.content.byte(*sector, *at) == *byte);
                write!(f, "sector {sector}, byte {at} is {byte:#04x}, of {whose:?}; possible: {possible:?}")
            }
            Wrong::Other(text) => f.write_str(text),
        }
    }
}

/// Checks that every byte belongs to a version that is not overwritten. A sector may mix several versions if it is read,
/// or loses power, while it is written.
fn check<'a>(
    versions: &'a [Version],
    overwritten: impl Fn(&Version) -> bool,
    sector: u64,
    bytes: &[u8],
) -> Result<(), Wrong<'a>> {
    // Nearly always the bytes are those of one version.
    if versions.iter().any(|version| version.content.is(sector, bytes) && !overwritten(version)) {
        return Ok(());
    }
    let possible: Vec<&Version> = versions.iter().filter(|version| !overwritten(version)).collect();
    let wrong = bytes
        .iter()
        .enumerate()
        .find(|(at, byte)| possible.iter().all(|version| version.content.byte(sector, *at) != **byte));
    match wrong {
        None => Ok(()),
        Some((at, &byte)) => Err(Wrong::Byte { sector, at, byte, versions, possible }),
    }
}

#[test]
fn an_altered_write_is_possible_while_a_candidate_remains() {
    let mut model = Model::new(1);
    let (zeroes, mut altered) = ([0; SECTOR_BYTES], [0; SECTOR_BYTES]);
    altered[15] = 8;
    model.begin(1, 0..1, &Content::Write(1), 1);
    model.complete(1, 0..1, true, true, 2);
    for request in [3, 4] {
        model.begin(request, 0..1, &Content::Zero, request);
    }
    model.alter(0, &zeroes, &altered);
    model.reject(3, 0..1);
    model.check_read(0, 5, &altered).unwrap();
    model.reject(4, 0..1);
    model.check_read(0, 5, &altered).unwrap_err();
}
