//! `blkq top`: shows the activity of all devices. `sampler` asks the daemons for their counters; `devices`
//! computes the figures of each interval; `view` is the state that keys change; `draw` and `page` draw it
//! into a buffer; `terminal` writes the buffer to the terminal.

mod devices;
mod draw;
mod page;
mod row;
mod sampler;
mod terminal;
mod theme;
mod view;

use std::io;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::state::StateDir;
use blkq_protocol::system::signals::{self, Signal, Signals};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::output::{exit_code, print, print_json, render_figures};
use crate::usage::seconds;

use devices::Devices;

use row::{COLUMNS, ERRORS, Row};
use sampler::Sampler;
use terminal::{KEY_WAIT, Keys, Screen};
use theme::Theme;
use view::{Action, View};

/// The first interval is at most this long, so that figures appear soon.
const SECOND_SAMPLE: Duration = Duration::from_millis(250);
/// The longest time that `--once` waits for a daemon to answer.
const ONCE_WAIT: Duration = Duration::from_secs(2);

#[derive(clap::Args, Debug)]
#[command(after_help = "\
Each row is a device, with the figures of the last interval: IOPS and MB/s of reads, writes and
discards, the median and the 99th percentile of the latencies, both also as a bar, the requests in
flight, merges and flushes per second, the share of the interval in which requests waited for a
limit, hung requests, and connected clients. docs/top.md explains every column.

Keys:
  Enter      open the page of a device: operations, heat map of latencies, queues; Esc closes it
  s, S, r    sort by the next or the previous column; reverse the order
  /          show only the names that contain some letters; Esc shows all
  Ctrl-Z, q  suspend; quit

Examples:
  blkq top
  blkq top --interval 0.2
  blkq top --once
  blkq top --json | jq 'select(.hung > 0) | .name'

Environment:
  NO_COLOR                if set, no colours are used
  LC_ALL, LC_CTYPE, LANG  unless the encoding is UTF-8, only ASCII characters are used")]
pub struct Args {
    /// Set the time between samples, in seconds
    #[arg(long, short, value_name = "SECONDS", default_value = "1", value_parser = seconds(0.1..=3600.0, "an interval must be 0.1 to 3600 seconds"))]
    interval: Duration,
    /// Print the figures of one interval, and exit
    #[arg(long)]
    once: bool,
    /// Print the figures of one interval as JSON, one object per device and line, and exit
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Outcome<ExitCode> {
    let sampler = Sampler::new(StateDir::locate()?)?;
    if args.once || args.json {
        return args.print_once(sampler);
    }
    let screen = Screen::open()?;
    let outcome = watch(screen, sampler, Signals::install(&signals::ALL)?, args.interval);
    terminal::leave();
    match outcome {
        Ok(Some(signal)) => signal.act().map(|()| ExitCode::SUCCESS),
        Ok(None) => Ok(ExitCode::SUCCESS),
        // Any other error means that the terminal was closed: there is no user to whom it could be shown.
        Err(e) => e.downcast::<Failure>().map_or(Ok(ExitCode::SUCCESS), Err),
    }
}

impl Args {
    fn print_once(&self, mut sampler: Sampler) -> Outcome<ExitCode> {
        let mut devices = Devices::default();
        let begin = Instant::now();
        for sample in 0..2 {
            if sample > 0 {
                std::thread::sleep(self.interval.saturating_sub(begin.elapsed()));
            }
            let now = Instant::now();
            devices.asked(sampler.ask()?, now);
            for (name, outcome) in sampler.wait(now + ONCE_WAIT) {
                devices.answered(&name, outcome);
            }
        }
        devices.mark_silent(Instant::now());
        let rows = devices.rows();
        let printed = if self.json { rows.iter().try_for_each(print_json) } else { print(&table(&rows)) };
        printed.map(|()| exit_code(rows.iter().any(|row| row.error.is_some())))
    }
}

fn table(rows: &[Row]) -> String {
    let (before, after) = COLUMNS.split_at(8);
    let columns = || before.iter().chain([&ERRORS]).chain(after);
    let heads: Vec<&str> = std::iter::once("NAME").chain(columns().map(|column| column.head)).collect();
    let line =
        |row: &Row| [row.name.clone()].into_iter().chain(columns().map(|column| column.cell(row))).collect();
    let mut table = render_figures(&heads, rows.iter().map(line));
    for row in rows {
        if let Some(error) = &row.error {
            table += &format!("{}: {error}\n", row.name);
        }
    }
    table
}

/// Returns the signal that stopped the program; `None` for a key. An error is that of the terminal, or contains a
/// [`Failure`].
fn watch(
    mut screen: Screen,
    mut sampler: Sampler,
    mut signals: Signals,
    interval: Duration,
) -> io::Result<Option<Signal>> {
    let mut view = View::new(format!("{} s", interval.as_secs_f64()));
    let theme = Theme::of(|name| std::env::var(name).ok());
    let mut keys = Keys::default();
    screen.enter()?;
    let mut next = Instant::now();
    let mut pause = interval.min(SECOND_SAMPLE);
    loop {
        let now = Instant::now();
        if now >= next {
            view.devices.asked(sampler.ask().map_err(io::Error::other)?, now);
            // Samples that were missed, for example while the process was suspended, are not made up for.
            next = if next + pause > now { next + pause } else { now + pause };
            pause = interval;
        }
        for (name, outcome) in sampler.take() {
            view.devices.answered(&name, outcome);
        }
        view.devices.mark_silent(now);
        // A slow terminal gets the next picture, the latest one then, when it has taken the previous one
        // completely.
        if !screen.is_behind() {
            screen.show(|buffer| draw::draw(&mut view, theme, buffer))?;
        }
        let until = if keys.is_pending() { next.min(Instant::now() + KEY_WAIT) } else { next };
        wait(&mut screen, &signals, &sampler, until)?;
        let (mut suspend, mut redraw) = (false, false);
        for signal in signals.take() {
            match signal {
                Signal::Terminate | Signal::Interrupt | Signal::Hangup | Signal::Quit => {
                    return Ok(Some(signal));
                }
                Signal::Stop => suspend = true,
                Signal::Continue => redraw = true,
                // The screen reads the size of the terminal each time.
                Signal::Resize => {}
            }
        }
        for key in keys.take(&screen.typed()?, Instant::now()) {
            match view.press(key) {
                Action::None => {}
                Action::Quit => return Ok(None),
                Action::Suspend => suspend = true,
                Action::Redraw => redraw = true,
            }
        }
        if suspend {
            terminal::leave();
            Signal::Stop.act().map_err(io::Error::other)?;
        }
        if suspend || redraw {
            screen.enter()?;
        }
    }
}

/// Waits for a key, a signal, an answer of a daemon, or the time `until`, and writes pending output.
fn wait(screen: &mut Screen, signals: &Signals, sampler: &Sampler, until: Instant) -> io::Result<()> {
    let left = Timespec::try_from(until.saturating_duration_since(Instant::now())).unwrap_or_default();
    let output = if screen.is_behind() { PollFlags::OUT } else { PollFlags::empty() };
    let mut polled = [
        PollFd::new(screen, PollFlags::IN | output),
        PollFd::new(signals, PollFlags::IN),
        PollFd::new(sampler, PollFlags::IN),
    ];
    match poll(&mut polled, Some(&left)) {
        Ok(_) | Err(Errno::INTR) => screen.write_some(),
        Err(e) => Err(io::Error::other(Failure::new(format!("top: cannot wait for events: {e}")))),
    }
}
