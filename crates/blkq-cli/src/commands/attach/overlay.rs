//! `attach IMAGE --overlay FILE`: a clone of an image, which stays as it is.

use std::path::Path;

use blkq::drivers::qcow2::Base;
use blkq::drivers::{DriverSpec, ImageFormat, detect_format};
use blkq::{Error, ErrorKind};

use super::create::{NewImage, directory_of};
use crate::failure::{Failure, Outcome};
use crate::options::{AttachOptions, Format, image_text};

/// The options of the device in the clone `file`, where `options` are those of the image behind it.
///
/// # Errors
/// If the image is not in a file; for an option that serves a part of it; and for one that a qcow2 image cannot have.
pub fn options(options: &AttachOptions, file: &Path) -> Outcome<AttachOptions> {
    if !matches!(options.image, DriverSpec::Image(_)) {
        let text = image_text(&options.image);
        return Err(Failure::new(format!("--overlay clones image files, and {text} is none; omit it")));
    }
    if options.offset != 0 || options.size_limit.is_some() {
        return Err(Failure::new(
            "--overlay clones whole images; omit --offset and --size-limit, or copy that part to a file",
        ));
    }
    if file.as_os_str().is_empty() {
        return Err(Failure::new("--overlay: the path of the new image is empty"));
    }
    let image = DriverSpec::Image(file.to_owned());
    let options = AttachOptions { image, format: Some(Format::Qcow2), ..options.clone() };
    options.check().map(|()| options)
}

/// Makes the clone `file` of the image of `options`.
///
/// # Errors
/// If there is something of that name, the image cannot be behind another, or the file system has no room.
pub fn create(options: &AttachOptions, file: &Path) -> Outcome<NewImage> {
    let DriverSpec::Image(path) = &options.image else { return Err(Failure::new("no image")) };
    let format = match options.format {
        Some(Format::Raw) => ImageFormat::Raw,
        Some(Format::Qcow2) => ImageFormat::Qcow2,
        Some(Format::Auto) if detect_format(path)? == Some("qcow2") => ImageFormat::Qcow2,
        Some(Format::Auto) | None => ImageFormat::Checked,
    };
    let base = Base::open(path, format).map_err(refusal)?;
    let there =
        "already exists and is never overwritten; attach it with --format qcow2, or choose another name";
    let fill = |new: &std::fs::File| {
        let directory = directory_of(file).canonicalize().map_err(|e| Failure::new(e.to_string()))?;
        Ok(base.write_overlay(new, &directory)?)
    };
    NewImage::make(file, there, fill).map_err(|e| e.during(format_args!("--overlay {}", file.display())))
}

/// Why the image cannot be behind another, with the cure.
fn refusal(error: Error) -> Failure {
    match error.kind() {
        ErrorKind::Format => {
            let cure = "give its format: --format qcow2, or --format raw for its bytes as they are";
            Failure::new(format!("{error}; {cure}"))
        }
        _ => error.into(),
    }
}
