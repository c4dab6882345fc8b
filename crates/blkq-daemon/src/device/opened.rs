//! Opens the files, locks and processes of a device, before its mounts are detached and threads are created.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use blkq_drivers::DriverSpec;
use blkq_drivers::qcow2::Journals;
use blkq_export::Listen;
use blkq_export::nbd::TlsOptions;
use blkq_export::ublk::{IdleWatch, SetupProcess, process};
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::options::AttachOptions;
use blkq_protocol::state::{Claim, StateDir};
use rustix::fs::{CWD, Mode, OFlags, openat};

use super::image::{Opening, ceph_mounts, image_name, journals, open_driver, refusal};
use super::listen::{Sockets, directories_of, listen_at, tls, unix_path};
use crate::pid_file::real_path;
use crate::sandbox::{self, Needs};

type Children = (SetupProcess, IdleWatch);

pub(super) struct Opened {
    /// A name that other processes understand.
    pub(super) image: String,
    pub(super) source: blkq_drivers::Opened,
    pub(super) journals: Option<Arc<Journals>>,
    pub(super) no_journals: Option<String>,
    pub(super) metrics: Option<Listen>,
    pub(super) tls: Option<TlsOptions>,
    pub(super) needs: Needs,
    pub(super) children: Option<Children>,
}

impl Opened {
    /// If `idle_event` is given, the device will have a block device: this process then gets a mount
    /// namespace of its own, and the event becomes readable when the block device has no users. Fails if a
    /// file cannot be opened or a process cannot be created.
    pub(super) fn new(
        options: &AttachOptions,
        claim: &Claim,
        sockets: &Sockets,
        idle_event: Option<&Arc<OwnedFd>>,
        opening: Opening,
    ) -> Outcome<Opened> {
        let open = |journals| {
            let opened = open_driver(claim.dir(), options, idle_event.is_some(), &opening, journals);
            let opened = opened.map_err(|error| refusal(error, options, claim))?;
            // A daemon may have exited since the check before the image was opened, and its device may wait for the
            // next daemon.
            claim.dir().check_not_waiting(claim.name(), options).map(|()| opened)
        };
        // The path must be resolved before the mount on which the image is may be detached.
        let image = image_name(&options.image);
        // An RBD image must be opened after the processes are forked, because its client library has threads.
        // A file must be opened before, because its mount may be detached in between.
        let is_file = !matches!(options.image, DriverSpec::Rbd(_));
        let (journals, no_journals) = journals(options, claim.dir().path())?;
        let source = is_file.then(|| open(journals.clone())).transpose()?;
        let metrics = options.metrics.as_ref().map(listen_at).transpose()?;
        let tls = tls(options, claim.is_kept())?;
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

/// Does not contain the block device, which is added later.
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

/// Afterwards this process has a mount namespace of its own, with only the mounts that it needs.
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
        // The libraries may be on a mount that is detached below. Loading them creates no threads.
        blkq_drivers::rbd::load()?;
    }
    process::prepare(&kept)?;
    let sandbox = options.sandbox;
    // SAFETY: this process has no other threads yet.
    let setup = unsafe { SetupProcess::fork(move || !sandbox || sandbox::ublk_commands().is_ok()) }?;
    // This process must be forked now: later this daemon has threads and lacks the privileges.
    let confine = move || !sandbox || sandbox::watcher().is_ok();
    // SAFETY: as above.
    let users = unsafe { IdleWatch::fork(idle_event, confine) }?;
    Ok((setup, users))
}
