//! `attach --nooverlap`: finding the device that has an image already, or attaching it, as
//! one step.
//!
//! Commands with this option take turns by a lock on the state directory. Others may
//! still attach the image in between; the lock on its bytes then refuses the attach
//! here, and the device is there to be found.

use std::time::{Duration, Instant};

use blkq::drivers::DriverSpec;
use blkq::drivers::fault::FaultSpec;

use super::attached::Attached;
use crate::backing::{Backing, FileId, Window, fact};
use crate::control::{Called, Request, call};
use crate::devices::{Entry, all};
use crate::failure::{Failure, Outcome};
use crate::info::DeviceInfo;
use crate::options::{AttachOptions, Format};
use crate::settings::Setting;
use crate::state::{Fate, StateDir};

/// How long to wait for devices that are just starting or stopping.
const SETTLE_WAIT: Duration = Duration::from_secs(5);

/// The device that has the bytes of the image already, if one has.
enum Found {
    Same(Box<DeviceInfo>),
    Nothing,
    /// None that is known; a daemon is just starting or stopping.
    Unsettled,
}

/// The device of these bytes of the image, which is attached by `start` if there is none.
///
/// # Errors
/// If the bytes are attached in another way or in part, and those of `start`.
pub fn attach(options: &AttachOptions, start: impl Fn() -> Outcome<DeviceInfo>) -> Outcome<Attached> {
    let dir = StateDir::locate()?;
    dir.create()?;
    let _turn = dir.lock()?;
    let until = Instant::now() + SETTLE_WAIT;
    loop {
        if let Found::Same(info) = find(&dir, options)?
            && keep(&dir, &info)
        {
            return Ok(Attached { info: *info, is_new: false });
        }
        let refusal = match start() {
            Ok(info) => return Ok(Attached { info, is_new: true }),
            Err(refusal) => refusal,
        };
        match find(&dir, options)? {
            Found::Nothing => return Err(refusal),
            _ if Instant::now() > until => return Err(refusal),
            Found::Same(_) | Found::Unsettled => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

/// Makes sure that the device stays for the user that gets it now. False if it is just stopping.
fn keep(dir: &StateDir, info: &DeviceInfo) -> bool {
    let settings = vec![Setting::Autoclear(false).to_text()];
    let kept = call::<()>(dir, &info.name, &Request::Set { settings });
    matches!(kept, Ok(Called::Answered(())))
}

fn find(dir: &StateDir, options: &AttachOptions) -> Outcome<Found> {
    let DriverSpec::Image(path) = &options.image else {
        return Err(Failure::new("--nooverlap is for images, and there is none behind the device; omit it"));
    };
    // The daemon reports an image that does not exist.
    let Some(file) = FileId::of(path) else { return Ok(Found::Nothing) };
    let window = Window { offset: options.offset, size_limit: options.size_limit };
    let mut found = Found::Nothing;
    for entry in all(dir)? {
        let info = match entry {
            Entry::Device(info) => info,
            // Which of its bytes it has, only its daemon knew.
            Entry::Remains(it) if it.state == Fate::Orphan && it.file == Some(file) => {
                return Err(it.failure());
            }
            Entry::Remains(_) | Entry::Configured(_) => continue,
            Entry::Silent { .. } => {
                found = Found::Unsettled;
                continue;
            }
        };
        match Backing::of(&info) {
            Some(backing) if backing.file == file && backing.window.overlaps(window) => {
                check_same(&info, backing.window, options)?;
                return Ok(Found::Same(info));
            }
            _ => {}
        }
    }
    Ok(found)
}

/// Refuses a device that differs from what is asked for in what clients read from it, or in what a flush makes durable.
fn check_same(info: &DeviceInfo, window: Window, options: &AttachOptions) -> Outcome {
    let asked = Window { offset: options.offset, size_limit: options.size_limit };
    let sector_size = options.sector_size.bytes().unwrap_or(info.sector_size);
    let attached = info.attach_options.as_ref().and_then(|record| record.read().ok());
    let is_shared = attached.is_some_and(|attached| attached.shared);
    // As they are now: `blkq set` changes them.
    let faults = fact(info, "fault").map(str::to_owned).unwrap_or_else(|| FaultSpec::default().to_string());
    let asked_faults = options.fault.clone().unwrap_or_default().to_string();
    let is_qcow2 = fact(info, "fault-driver").unwrap_or(&info.driver) == "qcow2";
    let (difference, hint) = if window != asked {
        let Window { offset, size_limit } = window;
        let limit = size_limit.map_or("no size limit".to_owned(), |limit| format!("size limit {limit}"));
        (format!("in part (offset {offset}, {limit})"), Some("choose bytes that do not overlap"))
    } else if is_qcow2 != (options.format == Some(Format::Qcow2)) {
        match is_qcow2 {
            true => ("in the format qcow2".to_owned(), Some("use --format qcow2")),
            false => ("in the format raw".to_owned(), Some("use --format raw")),
        }
    } else if info.read_only && !options.read_only {
        ("read-only".to_owned(), Some("use --read-only"))
    } else if info.sector_size != sector_size {
        let hint = "use the same --sector-size";
        (format!("with sectors of {} bytes", info.sector_size), Some(hint))
    } else if info.unsafe_flush_ignore && !options.unsafe_flush_ignore {
        ("with --unsafe-flush-ignore, so that flushes make nothing durable".to_owned(), None)
    } else if faults != asked_faults {
        (format!("with the faults {faults:?}"), None)
    } else if is_shared {
        ("with --shared, so that others may write to it".to_owned(), None)
    } else {
        return Ok(());
    };
    let hint = hint.map(|hint| format!(", or {hint}")).unwrap_or_default();
    let name = &info.name;
    Err(Failure::new(format!("the device {name} already serves these bytes {difference}; detach it{hint}")))
}
