//! A kernel's block device that outlived its daemon.

use crate::failure::Outcome;
use crate::info::StateFile;

/// Why the orphan `name` is in the way, and what can be done.
pub(super) fn refusal(name: &str, exports: &[String]) -> String {
    let exports = exports.join(" ");
    format!(
        "{name}: its daemon has exited, and I/O on {exports} waits for a new one; blkq recover {name}, or blkq detach {name}"
    )
}

/// The state file of a block device that waits for a new daemon.
pub(super) fn orphan(state: Option<StateFile>) -> Outcome<Option<StateFile>> {
    let Some(mut state) = state else { return Ok(None) };
    let Some(ublk) = &mut state.ublk else { return Ok(None) };
    let Some(survivor) = ublk.identity().survivor()? else { return Ok(None) };
    if ublk.id != survivor.id {
        // Its daemon died before it got the number.
        ublk.id = survivor.id;
        state.exports = vec![survivor.path()];
    }
    Ok(Some(state))
}
