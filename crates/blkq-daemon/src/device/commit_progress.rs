use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use blkq_protocol::failure::Failure;
use blkq_protocol::info::CommitInfo;

pub(super) struct CommitProgress {
    by: String,
    into: String,
    copied_bytes: AtomicU64,
    total_bytes: AtomicU64,
}

impl CommitProgress {
    /// The client `by` has requested the commit into the image `into`.
    pub fn new(by: &str, into: &str) -> CommitProgress {
        CommitProgress {
            by: by.to_owned(),
            into: into.to_owned(),
            copied_bytes: AtomicU64::new(0),
            total_bytes: AtomicU64::new(0),
        }
    }

    pub fn note(&self, (copied_bytes, total_bytes): (u64, u64)) {
        self.copied_bytes.store(copied_bytes, Relaxed);
        self.total_bytes.store(total_bytes, Relaxed);
    }

    pub fn info(&self) -> CommitInfo {
        CommitInfo {
            into: self.into.clone(),
            by: self.by.clone(),
            copied_bytes: self.copied_bytes.load(Relaxed),
            total_bytes: self.total_bytes.load(Relaxed),
        }
    }

    pub fn refusal(&self) -> Failure {
        Failure::new(format!(
            "a block commit by {} is in progress; wait for it, or stop that process",
            self.by
        ))
    }
}
