//! The image or memory behind a device: how its driver is opened, and why it is not.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use blkq::ErrorKind;
use blkq::text::shell_word;
use blkq::units::parse_bytes;
use blkq_drivers::qcow2::Journals;
use blkq_drivers::{DriverOptions, DriverSpec, ImageFormat, Opened};

use crate::complain;
use crate::confine;
use crate::elsewhere;
use crate::failure::{Failure, Outcome};
use crate::options::{AttachOptions, Export, Format, find_ceph_files, image_text};
use crate::state::{Claim, DYING_WAIT};

/// How long the kernel may keep the files of a daemon that was killed, after that has exited.
const RELEASE_WAIT: Duration = Duration::from_secs(5);

/// How long to wait for the lock of an RBD client that was killed: its cluster takes it for alive for 30 s.
const CLIENT_DYING_WAIT: Duration = Duration::from_secs(40);

/// The options with the files that Ceph's client finds in this process's environment.
pub(super) fn with_ceph_files(options: &AttachOptions) -> AttachOptions {
    let mut options = options.clone();
    find_ceph_files(&mut options, |name| std::env::var_os(name));
    options
}

/// The files and directories that Ceph's client reads, with its configuration and keyrings.
pub(super) fn ceph_paths(options: &AttachOptions) -> Vec<PathBuf> {
    if !matches!(options.image, DriverSpec::Rbd(_)) {
        return Vec::new();
    }
    let of_files = options.ceph_conf.iter().chain(&options.ceph_keyring);
    let directories = of_files.filter_map(|file| file.canonicalize().ok()?.parent().map(PathBuf::from));
    let of_user = std::env::var_os("HOME").map(|home| Path::new(&home).join(".ceph"));
    confine::READ_BY_CEPH.iter().map(PathBuf::from).chain(directories).chain(of_user).collect()
}

/// Each of [`ceph_paths`], and the files of those that are directories, as each may be a mount: a secret of a
/// container is.
pub(super) fn ceph_mounts(options: &AttachOptions) -> Vec<PathBuf> {
    let files = |path: &PathBuf| {
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).filter(|path| path.is_file()).collect::<Vec<_>>()
    };
    let mut paths = ceph_paths(options);
    paths.extend(paths.iter().flat_map(files).collect::<Vec<_>>());
    paths
}

/// Opens the driver. The threads of a cluster's client are made by one that is confined, and so are they.
fn open_confined(options: &AttachOptions, driver_options: &DriverOptions) -> Result<Opened, blkq::Error> {
    let open = || blkq_drivers::open(&options.image, driver_options);
    if !options.sandbox || !matches!(options.image, DriverSpec::Rbd(_)) {
        return open();
    }
    // Confined, nothing can be loaded any more.
    blkq_drivers::rbd::load()?;
    let failed = |text: String| blkq::Error::new(ErrorKind::System, text);
    let confined = || {
        confine::cluster(&ceph_paths(options)).map_err(|failure| failed(failure.to_string()))?;
        open()
    };
    std::thread::scope(|scope| scope.spawn(confined).join())
        .unwrap_or_else(|_| Err(failed("the thread that opens the image has exited".to_owned())))
}

/// Opens the driver. An image in use is tried for a moment: the kernel lets go of the
/// files of a daemon that was killed only some time after the process has exited. That daemon is the `predecessor`.
/// `device_bytes` is the size of a device that is taken over.
pub(super) fn open_driver(
    options: &AttachOptions,
    ublk: bool,
    device_bytes: Option<u64>,
    wait: Duration,
    predecessor: Option<String>,
    journals: Option<Arc<Journals>>,
) -> Result<Opened, blkq::Error> {
    let driver_options =
        DriverOptions { predecessor, device_bytes, journals, ..driver_options(options, ublk) };
    // A cluster notices in its own time that a client has died; other waits are of no use with it.
    let (wait, retry) = match &options.image {
        DriverSpec::Rbd(_) if wait >= DYING_WAIT => (CLIENT_DYING_WAIT, Duration::from_secs(1)),
        DriverSpec::Rbd(_) => (Duration::ZERO, Duration::ZERO),
        _ => (wait, Duration::from_millis(10)),
    };
    let mut until = Instant::now() + wait;
    let mut release = Some(RELEASE_WAIT).filter(|_| !wait.is_zero());
    loop {
        let error = match open_confined(options, &driver_options) {
            // Others also open a block device for a moment to learn whether it is in use.
            Err(error) if matches!(error.kind(), ErrorKind::Busy | ErrorKind::Claimed) => error,
            opened => return opened,
        };
        if Instant::now() >= until {
            match release.take() {
                Some(more) if is_held_by_kernel(options, &error) => until = Instant::now() + more,
                _ => return Err(error),
            }
        }
        std::thread::sleep(retry);
    }
}

