//! After a commit, the device switches from an overlay to its raw backing file, the base. This module makes a loop
//! device of that base and lets the commit write to it.

use std::fs::File;
use std::ops::Range;
use std::path::PathBuf;

use blkq::{Error, IoBuffer};

use crate::errors::unsupported;
use crate::image_file::{ClientTerms, ImageFile, check_not_longer, choose_mode};

use super::options::{LoopOptions, Window};
use super::{Chosen, LoopDevice, bitmaps};

impl LoopDevice {
    /// Makes a device of `size` bytes of the raw image at `path`. `file` has the image open for writing and
    /// locked. `synced` has it open twice more, for the syncs of control threads and of queue 0. An image that is
    /// shorter than the device is extended. `bitmaps` is the open bitmap file of the image; its dirty bitmaps are
    /// marked as in use.
    ///
    /// Fails with [`ErrorKind::Mismatch`] if the image is longer than the device, and with
    /// [`ErrorKind::Unsupported`] if its sectors are larger or it is a block device that is too small.
    pub(crate) fn of_base(
        file: File,
        (synced, synced_by_queue): (File, File),
        bitmaps: Option<File>,
        path: PathBuf,
        size: u64,
        terms: ClientTerms,
    ) -> Result<LoopDevice, Error> {
        let image = ImageFile::of_open(file, path)?;
        let synced = image.with_file(synced);
        let block = terms.logical_block_bytes;
        if image.block_device && image.logical_block > block {
            let shown = image.path.display();
            return Err(unsupported(format!(
                "{shown} has sectors of {} bytes, and the device has sectors of {block}",
                image.logical_block
            )));
        }
        let bytes = image.size()?;
        check_not_longer(&image.path, bytes - bytes % u64::from(block), size)?;
        let mode = terms.choose_mode(&image.path, || {
            choose_mode(terms.requested, &image.direct, &image.path, block, 0)
        })?;
        // This marks the bitmaps as in use, so the checks precede it. The check that follows concerns only block
        // devices, which have no bitmaps.
        let (bitmaps, warning) = bitmaps::take(bitmaps, &image, size)?;
        if bytes < size {
            let shown = image.path.display();
            if image.block_device {
                return Err(unsupported(format!(
                    "{shown} has {bytes} bytes, fewer than the device ({size}), and a block device cannot grow"
                )));
            }
            // This write of one byte must come before O_DIRECT is set, which requires whole blocks.
            image
                .write_all_at(&[0], size - 1)
                .map_err(|e| Error::system(format!("cannot extend {shown} to {size} bytes"), e))?;
        }
        image.set_direct(mode.direct.is_some())?;
        let options = LoopOptions { direct_io: terms.requested, raw: true, ..LoopOptions::new(&image.path) };
        let path = image.path.clone();
        let chosen = Chosen {
            window: Window { path, offset: 0, logical_block_bytes: block, partial: false },
            mode,
            size,
            synced,
            bitmaps,
            warnings: Vec::from_iter(warning),
        };
        let device = LoopDevice::assemble(image, &options, chosen)?;
        // This succeeds, because the new device has no queues yet.
        let _ = device.shared.synced_by_queues[0].set(synced_by_queue);
        Ok(device)
    }

    /// Writes to the image on the calling thread. No queue may be in use.
    pub(crate) fn write_now(&self, position: u64, data: &IoBuffer) -> Result<(), Error> {
        let file = self.file();
        file.write_all_at(data, position).map_err(|e| file.failed("write to", e))
    }

    /// Zeroes a range of the image on the calling thread. No queue may be in use.
    pub(crate) fn zero_now(&self, range: Range<u64>) -> Result<(), Error> {
        let file = self.file();
        file.zero(range).map_err(|e| file.failed("write to", e))
    }
}
