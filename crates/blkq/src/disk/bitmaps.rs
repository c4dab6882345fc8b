//! The dirty bitmaps of a disk.

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

    /// Adds a bitmap of the writes from now on: what completed before this is not in it, and what is submitted
    /// afterwards is.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] if there is one of that name, or it cannot be; [`ErrorKind::Unsupported`] if the disk is
    /// read-only; [`ErrorKind::Busy`] as with [`Disk::set`].
    pub fn add_bitmap(&self, name: &str, granularity: u64) -> Result<(), Error> {
        let _one_at_a_time = lock(&self.changing);
        self.check_not_read_only("nothing would be in a bitmap")?;
        let bitmap = Bitmap::new(name, granularity, self.limits().size_bytes(), BitmapState::Recording)?;
        self.frozen(|| self.bitmaps.add(bitmap))
    }

    /// Adds bitmaps that were loaded. Those that there is no room for are left out, and their errors returned.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] as with [`Disk::set`].
    pub fn load_bitmaps(&self, bitmaps: Vec<Bitmap>) -> Result<Vec<Error>, Error> {
        let _one_at_a_time = lock(&self.changing);
        let size = self.limits().size_bytes();
        let mut errors = Vec::new();
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
    /// [`ErrorKind::NotFound`] if there is none of that name; [`ErrorKind::Unsupported`] if the disk is read-only;
    /// [`ErrorKind::Busy`] as with [`Disk::set`].
    pub fn remove_bitmap(&self, name: &str) -> Result<(), Error> {
        let _one_at_a_time = lock(&self.changing);
        self.find_bitmap(name)?;
        self.check_not_read_only("its bitmaps stay as they are")?;
        self.frozen(|| {
            self.bitmaps.remove(name);
            Ok(())
        })
    }

    /// Clears a bitmap: what completed before this is not in it any more, and what is submitted afterwards is.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if there is none of that name; [`ErrorKind::Unsupported`] if it is not
    /// recording, or the disk is read-only; [`ErrorKind::Busy`] as with [`Disk::set`].
    pub fn clear_bitmap(&self, name: &str) -> Result<(), Error> {
        let _one_at_a_time = lock(&self.changing);
        let bitmap = self.find_bitmap(name)?;
        self.check_not_read_only("its bitmaps stay as they are")?;
        if bitmap.state() != BitmapState::Recording {
            let message = format!("bitmap {name} is not kept up to date; remove it, and add it again");
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        let cleared = bitmap.cleared()?;
        self.frozen(|| {
            self.bitmaps.replace(cleared);
            Ok(())
        })
    }

    fn check_not_read_only(&self, why: &str) -> Result<(), Error> {
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