/// Whether the image is locked and no process has the lock: the kernel has not released the files of a daemon yet that
/// was killed.
fn is_held_by_kernel(options: &AttachOptions, error: &blkq::Error) -> bool {
    let DriverSpec::Image(path) = &options.image else { return false };
    error.kind() == ErrorKind::Busy && !elsewhere::has_holder(path, options.offset, options.size_limit)
}

/// Why the image was not opened, with the cure.
pub(super) fn refusal(error: blkq::Error, options: &AttachOptions, claim: &Claim) -> Failure {
    let cure = match error.kind() {
        ErrorKind::Busy => {
            let holders = match &options.image {
                DriverSpec::Image(path) => {
                    elsewhere::holders_of(claim.dir(), path, options.offset, options.size_limit)
                }
                _ => None,
            };
            let place = holders.as_ref().map(|holders| format!(" {}", holders.text)).unwrap_or_default();
            let can_share = options.format != Some(Format::Qcow2)
                && holders.as_ref().is_none_or(|holders| holders.can_share);
            match &options.image {
                DriverSpec::Rbd(_) => "; detach it there first, or attach with --read-only".to_owned(),
                _ if can_share => {
                    format!("{place}; detach it there first, or attach with --shared on both sides")
                }
                _ => format!("{place}; detach it there first"),
            }
        }
        ErrorKind::Claimed => "; release it there first, or attach with --shared: file systems that do not \
             know of each other destroy the data"
            .to_owned(),
        ErrorKind::Format if options.format == Some(Format::Qcow2) => return error.into(),
        ErrorKind::Format if has_qcow2(&options.image) => {
            "; attach with --format qcow2 to serve the device in \
             it, or attach with --format raw to serve its bytes as they are"
                .to_owned()
        }
        ErrorKind::BackingFile => {
            "; move it there, or attach with --backing-chain allow if you know who made \
             the image"
                .to_owned()
        }
        ErrorKind::Format => "; convert it with `qemu-img convert -O raw`, or attach with --format raw to \
             serve its bytes as they are"
            .to_owned(),
        ErrorKind::NotFound if !error.has_cure() => match &options.image {
            DriverSpec::Image(path) => format!("; {}", not_found(path)),
            _ => return error.into(),
        },
        _ => return error.into(),
    };
    Failure::new(format!("{error}{cure}"))
}

/// The hint of an image that does not exist.
fn not_found(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    match name.rsplit_once(':').map(|(_, size)| parse_bytes(size)) {
        Some(Ok(_)) => "a device without an image is ram:SIZE or null:SIZE".to_owned(),
        _ => format!("create it with `blkq attach {} --create SIZE`", shell_word(path)),
    }
}

fn has_qcow2(image: &DriverSpec) -> bool {
    matches!(image, DriverSpec::Image(path) if matches!(blkq_drivers::detect_format(path), Ok(Some("qcow2"))))
}

