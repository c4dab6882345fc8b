//! `attach --nooverlap`: reuses the device that already serves the bytes of an image, or attaches the image.
//!
//! A lock on the state directory makes this one step with regard to other commands with --nooverlap. A
//! command without this option may still attach the image between the search and the attach. The lock on the
//! bytes of the image then makes the attach fail, and the next search finds the device of the other command.

use std::time::{Duration, Instant};

use blkq_drivers::fault::FaultSpec;
use blkq_protocol::control::{Request, call};
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::info::{Backing, DeviceInfo, FileId, Window, fact};
use blkq_protocol::options::{AttachOptions, Format, Setting};
use blkq_protocol::state::{Fate, StateDir};

use super::Attached;
use super::create::image_file;
use crate::devices::{Entry, all};

/// The longest wait for devices that are starting or stopping.
const SETTLE_WAIT: Duration = Duration::from_secs(5);
const SETTLE_POLL_INTERVAL: Duration = Duration::from_millis(10);

enum Found {
    Same(Box<DeviceInfo>),
    Nothing,
    /// No known device serves the bytes, but a device that is starting or stopping may do so.
    Unsettled,
}

/// Fails if another device serves some of the bytes, or all of them with other properties.
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
            Found::Same(_) | Found::Unsettled => std::thread::sleep(SETTLE_POLL_INTERVAL),
        }
    }
}

/// Turns autoclear off, so that the device stays for this user. Returns false if the device is stopping.
fn keep(dir: &StateDir, info: &DeviceInfo) -> bool {
    let settings = vec![Setting::Autoclear(false).to_text()];
    matches!(call::<()>(dir, &info.name, &Request::Set { settings }), Ok(Some(())))
}

fn find(dir: &StateDir, options: &AttachOptions) -> Outcome<Found> {
    let path = image_file(&options.image, "--nooverlap is for image files", "one")?;
    // If the image does not exist, the daemon reports that.
    let Some(file) = FileId::of(path) else { return Ok(Found::Nothing) };
    let window = Window::of(options);
    let mut found = Found::Nothing;
    for entry in all(dir)? {
        match entry {
            Entry::Device(info) => {
                let backing = Backing::of(&info).filter(|backing| backing.file == file);
                if let Some(backing) = backing.filter(|backing| backing.window.overlaps(window)) {
                    check_same(&info, backing.window, window, options)?;
                    return Ok(Found::Same(info));
                }
            }
            // Only the daemon knew which bytes the orphan serves, so every orphan of the file is refused.
            Entry::Remains(it) if it.state == Fate::Orphan && it.file == Some(file) => {
                return Err(it.failure());
            }
            Entry::Silent { .. } => found = Found::Unsettled,
            Entry::Remains(_) | Entry::Configured(_) => {}
        }
    }
    Ok(found)
}

/// Refuses a device whose clients would read other data than those of the requested device, or whose flushes
/// do not make the data durable.
fn check_same(info: &DeviceInfo, window: Window, asked: Window, options: &AttachOptions) -> Outcome {
    let sector_size = options.sector_size.bytes().unwrap_or(info.sector_size);
    let attached = info.attach_options.as_ref().and_then(|record| record.read().ok());
    let is_shared = attached.is_some_and(|attached| attached.shared);
    // The faults come from the driver, not from the attach options, because `blkq set` may have changed them.
    let faults = fact(info, "fault").map(str::to_owned).unwrap_or_else(|| FaultSpec::default().to_string());
    let asked_faults = options.fault.clone().unwrap_or_default().to_string();
    let is_qcow2 = fact(info, "fault-driver").unwrap_or(&info.driver) == "qcow2";
    let (difference, hint) = if window != asked {
        let Window { offset, size_limit } = window;
        let limit = size_limit.map_or("no size limit".to_owned(), |limit| format!("size limit {limit}"));
        (format!("in part (offset {offset}, {limit})"), Some("choose bytes that do not overlap"))
    } else if is_qcow2 != (options.format == Some(Format::Qcow2)) {
        let hint = if is_qcow2 { "use --format qcow2" } else { "use --format raw" };
        (format!("in the format {}", if is_qcow2 { "qcow2" } else { "raw" }), Some(hint))
    } else if info.read_only && !options.read_only {
        ("read-only".to_owned(), Some("use --read-only"))
    } else if info.sector_size != sector_size {
        (format!("with sectors of {} bytes", info.sector_size), Some("use the same --sector-size"))
    } else if info.unsafe_flush_ignore && !options.unsafe_flush_ignore {
        ("with --unsafe-flush-ignore, which does not make data durable".to_owned(), None)
    } else if faults != asked_faults {
        (format!("with the faults {faults:?}"), None)
    } else if is_shared {
        ("with --shared, which lets others write to them".to_owned(), None)
    } else {
        return Ok(());
    };
    let hint = hint.map(|hint| format!(", or {hint}")).unwrap_or_default();
    let name = &info.name;
    Err(Failure::new(format!("the device {name} already serves these bytes {difference}; detach it{hint}")))
}
