use std::fs::File;

use blkq::Disk;
use blkq::throttle::{Ceiling, WEIGHT_DEFAULT};
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::group::{GroupWatch, Joined};

use super::running::{Running, stopping};
use super::{Device, Permit};

impl Device {
    /// The device leaves its previous group and keeps its weight. `file` is the open file of the group. Fails
    /// if the group cannot be joined, or if the device has `limit=auto`, and as `permit` does.
    pub fn join_group(&self, name: &str, file: File, permit: Permit) -> Outcome {
        let running = self.running()?;
        let _changing = self.begin_change_if(permit)?;
        check_no_ceiling(&running.disk)?;
        let weight = running.disk.group_member().map_or(WEIGHT_DEFAULT, |member| member.weight());
        let (joined, member) = Joined::over(file, name, &self.attached.name, weight)?;
        let watch = GroupWatch::new(joined.keeper(&member), running.disk.clone());
        let mut background = self.background();
        let background = background.as_mut().ok_or_else(stopping)?;
        // The `blkq-group` thread repairs the previous group's file from the member of the disk, so it must
        // stop before the disk gets a member of another group.
        background.stop_group();
        running.disk.join_group(member);
        self.group.replace(Some(joined));
        if let Err(failure) = background.watch_group(watch) {
            self.remove_from_group(&running);
            self.settings.note_group(None);
            return Err(Failure::new(format!("{failure}; the device is now in no group")));
        }
        self.settings.note_group(Some((name, weight)));
        Ok(())
    }

    /// The caller records that the device is in no group.
    pub(super) fn leave_group(&self, running: &Running) -> Outcome {
        self.background().as_mut().ok_or_else(stopping)?.stop_group();
        self.remove_from_group(running);
        Ok(())
    }

    fn remove_from_group(&self, running: &Running) {
        running.disk.leave_group();
        self.group.replace(None);
    }
}

fn check_no_ceiling(disk: &Disk) -> Outcome {
    match disk.ceiling() {
        Ceiling::NotSearched => Ok(()),
        _ => Err(Failure::new(
            "a device with limit=auto cannot be in a group; set limit=none or another limit first",
        )),
    }
}
