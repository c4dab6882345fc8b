//! Devices that wait for their next daemon. No lock protects the files of their images.

use std::path::PathBuf;

use blkq_drivers::DriverSpec;
use blkq_drivers::qcow2::BackingFile;

use super::{Fate, Found, StateDir};
use crate::failure::{Failure, Outcome};
use crate::info::{FileId, StateFile, Window};
use crate::options::{AttachOptions, image_text, with_write_access};

impl StateDir {
    /// Refuses to use the image of `options`, and its backing files, for the device `name` if one of these
    /// files belongs to another device that waits for its next daemon. That daemon reissues I/O that would
    /// overwrite newer data, and an overlay is destroyed by a write to its backing file. `options` must be
    /// writable if `blkq set` made the device writable ([`with_write_access`]).
    pub fn check_not_waiting(&self, name: &str, options: &AttachOptions) -> Outcome {
        for other in self.names()?.into_iter().filter(|other| other != name) {
            let Some(state) = self.read_state(&other) else { continue };
            // The state files of older versions have only the path.
            let theirs = state.attach_options.as_ref().and_then(|record| record.read().ok());
            let mut theirs = theirs.unwrap_or_else(|| AttachOptions {
                image: DriverSpec::Image(PathBuf::from(&state.image)),
                offset: 0,
                size_limit: None,
                shared: false,
                read_only: false,
                format: None,
                ..options.clone()
            });
            theirs = with_write_access(&theirs, &state.settings);
            // The next daemon serves a block device in its present size. If the size is unknown, the block device
            // does not exist or cannot be inspected below.
            if let Some(block_device) = &state.ublk {
                let bytes = || block_device.identity().size_bytes().ok().flatten();
                theirs.size_limit = theirs.size_limit.and_then(|_| bytes());
            }
            let is_image = excludes(&theirs, state.file, options);
            if !is_image && ![&theirs, options].into_iter().any(AttachOptions::is_qcow2) {
                continue;
            }
            // Backing files are read only if the device waits, because most devices do not.
            let found = (!self.is_handed_over(&other)).then(|| self.inspect(&other));
            if let Some(Ok(found)) = &found
                && !waits(found, &state)
            {
                continue;
            }
            let image = is_image.then(|| image_text(&options.image));
            let Some(file) = image.or_else(|| shared_backing_file(&theirs, state.file, options)) else {
                continue;
            };
            return Err(match found.transpose()? {
                Some(Found::Remains(remains)) => remains.failure().during(file),
                _ => Failure::new(format!(
                    "{file} belongs to {other}, which is being handed over to a new daemon; detach {other} first"
                )),
            });
        }
        Ok(())
    }
}

/// Whether requests of this device's clients wait for its next daemon, which would reissue writes over newer
/// data.
fn waits(found: &Found, state: &StateFile) -> bool {
    matches!(found, Found::Remains(remains)
        if remains.state == Fate::Orphan || state.is_guest())
}

/// Whether two devices must not use their images at the same time. `file` is the image of `a` as recorded
/// when it was attached: it may have been moved since.
fn excludes(a: &AttachOptions, file: Option<FileId>, b: &AttachOptions) -> bool {
    let same = match (&a.image, &b.image) {
        (DriverSpec::Image(one), DriverSpec::Image(other)) => {
            FileId::of(other).is_some_and(|other| [file, FileId::of(one)].contains(&Some(other)))
                && Window::of(a).overlaps(Window::of(b))
        }
        // Different ceph.conf files may describe the same cluster.
        (DriverSpec::Rbd(one), DriverSpec::Rbd(other)) => one == other,
        _ => false,
    };
    same && !(a.shared && b.shared || a.read_only && b.read_only)
}

