//! A device goes on in a new image.

use std::fs::File;
use std::sync::Arc;

use blkq::Driver;
use blkq_drivers::qcow2::Qcow2;
use blkq_drivers::{DriverSpec, Opened, no_overlay};
use blkq_export::ublk::UblkDevice;

use super::image::image_name;
use super::running::Running;
use super::{Device, Served, flush_unless_held};
use crate::failure::{Failure, Outcome};
use crate::info::DaemonState;
use crate::log;
use crate::options::{AttachOptions, Record};

impl Device {
    /// Makes what was written durable, so that the device need not stop for long.
    ///
    /// # Errors
    /// As [`Device::flush`], and if requests are held after errors.
    pub fn flush_for_change(&self) -> Outcome {
        // A flush would wait for them.
        self.check_not_held()?;
        self.flush()
    }

    /// Makes `file`, which is empty, the image over the present one, with which the device is as `options` say, and which
    /// has that number in `NAME.options`. All I/O
    /// waits while `ready` waits for other devices, and while `keep` writes the state file: if either fails, the
    /// device goes on as it was. Returns what the user should know of the new image, and not of the one before.
    ///
    /// # Errors
    /// Why the device can have no other image.
    pub fn snapshot(
        &self,
        file: File,
        options: &AttachOptions,
        number: u64,
        ready: impl FnOnce() -> Outcome,
        keep: impl FnOnce(&DaemonState) -> Outcome,
    ) -> Outcome<Vec<String>> {
        let running = self.running()?;
        let DriverSpec::Image(path) = &options.image else {
            return Err(Failure::new("the new image is none in a file"));
        };
        if running.ublk.as_ref().is_some_and(UblkDevice::passes_kernel_pages) {
            return Err(Failure::new(
                "the data of its block device is copied by nobody, which a qcow2 image cannot do; detach it, and attach \
                 it with --copy kernel",
            ));
        }
        let attach_options = Some(Record::new(options)?);
        let served = Served { image: image_name(&options.image), number, attach_options };
        self.check_not_held()?;
        // The state file has the settings of now, and no block commit begins.
        let _changing = self.begin_change();
        self.check_not_changed()?;
        let state = DaemonState { image: number, ..self.state()? };
        let exchange = running.disk.begin_exchange()?;
        let before = running.disk.driver();
        let image = running.image().ok_or_else(|| no_overlay(before.name()))?;
        let next = Qcow2::over(image.overlay_base()?, file, path, self.journals.as_deref())?;
        let next = Opened::with_image(next);
        let driver = &next.driver;
        exchange.check(&**driver)?;
        if running.ublk.as_ref().is_some_and(UblkDevice::is_recoverable) && driver.is_lost_with_process() {
            let why = match &self.journals {
                Some(_) => driver.warnings().join("; "),
                None => "it had no directory for journals when it was attached".to_owned(),
            };
            return Err(Failure::new(format!(
                "a block device outlives its daemon, and the new image would not: {why}"
            )));
        }
        driver.require_bitmap_store()?.reserve(&running.disk.bitmaps())?;
        ready()?;
        keep(&state)?;
        let warnings = new_warnings(&**driver, &*before);
        running.replace(&exchange, next)?;
        running.bitmaps.leave_in(&*before);
        if let Err(error) = image.supersede() {
            log::line(&format!("warning: the image before is not closed: {error}"));
        }
        *self.served() = served;
        drop(exchange);
        log_broken(&running);
        Ok(warnings)
    }
}

/// The warnings of the driver `next` that the user has not had from the one before.
pub(super) fn new_warnings(next: &dyn Driver, before: &dyn Driver) -> Vec<String> {
    let known = before.warnings();
    next.warnings().into_iter().filter(|warning| !known.contains(warning)).collect()
}

/// Logs why a queue could not go on with the driver that its disk has got.
pub(super) fn log_broken(running: &Arc<Running>) {
    // Each queue has taken it over when its flush completes.
    let flushed = flush_unless_held(running);
    if let (Err(_), Some(why)) = (flushed, running.disk.broken()) {
        log::line(&format!("all I/O fails: {why}; detach the device, and attach it again"));
    }
}
