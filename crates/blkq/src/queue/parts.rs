//! Bios that become several requests: bios that exceed the limits (`bio_split_to_limits` in
//! block/blk-merge.c), and write-zeroes that are emulated by writes of zeroes (`blkdev_issue_zeroout`). At
//! most [`PARTS_MAX`] parts of a bio are in flight, so that even an emulated write-zeroes of the whole device
//! needs little memory.
//!
//! A part has its own bio slot, which contains its parent's index. The parent completes when all parts have
//! completed, with the first error among them; after an error no further part is made.

use std::mem::ManuallyDrop;

use crate::bio::{BioFlags, Operation, Outline};
use crate::buffer::{Data, Segment};
use crate::completer::Completer;
use crate::error::{IoResult, Status};
use crate::sector::SECTOR_SHIFT;
use crate::slab::{DataSource, NewBio, SlotFlags};
use crate::split;
use crate::stats::Counter;

use super::io::Io;

/// Parts of one bio that are in flight at the same time.
const PARTS_MAX: u32 = 16;

impl Io {
    /// Starts the data step of a bio: as one request, in parts, or as emulated write-zeroes.
    pub fn begin_data(&mut self, index: u32) {
        let slot = &self.in_flight[index];
        let mut no_unmap = slot.flags.contains(BioFlags::NO_UNMAP);
        match slot.operation {
            Operation::Discard if self.disk.limits().max_discard_bytes == 0 => {
                return self.reject(index, Status::NotSupported);
            }
            Operation::WriteZeroes => {
                let (unmap_bytes, keep_bytes) = (
                    self.disk.limits().max_write_zeroes_bytes,
                    self.disk.limits().max_write_zeroes_no_unmap_bytes,
                );
                // The driver supports write-zeroes only without deallocation. That is allowed for any
                // write-zeroes, because deallocation is optional.
                if !no_unmap && unmap_bytes == 0 && keep_bytes != 0 {
                    self.in_flight[index].flags.insert(BioFlags::NO_UNMAP);
                    no_unmap = true;
                }
                if (if no_unmap { keep_bytes } else { unmap_bytes }) == 0 {
                    return self.begin_zeroes(index);
                }
            }
            _ => {}
        }
        if self.is_whole(index, no_unmap) {
            self.await_tag(index);
        } else {
            self.issue_first_parts(index, SlotFlags::SPLIT);
        }
    }

    fn is_whole(&self, index: u32, no_unmap: bool) -> bool {
        let slot = &self.in_flight[index];
        let length = slot.sectors << SECTOR_SHIFT;
        if slot.data_source == DataSource::Zeroes {
            let most = self.disk.limits().max_bytes_at(slot.operation, no_unmap, slot.sector.bytes());
            return length <= most.min(self.zeroes_bytes_max());
        }
        let (root, _) = self.in_flight.bios().memory_of(index);
        root.with_shape(|segments| {
            !split::needs_split(
                self.disk.limits(),
                slot.operation,
                no_unmap,
                slot.sector.bytes(),
                length,
                segments,
            )
        })
    }

    /// The number of zero bytes that one request can write: the buffer of zeroes is used repeatedly, once for
    /// each segment that a request may have.
    fn zeroes_bytes_max(&self) -> u64 {
        self.in_flight.zeroes().len() as u64 * u64::from(self.disk.limits().max_segments)
    }

    /// Emulates a write-zeroes by writing zeroes, unless the bio forbids it.
    pub fn begin_zeroes(&mut self, index: u32) {
        if self.in_flight[index].flags.contains(BioFlags::NO_FALLBACK) {
            return self.reject(index, Status::NotSupported);
        }
        self.issue_first_parts(index, SlotFlags::AS_ZEROES | SlotFlags::SPLIT);
    }

    fn issue_first_parts(&mut self, index: u32, slot_flags: SlotFlags) {
        let slot = &mut self.in_flight[index];
        slot.slot_flags.insert(slot_flags);
        (slot.issued, slot.pending, slot.error) = (0, 0, None);
        self.issue_parts(index);
        let slot = &self.in_flight[index];
        if let (0, Some(status)) = (slot.pending, slot.error) {
            self.reject(index, status);
        }
    }