/// A file that is the image of one of the devices, locked for a single writer, and a backing file of the
/// other, which has a reader's lock on all of it. `file` is as for [`excludes`].
fn shared_backing_file(a: &AttachOptions, file: Option<FileId>, b: &AttachOptions) -> Option<String> {
    let find = |top: &AttachOptions, file: Option<FileId>, overlay: &AttachOptions| {
        let DriverSpec::Image(image) = &top.image else { return None };
        if top.read_only || top.shared {
            return None;
        }
        let files = [file, FileId::of(image)];
        let is_image = |backing: &BackingFile| files.contains(&Some(backing.identity.into()));
        overlay.backing_files().into_iter().find(is_image)
    };
    let found = find(b, None, a).or_else(|| find(a, file, b))?;
    Some(found.path.display().to_string())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::harness::{options, scratch};
    use crate::info::DaemonState;
    use crate::options::Record;

    #[test]
    fn a_file_has_one_device_by_whatever_name() {
        let dir = scratch("waiting");
        let (image, link) = (dir.path().join("image"), dir.path().join("link"));
        fs::write(&image, "x").unwrap();
        fs::hard_link(&image, &link).unwrap();
        let with = |image: &Path, more: &[&str]| {
            options(&[&[image.to_str().unwrap(), "--export", "nbd"], more].concat())
        };
        let (one, other) = (with(&image, &[]), with(&link, &[]));
        assert!(excludes(&one, None, &other));
        let shared = ["--shared"];
        assert!(excludes(&with(&image, &shared), None, &other));
        assert!(!excludes(&with(&image, &shared), None, &with(&link, &shared)));
        let readers = ["--read-only"];
        assert!(excludes(&one, None, &with(&link, &readers)));
        assert!(!excludes(&with(&image, &readers), None, &with(&link, &readers)));
        assert!(!excludes(
            &with(&image, &["--offset", "4096"]),
            None,
            &with(&link, &["--size-limit", "4096"])
        ));
        let gone = with(&dir.path().join("gone"), &[]);
        assert!(!excludes(&one, None, &gone));
        assert!(excludes(&gone, FileId::of(&image), &other), "the image was moved");
        let rbd = |image, conf| options(&[image, "--export", "nbd", "--ceph-conf", conf]);
        assert!(excludes(&rbd("rbd:p/i", "/etc/ceph/ceph.conf"), None, &rbd("rbd:p/i", "copy")));
        assert!(!excludes(&rbd("rbd:p/i", "conf"), None, &rbd("rbd:p/j", "conf")));

        // During a handover, no process holds a lock on the image.
        let claim = dir.claim("a").unwrap();
        let number = claim.write_options("image", &Record::new(&one).unwrap(), None).unwrap();
        let state = DaemonState { pid: 1, number, ..DaemonState::default() };
        claim.write_state(&state).unwrap();
        assert_eq!(dir.check_not_waiting("b", &other), Ok(()));
        let _upgrade = dir.lock_upgrade("a", true).unwrap().unwrap();
        let why = dir.check_not_waiting("b", &other).unwrap_err().to_string();
        assert!(why.contains("belongs to a, which is being handed over"), "{why}");
        assert_eq!(dir.check_not_waiting("a", &other), Ok(()), "the next daemon may open the image");
        // Both devices read the image, until one becomes writable.
        let reader = with(&image, &readers);
        let record = Record::new(&reader).unwrap();
        let number = claim.write_options("other path", &record, None).unwrap();
        let mode = |value: &str| vec![("read-only".to_owned(), value.to_owned())];
        for (settings, is_free) in [(vec![], true), (mode("off"), false), (mode("on"), true)] {
            claim.write_state(&DaemonState { pid: 1, number, settings, ..DaemonState::default() }).unwrap();
            assert_eq!(dir.check_not_waiting("b", &reader).is_ok(), is_free);
        }
        drop(claim);
        fs::remove_dir_all(dir.path()).unwrap();
    }

    // Contract: exclusive
    #[test]
    fn a_block_device_may_have_outgrown_its_attach_options() {
        let dir = scratch("waiting-resized");
        let image = dir.path().join("image");
        fs::write(&image, "x").unwrap();
        let image = image.to_str().unwrap();
        let claim = dir.claim("a").unwrap();
        let record = Record::new(&options(&[image, "--export", "ublk", "--size-limit", "4096"])).unwrap();
        // There is no such block device, so its size is unknown.
        let number = claim.write_options(image, &record, Some(u64::MAX)).unwrap();
        claim.write_state(&DaemonState { pid: 1, number, ..DaemonState::default() }).unwrap();
        let _upgrade = dir.lock_upgrade("a", true).unwrap().unwrap();
        let after = options(&[image, "--export", "nbd", "--offset", "4096"]);
        let why = dir.check_not_waiting("b", &after).unwrap_err().to_string();
        assert!(why.contains("belongs to a"), "{why}");
        drop(claim);
        fs::remove_dir_all(dir.path()).unwrap();
    }
}
