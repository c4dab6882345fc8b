use std::sync::{Mutex, MutexGuard};

use blkq::sync::lock;
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::info::CommitInfo;

/// Fails if a change must not be made, because its client has exited.
pub type Permit<'a> = &'a dyn Fn() -> Outcome;

/// Serializes the changes of a device. A block commit is a change that takes long: while it copies, it excludes only
/// other changes of the image.
#[derive(Default)]
pub(super) struct Changes {
    /// May be held while waiting for I/O.
    changing: Mutex<()>,
    /// The block commit in progress.
    commit: Mutex<Option<CommitInfo>>,
}

impl Changes {
    /// Waits for a change in progress, and excludes others until the returned guard is dropped. Fails as `permit` does,
    /// which is called when no other change is in progress: the client may have exited meanwhile.
    pub(super) fn begin(&self, permit: Permit) -> Outcome<MutexGuard<'_, ()>> {
        let changing = lock(&self.changing);
        permit().map(|()| changing)
    }

    /// Refuses another change of the image while a block commit is in progress, and names its client.
    pub(super) fn check_no_commit(&self) -> Outcome {
        match self.commit() {
            None => Ok(()),
            Some(CommitInfo { by, .. }) => Err(Failure::new(format!(
                "a block commit by {by} is in progress; wait for it, or stop that process"
            ))),
        }
    }

    /// The block commit in progress.
    pub(super) fn commit(&self) -> Option<CommitInfo> {
        lock(&self.commit).clone()
    }

    pub(super) fn begin_commit(&self, into: String, by: String) {
        *lock(&self.commit) = Some(CommitInfo { into, by, copied_bytes: 0, total_bytes: 0 });
    }

    /// Publishes the progress of the block commit.
    pub(super) fn report(&self, (copied_bytes, total_bytes): (u64, u64)) {
        if let Some(commit) = &mut *lock(&self.commit) {
            (commit.copied_bytes, commit.total_bytes) = (copied_bytes, total_bytes);
        }
    }

    pub(super) fn end_commit(&self) {
        *lock(&self.commit) = None;
    }

    #[cfg(test)]
    pub(super) fn is_changing(&self) -> bool {
        self.changing.try_lock().is_err()
    }
}
