//! The record of the image that a device is about to switch to. If the daemon is killed during a snapshot or
//! a commit, `blkq recover` needs the attach options for the new image as well as those for the old one.

use blkq_protocol::failure::Outcome;
use blkq_protocol::info::RecordedBacking;
use blkq_protocol::options::Record;
use blkq_protocol::state::StateDir;

/// An entry of `NAME.options`. Dropping removes the entry, unless [`RecordedImage::keep`] was called.
#[derive(Debug)]
pub(super) struct RecordedImage<'a> {
    dir: &'a StateDir,
    name: &'a str,
    /// `None` if there is no entry to remove.
    number: Option<u64>,
}

impl<'a> RecordedImage<'a> {
    /// Records the image at `path`, the `options` with which the next daemon attaches it, and the backing files
    /// of the image. `number` is `None` for daemons of earlier versions, which have no file `NAME.options`:
    /// then nothing is recorded.
    pub(super) fn add(
        dir: &'a StateDir,
        name: &'a str,
        number: Option<u64>,
        path: &str,
        options: &Record,
        backing: Vec<RecordedBacking>,
    ) -> Outcome<RecordedImage<'a>> {
        number.map_or(Ok(()), |number| dir.add_image(name, number, path, options, backing))?;
        Ok(RecordedImage { dir, name, number })
    }

    /// Called if the daemon has switched to the image, or may have done so.
    pub(super) fn keep(mut self) {
        self.number = None;
    }
}

impl Drop for RecordedImage<'_> {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            self.dir.remove_image(self.name, number);
        }
    }
}
