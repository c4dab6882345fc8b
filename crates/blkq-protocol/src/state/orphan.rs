//! Orphans: block devices of the kernel whose daemon has exited.

use crate::failure::Outcome;
use crate::info::StateFile;

/// The message for a command that needs the name, or a running daemon.
pub(super) fn refusal(name: &str, exports: &[String]) -> String {
    let exports = exports.join(" ");
    format!(
        "{name}: the daemon has exited, and I/O on {exports} waits; run `blkq recover {name}`, or `blkq detach {name}` to remove the device"
    )
}

/// Returns the state file if its block device exists in the kernel and has no daemon.
pub(super) fn orphan(state: Option<StateFile>) -> Outcome<Option<StateFile>> {
    let Some(mut state) = state else { return Ok(None) };
    let Some(ublk) = &mut state.ublk else { return Ok(None) };
    let Some(survivor) = ublk.identity().survivor()? else { return Ok(None) };
    if ublk.id != survivor.id {
        // The daemon died before it recorded the number of the block device.
        ublk.id = survivor.id;
        state.exports = vec![survivor.path()];
    }
    Ok(Some(state))
}