    /// Creates parts of bio `index` until [`PARTS_MAX`] are in flight or the whole bio is covered.
    fn issue_parts(&mut self, index: u32) {
        loop {
            let slot = &self.in_flight[index];
            if slot.pending >= PARTS_MAX || slot.issued == slot.sectors || slot.error.is_some() {
                return;
            }
            // The limits may have changed since the first part was made.
            if let Err(status) = self.check_rest(index) {
                self.in_flight[index].error = Some(status);
                continue;
            }
            let slot = &self.in_flight[index];
            let as_zeroes = slot.slot_flags.contains(SlotFlags::AS_ZEROES);
            let operation = if as_zeroes { Operation::Write } else { slot.operation };
            let sector = slot.sector + slot.issued;
            let sectors = self.part_sectors(index, operation);
            if sectors == 0 {
                // The memory of a single block consists of more segments than a request may have.
                self.in_flight[index].error = Some(Status::Invalid);
                continue;
            }
            let (mut flags, start_ns, issued) = (slot.flags, slot.start_ns, slot.issued);
            let data_source = slot.data_source_of_parts();
            if as_zeroes {
                flags.remove(BioFlags::NO_UNMAP);
            }
            let part = self.in_flight.bios_mut().insert(NewBio {
                outline: Outline { operation, flags, sector, sectors, start_ns },
                data: ManuallyDrop::new(Data::None),
                completer: ManuallyDrop::new(Completer::None),
                slot_flags: SlotFlags::empty(),
            });
            let slot = &mut self.in_flight[part];
            slot.parent = index;
            slot.data_source = data_source;
            // Only reads and writes use the offset into the memory, and their memory is smaller than 4 GiB.
            slot.data_offset = (issued << SECTOR_SHIFT) as u32;
            let slot = &mut self.in_flight[index];
            slot.issued += sectors;
            slot.pending += 1;
            self.stats.count(Counter::Splits, 1);
            self.trace(|tracer, in_flight, clock| tracer.split(index, part, &in_flight[part], clock));
            self.await_tag(part);
        }
    }

    /// Checks whether the device still accepts the rest of bio `index`. If it no longer supports
    /// write-zeroes, the rest is emulated.
    fn check_rest(&mut self, index: u32) -> IoResult {
        let slot = &self.in_flight[index];
        self.disk.limits().check_range(slot.sector.bytes(), slot.sectors << SECTOR_SHIFT)?;
        if slot.operation.is_write() && self.disk.limits().read_only {
            return Err(Status::ReadOnly);
        }
        let bytes = match (slot.operation, slot.flags.contains(BioFlags::NO_UNMAP)) {
            (Operation::Discard, _) if self.disk.limits().max_discard_bytes == 0 => {
                return Err(Status::NotSupported);
            }
            (Operation::WriteZeroes, true) => self.disk.limits().max_write_zeroes_no_unmap_bytes,
            (Operation::WriteZeroes, false) => self.disk.limits().max_write_zeroes_bytes,
            _ => return Ok(()),
        };
        if bytes == 0 && !slot.slot_flags.contains(SlotFlags::AS_ZEROES) {
            if slot.flags.contains(BioFlags::NO_FALLBACK) {
                return Err(Status::NotSupported);
            }
            self.in_flight[index].slot_flags.insert(SlotFlags::AS_ZEROES);
        }
        Ok(())
    }

    /// Length of the next part of bio `index` in sectors. 0 if not even one block fits into a request.
    fn part_sectors(&self, index: u32, operation: Operation) -> u64 {
        let slot = &self.in_flight[index];
        let offset = (slot.sector + slot.issued).bytes();
        let left = (slot.sectors - slot.issued) << SECTOR_SHIFT;
        let no_unmap = slot.flags.contains(BioFlags::NO_UNMAP);
        let bytes = if slot.data_source_of_parts() == DataSource::Zeroes {
            let left = left.min(self.zeroes_bytes_max());
            split::split_point(self.disk.limits(), operation, false, offset, left, &[], 0)
        } else {
            let (root, skip) = self.in_flight.bios().memory_of(index);
            let skip = skip + (slot.issued << SECTOR_SHIFT);
            root.with_shape(|segments: &[Segment]| {
                split::split_point(self.disk.limits(), operation, no_unmap, offset, left, segments, skip)
            })
        };
        bytes >> SECTOR_SHIFT
    }

    /// Accounts for a completed part of bio `index`: makes further parts, or completes the bio.
    pub fn complete_part(&mut self, index: u32, result: IoResult) {
        let slot = &mut self.in_flight[index];
        slot.pending -= 1;
        if let (Err(status), None) = (result, slot.error) {
            slot.error = Some(status);
        }
        let slot = &self.in_flight[index];
        if slot.error.is_none() && slot.issued < slot.sectors {
            self.issue_parts(index);
        }
        let slot = &self.in_flight[index];
        if slot.pending == 0 && (slot.issued == slot.sectors || slot.error.is_some()) {
            let result = slot.error.map_or(Ok(()), Err);
            self.in_flight[index].slot_flags.remove(SlotFlags::SPLIT);
            self.complete_bio(index, result);
        }
    }
}
