//! `blkq commit`: what an image has goes to the one behind it, and the device goes on in that.

use std::io::{IsTerminal, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use blkq::ErrorKind;
use blkq::drivers::DriverSpec;
use blkq::drivers::qcow2::{BaseFiles, OpenedBase, open_base};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::bitmap_file::BitmapFile;
use super::recorded_image::RecordedImage;
use crate::bitmaps::BitmapInfo;
use crate::completion;
use crate::config;
use crate::control::{BegunCommit, CHANGE_TIMEOUT, Committed, Dialogue, Request, ask};
use crate::devices::{device_parser, named};
use crate::failure::{EXIT_FAILED, Failure, Outcome};
use crate::info::{CommitInfo, DeviceInfo, StateFile};
use crate::options::{Backing as BackingChain, Record};
use crate::signals::{Signal, Signals};
use crate::state::StateDir;
use crate::{complain, print_json, print_line};

/// When the progress is printed first, and how often then: on a terminal, and elsewhere.
const FIRST_LINE: Duration = Duration::from_secs(2);
const LINES_ON_TERMINAL: Duration = Duration::from_secs(1);
const LINES_ELSEWHERE: Duration = Duration::from_secs(10);
/// How long a daemon is waited for at a time.
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// Options of `commit`.
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
    /// The device, by its name, image, URI or node in /dev
    #[arg(value_name = "DEVICE", value_parser = device_parser(), add = completion::devices())]
    device: String,
    /// Choose which backing file is accepted
    ///
    /// With `allow`, the backing file may be in another directory than that of the overlay.
    #[arg(long, value_enum, value_name = "WHICH", default_value = "own-directory")]
    backing_chain: BackingChain,
    /// Print the result as one JSON object
    #[arg(long)]
    json: bool,
}

impl Args {
    /// Makes the commit, and prints the image in which the device goes on.
    ///
    /// # Errors
    /// Why the device goes on as it was.
    pub fn run(self) -> Outcome {
        let dir = StateDir::locate()?;
        let of = |e: Failure| e.during(format_args!("commit {}", self.device));
        let name = named(&dir, &self.device).map_err(of)?;
        // A daemon that died is reported as every command does.
        ask::<()>(&dir, &name, &Request::Ping {})?;
        let mut signals = Signals::install(&[Signal::Interrupt, Signal::Terminate])?;
        let number = dir.next_image(&name);
        let request = Request::Commit { image: number };
        let (dialogue, begun, _) =
            Dialogue::begin_with_file::<Option<BegunCommit>>(&dir, &name, &request, CHANGE_TIMEOUT)
                .map_err(of)?;
        let state = dir.read_state(&name).ok_or_else(|| of(Failure::new("its state file cannot be read")))?;
        let (base, bitmaps) = self.open(&dir, &state).map_err(of)?;
        // Before the files are sent, because this command may be killed while the daemon pivots to the backing file.
        let recorded = record(&dir, &state, number, &base, begun).map_err(of)?;
        let OpenedBase { path, files: BaseFiles { image, synced, .. }, .. } = base;
        let files = [Some(&image), Some(&synced), bitmaps.as_ref().and_then(BitmapFile::file)];
        let files: Vec<_> = files.into_iter().flatten().map(AsFd::as_fd).collect();
        dialogue.go_on(&files).map_err(of)?;
        drop((image, synced));
        let mut progress = ProgressLine::new(&name);
        wait(&dialogue, &mut signals, || progress.print(&dir));
        progress.clear();
        let reply = dialogue.reply::<Committed>();
        // Without a reply the device may be in that image by now.
        if let Ok(Ok(_)) | Err(_) = &reply {
            bitmaps.into_iter().for_each(BitmapFile::keep);
            recorded.keep();
        }
        let done = reply.and_then(|done| done).map_err(of)?;
        done.warnings.iter().for_each(|why| complain(&Failure::new(format!("{name}: warning: {why}"))));
        warn_of_configuration(&name, &done, &path);
        if self.json { print_json(&done) } else { print_line(&done.image) }
    }

    /// Opens the image behind that of the device, and the file with the bitmaps of a raw one: as the header of the
    /// device's image has it, which the state file names, and not as its daemon says.
    fn open(&self, dir: &StateDir, state: &StateFile) -> Outcome<(OpenedBase, Option<BitmapFile>)> {
        let options = state.attach_options.as_ref().map(Record::read).transpose()?;
        let image = match options.map(|options| options.image) {
            // By the link that the daemon opened, if it was one.
            Some(DriverSpec::Image(path)) => path,
            _ => PathBuf::from(&state.image),
        };
        let base = open_base(&image, self.backing_chain.into()).map_err(|e| {
            let cure = "if you know who made the image, give --backing-chain allow";
            Failure::of(e, ErrorKind::BackingFile, cure)
        })?;
        if !base.has_bitmap_file {
            return Ok((base, None));
        }
        let bitmaps: Vec<BitmapInfo> = ask(dir, &state.name, &Request::Bitmaps {})?;
        let file = match bitmaps.is_empty() {
            // As at attach, one that cannot be opened is left as it is.
            true => BitmapFile::open(&base.path).unwrap_or_default(),
            false => Some(BitmapFile::open_or_make(&base.path)?),
        };
        Ok((base, file))
    }
}

