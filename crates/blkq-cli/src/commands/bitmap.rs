//! `blkq bitmap`: dirty bitmaps, which record the written parts of a device, for incremental backups.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};
use std::path::Path;

use blkq::units::{format_bytes, parse_bytes};
use blkq_drivers::DriverSpec;
use blkq_drivers::r#loop::is_bitmap_file;
use blkq_protocol::control::{BitmapChange, BitmapInfo, Dialogue, Request, ask};
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::info::DeviceInfo;
use blkq_protocol::options::{AttachOptions, Format, Record, with_write_access};
use blkq_protocol::state::StateDir;
use clap::Subcommand;

use super::attach::create::FileGuard;
use crate::devices::DeviceArg;
use crate::output::{Align, print, print_json, render};

/// The file with the bitmaps of a raw image has the name of the image with this extension.
const BITMAP_EXTENSION: &str = "bitmaps";

#[derive(Subcommand, Debug)]
#[command(after_help = "\
A dirty bitmap records which parts of a device were written since the bitmap was added or cleared.
NBD clients read it as the metadata context qemu:dirty-bitmap:BITMAP. It is saved in a qcow2 image,
or in IMAGE.bitmaps beside a raw image. If the daemon is killed, the bitmap becomes inconsistent:
remove it, add it again, and make a full backup (docs/backup.md).

Examples:
  blkq bitmap add vm.qcow2 monday
  blkq bitmap list vm.qcow2
  nbdinfo --map=qemu:dirty-bitmap:monday URI
  blkq bitmap remove vm.qcow2 monday")]
pub enum Command {
    /// Add a bitmap, which records the writes from now on
    Add {
        #[command(flatten)]
        device: DeviceArg,
        /// The name of the bitmap, at most 1023 bytes
        bitmap: String,
        /// Set the number of bytes that each bit represents: a power of two from 512 to 2G
        #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "64K")]
        granularity: u64,
    },
    /// Remove a bitmap
    Remove(Existing),
    /// Clear a bitmap, so that it records the writes from now on
    Clear(Existing),
    /// Record writes in a bitmap again; it lacks the writes made while it was disabled
    Enable(Existing),
    /// Stop recording writes in a bitmap
    Disable(Existing),
    /// Add the dirty parts of some bitmaps to another bitmap
    Merge {
        #[command(flatten)]
        device: DeviceArg,
        /// The bitmaps to read, which are not changed
        #[arg(required = true)]
        from: Vec<String>,
        /// The bitmap that gets the dirty parts
        #[arg(required = true)]
        into: String,
    },
    /// List the bitmaps of a device
    List {
        #[command(flatten)]
        device: DeviceArg,
        /// Print one JSON array of objects
        #[arg(long)]
        json: bool,
    },
}

#[derive(clap::Args, Debug)]
pub struct Existing {
    #[command(flatten)]
    device: DeviceArg,
    /// The name of the bitmap
    bitmap: String,
}

pub fn run(command: Command) -> Outcome {
    let (device, change) = match command {
        Command::Add { device, bitmap, granularity } => {
            (device, BitmapChange::Add { name: bitmap, granularity })
        }
        Command::Remove(of) => (of.device, BitmapChange::Remove { name: of.bitmap }),
        Command::Clear(of) => (of.device, BitmapChange::Clear { name: of.bitmap }),
        Command::Enable(of) => (of.device, BitmapChange::Enable { name: of.bitmap }),
        Command::Disable(of) => (of.device, BitmapChange::Disable { name: of.bitmap }),
        Command::Merge { device, from, into } => (device, BitmapChange::Merge { from, into }),
        Command::List { device, json } => {
            let (dir, name) = device.find()?;
            let bitmaps: Vec<BitmapInfo> = ask(&dir, &name, &Request::Bitmaps {})?;
            return if json { print_json(&bitmaps) } else { print(&table(&bitmaps)) };
        }
    };
    device.act("bitmap", |dir, name| {
        if matches!(change, BitmapChange::Add { .. }) {
            send_bitmap_file(dir, name)?;
        }
        ask(dir, name, &Request::Bitmap { change })
    })
}

/// Sends the daemon of a raw image the file for its bitmaps, because the daemon is confined and cannot open
/// it. A daemon that got the file at attach keeps that one. Image and options come from the state file, not
/// from the daemon: a client that has taken over the daemon could choose which file this command opens.
fn send_bitmap_file(dir: &StateDir, name: &str) -> Outcome {
    let info: DeviceInfo = ask(dir, name, &Request::Show {})?;
    let Some(state) = dir.read_state(name) else { return Ok(()) };
    let options = state.attach_options.as_ref().map(Record::read).transpose()?;
    let has_file = |options: AttachOptions| {
        let is_image = matches!(options.image, DriverSpec::Image(_));
        let is_writable = !with_write_access(&options, &state.settings).read_only;
        is_image && options.format != Some(Format::Qcow2) && is_writable
    };
    let image = state.image_path();
    let is_file = fs::metadata(&image).is_ok_and(|image| image.is_file());
    // A device that was attached writable may be read-only now.
    if info.read_only || !is_file || !options.is_some_and(has_file) {
        return Ok(());
    }
    let file = open_or_create_file(&image)?;
    Dialogue::begin(dir, name, &Request::BitmapFile {})?.step(&[file.file().as_fd()])??;
    file.keep();
    Ok(())
}

/// Opens the file with the dirty bitmaps of a raw image, which a confined daemon cannot open itself. Returns `None` if the
/// image has no such file.
pub fn open_file(image: &Path) -> Outcome<Option<FileGuard>> {
    let path = image.with_added_extension(BITMAP_EXTENSION);
    let failed = |what: &str, e: io::Error| Failure::new(format!("cannot {what} {}: {e}", path.display()));
    // Another user may own the directory: a symbolic link could name any file, and opening a FIFO would
    // block.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = match File::options().read(true).write(true).custom_flags(flags).open(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ENAMETOOLONG) => {
            return Ok(None);
        }
        file => file.map_err(|e| failed("open", e))?,
    };
    // The daemon gets the file for writing, so it must not be an image that has this name.
    if !is_bitmap_file(&file).map_err(|e| failed("read", e))? {
        let shown = path.display();
        return Err(Failure::new(format!("{shown} is not a bitmap file; move it away or remove it")));
    }
    Ok(Some(FileGuard::existing(path, file)))
}

/// As [`open_file`], but creates a file that does not exist.
pub fn open_or_create_file(image: &Path) -> Outcome<FileGuard> {
    if let Some(file) = open_file(image)? {
        return Ok(file);
    }
    let path = image.with_added_extension(BITMAP_EXTENSION);
    let created = FileGuard::create(&path, "another command has just created the file; try again", |file| {
        // The next daemon of the device may run as another user than this command. Without the privilege to give the
        // file to the owner of the image, the owner does not change.
        let _ = fs::metadata(image).and_then(|owner| fchown(file, Some(owner.uid()), Some(owner.gid())));
        Ok(())
    });
    created.map_err(|e| e.during(path.display()))
}

fn table(bitmaps: &[BitmapInfo]) -> String {
    let mut rows = vec![["BITMAP", "GRANULARITY", "DIRTY", "STATE"].map(str::to_owned)];
    rows.extend(bitmaps.iter().map(|bitmap| {
        let dirty = bitmap.dirty.map_or("-".to_owned(), format_bytes);
        [bitmap.name.clone(), format_bytes(bitmap.granularity), dirty, bitmap.state.clone()]
    }));
    render([Align::Left, Align::Right, Align::Right, Align::Left], &rows)
}