/// The options with the format that the image has, if that is to be found out. It is kept with the device:
/// the writer of a raw image could give it another magic.
///
/// # Errors
/// If the image cannot be opened.
pub fn find_format(mut options: AttachOptions) -> Outcome<AttachOptions> {
    let DriverSpec::Image(path) = &options.image else { return Ok(options) };
    if options.format != Some(Format::Auto) {
        return Ok(options);
    }
    options.format = match blkq_drivers::detect_format(path)? {
        None => Some(Format::Raw),
        Some("qcow2") => Some(Format::Qcow2),
        // Rejected by its name.
        Some(_) => None,
    };
    if let Some(format) = options.format {
        let name = if format == Format::Raw { "raw" } else { "qcow2" };
        complain(&Failure::new(format!("{} is served as {name}", path.display())));
    }
    options.check().map(|()| options)
}

/// Has a disk opened in the format that it was served in: the bytes of a raw image by now are those written
/// to the device.
pub(super) fn keep_format(options: &mut AttachOptions) {
    if options.format != Some(Format::Qcow2) {
        options.format = Some(Format::Raw);
    }
}

/// Has a disk opened at the size that its block device has now.
pub(super) fn keep_size(options: &mut AttachOptions, bytes: u64) {
    match &mut options.image {
        DriverSpec::Image(_) => options.size_limit = options.size_limit.map(|_| bytes),
        // Its cluster has its size.
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
        device_bytes: None,
        // Neither the kernel nor a virtual machine notices another daemon.
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
        predecessor: None,
        journals: None,
        fault: options.fault.clone(),
    }
}

/// Whether clients may begin and end in the middle of a block: where a sector size is asked for they
/// may not, and where something else than NBD writes too they would undo its writes.
pub(super) fn serves_bytes(options: &AttachOptions, ublk: bool) -> bool {
    let only_nbd = !ublk && options.exports.iter().all(|export| *export == Export::Nbd);
    only_nbd && options.sector_size.bytes().is_none() && !options.whole_sectors
}

/// The options as another process understands them, wherever it runs.
pub(super) fn absolute(options: &AttachOptions) -> Outcome<AttachOptions> {
    // Where this process has no directory any more, there are no relative paths.
    options.clone().absolute(&std::env::current_dir().unwrap_or_default())
}

/// The journals of qcow2 images, which are with the state of devices. A raw image needs none before it has another over
/// it, and if there are none the reason is a warning.
///
/// # Errors
/// If their directory cannot be made.
pub(super) fn journals(
    options: &AttachOptions,
    state: &Path,
) -> Outcome<(Option<Arc<Journals>>, Option<String>)> {
    if !matches!(options.image, DriverSpec::Image(_)) {
        return Ok((None, None));
    }
    match Journals::open(&state.join("journals")) {
        Err(error) if options.format != Some(Format::Qcow2) => {
            let warning =
                format!("what is not flushed after a snapshot is lost if the daemon is killed: {error}");
            Ok((None, Some(warning).filter(|_| !options.read_only)))
        }
        journals => Ok((Some(journals?), None)),
    }
}

/// The image as another process finds it.
pub(super) fn image_name(image: &DriverSpec) -> String {
    match image {
        DriverSpec::Image(path) => path.canonicalize().unwrap_or_else(|_| path.clone()).display().to_string(),
        _ => image_text(image),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::tests::options;

    /// The lock is this process's, and it sees no other that has it: so it is with files that the kernel has not released.
    #[test]
    fn a_lock_without_a_process_is_waited_for() {
        let path = std::env::temp_dir().join(format!("blkq-released-{}", std::process::id()));
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(1 << 20).unwrap();
        let options = options(&[path.to_str().unwrap(), "--export", "nbd", "--format", "raw"]);
        let open = |wait| open_driver(&options, false, None, wait, None, None);
        let holder = open(Duration::ZERO).unwrap();
        assert_eq!(open(Duration::ZERO).err().unwrap().kind(), ErrorKind::Busy);
        let release = std::thread::spawn(move || {
            // Longer than it is waited for a process.
            std::thread::sleep(Duration::from_millis(100));
            drop(holder);
        });
        open(Duration::from_millis(1)).unwrap();
        release.join().unwrap();
        std::fs::remove_file(path).unwrap();
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
    fn writes_go_through_where_another_daemon_goes_on() {
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