/// Records the backing file `base` for the next daemon of the device of `state`, under `number`.
fn record<'a>(
    dir: &'a StateDir,
    state: &'a StateFile,
    number: Option<u64>,
    base: &OpenedBase,
    begun: Option<BegunCommit>,
) -> Outcome<RecordedImage<'a>> {
    let Some(options) = &state.attach_options else { return Err(Failure::new("its state file is damaged")) };
    let options = options.read()?;
    let sector_bytes = begun.map_or(512, |begun| begun.sector_size);
    let options = options.committed_into(&base.path, base.qcow2, sector_bytes)?;
    RecordedImage::add(dir, &state.name, number, &base.path.display().to_string(), &Record::new(&options)?)
}

/// Waits for the reply. The first signal has the daemon stop; the second one makes this process exit.
fn wait(dialogue: &Dialogue, signals: &mut Signals, mut each: impl FnMut()) {
    let mut stopped = false;
    loop {
        let mut fds = [PollFd::new(dialogue, PollFlags::IN), PollFd::new(signals, PollFlags::IN)];
        let ready = poll(&mut fds, Some(&TICK));
        let [replied, signalled] = fds.map(|fd| ready.is_ok() && !fd.revents().is_empty());
        if replied {
            return;
        }
        if signalled {
            for _ in signals.take() {
                if std::mem::replace(&mut stopped, true) {
                    complain(&Failure::new(
                        "left before it was answered: the outcome is not known; blkq show has the image",
                    ));
                    std::process::exit(EXIT_FAILED.into());
                }
                dialogue.give_up();
            }
        }
        each();
    }
}

/// The progress, on standard error.
struct ProgressLine<'a> {
    name: &'a str,
    is_terminal: bool,
    next: Instant,
    is_shown: bool,
}

impl ProgressLine<'_> {
    fn new(name: &str) -> ProgressLine<'_> {
        let is_terminal = std::io::stderr().is_terminal();
        ProgressLine { name, is_terminal, next: Instant::now() + FIRST_LINE, is_shown: false }
    }

    fn print(&mut self, dir: &StateDir) {
        if Instant::now() < self.next {
            return;
        }
        self.next = Instant::now() + if self.is_terminal { LINES_ON_TERMINAL } else { LINES_ELSEWHERE };
        let info = ask::<DeviceInfo>(dir, self.name, &Request::Show {});
        let Some(commit) = info.ok().and_then(|info| info.commit) else { return };
        let line = format!("{}: {}", self.name, shown_progress(&commit));
        match self.is_terminal {
            // Over the one before.
            true => _ = write!(std::io::stderr(), "\r\x1b[K{line}"),
            false => complain(&Failure::new(line)),
        }
        self.is_shown = true;
    }

    fn clear(&self) {
        if self.is_shown && self.is_terminal {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

/// How far a block commit is, in words.
pub fn shown_progress(commit: &CommitInfo) -> String {
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    let percent = commit.copied_bytes.saturating_mul(100).checked_div(commit.total_bytes).unwrap_or(0);
    format!("{percent} %, {} of {} MiB copied", mib(commit.copied_bytes), mib(commit.total_bytes))
}

/// Its next start would have the empty image again, over the other: no data would be missing, but it would not be where
/// it is now.
fn warn_of_configuration(name: &str, done: &Committed, base: &Path) {
    let configured = match config::image_of(name) {
        Ok(Some(configured)) => configured,
        Ok(None) => return,
        Err(mistake) => {
            return complain(&Failure::new(format!(
                "{name}: warning: the configuration file of the device has a mistake; if it names {}, change that to \
                 {base:?}, and the format with it, before you remove the image: {mistake}",
                done.emptied
            )));
        }
    };
    if configured.canonicalize().is_ok_and(|configured| configured == Path::new(&done.emptied)) {
        complain(&Failure::new(format!(
            "{name}: the next start of its service would go on in {} again, over {}; in {} write image = {base:?}, and its \
             format, before you remove that",
            done.emptied,
            done.image,
            config::path_of(name).display()
        )));
    }
}
