//! The confinement of a device's control plane.

use std::path::PathBuf;

use crate::confine::{self, Confinement, Needs};
use crate::failure::Outcome;

/// The confinement of the control plane, before and after it is in force.
pub(super) struct Sandbox {
    /// The parts of the system that it needs, until it is confined to them; none if it is not to be.
    needs: Option<Needs>,
    confinement: Confinement,
}

impl Sandbox {
    /// One that is not in force yet.
    pub(super) fn new(needs: Option<Needs>) -> Sandbox {
        Sandbox { needs, confinement: Confinement::default() }
    }

    /// Confines this thread, and those that it makes from now on, which may remove the files `removed`, too.
    ///
    /// # Errors
    /// Confinement that the kernel has, and refuses.
    pub(super) fn enter(&mut self, removed: impl IntoIterator<Item = PathBuf>) -> Outcome {
        if let Some(mut needs) = self.needs.take() {
            needs.removed.extend(removed);
            self.confinement = confine::control(&needs)?;
        }
        Ok(())
    }

    /// Those privileges that it has dropped by now.
    pub(super) fn confinement(&self) -> &Confinement {
        &self.confinement
    }
}
