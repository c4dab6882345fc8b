//! After a commit, the device switches from an overlay to its raw backing file, the base. This module makes a loop
//! device of that base and lets the commit write to it.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use blkq::sync::lock as locked;
use blkq::{Error, ErrorKind, IoBuffer};
use rustix::io::Errno;

use crate::image_file::{ClientTerms, ImageFile, choose_mode};

use super::options::LoopOptions;
use super::{Chosen, LoopDevice, bitmaps};

/// Size of one write of zeroes, in bytes, if the file system cannot punch holes.
const ZEROES_BYTES: u64 = 1 << 20;

impl LoopDevice {
    /// Makes a device of `size` bytes of the raw image at `path`. `file` has the image open for writing and
    /// locked, and `synced` has it open a second time, for syncs. An image that is shorter than the device is
    /// extended. `bitmaps` is the open bitmap file of the image; its dirty bitmaps are marked as in use.
    ///
    /// Fails with [`ErrorKind::Mismatch`] if the image is longer than the device, and with
    /// [`ErrorKind::Unsupported`] if its sectors are larger or it is a block device that is too small.
    pub(crate) fn of_base(
        file: File,
        synced: File,
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
            let message = format!(
                "{shown} has sectors of {} bytes, and the device has sectors of {block}",
                image.logical_block
            );
            return Err(Error::new(ErrorKind::Unsupported, message));
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
                let message = format!(
                    "{shown} has {bytes} bytes, fewer than the device ({size}), and a block device cannot grow"
                );
                return Err(Error::new(ErrorKind::Unsupported, message));
            }
            // This write of one byte must come before O_DIRECT is set, which requires whole blocks.
            image
                .write_all_at(&[0], size - 1)
                .map_err(|e| Error::system(format!("cannot extend {shown} to {size} bytes"), e))?;
        }
        image.set_direct(mode.direct.is_some())?;
        let options = LoopOptions { direct_io: terms.requested, raw: true, ..LoopOptions::new(&image.path) };
        let chosen = Chosen {
            logical_block_bytes: block,
            mode,
            size,
            synced,
            tail: None,
            bitmaps,
            warnings: Vec::from_iter(warning),
        };
        Ok(LoopDevice::assemble(image, &options, chosen))
    }

    /// Writes to the image on the calling thread. No queue may be in use.
    pub(crate) fn write_now(&self, position: u64, data: &IoBuffer) -> Result<(), Error> {
        let file = locked(&self.shared.state).file.clone();
        file.write_all_at(data, position).map_err(|e| self.cannot_write(e))
    }

    /// Zeroes a range of the image on the calling thread. No queue may be in use.
    pub(crate) fn zero_now(&self, range: Range<u64>) -> Result<(), Error> {
        let file = locked(&self.shared.state).file.clone();
        match file.punch(range.clone()) {
            Ok(()) => return Ok(()),
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
            Err(e) => return Err(self.cannot_write(e.into())),
        }
        let zeroes = IoBuffer::zeroed(ZEROES_BYTES.min(range.end - range.start) as usize);
        let mut at = range.start;
        while at < range.end {
            let bytes = (range.end - at).min(ZEROES_BYTES);
            file.write_all_at(&zeroes[..bytes as usize], at).map_err(|e| self.cannot_write(e))?;
            at += bytes;
        }
        Ok(())
    }

    fn cannot_write(&self, error: io::Error) -> Error {
        Error::system(format!("cannot write to {}", self.path.display()), error)
    }
}

/// Rejects a backing file that is longer than the device: its end would become visible after the switch.
pub(crate) fn check_not_longer(path: &Path, bytes: u64, size: u64) -> Result<(), Error> {
    if bytes <= size {
        return Ok(());
    }
    let message =
        format!("the backing file {} has {bytes} bytes, more than the device ({size})", path.display());
    Err(Error::new(ErrorKind::Mismatch, message))
}
