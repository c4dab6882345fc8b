//! The image file of a device, and the bytes of it that are served.

use std::path::Path;

use super::{DeviceInfo, FileId};
use crate::options::AttachOptions;

/// A range of bytes of a file, as the options request it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Window {
    pub offset: u64,
    /// The maximum length in bytes, or `None` for the rest of the file.
    pub size_limit: Option<u64>,
}

impl Window {
    pub fn of(options: &AttachOptions) -> Window {
        Window { offset: options.offset, size_limit: options.size_limit }
    }

    /// Whether the two ranges have a byte in common if the file is long enough.
    pub fn overlaps(self, other: Window) -> bool {
        let end = |window: Window| window.offset.saturating_add(window.size_limit.unwrap_or(u64::MAX));
        self.offset < end(other) && other.offset < end(self)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Backing {
    pub file: FileId,
    pub window: Window,
}

impl Backing {
    pub fn of(info: &DeviceInfo) -> Option<Backing> {
        let fact = |name: &str| fact(info, name);
        let (major, minor) = fact("backing-device")?.split_once(':')?;
        let device = (major.parse().ok()?, minor.parse().ok()?);
        let file = FileId { device, inode: fact("backing-inode")?.parse().ok()?, node: None };
        let window =
            Window { offset: fact("offset")?.parse().ok()?, size_limit: fact("size-limit")?.parse().ok() };
        Some(Backing { file, window })
    }
}

/// Compares the files, or the names if there is no file at `path`.
pub fn is_behind(path: &Path, info: &DeviceInfo) -> bool {
    match FileId::of(path) {
        Some(file) => Backing::of(info).is_some_and(|backing| backing.file == file),
        None => {
            Backing::of(info).is_some()
                && std::path::absolute(path).is_ok_and(|path| path == info.image_path())
        }
    }
}

/// The current path of the image, followed by ` (deleted)` if the file was removed. For other images, their
/// spec.
pub fn shown_path(info: &DeviceInfo) -> String {
    fact(info, "backing-file").unwrap_or(&info.image).to_owned()
}

pub fn fact<'a>(info: &'a DeviceInfo, name: &str) -> Option<&'a str> {
    let found = info.driver_facts.iter().find(|(key, _)| key == name)?;
    Some(found.1.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_overlap_where_they_share_a_byte() {
        let window = |offset, size_limit| Window { offset, size_limit };
        for (a, b, expected) in [
            (window(0, None), window(0, None), true),
            (window(0, None), window(1 << 40, Some(1)), true),
            (window(0, Some(512)), window(512, None), false),
            (window(0, Some(513)), window(512, None), true),
            (window(512, Some(512)), window(0, Some(4096)), true),
            (window(u64::MAX, None), window(0, Some(u64::MAX)), false),
        ] {
            assert_eq!((a.overlaps(b), b.overlaps(a)), (expected, expected), "{a:?} {b:?}");
        }
    }
}
