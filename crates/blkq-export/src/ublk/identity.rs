//! Which device it is, whether or not it has a server, and how it is stopped and removed.

use std::io;
use std::path::Path;

use blkq::clock::monotonic_ns;
use blkq::{Error, ErrorKind};

use super::abi::{ANY_ID, DeviceInfo, Features, STATE_DEAD};
use super::command::{Command, DELETE, STOP, TRY_STOP};
use super::control::{ControlDevice, block_path, failed};
use super::setup::SetupProcess;
use super::usage;

/// Which device it is, for longer than its server lives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Identity {
    /// The number N of `/dev/ublkbN`; [`u32::MAX`] of one that is about to be made, whose number
    /// only the kernel knows.
    pub id: u32,
    /// Kept by the kernel with the device: another one that got the same number has another.
    pub cookie: u64,
}

impl Identity {
    /// Of a device that is about to be made: written down before, so that it is found if its server
    /// is killed meanwhile.
    pub fn of_new() -> Identity {
        // Differs between any two devices that live between two boots.
        Identity { id: ANY_ID, cookie: monotonic_ns() }
    }

    /// The block device.
    pub fn path(&self) -> String {
        block_path(self.id)
    }

    /// The kernel's information about the device; `None` if there is no such device.
    pub(super) fn info(&self, control: &mut ControlDevice) -> Result<Option<DeviceInfo>, Error> {
        let ids = if self.id == ANY_ID { control.devices()? } else { vec![self.id] };
        for id in ids {
            let info = match control.info(id) {
                // The device of another user is none of ours.
                Err(e) if self.id == ANY_ID && e.kind() == ErrorKind::Denied => continue,
                info => info?,
            };
            if let Some(info) = info.filter(|info| info.ublksrv_flags == self.cookie) {
                return Ok(Some(info));
            }
        }
        Ok(None)
    }

    /// The device with its number, if it waits for a new server. A device whose server has exited and
    /// that waits for none is removed.
    ///
    /// # Errors
    /// If the kernel cannot be asked, or does not remove it.
    pub fn survivor(&self) -> Result<Option<Identity>, Error> {
        let mut control = match ControlDevice::open() {
            Ok(control) => control,
            // The driver was unloaded, and that it is only without devices.
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e),
        };
        let Some(info) = self.info(&mut control)? else { return Ok(None) };
        let id = info.dev_id;
        if is_recoverable(&info) {
            return Ok(Some(Identity { id, cookie: self.cookie }));
        }
        // It was never started; or the kernel has stopped the block device, and leaves the character
        // device.
        let give = |command| control.give(command, id);
        give_commands(give, &[STOP, DELETE]).map(|()| None)
    }

    /// As [`Identity::survivor`], but a device that no server can take over stays.
    ///
    /// # Errors
    /// If the kernel cannot be asked.
    pub fn waiting(&self) -> Result<Option<Identity>, Error> {
        let mut control = match ControlDevice::open() {
            Ok(control) => control,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e),
        };
        let info = self.info(&mut control)?.filter(is_recoverable);
        Ok(info.map(|info| Identity { id: info.dev_id, cookie: self.cookie }))
    }

    /// The size of the device in bytes; `None` if it no longer exists.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn size_bytes(&self) -> Result<Option<u64>, Error> {
        let mut control = ControlDevice::open()?;
        match self.info(&mut control)? {
            Some(info) => Ok(Some(control.parameters(info.dev_id)?.basic.dev_sectors << 9)),
            None => Ok(None),
        }
    }

    pub(super) fn not_found(&self) -> Error {
        let message = format!("{}: the device no longer exists", self.path());
        Error::new(ErrorKind::NotFound, message)
    }

    /// Removes a device whose server has exited, by way of `setup`. Without `force` not if it is in
    /// use; with it, I/O that waits for a new server fails.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if it is in use, and the kernel's error.
    pub fn remove(&self, force: bool, mut setup: SetupProcess) -> Result<(), Error> {
        let mut control = ControlDevice::open()?;
        let kernel = control.features()?;
        if self.info(&mut control)?.is_none() {
            return Ok(());
        }
        let mut give = |command| setup.give(command, self.id);
        stop(&mut give, self.id, kernel, force)?;
        give_commands(give, &[DELETE])
    }
}

/// Whether another server can take the device over.
fn is_recoverable(info: &DeviceInfo) -> bool {
    info.state != STATE_DEAD && info.flags & Features::USER_RECOVERY.bits() != 0
}

/// Gives the commands that stop or remove a device.
pub(super) fn give_commands(
    mut give: impl FnMut(Command) -> io::Result<()>,
    commands: &[Command],
) -> Result<(), Error> {
    commands.iter().try_for_each(|command| {
        let what = if *command == DELETE { "removing a device" } else { "stopping a device" };
        give(*command).map_err(|e| match e.kind() {
            io::ErrorKind::TimedOut if *command != DELETE => Error::new(
                ErrorKind::System,
                "ublk: the device does not stop, for I/O in flight does not complete; try again when its \
                 image answers",
            ),
            _ => failed(what, e),
        })
    })
}

/// Makes the block device disappear. Without `force` not if it is in use.
pub(super) fn stop(
    give: &mut impl FnMut(Command) -> io::Result<()>,
    id: u32,
    kernel: Features,
    force: bool,
) -> Result<(), Error> {
    // A stop that timed out may have completed since: then there is no device to check.
    if force || !Path::new(&block_path(id)).exists() {
        return give_commands(give, &[STOP]);
    }
    // Claimed until it is stopped, so that nobody opens it meanwhile.
    let claim = usage::claim(&block_path(id))?;
    if kernel.contains(Features::SAFE_STOP_DEV) {
        // The kernel checks itself, atomically.
        drop(claim);
        return give_commands(give, &[TRY_STOP]).map_err(|e| match e.kind() {
            ErrorKind::Busy => usage::busy(&block_path(id), "another process has it open"),
            _ => e,
        });
    }
    give_commands(give, &[STOP])
}
