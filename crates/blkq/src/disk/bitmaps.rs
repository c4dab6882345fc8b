//! The set of bitmaps of a disk changes only under a freeze, so that no write is missed.

use std::fs::File;
use std::sync::Arc;

use crate::bitmap::{Bitmap, BitmapState};
use crate::error::{Error, ErrorKind};
use crate::sync::lock;

use super::Disk;

impl Disk {
    /// The dirty bitmaps, by name.
    pub fn bitmaps(&self) -> Vec<Arc<Bitmap>> {
        self.bitmaps.list()
    }

    /// Closes the set of bitmaps of a disk that is stopping, and returns the bitmaps. No change of them is in
    /// progress afterwards, and further changes are rejected. Writes still set bits.
    pub fn close_bitmaps(&self) -> Vec<Arc<Bitmap>> {
        let _one_at_a_time = lock(&self.changing);
        self.bitmaps.close();
        self.bitmaps.list()
    }

    /// Makes `file` the file that stores the bitmaps, as `BitmapStore::set_file` does, with the same errors.
    /// Fails with [`ErrorKind::Unsupported`] after [`Disk::close_bitmaps`].
    pub fn set_bitmap_file(&self, file: File) -> Result<(), Error> {
        let _one_at_a_time = lock(&self.changing);
        self.check_bitmaps_open()?;
        self.driver().require_bitmap_store()?.set_file(file)
    }

    /// Adds a bitmap that records writes from now on. Writes that completed before are not in it, and writes
    /// that are submitted afterwards are.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] if the name is in use, or name or granularity are invalid;
    /// [`ErrorKind::Unsupported`] if the disk is read-only, or after [`Disk::close_bitmaps`];
    /// [`ErrorKind::Busy`] as for [`Disk::set`]; the errors of `BitmapStore::reserve`.
    pub fn add_bitmap(&self, name: &str, granularity: u64) -> Result<(), Error> {
        let _one_at_a_time = lock(&self.changing);
        self.check_changeable("a bitmap would stay empty")?;
        let bitmap = Bitmap::new(name, granularity, self.limits().size_bytes(), BitmapState::Recording)?;
        self.change_bitmaps(|| self.bitmaps.add(bitmap))
    }

    /// Adds bitmaps that were loaded from the image. Bitmaps for which there is no room are left out, and
    /// their errors returned. From now on the names of all bitmaps are saved in the image
    /// (`BitmapStore::reserve`). Fails with [`ErrorKind::Busy`] as [`Disk::set`] does.
    pub fn load_bitmaps(&self, bitmaps: Vec<Bitmap>) -> Result<Vec<Error>, Error> {
        let _one_at_a_time = lock(&self.changing);
        let size = self.limits().size_bytes();
        let mut errors = Vec::new();
        self.bitmaps.set_persistent();
        self.frozen(|| {
            for bitmap in bitmaps {
                // The bitmap is larger if the image ends with a part of a sector. Its bits are kept then.
                let bitmap = if bitmap.size() >= size { Ok(bitmap) } else { bitmap.resized(size) };
                errors.extend(bitmap.and_then(|bitmap| self.bitmaps.add(bitmap)).err());
            }
            Ok(())
        })?;
        Ok(errors)
    }

    /// Removes the bitmap with this name.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if there is no such bitmap; [`ErrorKind::Unsupported`] if the disk is
    /// read-only, or after [`Disk::close_bitmaps`]; [`ErrorKind::Busy`] as for [`Disk::set`]; the errors of
    /// `BitmapStore::reserve`.
    pub fn remove_bitmap(&self, name: &str) -> Result<(), Error> {
        let _one_at_a_time = lock(&self.changing);
        self.find_bitmap(name)?;
        self.check_changeable("its bitmaps cannot be changed")?;
        self.change_bitmaps(|| {
            self.bitmaps.remove(name);
            Ok(())
        })
    }

