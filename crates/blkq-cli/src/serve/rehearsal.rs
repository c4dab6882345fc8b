//! Whether a new daemon could serve a block device, asked while the old one still does.

use std::fs;
use std::path::Path;

use blkq::ErrorKind;
use blkq::drivers::{self, DriverSpec};

use super::open::{driver_options, keep_size, tls};
use crate::commands::attach::{Args, Format};
use crate::failure::{Failure, Outcome};
use crate::info::BlockDevice;

/// Checks what this program needs to take `block_device` over, attached with `args`: the kernel's
/// device, the image and the certificates. Nothing is changed.
///
/// # Errors
/// What would keep it from being taken over.
pub fn check_take_over(args: &Args, block_device: &BlockDevice) -> Outcome {
    let bytes = block_device.identity().size_bytes()?;
    // Paths are those of where it was attached.
    let here = std::env::current_dir();
    let _ = std::env::set_current_dir(&block_device.directory);
    let checked = check(args, bytes);
    if let Ok(here) = here {
        let _ = std::env::set_current_dir(here);
    }
    checked
}

fn check(args: &Args, bytes: u64) -> Outcome {
    let mut args = args.clone();
    args.format = Some(Format::Raw);
    keep_size(&mut args, bytes);
    if let DriverSpec::Image(path) = &args.image {
        check_size(path, args.offset, bytes)?;
    }
    tls(&args)?;
    match drivers::open(&args.image, &driver_options(&args, true)) {
        // By the old daemon: what comes before its lock is well.
        Err(error) if error.kind() == ErrorKind::Busy => Ok(()),
        opened => Ok(opened.map(drop)?),
    }
}

/// Refuses an image that is smaller than its device. (A block device has no length here.)
fn check_size(path: &Path, offset: u64, bytes: u64) -> Outcome {
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_file() && metadata.len() < offset.saturating_add(bytes) => {
            Err(Failure::new(format!(
                "{} is now smaller than the device; make it as large as it was",
                path.display()
            )))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_that_cannot_be_taken_over_is_refused_beforehand() {
        let dir = std::env::temp_dir().join(format!("blkq-rehearsal-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir(&dir).unwrap();
        let image = dir.join("disk.img");
        let args = |more: &[&str]| {
            let words = [&[image.to_str().unwrap(), "--export", "ublk"], more].concat();
            Args::from_words(&words.into_iter().map(Into::into).collect::<Vec<_>>()).unwrap()
        };
        let why = |more: &[&str]| check(&args(more), 1 << 20).unwrap_err().to_string();
        assert!(why(&[]).contains("disk.img"), "{}", why(&[]));
        fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
        assert_eq!(check(&args(&[]), 1 << 20), Ok(()));
        // While it is served.
        let served = drivers::open(&args(&[]).image, &driver_options(&args(&[]), true)).unwrap();
        assert_eq!(check(&args(&[]), 1 << 20), Ok(()));
        assert!(why(&["--tls-certificates", "/nowhere"]).contains("/nowhere"));
        assert!(why(&["--offset", "512"]).contains("smaller than the device"));
        drop(served);
        fs::File::options().write(true).open(&image).unwrap().set_len(4096).unwrap();
        assert!(why(&[]).contains("smaller than the device"));
        fs::remove_dir_all(&dir).unwrap();
    }
}
