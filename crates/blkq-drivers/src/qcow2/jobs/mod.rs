//! The jobs that change a whole image: recovery after a kill, new overlays and external snapshots, and block commit.
//! Names all other modules of the driver. No other module depends on these; `qcow2` only exports their public types.

pub(super) mod allocated;
pub(super) mod block_commit;
pub(super) mod block_commit_base;
pub(super) mod create;
pub(super) mod empty;
pub(super) mod overlay;
pub(super) mod recover;
pub(super) mod replay;
