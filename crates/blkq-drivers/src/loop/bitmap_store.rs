//! Implements the block layer's interface to persistent dirty bitmaps for a loop device. The work is in `bitmaps`.

use std::fs::File;
use std::sync::Arc;

use blkq::Error;
use blkq::bitmap::{Bitmap, BitmapStore};

use super::LoopDevice;

impl BitmapStore for LoopDevice {
    fn load(&self) -> Result<(Vec<Bitmap>, Vec<String>), Error> {
        self.image().load_bitmaps()
    }

    fn check(&self) -> Result<(), Error> {
        self.image().check_bitmaps()
    }

    fn set_file(&self, file: File) -> Result<(), Error> {
        self.image().set_bitmap_file(file)
    }

    fn reserve(&self, all: &[Arc<Bitmap>]) -> Result<(), Error> {
        self.image().reserve_bitmaps(all)
    }

    fn store(&self, all: &[Arc<Bitmap>]) -> Result<(), Error> {
        self.image().store_bitmaps(all)
    }
}
