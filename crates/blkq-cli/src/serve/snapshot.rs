//! A device goes on in a new image.

use std::fs::File;

use blkq::drivers::DriverSpec;
use blkq::drivers::snapshot::{prepare, supersede};

use super::image::{image_name, is_lost_with_daemon};
use super::{Device, Served};
use crate::failure::{Failure, Outcome};
use crate::info::StateFile;
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
        let state = self.state_file()?;
        self.check_not_held()?;
        // One change at a time; the state file has the settings of now.
        let settings = self.settings();
        let state = StateFile {
            image: served.image.clone(),
            attach_options: served.attach_options.clone(),
            settings: settings.clone(),
            ..state
        };
        let exchange = running.disk.begin_exchange()?;
        let before = running.disk.driver();
        let driver = prepare(&*before, file, path)?;
        exchange.check(&*driver)?;
        ready()?;
        keep(&state)?;
        exchange.replace(driver)?;
        supersede(&*before);
        *self.served() = served;
        drop(exchange);
        Ok(())
    }
}
