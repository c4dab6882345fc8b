use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use blkq::ErrorKind;
use blkq::text::shell_word;
use blkq::units::parse_bytes;
use blkq_drivers::qcow2::Journals;
use blkq_drivers::{DriverOptions, DriverSpec, ImageFormat, Opened};
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::info::Window;
use blkq_protocol::options::{AttachOptions, Export, Format, find_ceph_files, image_text};
use blkq_protocol::state::{Claim, DYING_WAIT, StateDir};

use crate::device::lock_holders;
use crate::sandbox;

/// How long the kernel may keep the files of a killed daemon open after the process has exited.
pub(super) const RELEASE_WAIT: Duration = Duration::from_secs(5);
/// How long to wait for an image that another device serves. Other programs, such as qemu-img, may lock an
/// image only for a moment, so that the full wait applies to them.
const SERVED_WAIT: Duration = Duration::from_millis(20);

/// How long to wait for the lock of an RBD client that was killed: its cluster considers it alive for 30 s.
const CLIENT_DYING_WAIT: Duration = Duration::from_secs(40);

/// Adds the files that Ceph's client library finds through the environment of this process.
pub fn with_ceph_files(options: &AttachOptions) -> AttachOptions {
    let mut options = options.clone();
    find_ceph_files(&mut options, |name| std::env::var_os(name));
    options
}

/// The files and directories that Ceph's client library reads, including its configuration and keyrings.
pub(super) fn ceph_paths(options: &AttachOptions) -> Vec<PathBuf> {
    if !matches!(options.image, DriverSpec::Rbd(_)) {
        return Vec::new();
    }
    let of_files = options.ceph_conf.iter().chain(&options.ceph_keyring);
    let directories = of_files.filter_map(|file| file.canonicalize().ok()?.parent().map(PathBuf::from));
    let of_user = std::env::var_os("HOME").map(|home| Path::new(&home).join(".ceph"));
    sandbox::READ_BY_CEPH.iter().map(PathBuf::from).chain(directories).chain(of_user).collect()
}

/// Also contains the files in the directories of [`ceph_paths`]: each may be a mount, as the secrets of a
/// container are.
pub(super) fn ceph_mounts(options: &AttachOptions) -> Vec<PathBuf> {
    let files = |path: &PathBuf| {
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).filter(|path| path.is_file()).collect::<Vec<_>>()
    };
    let mut paths = ceph_paths(options);
    paths.extend(paths.iter().flat_map(files).collect::<Vec<_>>());
    paths
}

/// For RBD, opens the driver on a confined thread: the threads of Ceph's client library inherit the
/// confinement.
fn open_confined(options: &AttachOptions, driver_options: &DriverOptions) -> Result<Opened, blkq::Error> {
    let open = || blkq_drivers::open(&options.image, driver_options);
    if !options.sandbox || !matches!(options.image, DriverSpec::Rbd(_)) {
        return open();
    }
    // A confined thread cannot load libraries.
    blkq_drivers::rbd::load()?;
    let failed = |text: String| blkq::Error::new(ErrorKind::System, text);
    let confined = || {
        sandbox::cluster(&ceph_paths(options)).map_err(|failure| failed(failure.to_string()))?;
        open()
    };
    std::thread::scope(|scope| scope.spawn(confined).join())
        .unwrap_or_else(|_| Err(failed("cannot open the image: its thread panicked".to_owned())))
}

/// How the image of a device is opened.
#[derive(Default)]
pub(super) struct Opening {
    /// The size of the device that is taken over.
    pub(super) device_bytes: Option<u64>,
    /// How long to wait for an image that is in use.
    pub(super) wait: Duration,
    /// Identifies the previous daemon to the storage of the image.
    pub(super) predecessor: Option<String>,
}