    /// Clears a bitmap. Writes that completed before are no longer in it, and writes that are submitted
    /// afterwards are.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if there is no such bitmap; [`ErrorKind::Unsupported`] if the bitmap is
    /// inconsistent, if the disk is read-only, or after [`Disk::close_bitmaps`]; [`ErrorKind::Busy`] as for
    /// [`Disk::set`].
    pub fn clear_bitmap(&self, name: &str) -> Result<(), Error> {
        let _one_at_a_time = lock(&self.changing);
        let cleared = self.find_consistent(name)?.cleared()?;
        self.frozen(|| {
            self.bitmaps.replace(cleared);
            Ok(())
        })
    }

    /// Starts or stops the recording of writes in a bitmap, which keeps its bits. Fails as
    /// [`Disk::clear_bitmap`] does.
    pub fn set_bitmap_recording(&self, name: &str, is_recording: bool) -> Result<(), Error> {
        let _one_at_a_time = lock(&self.changing);
        let bitmap = self.find_consistent(name)?;
        let state = if is_recording { BitmapState::Recording } else { BitmapState::Disabled };
        self.frozen(|| {
            self.bitmaps.replace(bitmap.with_state(state)?);
            Ok(())
        })
    }

    /// Adds the dirty bits of the bitmaps `from` to the bitmap `into`, all at one point in time. Fails as
    /// [`Disk::clear_bitmap`] does; then nothing has changed.
    pub fn merge_bitmaps(&self, from: &[String], into: &str) -> Result<(), Error> {
        let _one_at_a_time = lock(&self.changing);
        let into = self.find_consistent(into)?;
        let from = from.iter().map(|name| self.find_consistent(name)).collect::<Result<Vec<_>, _>>()?;
        self.frozen(|| {
            from.iter().for_each(|bitmap| into.merge(bitmap));
            Ok(())
        })
    }

    /// The bitmap with this name, if it may be changed.
    fn find_consistent(&self, name: &str) -> Result<Arc<Bitmap>, Error> {
        let bitmap = self.find_bitmap(name)?;
        self.check_changeable("its bitmaps cannot be changed")?;
        if bitmap.state() == BitmapState::Inconsistent {
            let message = format!("the bitmap {name} is inconsistent; remove it and add it again");
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        Ok(bitmap)
    }

    /// Changes the set of bitmaps while no request is in flight. After an error everything is as before.
    fn change_bitmaps(&self, change: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        self.frozen(|| {
            let before = self.bitmaps.list();
            change().and_then(|()| self.reserve_bitmaps()).inspect_err(|_| self.bitmaps.restore(before))
        })
    }

    /// Resizes the bitmaps to the `expected` size, and then the driver, while no request is in flight.
    pub(super) fn resize_with_bitmaps(&self, bytes: Option<u64>, expected: u64) -> Result<(), Error> {
        let (bitmaps, before) = (self.bitmaps.list(), self.limits().size_bytes());
        let resize_bitmaps = |before: u64, after: u64| {
            if before == after {
                return Ok(());
            }
            self.bitmaps.resize(after);
            self.reserve_bitmaps()
        };
        let resized = resize_bitmaps(before, expected).and_then(|()| self.driver().resize(bytes));
        resized.inspect_err(|_| self.bitmaps.restore(bitmaps))?;
        // The size of the backing store may have changed again in the meantime.
        resize_bitmaps(expected, self.limits().size_bytes())
    }

    fn reserve_bitmaps(&self) -> Result<(), Error> {
        if !self.bitmaps.is_persistent() {
            return Ok(());
        }
        self.driver().bitmap_store().map_or(Ok(()), |store| store.reserve(&self.bitmaps.list()))
    }

    /// Rejects a change after [`Disk::close_bitmaps`]. The caller must have locked changes.
    pub(super) fn check_bitmaps_open(&self) -> Result<(), Error> {
        let why = "the device is stopping, so its bitmaps cannot be changed";
        self.refuse_if(self.bitmaps.is_closed(), why)
    }

    fn check_changeable(&self, why: &str) -> Result<(), Error> {
        self.check_bitmaps_open()?;
        self.refuse_if(self.limits().read_only, format_args!("the device is read-only, so {why}"))
    }

    fn find_bitmap(&self, name: &str) -> Result<Arc<Bitmap>, Error> {
        let found = self.bitmaps().into_iter().find(|bitmap| bitmap.name() == name);
        found.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("there is no bitmap {name}")))
    }
}
