//! `blkq commit`: merges the active overlay of a device into its backing file. The daemon is confined, so
//! this command opens the backing file and sends it over the control socket.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use blkq::ErrorKind;
use blkq_drivers::DriverSpec;
use blkq_drivers::qcow2::{BaseFiles, OpenedBase, open_base};
use blkq_protocol::control::{
    BegunCommit, BitmapInfo, CHANGE_TIMEOUT, Committed, Dialogue, Request, ask, is_readable,
};
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::info::{CommitInfo, DeviceInfo, FileId, RecordedBacking, StateFile};
use blkq_protocol::options::{AttachOptions, Backing as BackingChain, Record};
use blkq_protocol::state::StateDir;
use blkq_protocol::system::signals::Signal;

use super::attach::create::FileGuard;
use super::bitmap::{open_file, open_or_create_file};
use super::signals::{Stop, stop_on_signals};
use super::snapshot::RecordedImage;
use crate::config;
use crate::devices::DeviceArg;
use crate::output::{Progress, print_json, print_line, warn};

const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);
const TICK: Duration = Duration::from_millis(200);

#[derive(clap::Args, Debug)]
#[command(after_help = "\
Copies the clusters allocated in the qcow2 image of a device, the active overlay, into its backing
file while clients use the device, then pivots the device to the backing file. Clients notice a
short pause at the end. The overlay is then empty and can be removed. Ctrl-C cancels the commit, and
the device continues with the overlay.

Examples:
  blkq commit data
  blkq commit disk.2.qcow2 --json")]
pub struct Args {
    #[command(flatten)]
    device: DeviceArg,
    /// Choose which backing file is accepted
    ///
    /// With `allow`, the backing file may be outside of the overlay's directory.
    #[arg(long, value_enum, value_name = "WHICH", default_value = "own-directory")]
    backing_chain: BackingChain,
    /// Print the result as one JSON object
    #[arg(long)]
    json: bool,
}

/// If this fails, the device still uses the overlay, unless the message says that the outcome is unknown.
pub fn run(args: Args) -> Outcome {
    let of = |e: Failure| e.during(format_args!("commit {}", args.device.word));
    let (dir, name) = args.device.find().map_err(of)?;
    // This reports a dead daemon in the same words as other commands.
    ask::<()>(&dir, &name, &Request::Ping {})?;
    let notice = format!(
        "{name}: interrupted before the daemon answered, so the outcome is unknown; `blkq show {name}` prints the image"
    );
    let stop = stop_on_signals(&[Signal::Interrupt, Signal::Terminate], notice)?;
    let (done, path) = args.commit(&dir, &name, &stop).map_err(of)?;
    warn(&name, &done.warnings);
    warn_of_configuration(&name, &done, &path);
    if args.json { print_json(&done) } else { print_line(&done.image) }
}

impl Args {
    /// Returns the result, and the path of the backing file. Cancels the commit when a stop is requested.
    fn commit(&self, dir: &StateDir, name: &str, stop: &Stop) -> Outcome<(Committed, PathBuf)> {
        let number = dir.next_image(name);
        let request = Request::Commit { image: number };
        let (dialogue, begun, _) =
            Dialogue::begin_with_file::<Option<BegunCommit>>(dir, name, &request, CHANGE_TIMEOUT)?;
        let state =
            dir.read_state(name).ok_or_else(|| Failure::new("cannot read the state file of the device"))?;
        let (base, bitmaps) = self.open(dir, &state)?;
        // The backing file must be recorded before the files are sent: this command may be killed while the
        // daemon pivots to it, and the next daemon needs its options.
        let recorded = record(dir, &state, number, &base, begun)?;
        let OpenedBase { path, files: BaseFiles { image, synced, .. }, .. } = base;
        let files = [Some(&image), Some(&synced), bitmaps.as_ref().map(FileGuard::file)];
        let files: Vec<_> = files.into_iter().flatten().map(AsFd::as_fd).collect();
        dialogue.go_on(&files)?;
        drop((image, synced));
        let mut progress = Progress::new(PROGRESS_INTERVAL);
        loop {
            // Only the first call has an effect.
            if stop.is_requested() {
                dialogue.give_up();
            }
            if is_readable(&dialogue, Some(Instant::now() + TICK)) {
                break;
            }
            progress.show(|| {
                let commit = ask::<DeviceInfo>(dir, name, &Request::Show {}).ok()?.commit?;
                Some(format!("{name}: {}", shown_progress(&commit)))
            });
        }
        progress.clear();
        let reply = dialogue.reply::<Committed>();
        stop.end();
        // If no reply arrived, the device may already have pivoted, so the record must stay.
        if let Ok(Ok(_)) | Err(_) = &reply {
            bitmaps.into_iter().for_each(FileGuard::keep);
            recorded.keep();
        }
        reply?.map(|done| (done, path))
    }

