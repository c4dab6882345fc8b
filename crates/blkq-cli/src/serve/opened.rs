//! Files, locks and processes of a device, opened before its mounts may go and before it has threads.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use blkq_drivers::DriverSpec;
use blkq_drivers::qcow2::Journals;
use blkq_export::nbd::{Listen, TlsOptions};
use blkq_export::ublk::{IdleWatch, SetupProcess, process};
use rustix::fs::{CWD, Mode, OFlags, openat};

use super::image::{ceph_mounts, image_name, journals};
use super::listen::{Sockets, directories_of, listen_at, tls, unix_path};
use crate::confine::{self, Needs};
use crate::failure::{Failure, Outcome};
use crate::options::AttachOptions;
use crate::pid_file::real_path;
use crate::state::{Claim, StateDir};

/// The processes of a block device.
pub(super) type Children = (SetupProcess, IdleWatch);

/// All that is opened for a device before there is a disk.
pub(super) struct Opened {
    /// The image as another process finds it.
    pub(super) image: String,
    pub(super) source: blkq_drivers::Opened,
    pub(super) journals: Option<Arc<Journals>>,
    /// The warning that there are none.
    pub(super) no_journals: Option<String>,
    /// Where metrics are served.
    pub(super) metrics: Option<Listen>,
    pub(super) tls: Option<TlsOptions>,
    /// Those of the control plane, as far as there is no block device yet.
    pub(super) needs: Needs,
    /// Those of the block device, if there is to be one.
    pub(super) children: Option<Children>,
}

impl Opened {
    /// Opens a device that will be served on `sockets`. With an `idle_event` it will have a block device: then this
    /// process has mounts of its own, and the event becomes readable when the block device has no users any more.
    ///
    /// # Errors
    /// Of files that cannot be opened, and processes that cannot be made.
    pub(super) fn new(
        options: &AttachOptions,
        claim: &Claim,
        sockets: &Sockets,
        idle_event: Option<&Arc<OwnedFd>>,
        open: impl Fn(Option<Arc<Journals>>) -> Outcome<blkq_drivers::Opened>,
    ) -> Outcome<Opened> {
        // Before the mount that it is on may go.
        let image = image_name(&options.image);
        // The client of a cluster has threads, and they are to be made after all processes; a file may be on a
        // mount that goes with them.
        let is_file = !matches!(options.image, DriverSpec::Rbd(_));
        let (journals, no_journals) = journals(options, claim.dir().path())?;
        let source = is_file.then(|| open(journals.clone())).transpose()?;
        let metrics = options.metrics.as_ref().map(listen_at).transpose()?;
        let tls = tls(options)?;
        let listen = sockets.nbd.iter().chain(&metrics).chain(&sockets.vhost);
        let mut needs = needs(options, listen.clone())?;
        let certificates = tls.iter().flat_map(|tls| directories_of(tls.certificates.directory()));
        needs.read.extend(certificates);
        needs.journals = journals.as_ref().map(|journals| journals.directory().to_owned());
        let children =
            idle_event.map(|idle| fork_children(options, listen, &needs, is_file, idle)).transpose()?;
        let source = source.map_or_else(|| open(None), Ok)?;
        Ok(Opened { image, source, journals, no_journals, metrics, tls, needs, children })
    }
}

/// The needs of the control plane, as far as there is no block device yet.
fn needs<'a>(options: &AttachOptions, listen: impl Iterator<Item = &'a Listen>) -> Outcome<Needs> {
    let mut needs = Needs::default();
    if !options.sandbox {
        return Ok(needs);
    }
    if let DriverSpec::Image(path) = &options.image {
        let file = openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
        needs.image = Some(file.map_err(|e| Failure::new(format!("{}: {e}", path.display())))?);
    }
    needs.removed.extend(listen.filter_map(unix_path));
    Ok(needs)
}

/// Forks the processes of a block device. From then on this process has mounts of its own: of those from before, what
/// it needs.
fn fork_children<'a>(
    options: &AttachOptions,
    listen: impl Iterator<Item = &'a Listen>,
    needs: &Needs,
    is_file: bool,
    idle_event: &Arc<OwnedFd>,
) -> Outcome<Children> {
    let mut kept = vec![StateDir::locate()?.path().to_owned()];
    kept.extend(listen.filter_map(unix_path));
    kept.extend(needs.read.iter().cloned());
    kept.extend(ceph_mounts(options));
    kept.extend(
        options.pid_file.iter().flat_map(|path| [path.clone()].into_iter().chain(real_path(path).ok())),
    );
    if !is_file {
        // Its libraries may be on a mount that goes, too; and they make no threads by themselves.
        blkq_drivers::rbd::load()?;
    }
    process::prepare(&kept)?;
    let sandbox = options.sandbox;
    // SAFETY: this process has no other threads yet.
    let setup = unsafe { SetupProcess::fork(move || !sandbox || confine::ublk_commands().is_ok()) }?;
    // It cannot be made later, when there are threads and no privileges.
    let confine = move || !sandbox || confine::watcher().is_ok();
    // SAFETY: as above.
    let users = unsafe { IdleWatch::fork(idle_event, confine) }?;
    Ok((setup, users))
}
