use std::fs::File;

use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::options::{Setting, is_removed, parse_new_group_name};

use super::shared::{Shared, Stage};
use crate::device::{Change, Permit};
use crate::log;

impl Shared {
    pub(super) fn set(&self, settings: &[(String, String)], permit: Permit) -> Outcome {
        self.stage().check()?;
        self.save(self.change(settings, permit), "set, but not saved")
    }

    pub(super) fn join_group(&self, group: &str, file: File, permit: Permit) -> Outcome {
        self.stage().check()?;
        let group = parse_new_group_name(group).map_err(Failure::new)?;
        self.save(self.device.join_group(&group, file, permit), "joined, but not saved")
    }

    /// Changes all settings whose value differs, and reloads the certificates: all of it, or nothing.
    pub(super) fn apply(&self, settings: &[(String, String)], permit: Permit) -> Outcome {
        self.stage().check()?;
        let changes = self.device.prepare_changes(settings)?;
        let certificates = self.device.prepare_certificates()?;
        let mut done = Vec::new();
        let set = changes.iter().try_for_each(|change| {
            let (key, value) = change.to.to_text();
            log::line(&format!("set {key}={value}"));
            self.change_to(&change.to, permit).map_err(|e| e.during(format_args!("{key}={value}")))?;
            done.push(change);
            Ok(())
        });
        // If nothing changed, a state file that cannot be written is no reason to fail.
        let kept =
            set.and_then(|()| if changes.is_empty() { Ok(()) } else { self.save(Ok(()), "cannot be saved") });
        kept.map_err(|failure| self.undo(&done, failure))?;
        if let Some((directory, certificates)) = certificates {
            certificates.install();
            log::line(&format!("reloaded the certificates in {}", directory.display()));
        }
        Ok(())
    }

    /// Returns `failure`, with the changes that could not be undone.
    fn undo(&self, done: &[&Change], mut failure: Failure) -> Failure {
        for change in done.iter().rev() {
            log::line(&format!("undo {}", change.to.name()));
            if let Err(e) = self.device.undo(change) {
                let (key, value) = change.to.to_text();
                failure = Failure::new(format!("{failure} ({key}={value} could not be undone: {e})"));
            }
        }
        failure
    }

    /// Saves the settings after they were `changed`. A failure to save begins with `otherwise`.
    pub(super) fn save(&self, changed: Outcome, otherwise: &str) -> Outcome {
        let stage = self.stage();
        match *stage {
            // If one of several settings could not be set, those before it were set, and are saved.
            Stage::Serving => {
                let written = self.device.state().and_then(|state| self.write_state(&state));
                changed.and(written.map_err(|e| e.during(format_args!("{otherwise} for the next daemon"))))
            }
            // The next daemon has already read the state file, so the change would be lost.
            Stage::Leaving => stage.check(),
            // The state file is about to be removed.
            Stage::Stopping => changed,
        }
    }

    pub(super) fn change(&self, settings: &[(String, String)], permit: Permit) -> Outcome {
        for (done, (key, value)) in settings.iter().enumerate() {
            log::line(&format!("set {key}={value}"));
            // An option that was removed is still accepted and ignored.
            let set = || self.change_to(&self.device.read_setting(key, value)?, permit);
            let changed = if is_removed(key) { Ok(()) } else { set() };
            changed.map_err(|e| {
                let before: Vec<&str> = settings[..done].iter().map(|(key, _)| key.as_str()).collect();
                let note =
                    if done > 0 { format!(" (already set: {})", before.join(", ")) } else { String::new() };
                Failure::new(format!("{key}={value}: {e}{note}"))
            })?;
        }
        Ok(())
    }

    fn change_to(&self, setting: &Setting, permit: Permit) -> Outcome {
        // After `autoclear=off` has succeeded, the device must not detach. So the stage must not change before
        // the setting has.
        let staying = matches!(setting, Setting::Autoclear(_)).then(|| self.stage());
        staying.as_ref().map_or(Ok(()), |stage| stage.check())?;
        self.device.set(setting, permit)
    }
}
