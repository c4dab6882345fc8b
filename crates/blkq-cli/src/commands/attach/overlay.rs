//! `attach IMAGE --overlay FILE`: creates a qcow2 overlay of an image, and attaches the overlay.

use std::path::Path;

use blkq::{Error, ErrorKind};
use blkq_drivers::qcow2::Base;
use blkq_drivers::{DriverSpec, ImageFormat, detect_format};
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::options::{AttachOptions, Format, image_text};

use super::create::{FileGuard, directory_of};

/// The options for the overlay `file`. `options` are those for its backing file.
pub fn options(options: &AttachOptions, file: &Path) -> Outcome<AttachOptions> {
    if !matches!(options.image, DriverSpec::Image(_)) {
        let text = image_text(&options.image);
        return Err(Failure::new(format!("--overlay needs an image file, and {text} is not one; omit it")));
    }
    if options.offset != 0 || options.size_limit.is_some() {
        return Err(Failure::new(
            "an overlay covers a whole image; omit --offset and --size-limit, or copy that part to a file first",
        ));
    }
    if file.as_os_str().is_empty() {
        return Err(Failure::new("the path of --overlay is empty"));
    }
    let image = DriverSpec::Image(file.to_owned());
    let options = AttachOptions { image, format: Some(Format::Qcow2), ..options.clone() };
    options.check().map(|()| options)
}

pub fn create(options: &AttachOptions, file: &Path) -> Outcome<FileGuard> {
    let DriverSpec::Image(path) = &options.image else {
        return Err(Failure::new("--overlay needs an image file; omit it"));
    };
    let format = match options.format {
        Some(Format::Raw) => ImageFormat::Raw,
        Some(Format::Qcow2) => ImageFormat::Qcow2,
        Some(Format::Auto) if detect_format(path)? == Some("qcow2") => ImageFormat::Qcow2,
        Some(Format::Auto) | None => ImageFormat::Checked,
    };
    let base = Base::open(path, format).map_err(refusal)?;
    let exists =
        "already exists and is never overwritten; attach it with --format qcow2, or choose another name";
    let fill = |new: &std::fs::File| {
        let directory = directory_of(file).canonicalize().map_err(|e| Failure::new(e.to_string()))?;
        Ok(base.write_overlay(new, &directory)?)
    };
    FileGuard::create(file, exists, fill).map_err(|e| e.during(format_args!("--overlay {}", file.display())))
}

fn refusal(error: Error) -> Failure {
    match error.kind() {
        ErrorKind::Format => {
            let hint = "add --format qcow2, or --format raw to use the bytes of the file unchanged";
            Failure::new(format!("{error}; {hint}"))
        }
        _ => error.into(),
    }
}