/// Opens the image. If it is in use, tries again for up to the time of `opening`, because the kernel closes the files of
/// a killed daemon only some time after its exit. Devices of `dir` may use the image.
pub(super) fn open_driver(
    dir: &StateDir,
    options: &AttachOptions,
    ublk: bool,
    opening: &Opening,
    journals: Option<Arc<Journals>>,
) -> Result<Opened, blkq::Error> {
    let Opening { device_bytes, wait, ref predecessor } = *opening;
    let predecessor = predecessor.clone();
    let driver_options =
        DriverOptions { predecessor, device_bytes, journals, ..driver_options(options, ublk) };
    // A Ceph cluster detects dead clients by a timeout of its own, so a short wait would be of no use.
    let (wait, retry) = match &options.image {
        DriverSpec::Rbd(_) if wait >= DYING_WAIT => (CLIENT_DYING_WAIT, Duration::from_secs(1)),
        DriverSpec::Rbd(_) => (Duration::ZERO, Duration::ZERO),
        _ => (wait, Duration::from_millis(10)),
    };
    let mut until = Instant::now() + wait;
    let mut release = Some(RELEASE_WAIT).filter(|_| !wait.is_zero());
    let mut is_first = true;
    loop {
        let error = match open_confined(options, &driver_options) {
            // Other programs, too, open block devices for a moment to find out whether they are in use.
            Err(error) if matches!(error.kind(), ErrorKind::Busy | ErrorKind::Claimed) => error,
            opened => return opened,
        };
        if std::mem::take(&mut is_first) && is_held_by_device(dir, options, &error) {
            (until, release) = (until.min(Instant::now() + SERVED_WAIT), None);
        }
        if Instant::now() >= until {
            match release.take() {
                Some(more) if is_held_by_kernel(options, &error) => until = Instant::now() + more,
                _ => return Err(error),
            }
        }
        std::thread::sleep(retry);
    }
}

/// Whether a device serves the image, or a file system on it is mounted: it will not be released soon.
fn is_held_by_device(dir: &StateDir, options: &AttachOptions, error: &blkq::Error) -> bool {
    let DriverSpec::Image(path) = &options.image else { return false };
    match error.kind() {
        ErrorKind::Claimed => lock_holders::is_mounted(path),
        _ => lock_holders::has_running_holder(lock_holders::daemons(dir), path, Window::of(options)),
    }
}

/// The image is locked although no process holds a lock: the kernel has not closed a killed daemon's files
/// yet.
fn is_held_by_kernel(options: &AttachOptions, error: &blkq::Error) -> bool {
    let DriverSpec::Image(path) = &options.image else { return false };
    error.kind() == ErrorKind::Busy && !lock_holders::has_holder(path, Window::of(options))
}

pub(super) fn refusal(error: blkq::Error, options: &AttachOptions, claim: &Claim) -> Failure {
    // The clients of a device that waits would lose their writes, and `recover` has no options.
    let error = if claim.is_kept() { error.not_read_only() } else { error };
    match error.kind() {
        ErrorKind::Busy => {
            let holders = match &options.image {
                DriverSpec::Image(path) => lock_holders::holders_of(claim, path, Window::of(options)),
                _ => None,
            };
            let place = holders.as_ref().map(|holders| format!(" {}", holders.text)).unwrap_or_default();
            let can_share = !claim.is_kept()
                && !options.is_qcow2()
                && holders.as_ref().is_none_or(|holders| holders.can_share);
            let hint = match &options.image {
                DriverSpec::Rbd(_) if claim.is_kept() => "close the image in that client first",
                DriverSpec::Rbd(_) => "close the image in that client first, or attach with --read-only",
                _ if can_share => "release it there first, or attach with --shared on both sides",
                _ => "release it there first",
            };
            Failure::new(format!("{error}{place}; {hint}"))
        }
        ErrorKind::NotFound | ErrorKind::BackingFile if claim.is_kept() && !error.has_hint() => {
            Failure::new(format!("{error}; move the file back to its place"))
        }
        ErrorKind::Claimed if claim.is_kept() => Failure::new(format!("{error}; release it there first")),
        ErrorKind::Claimed => Failure::new(format!(
            "{error}; release it there first, or attach with --shared, which skips this check: two file systems on \
             the same bytes destroy each other"
        )),
        _ => format_refusal(error, options),
    }
}

