//! A device goes on in a new image.

use std::fs::File;
use std::sync::Arc;

use blkq::drivers::DriverSpec;
use blkq::drivers::snapshot::{prepare, supersede};

use super::image::{image_name, is_lost_with_daemon};
use super::running::Running;
use super::{Device, Served, flush_unless_held};
use crate::failure::{Failure, Outcome};
use crate::info::StateFile;
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

    /// Makes `file`, which is empty, the image over the present one, with which the device is as `options` say. All I/O
    /// waits while `ready` waits for other devices, and while `keep` writes the state file: if either fails, the
    /// device goes on as it was.
    ///
    /// # Errors
    /// Why the device can have no other image.
    pub fn snapshot(
        &self,
        file: File,
        options: &AttachOptions,
        ready: impl FnOnce() -> Outcome,
        keep: impl FnOnce(&StateFile) -> Outcome,
    ) -> Outcome {
        let running = self.running()?;
        let DriverSpec::Image(path) = &options.image else {
            return Err(Failure::new("the new image is none in a file"));
        };
        // The kernel keeps the block device of a raw image when its daemon exits, and may pass pages that only
        // the ring reaches.
        if running.ublk.is_some() && !self.served().lost_with_daemon {
            return Err(Failure::new(
                "a block device of a raw image outlives its daemon, and with a qcow2 image it does not; detach it, and \
                 attach a new image with --overlay",
            ));
        }
        let served = Served {
            image: image_name(&options.image),
            lost_with_daemon: is_lost_with_daemon(options),
            attach_options: Some(Record::new(options)?),
        };
        self.check_not_held()?;
        // The state file has the settings of now.
        let _changing = self.begin_change();
        let state = StateFile {
            image: served.image.clone(),
            attach_options: served.attach_options.clone(),
            ..self.state_file()?
        };
        let exchange = running.disk.begin_exchange()?;
        let before = running.disk.driver();
        let driver = prepare(&*before, file, path)?;
        exchange.check(&*driver)?;
        ready()?;
        keep(&state)?;
        exchange.replace(driver)?;
        running.bitmaps.leave_in(&*before);
        supersede(&*before);
        *self.served() = served;
        drop(exchange);
        log_broken(&running);
        Ok(())
    }
}

/// Logs why a queue could not go on with the driver that its disk has got.
pub(super) fn log_broken(running: &Arc<Running>) {
    // Each queue has taken it over when its flush completes.
    let flushed = flush_unless_held(running);
    if let (Err(_), Some(why)) = (flushed, running.disk.broken()) {
        log::line(&format!("all I/O fails: {why}; detach the device, and attach it again"));
    }
}
