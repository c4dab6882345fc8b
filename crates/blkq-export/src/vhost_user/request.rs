//! Parses a chain as a request (virtio 1.2, 5.2.6), split into buffers in any way: the first 16 readable
//! bytes are the header, the last writable byte is the status, and the bytes between are data.

use std::sync::Arc;

use blkq::{Data, IoResult, Operation, Sector, Status};

use super::chain::{Buffer, Chain, RingError, for_each_part};
use super::config::RANGES_MAX;
use super::memory::{Cursor, GuestMemory};
use super::segments::{Gathered, SegmentPool};

// Types of requests (VIRTIO_BLK_T_*).
const T_IN: u32 = 0;
const T_OUT: u32 = 1;
const T_FLUSH: u32 = 4;
const T_GET_ID: u32 = 8;
const T_DISCARD: u32 = 11;
const T_WRITE_ZEROES: u32 = 13;

// Status of a completed request (VIRTIO_BLK_S_*).
pub const S_OK: u8 = 0;
pub const S_IOERR: u8 = 1;
const S_UNSUPP: u8 = 2;

const HEADER_BYTES: usize = 16;
/// Size of a range of a discard or write zeroes in a request.
const RANGE_BYTES: usize = 16;
/// A flag of a range: write zeroes may deallocate the range.
const RANGE_UNMAP: u32 = 1;
/// Size of a serial number, which has no terminator if it is that long.
const ID_BYTES: usize = 20;

/// Most data of a request in bytes. Longer requests fail.
const DATA_MAX_BYTES: u64 = 1 << 30;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Range {
    /// The first sector of 512 bytes.
    pub sector: Sector,
    /// The length in sectors of 512 bytes.
    pub sectors: u64,
    /// Whether write zeroes may deallocate the range.
    pub unmap: bool,
}

#[derive(Debug)]
pub enum Action {
    /// A read or write of `bytes` bytes, a multiple of 512. With 0 bytes, the request is complete.
    Transfer {
        operation: Operation,
        sector: Sector,
        bytes: u64,
        gathered: Gathered,
    },
    /// A discard or write zeroes of the ranges in [`Parser::ranges`], which has 1 to [`RANGES_MAX`] ranges.
    Ranges(Operation),
    Flush,
    /// The request completes with this status. A serial number has been written already.
    Reply(u8),
}

#[derive(Debug)]
pub struct BlockRequest {
    /// Guest address of the status byte, which is guest memory.
    pub status: u64,
    /// The first argument of [`BlockRequest::written`].
    pub writable: u32,
    pub action: Action,
}

impl BlockRequest {
    /// The bytes that the device has written without a gap, from the chain's first writable byte on.
    pub fn written(writable: u32, status: u8) -> u32 {
        // After an error the data may have gaps, unless the status is the only writable byte.
        if status == S_OK || writable == 1 { writable } else { 0 }
    }
}

pub fn status_of(result: IoResult) -> u8 {
    match result {
        Ok(()) => S_OK,
        Err(Status::NotSupported) => S_UNSUPP,
        Err(_) => S_IOERR,
    }
}

pub struct Parser {
    /// The ranges of the last [`Action::Ranges`].
    pub ranges: Vec<Range>,
    segments: SegmentPool,
    cursor: Cursor,
    id: [u8; ID_BYTES],
}

impl Parser {
    pub fn new(id: &str) -> Parser {
        let mut bytes = [0; ID_BYTES];
        let length = id.len().min(ID_BYTES);
        bytes[..length].copy_from_slice(&id.as_bytes()[..length]);
        Parser {
            ranges: Vec::with_capacity(RANGES_MAX),
            segments: SegmentPool::default(),
            cursor: Cursor::default(),
            id: bytes,
        }
    }

    pub fn recycle(&mut self, data: Data) {
        self.segments.recycle(data);
    }

    pub fn write_status(&mut self, memory: &GuestMemory, address: u64, status: u8) -> bool {
        memory.write(&mut self.cursor, address, &[status])
    }