/// For an image that is not in use.
pub(super) fn format_refusal(error: blkq::Error, options: &AttachOptions) -> Failure {
    let hint = match error.kind() {
        ErrorKind::Format if options.is_qcow2() => return error.into(),
        ErrorKind::Format if has_qcow2(&options.image) => {
            "attach with --format qcow2 to serve its guest data, or attach with --format raw to serve the bytes of \
             the file"
        }
        ErrorKind::BackingFile => {
            "move it there, or attach with --backing-chain allow if you trust the image"
        }
        ErrorKind::Format => {
            "convert it with `qemu-img convert -O raw`, or attach with --format raw to serve the bytes of the file"
        }
        ErrorKind::NotFound if !error.has_hint() => match &options.image {
            DriverSpec::Image(path) => return Failure::new(format!("{error}; {}", not_found(path))),
            _ => return error.into(),
        },
        _ => return error.into(),
    };
    Failure::new(format!("{error}; {hint}"))
}

fn not_found(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    match name.rsplit_once(':').map(|(_, size)| parse_bytes(size)) {
        Some(Ok(_)) => "for a device without an image, use ram:SIZE or null:SIZE".to_owned(),
        _ => format!("create it with `blkq attach {} --create SIZE`", shell_word(path)),
    }
}

fn has_qcow2(image: &DriverSpec) -> bool {
    matches!(image, DriverSpec::Image(path) if matches!(blkq_drivers::detect_format(path), Ok(Some("qcow2"))))
}

/// The format must not be detected again: clients may have written another magic number to a raw image.
pub(super) fn keep_format(options: &mut AttachOptions) {
    if !options.is_qcow2() {
        options.format = Some(Format::Raw);
    }
}

/// Makes sure that the image is opened with the current size of its block device.
pub(super) fn keep_size(options: &mut AttachOptions, bytes: u64) {
    match &mut options.image {
        DriverSpec::Image(_) => options.size_limit = options.size_limit.map(|_| bytes),
        // The cluster stores the size of the image.
        DriverSpec::Rbd(_) => {}
        DriverSpec::Null(size) | DriverSpec::Ram(size) => *size = bytes,
    }
}

pub(super) fn driver_options(options: &AttachOptions, ublk: bool) -> DriverOptions {
    DriverOptions {
        offset: options.offset,
        size_limit: options.size_limit,
        logical_block_bytes: options.sector_size.bytes(),
        partial_block: serves_bytes(options, ublk),
        direct_io: options.direct_io,
        dispatch: options.dispatch,
        read_only: options.read_only,
        shared: options.shared,
        // The kernel and virtual machines do not notice that another daemon continues, so they would not
        // repeat writes that only the old one had cached.
        write_through: ublk || options.exports.contains(&Export::VhostUserBlk),
        format: match options.format {
            Some(Format::Raw) => ImageFormat::Raw,
            Some(Format::Qcow2) => ImageFormat::Qcow2,
            Some(Format::Auto) | None => ImageFormat::Checked,
        },
        backing_chain: options.backing_chain.into(),
        ceph_conf: options.ceph_conf.clone(),
        ceph_keyring: options.ceph_keyring.clone(),
        ceph_user: options.ceph_user.clone(),
        fault: options.fault.clone(),
        ..DriverOptions::default()
    }
}

/// Whether NBD clients may access parts of a block. Not if the user chose a sector size, or if something
/// other than NBD writes: the read-modify-write of a partial block could undo its writes.
pub(super) fn serves_bytes(options: &AttachOptions, ublk: bool) -> bool {
    let only_nbd = !ublk && options.exports.iter().all(|export| *export == Export::Nbd);
    only_nbd && options.sector_size.bytes().is_none() && !options.whole_sectors
}

