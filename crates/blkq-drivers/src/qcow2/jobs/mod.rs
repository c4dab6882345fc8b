//! The jobs that change a whole image: recovery after a kill or a power loss, new overlays and external snapshots, and
//! block commit.
//! Names all other modules of the driver. Only `qcow2` itself depends on these: it exports their public types, and
//! begins and ends the journal with `recover`.

pub(super) mod block_commit;
pub(super) mod leaked;
pub(super) mod overlay;
pub(super) mod recover;