    /// Fails if the header or status byte is missing, or a buffer is not guest memory: the ring must then
    /// stop.
    pub fn parse(&mut self, chain: &Chain, memory: &Arc<GuestMemory>) -> Result<BlockRequest, RingError> {
        let header: [u8; HEADER_BYTES] = match chain.readable().first() {
            Some(first) if first.length as usize >= HEADER_BYTES => {
                let unmapped = RingError::BufferUnmapped { address: first.address, length: first.length };
                memory.load(&mut self.cursor, first.address).ok_or(unmapped)?
            }
            _ => {
                let mut header = [0; HEADER_BYTES];
                let bytes = self.read(chain.readable(), 0, &mut header, memory)?;
                if bytes < HEADER_BYTES as u64 {
                    return Err(RingError::HeaderShort { bytes });
                }
                header
            }
        };
        let [kind, _, low, high] = words(header);
        let sector = Sector(u64::from(low) | u64::from(high) << 32);
        let Some(&Buffer { address, length }) = chain.writable().last() else {
            return Err(RingError::NoStatus);
        };
        let unmapped = RingError::BufferUnmapped { address, length };
        let status = address.checked_add(u64::from(length) - 1).ok_or(unmapped)?;
        memory.span(&mut self.cursor, status, 1).ok_or(unmapped)?;
        let read_bytes = total(chain.writable()) - 1;
        let written_bytes = total(chain.readable()) - HEADER_BYTES as u64;
        let action = match kind {
            T_IN | T_OUT => {
                let (operation, buffers, skip, bytes) = match kind {
                    T_IN => (Operation::Read, chain.writable(), 0, read_bytes),
                    _ => (Operation::Write, chain.readable(), HEADER_BYTES as u64, written_bytes),
                };
                if !bytes.is_multiple_of(512) || bytes > DATA_MAX_BYTES {
                    Action::Reply(S_IOERR)
                } else {
                    let gathered = match bytes {
                        0 => Gathered { data: Data::None, unaligned: 0, registered_pieces: 0 },
                        _ => self.segments.gather(memory, buffers, skip, bytes)?,
                    };
                    Action::Transfer { operation, sector, bytes, gathered }
                }
            }
            T_FLUSH => Action::Flush,
            T_GET_ID => self.identify(chain, memory, read_bytes)?,
            T_DISCARD => self.parse_ranges(Operation::Discard, chain, memory, written_bytes)?,
            T_WRITE_ZEROES => self.parse_ranges(Operation::WriteZeroes, chain, memory, written_bytes)?,
            _ => Action::Reply(S_UNSUPP),
        };
        let writable = match &action {
            Action::Transfer { operation: Operation::Read, .. } => read_bytes as u32 + 1,
            Action::Reply(S_OK) => {
                (read_bytes.min(ID_BYTES as u64)) as u32 + u32::from(read_bytes <= ID_BYTES as u64)
            }
            _ if read_bytes == 0 => 1,
            // The status is not the first writable byte.
            _ => 0,
        };
        Ok(BlockRequest { status, writable, action })
    }

    fn identify(&mut self, chain: &Chain, memory: &GuestMemory, room: u64) -> Result<Action, RingError> {
        let mut id = &self.id[..];
        for_each_part(chain.writable(), 0, room.min(ID_BYTES as u64), |address, length| {
            let (now, rest) = id.split_at(length as usize);
            id = rest;
            memory.write(&mut self.cursor, address, now)
        })?;
        Ok(Action::Reply(S_OK))
    }

    fn parse_ranges(
        &mut self,
        operation: Operation,
        chain: &Chain,
        memory: &GuestMemory,
        bytes: u64,
    ) -> Result<Action, RingError> {
        self.ranges.clear();
        let count = bytes / RANGE_BYTES as u64;
        if count == 0 || !bytes.is_multiple_of(RANGE_BYTES as u64) || count > RANGES_MAX as u64 {
            return Ok(Action::Reply(S_IOERR));
        }
        for index in 0..count as usize {
            let mut range = [0; RANGE_BYTES];
            self.read(chain.readable(), HEADER_BYTES + index * RANGE_BYTES, &mut range, memory)?;
            let [low, high, sectors, flags] = words(range);
            let known = if operation == Operation::WriteZeroes { RANGE_UNMAP } else { 0 };
            if flags & !known != 0 {
                return Ok(Action::Reply(S_UNSUPP));
            }
            let sector = Sector(u64::from(low) | u64::from(high) << 32);
            self.ranges.push(Range { sector, sectors: sectors.into(), unmap: flags & RANGE_UNMAP != 0 });
        }
        Ok(Action::Ranges(operation))
    }

    fn read(
        &mut self,
        buffers: &[Buffer],
        skip: usize,
        bytes: &mut [u8],
        memory: &GuestMemory,
    ) -> Result<u64, RingError> {
        let (mut done, all) = (0, bytes.len() as u64);
        for_each_part(buffers, skip as u64, all, |address, length| {
            let begin = done;
            done += length as usize;
            memory.read(&mut self.cursor, address, &mut bytes[begin..done])
        })
    }
}

/// The little-endian words of a header or a range.
fn words(bytes: [u8; 16]) -> [u32; 4] {
    let words: [[u8; 4]; 4] = zerocopy::transmute!(bytes);
    words.map(u32::from_le_bytes)
}

fn total(buffers: &[Buffer]) -> u64 {
    buffers.iter().map(|buffer| u64::from(buffer.length)).sum()
}

#[cfg(test)]
mod tests;
