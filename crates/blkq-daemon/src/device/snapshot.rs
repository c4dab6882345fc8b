//! External snapshots: the device continues with a new overlay.

use std::fs::File;
use std::sync::Arc;

use blkq::Driver;
use blkq::sync::lock;
use blkq_drivers::qcow2::Qcow2;
use blkq_drivers::{DriverSpec, Opened, no_overlay};
use blkq_export::ublk::UblkDevice;
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::info::DaemonState;
use blkq_protocol::options::{AttachOptions, Record};

use super::image::image_name;
use super::running::Running;
use super::{Device, Served, flush_unless_held};
use crate::log;

impl Device {
    /// Makes the empty `file` an overlay of the current image, and continues with it. `options` are those of
    /// the device with the overlay, which has the `number` in `NAME.options`. All I/O waits while `ready`
    /// waits for other devices and `save` writes the state file; after a failure, the device continues with
    /// its image. Returns warnings about the overlay that did not apply to the previous image.
    pub fn snapshot(
        &self,
        file: File,
        options: &AttachOptions,
        number: u64,
        ready: impl FnOnce() -> Outcome,
        save: impl FnOnce(&DaemonState) -> Outcome,
    ) -> Outcome<Vec<String>> {
        let running = self.running()?;
        let DriverSpec::Image(path) = &options.image else {
            return Err(Failure::new("the new image must be a file"));
        };
        if running.ublk.as_ref().is_some_and(UblkDevice::passes_kernel_pages) {
            return Err(Failure::new(
                "this ublk device uses --copy none, which qcow2 does not support; detach it and attach it with --copy \
                 kernel",
            ));
        }
        let attach_options = Some(Record::new(options)?);
        let served = Served { image: image_name(&options.image), number, attach_options };
        self.check_not_held()?;
        // This serializes changes: the state file gets the current settings, and no block commit begins.
        let _changing = lock(&self.changing);
        self.check_not_changed()?;
        let state = DaemonState { image: number, ..self.state()? };
        let exchange = running.disk.begin_exchange()?;
        let before = running.disk.driver();
        let image = running.image().ok_or_else(|| no_overlay(before.name()))?;
        let next = Qcow2::over(image.overlay_base()?, file, path, self.journals.as_deref())?;
        let next = Opened::from(next);
        let driver = &next.driver;
        exchange.check(&**driver)?;
        let no_journals = "the directory of journals was not available when the device was attached";
        check_outlives(&running, &**driver, self.journals.is_none().then_some(no_journals))?;
        driver.require_bitmap_store()?.reserve(&running.disk.bitmaps())?;
        ready()?;
        save(&state)?;
        let warnings = new_warnings(&**driver, &*before);
        running.replace(&exchange, next)?;
        running.bitmaps.save_in(&*before);
        if let Err(error) = image.supersede() {
            log::line(&format!("warning: cannot close the previous image: {error}"));
        }
        *lock(&self.served) = served;
        drop(exchange);
        log_broken(&running);
        Ok(warnings)
    }
}

pub(super) fn new_warnings(next: &dyn Driver, before: &dyn Driver) -> Vec<String> {
    let known = before.warnings();
    next.warnings().into_iter().filter(|warning| !known.contains(warning)).collect()
}

/// A block device that survives its daemon promises to keep recent writes if the daemon is killed. `why` is the reason
/// for which `driver` does not; by default, its warnings are.
pub(super) fn check_outlives(running: &Running, driver: &dyn Driver, why: Option<&str>) -> Outcome {
    if running.ublk.as_ref().is_some_and(UblkDevice::is_recoverable) && driver.is_lost_with_process() {
        let why = why.map_or_else(|| driver.warnings().join("; "), str::to_owned);
        return Err(Failure::new(format!("a killed daemon would lose data of the block device: {why}")));
    }
    Ok(())
}

pub(super) fn log_broken(running: &Arc<Running>) {
    // When the flush completes, every queue has switched to the new driver.
    let flushed = flush_unless_held(running);
    if let (Err(_), Some(why)) = (flushed, running.disk.broken()) {
        log::line(&format!("all I/O fails: {why}; detach the device and attach it again"));
    }
}
