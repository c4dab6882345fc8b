use std::path::PathBuf;

use blkq_protocol::failure::Outcome;
use blkq_protocol::info::Confinement;

use crate::sandbox::{self, Needs};

pub(super) struct Sandbox {
    /// The files that the control plane may still access, until it is confined. `None` if it is already
    /// confined, or is not to be.
    needs: Option<Needs>,
    confinement: Confinement,
}

impl Sandbox {
    pub(super) fn new(needs: Option<Needs>) -> Sandbox {
        Sandbox { needs, confinement: Confinement::default() }
    }

    /// Confines this thread and the threads that it creates from now on. They may still remove the files
    /// `removed`. Fails if the kernel supports a confinement but refuses it.
    pub(super) fn enter(&mut self, removed: impl IntoIterator<Item = PathBuf>) -> Outcome {
        if let Some(mut needs) = self.needs.take() {
            needs.removed.extend(removed);
            self.confinement = sandbox::control(&needs)?;
        }
        Ok(())
    }

    /// Empty until [`Sandbox::enter`] has confined the control plane.
    pub(super) fn confinement(&self) -> &Confinement {
        &self.confinement
    }
}
