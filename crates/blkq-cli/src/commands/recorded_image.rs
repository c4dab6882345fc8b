//! An image that a device may have soon, recorded for its next daemon.

use crate::failure::Outcome;
use crate::options::Record;
use crate::state::StateDir;

/// An entry of `NAME.options`, which is removed again unless it is kept.
#[derive(Debug)]
pub(super) struct RecordedImage<'a> {
    dir: &'a StateDir,
    name: &'a str,
    number: Option<u64>,
}

impl<'a> RecordedImage<'a> {
    /// Records the image at `path`, with which the device `name` will be attached as `options` say. Without a `number` there
    /// is nothing to record: its daemon keeps the options.
    ///
    /// # Errors
    /// If it cannot be recorded.
    pub(super) fn add(
        dir: &'a StateDir,
        name: &'a str,
        number: Option<u64>,
        path: &str,
        options: &Record,
    ) -> Outcome<RecordedImage<'a>> {
        number.map_or(Ok(()), |number| dir.add_image(name, number, path, options))?;
        Ok(RecordedImage { dir, name, number })
    }

    /// Lets it stay: the daemon has the image, or may have it.
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