    /// Opens the backing file, and for a raw backing file also the file of its dirty bitmaps. The name of the
    /// backing file comes from the header of the image that the state file names, and the file must be the
    /// recorded one: a client that has taken over the confined daemon can change the header, and could choose
    /// which file the daemon gets for writing.
    fn open(&self, dir: &StateDir, state: &StateFile) -> Outcome<(OpenedBase, Option<FileGuard>)> {
        let options = state.attach_options.as_ref().map(Record::read).transpose()?;
        let image = match options.map(|options| options.image) {
            // The path in the options may be a symbolic link. The daemon opened it, so the names in the
            // header are relative to the directory of the link.
            Some(DriverSpec::Image(path)) => path,
            _ => PathBuf::from(&state.image),
        };
        let base = open_base(&image, self.backing_chain.into()).map_err(|e| {
            let (kind, hint) = match e.kind() {
                ErrorKind::Busy => (ErrorKind::Busy, "detach the device or stop the program that uses it"),
                _ => {
                    (ErrorKind::BackingFile, "add --backing-chain allow if you trust the author of the image")
                }
            };
            Failure::of(e, kind, hint)
        })?;
        let opened = base.files.image.metadata().ok().map(|metadata| FileId::from(&metadata));
        let opened = opened.map(|file| RecordedBacking { file, qcow2: base.qcow2 });
        if state.backing.as_ref().is_some_and(|recorded| recorded.first() != opened.as_ref()) {
            return Err(Failure::new(format!(
                "{} does not match the backing file of the device; move that file back, or detach the device and attach \
                 it again",
                base.path.display()
            )));
        }
        if !base.has_bitmap_file {
            return Ok((base, None));
        }
        let bitmaps: Vec<BitmapInfo> = ask(dir, &state.name, &Request::Bitmaps {})?;
        let file = match bitmaps.is_empty() {
            // Without bitmaps to move, a file that cannot be opened is left unchanged, as at attach.
            true => open_file(&base.path).unwrap_or_default(),
            false => Some(open_or_create_file(&base.path)?),
        };
        Ok((base, file))
    }
}

/// Records for the next daemon of the device that the device may have the image `base` from now on.
fn record<'a>(
    dir: &'a StateDir,
    state: &'a StateFile,
    number: Option<u64>,
    base: &OpenedBase,
    begun: Option<BegunCommit>,
) -> Outcome<RecordedImage<'a>> {
    let Some(options) = &state.attach_options else {
        return Err(Failure::new("the state file of the device is damaged"));
    };
    let options = options.read()?;
    let sector_bytes = begun.map_or(512, |begun| begun.sector_size);
    let options = options.committed_into(&base.path, base.qcow2, sector_bytes)?;
    // The commit writes, however the device was attached.
    dir.check_not_waiting(&state.name, &AttachOptions { read_only: false, ..options.clone() })?;
    // Not from the header of the base: the daemon of an earlier commit may have changed it.
    let below = state.backing.iter().flatten().skip(1).copied().collect();
    let (path, options) = (base.path.display().to_string(), Record::new(&options)?);
    RecordedImage::add(dir, &state.name, number, &path, &options, below)
}

pub fn shown_progress(commit: &CommitInfo) -> String {
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    let percent = commit.copied_bytes.saturating_mul(100).checked_div(commit.total_bytes).unwrap_or(0);
    format!("{percent} %, {} of {} MiB copied", mib(commit.copied_bytes), mib(commit.total_bytes))
}

/// Warns if the configuration file of the device still names the overlay. The next start of the service would
/// write to the overlay again, or fail if it was deleted.
fn warn_of_configuration(name: &str, done: &Committed, base: &Path) {
    let emptied = &done.emptied;
    let warning = match config::names_image(name, Path::new(emptied)) {
        Ok(false) => return,
        Ok(true) => format!(
            "{} still names {emptied}, which is empty now; change it to image = {base:?} and the format of that image \
             before you delete the overlay",
            config::path_of(name).display()
        ),
        Err(mistake) => format!(
            "the configuration file of the device has a mistake; if it names {emptied}, change it to image = {base:?} and \
             the format of that image before you delete the overlay: {mistake}"
        ),
    };
    warn(name, &[warning]);
}
