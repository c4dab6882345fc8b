//! Creates image files, overlays and the files of dirty bitmaps.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::{io, thread};

use blkq::ErrorKind;
use blkq::units::format_bytes;
use blkq_drivers::qcow2::Base;
use blkq_drivers::{DriverSpec, ImageFormat, detect_format};
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::info::FileId;
use blkq_protocol::options::{AttachOptions, Format, image_text};

/// Only the owner may read the content of a disk.
const MODE: u32 = 0o600;

/// Creates a sparse image of `bytes`, durably. An existing file is never replaced.
pub fn create_image(image: &DriverSpec, bytes: u64) -> Outcome<FileGuard> {
    let path = image_file(image, "--create creates image files", "a file")?;
    let exists = "already exists and --create never overwrites; omit --create to attach it";
    FileGuard::create(path, exists, |file| {
        file.set_len(bytes).map_err(|e| {
            let too_large = "the file system does not allow files that large; choose a smaller size";
            let why = if e.kind() == io::ErrorKind::FileTooLarge { too_large } else { &e.to_string() };
            Failure::new(format!("cannot create an image of {}: {why}", format_bytes(bytes)))
        })
    })
}

/// The path of an image that is a file. Refuses any other image by a `rule`, which begins with an option.
pub fn image_file<'a>(image: &'a DriverSpec, rule: &str, file: &str) -> Outcome<&'a Path> {
    let DriverSpec::Image(path) = image else {
        let text = image_text(image);
        return Err(Failure::new(format!("{rule}, and {text} is not {file}; omit it")));
    };
    Ok(path)
}

const OVERLAY_RULE: &str = "--overlay needs an image file";

/// The options for the overlay `file`. `options` are those for its backing file.
pub fn overlay_options(options: &AttachOptions, file: &Path) -> Outcome<AttachOptions> {
    image_file(&options.image, OVERLAY_RULE, "one")?;
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

pub fn create_overlay(options: &AttachOptions, file: &Path) -> Outcome<FileGuard> {
    let path = image_file(&options.image, OVERLAY_RULE, "one")?;
    let format = match options.format {
        Some(Format::Raw) => ImageFormat::Raw,
        Some(Format::Qcow2) => ImageFormat::Qcow2,
        Some(Format::Auto) if detect_format(path)? == Some("qcow2") => ImageFormat::Qcow2,
        Some(Format::Auto) | None => ImageFormat::Checked,
    };
    let hint = "add --format qcow2, or --format raw to use the bytes of the file unchanged";
    let base = Base::open(path, format).map_err(|e| Failure::of(e, ErrorKind::Format, hint))?;
    let exists =
        "already exists and is never overwritten; attach it with --format qcow2, or choose another name";
    let fill = |new: &File| {
        let directory = directory_of(file).canonicalize().map_err(|e| Failure::new(e.to_string()))?;
        Ok(base.write_overlay(new, &directory)?)
    };
    FileGuard::create(file, exists, fill).map_err(|e| e.during(format_args!("--overlay {}", file.display())))
}

/// A file that this command has created, or has found. Dropping removes a created file, unless [`FileGuard::keep`] was
/// called.
#[derive(Debug)]
pub struct FileGuard {
    path: PathBuf,
    file: File,
    kept: bool,
}

impl FileGuard {
    pub fn existing(path: PathBuf, file: File) -> FileGuard {
        FileGuard { path, file, kept: true }
    }

    /// Creates the file at `path`, lets `fill` write it, and makes the file and its name durable, or removes
    /// it. The error is `exists` if the path exists. No message contains the path: the caller adds it.
    pub fn create(path: &Path, exists: &str, fill: impl FnOnce(&File) -> Outcome) -> Outcome<FileGuard> {
        let failure = |e: io::Error| Failure::new(format!("cannot create the file: {e}"));
        let opened = OpenOptions::new().read(true).write(true).create_new(true).mode(MODE).open(path);
        let file = opened.map_err(|e| match e.kind() {
            io::ErrorKind::AlreadyExists => Failure::new(exists),
            _ => failure(e),
        })?;
        // From here on, returning an error drops the value, which removes the file.
        let guard = FileGuard { path: path.to_owned(), file, kept: false };
        fill(&guard.file)?;
        sync(&guard.file, directory_of(path)).map_err(failure)?;
        Ok(guard)
    }

    pub fn file(&self) -> &File {
        &self.file
    }

    pub fn keep(mut self) {
        self.kept = true;
    }
}

/// Makes a file and its name in `directory` durable. The two syncs run at the same time, because a file
/// system with a journal then commits both in one transaction.
fn sync(file: &File, directory: &Path) -> io::Result<()> {
    let sync_name = || File::open(directory)?.sync_all();
    thread::scope(|scope| {
        let name = thread::Builder::new().spawn_scoped(scope, sync_name);
        file.sync_all()?;
        match name {
            Ok(name) => name.join().unwrap_or_else(|_| Err(io::Error::other("cannot sync the directory"))),
            Err(_) => sync_name(),
        }
    })
}

pub fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

impl Drop for FileGuard {
    fn drop(&mut self) {
        let id = |metadata: io::Result<fs::Metadata>| metadata.ok().map(|metadata| FileId::from(&metadata));
        let created = id(self.file.metadata());
        // Another process may have replaced the file in the meantime; its file is not removed.
        if !self.kept && created.is_some() && created == id(fs::symlink_metadata(&self.path)) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use blkq_protocol::harness::scratch;

    use super::*;

    #[test]
    fn a_new_image_is_sparse_private_and_removed_unless_kept() {
        let dir = scratch("create");
        let path = dir.file("new", ".img");
        let image = DriverSpec::Image(path.clone());
        let new = create_image(&image, 1 << 30).unwrap();
        let metadata = fs::metadata(&path).unwrap();
        assert_eq!((metadata.len(), metadata.blocks(), metadata.mode() & 0o777), (1 << 30, 0, MODE));
        drop(new);
        assert!(!path.exists());
        create_image(&image, 512).unwrap().keep();
        assert!(path.exists());
        let refused = create_image(&image, 1024).unwrap_err().to_string();
        assert!(refused.contains("already exists"), "{refused}");
        assert_eq!(fs::metadata(&path).unwrap().len(), 512, "the file is unchanged");
        fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn no_file_is_created_through_a_link_or_without_space() {
        let dir = scratch("create-link");
        let link = dir.file("link", ".img");
        std::os::unix::fs::symlink(dir.file("target", ".img"), &link).unwrap();
        assert!(create_image(&DriverSpec::Image(link), 512).is_err());
        assert!(!dir.file("target", ".img").exists());
        let path = dir.file("huge", ".img");
        assert!(create_image(&DriverSpec::Image(path.clone()), u64::MAX).is_err());
        assert!(!path.exists());
        assert!(create_image(&DriverSpec::Image("/dev/null".into()), 512).is_err());
        assert!(create_image(&DriverSpec::Ram(512), 512).is_err());
        fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn a_file_that_replaced_the_new_image_is_not_removed() {
        let dir = scratch("create-replaced");
        let path = dir.file("new", ".img");
        let new = create_image(&DriverSpec::Image(path.clone()), 512).unwrap();
        fs::rename(&path, dir.file("moved", ".img")).unwrap();
        fs::write(&path, "other").unwrap();
        drop(new);
        assert_eq!(fs::read(&path).unwrap(), b"other");
        fs::remove_dir_all(dir.path()).unwrap();
    }
}
