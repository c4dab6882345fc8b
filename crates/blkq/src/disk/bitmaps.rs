//! The dirty bitmaps of a disk.

use std::fs::File;
use std::sync::Arc;

use crate::bitmap::{Bitmap, BitmapState};
use crate::drivers::bitmaps;
use crate::error::{Error, ErrorKind};
use crate::sync::lock;

use super::Disk;

impl Disk {
    /// The dirty bitmaps, by name.
    pub fn bitmaps(&self) -> Vec<Arc<Bitmap>> {
        self.bitmaps.list()
    }

    /// Closes the set of bitmaps of a disk that stops: from now on all changes of it are refused, and none is under
    /// way. Writes set bits still. Returns them.
    pub fn close_bitmaps(&self) -> Vec<Arc<Bitmap>> {
        let _one_at_a_time = lock(&self.changing);
        self.bitmaps.close();
        self.bitmaps.list()
    }

    /// Has the bitmaps kept in `file`, as [`bitmaps::set_file`] does.
    ///
    /// # Errors
    /// As that, and [`ErrorKind::Unsupported`] after [`Disk::close_bitmaps`].
    pub fn set_bitmap_file(&self, file: File) -> Result<(), Error> {
        let _one_at_a_time = lock(&self.changing);
        self.check_bitmaps_open()?;
        bitmaps::set_file(&*self.driver(), file)
    }

    /// Adds a bitmap of the writes from now on: what completed before this is not in it, and what is submitted
    /// afterwards is.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] if there is one of that name, or it cannot be; [`ErrorKind::Unsupported`] if the disk is
    /// read-only, or after [`Disk::close_bitmaps`]; [`ErrorKind::Busy`] as with [`Disk::set`]; those of
    /// [`bitmaps::reserve`].
    pub fn add_bitmap(&self, name: &str, granularity: u64) -> Result<(), Error> {
        let _one_at_a_time = lock(&self.changing);
        self.check_changeable("nothing would be in a bitmap")?;
        let bitmap = Bitmap::new(name, granularity, self.limits().size_bytes(), BitmapState::Recording)?;
        self.change_bitmaps(|| self.bitmaps.add(bitmap))
    }

    /// Adds bitmaps that were loaded. Those that there is no room for are left out, and their errors returned. From now
    /// on the image has the names of all ([`bitmaps::reserve`]).
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] as with [`Disk::set`].
    pub fn load_bitmaps(&self, bitmaps: Vec<Bitmap>) -> Result<Vec<Error>, Error> {
        let _one_at_a_time = lock(&self.changing);
        let size = self.limits().size_bytes();
        let mut errors = Vec::new();
        self.bitmaps.set_kept();
        self.frozen(|| {
            for bitmap in bitmaps {
                // Of an image with a part of a sector more: those bits stay, too.
                let bitmap = if bitmap.size() >= size { Ok(bitmap) } else { bitmap.resized(size) };
                errors.extend(bitmap.and_then(|bitmap| self.bitmaps.add(bitmap)).err());
            }
            Ok(())
        })?;
        Ok(errors)
    }

    /// Removes a bitmap.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if there is none of that name; [`ErrorKind::Unsupported`] if the disk is read-only, or
    /// after [`Disk::close_bitmaps`]; [`ErrorKind::Busy`] as with [`Disk::set`]; those of [`bitmaps::reserve`].
    pub fn remove_bitmap(&self, name: &str) -> Result<(), Error> {
        let _one_at_a_time = lock(&self.changing);
        self.find_bitmap(name)?;
        self.check_changeable("its bitmaps stay as they are")?;
        self.change_bitmaps(|| {
            self.bitmaps.remove(name);
            Ok(())
        })
    }

    /// Clears a bitmap: what completed before this is not in it any more, and what is submitted afterwards is.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if there is none of that name; [`ErrorKind::Unsupported`] if it is inconsistent, the
    /// disk is read-only, or after [`Disk::close_bitmaps`]; [`ErrorKind::Busy`] as with [`Disk::set`].
    pub fn clear_bitmap(&self, name: &str) -> Result<(), Error> {
        let _one_at_a_time = lock(&self.changing);
        let cleared = self.find_consistent(name)?.cleared()?;
        self.frozen(|| {
            self.bitmaps.replace(cleared);
            Ok(())
        })
    }

    /// Has writes set the bits of a bitmap from now on, or not any more. It keeps those that it has.
    ///
    /// # Errors
    /// As [`Disk::clear_bitmap`].
    pub fn set_bitmap_recording(&self, name: &str, is_recording: bool) -> Result<(), Error> {
        let _one_at_a_time = lock(&self.changing);
        let bitmap = self.find_consistent(name)?;
        let state = if is_recording { BitmapState::Recording } else { BitmapState::Disabled };
        self.frozen(|| {
            self.bitmaps.replace(bitmap.with_state(state)?);
            Ok(())
        })
    }

    /// Adds all that is dirty in the bitmaps `from` to the bitmap `into`, at one moment.
    ///
    /// # Errors
    /// As [`Disk::clear_bitmap`], and then nothing has changed.
    pub fn merge_bitmaps(&self, from: &[String], into: &str) -> Result<(), Error> {
        let _one_at_a_time = lock(&self.changing);
        let into = self.find_consistent(into)?;
        let from = from.iter().map(|name| self.find_consistent(name)).collect::<Result<Vec<_>, _>>()?;
        self.frozen(|| {
            from.iter().for_each(|bitmap| into.merge(bitmap));
            Ok(())
        })
    }

    /// The bitmap of that name, to be changed.
    fn find_consistent(&self, name: &str) -> Result<Arc<Bitmap>, Error> {
        let bitmap = self.find_bitmap(name)?;
        self.check_changeable("its bitmaps stay as they are")?;
        if bitmap.state() == BitmapState::Inconsistent {
            let message = format!("bitmap {name} is inconsistent; remove it, and add it again");
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        Ok(bitmap)
    }

    /// Changes which bitmaps there are while no request is in flight, or leaves all as it was.
    fn change_bitmaps(&self, change: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        self.frozen(|| {
            let before = self.bitmaps.list();
            change().and_then(|()| self.reserve_bitmaps()).inspect_err(|_| self.bitmaps.restore(before))
        })
    }

    /// Resizes the driver while no request is in flight, and before that the bitmaps, to the `expected` size.
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
        // The backing store may have got another size just now.
        resize_bitmaps(expected, self.limits().size_bytes())
    }

    /// Has the image name the bitmaps, if it keeps them.
    fn reserve_bitmaps(&self) -> Result<(), Error> {
        if !self.bitmaps.is_kept() {
            return Ok(());
        }
        bitmaps::reserve(&*self.driver(), &self.bitmaps.list())
    }

    /// Refuses a change after [`Disk::close_bitmaps`]. Changes are locked.
    pub(super) fn check_bitmaps_open(&self) -> Result<(), Error> {
        if !self.bitmaps.is_closed() {
            return Ok(());
        }
        let message = format!("{}: the device is stopping: its bitmaps stay as they are", self.name);
        Err(Error::new(ErrorKind::Unsupported, message))
    }

    fn check_changeable(&self, why: &str) -> Result<(), Error> {
        self.check_bitmaps_open()?;
        if !self.limits().read_only {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Unsupported, format!("{}: it is read-only: {why}", self.name)))
    }

    fn find_bitmap(&self, name: &str) -> Result<Arc<Bitmap>, Error> {
        let found = self.bitmaps().into_iter().find(|bitmap| bitmap.name() == name);
        found.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("there is no bitmap {name}")))
    }
}
