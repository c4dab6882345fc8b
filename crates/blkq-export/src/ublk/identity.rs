//! Identifies a device, with or without a server, and stops and removes it.

use std::path::Path;

use blkq::clock::monotonic_ns;
use blkq::{Error, ErrorKind};

use super::abi::{ANY_ID, DeviceInfo, Features, STATE_DEAD, command};
use super::control::{ControlDevice, block_path, failed};
use super::setup::SetupProcess;
use super::usage;

/// Identifies a device, also after its server has exited.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Identity {
    /// The number N of `/dev/ublkbN`. [`u32::MAX`] before the kernel has chosen the number of a new device.
    pub id: u32,
    /// A number that the kernel stores with the device. A later device with the same `id` has another cookie.
    pub cookie: u64,
}

impl Identity {
    /// The identity of a device that is about to be created. The state file records it before the device
    /// exists, so that the device is found if its server is killed in between.
    pub fn of_new() -> Identity {
        // No two devices of the same boot have the same value.
        Identity { id: ANY_ID, cookie: monotonic_ns() }
    }

    /// Path of the block device.
    pub fn path(&self) -> String {
        block_path(self.id)
    }

    pub(super) fn info(&self, control: &mut ControlDevice) -> Result<Option<DeviceInfo>, Error> {
        let ids = if self.id == ANY_ID { control.devices()? } else { vec![self.id] };
        for id in ids {
            let info = match control.info(id) {
                // A device that another user created is not this one.
                Err(e) if self.id == ANY_ID && e.kind() == ErrorKind::Denied => continue,
                info => info?,
            };
            if let Some(info) = info.filter(|info| info.ublksrv_flags == self.cookie) {
                return Ok(Some(info));
            }
        }
        Ok(None)
    }

    /// The device with an open control device; `None` also if the driver is not loaded.
    fn find(&self) -> Result<Option<(ControlDevice, DeviceInfo)>, Error> {
        let mut control = match ControlDevice::open() {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        Ok(self.info(&mut control)?.map(|info| (control, info)))
    }

    /// The device with its number, if it waits for a new server. If no server can take it over, this removes
    /// the device. Fails with the kernel's error.
    pub fn survivor(&self) -> Result<Option<Identity>, Error> {
        let Some((mut control, info)) = self.find()? else { return Ok(None) };
        let id = info.dev_id;
        if is_recoverable(&info) {
            return Ok(Some(Identity { id, cookie: self.cookie }));
        }
        // The device was never started; or the kernel has stopped the block device, and its character device
        // is left.
        for code in [command::STOP_DEV, command::DEL_DEV] {
            control.issue(code, id).map_err(|e| failed(code, e))?;
        }
        Ok(None)
    }

    /// As [`Identity::survivor`], but never removes a device.
    pub fn waiting(&self) -> Result<Option<Identity>, Error> {
        let found = self.find()?.filter(|(_, info)| is_recoverable(info));
        Ok(found.map(|(_, info)| Identity { id: info.dev_id, cookie: self.cookie }))
    }

    /// The device's size in bytes, or the kernel's error; `None` if there is no such device.
    pub fn size_bytes(&self) -> Result<Option<u64>, Error> {
        let mut control = ControlDevice::open()?;
        let Some(info) = self.info(&mut control)? else { return Ok(None) };
        Ok(Some(control.parameters(info.dev_id)?.basic.dev_sectors << 9))
    }

    /// Removes a device whose server has exited, with the process `setup`. With `force`, I/O that waits for a
    /// new server fails; without, a device in use fails with [`ErrorKind::Busy`]. Also fails with the
    /// kernel's error.
    pub fn remove(&self, force: bool, mut setup: SetupProcess) -> Result<(), Error> {
        let mut control = ControlDevice::open()?;
        let kernel = control.features()?;
        if self.info(&mut control)?.is_none() {
            return Ok(());
        }
        stop(&mut setup, self.id, kernel, force)?;
        setup.issue(command::DEL_DEV, self.id)
    }
}

/// Whether another server can take the device over.
fn is_recoverable(info: &DeviceInfo) -> bool {
    info.state != STATE_DEAD && info.flags & Features::USER_RECOVERY.bits() != 0
}

/// Makes the block device disappear. Without `force` this fails if the device is in use.
pub(super) fn stop(setup: &mut SetupProcess, id: u32, kernel: Features, force: bool) -> Result<(), Error> {
    // An earlier stop that timed out may have completed since. Then there is no block device left to check.
    if force || !Path::new(&block_path(id)).exists() {
        return setup.issue(command::STOP_DEV, id);
    }
    // The claim keeps other processes from mounting the device until it is stopped.
    let claim = usage::claim(&block_path(id))?;
    if kernel.contains(Features::SAFE_STOP_DEV) {
        // The kernel itself checks for openers, atomically with the stop.
        drop(claim);
        return setup.issue(command::TRY_STOP_DEV, id).map_err(|e| match e.kind() {
            ErrorKind::Busy => usage::busy(&block_path(id), "another process has it open"),
            _ => e,
        });
    }
    setup.issue(command::STOP_DEV, id)
}