/// Absolute paths mean the same to another process.
pub fn absolute(options: &AttachOptions) -> Outcome<AttachOptions> {
    // If the current directory was removed, there are no relative paths.
    options.clone().absolute(&std::env::current_dir().unwrap_or_default())
}

/// A raw image needs no journal until it becomes a backing file, so a failure for it is only a warning. Fails
/// if the directory of the journals cannot be created.
pub(super) fn journals(
    options: &AttachOptions,
    state: &Path,
) -> Outcome<(Option<Arc<Journals>>, Option<String>)> {
    if !matches!(options.image, DriverSpec::Image(_)) {
        return Ok((None, None));
    }
    match Journals::open(&state.join("journals")) {
        Err(error) if !options.is_qcow2() => {
            let warning = format!(
                "after a snapshot, data that was not flushed is lost if the daemon is killed: {error}"
            );
            Ok((None, Some(warning)))
        }
        journals => Ok((Some(journals?), None)),
    }
}

/// The image under a name that other processes understand.
pub(super) fn image_name(image: &DriverSpec) -> String {
    match image {
        DriverSpec::Image(path) => path.canonicalize().unwrap_or_else(|_| path.clone()).display().to_string(),
        _ => image_text(image),
    }
}

#[cfg(test)]
mod tests {
    use blkq_protocol::harness::{options, scratch};

    use super::*;

    /// This process holds the lock, and does not count itself. So it looks like a lock that the kernel has
    /// not released yet.
    #[test]
    fn a_lock_without_a_process_is_waited_for() {
        let path = std::env::temp_dir().join(format!("blkq-released-{}", std::process::id()));
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(1 << 20).unwrap();
        let options = options(&[path.to_str().unwrap(), "--export", "nbd", "--format", "raw"]);
        let dir = scratch("released");
        let open = |wait| open_driver(&dir, &options, false, &Opening { wait, ..Opening::default() }, None);
        let holder = open(Duration::ZERO).unwrap();
        assert_eq!(open(Duration::ZERO).err().unwrap().kind(), ErrorKind::Busy);
        let release = std::thread::spawn(move || {
            // This is longer than the wait for a process below.
            std::thread::sleep(Duration::from_millis(100));
            drop(holder);
        });
        open(Duration::from_millis(1)).unwrap();
        release.join().unwrap();
        std::fs::remove_file(path).unwrap();
        std::fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn mounts_that_a_ceph_client_reads_are_kept() {
        let dir = std::env::temp_dir().join(format!("blkq-ceph-mounts-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (conf, keyring) = (dir.join("ceph.conf"), dir.join("keyring"));
        std::fs::write(&conf, "").unwrap();
        std::fs::write(&keyring, "").unwrap();
        let kept = ceph_mounts(&options(&["rbd:p/i", "--ceph-conf", conf.to_str().unwrap()]));
        for path in [dir.as_path(), &conf, &keyring, Path::new("/etc/ceph"), Path::new("/etc/resolv.conf")] {
            assert!(kept.iter().any(|kept| kept == path), "{path:?}: {kept:?}");
        }
        assert_eq!(ceph_mounts(&options(&["d.img"])), Vec::<PathBuf>::new());
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn writes_are_not_cached_where_another_daemon_may_continue() {
        let through = |more: &[&str], ublk| {
            driver_options(&options(&[&["rbd:p/i"], more].concat()), ublk).write_through
        };
        assert!(!through(&["--export", "nbd"], false));
        assert!(through(&["--export", "nbd", "--export", "vhost-user-blk"], false));
        assert!(through(&["--export", "ublk"], true));
        assert!(through(&[], true), "ublk was chosen");
        assert!(through(&["--export", "vhost-user-blk", "--shared"], false));
    }
}
