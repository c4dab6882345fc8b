use std::process::ExitCode;

use blkq_protocol::control::no_such_device;
use blkq_protocol::failure::{Failure, Outcome, print_error};
use blkq_protocol::info::{ClientInfo, DeviceInfo, shown_path};
use blkq_protocol::state::{Remains, StateDir};

use crate::commands::commit::shown_progress;
use crate::commands::front_ends::{self, memory_hint};
use crate::devices::{Entry, device_names, device_parser, inspect, named};
use crate::output::columns::Cell;
use crate::output::{Align, for_each, print, print_json, quantity, render};
use blkq::units::format_bytes;

#[derive(clap::Args, Debug)]
#[command(after_help = "\
Prints the image, exports, clients, daemon, size, settings and warnings of each device. If the
daemon was killed or crashed, prints the last lines of its log.

Examples:
  blkq show disk.img
  blkq show ./disk.img /dev/ublkb1
  blkq show disk.img --json | jq .direct_io
  blkq show disk.img --qemu             # options for QEMU's command line
  blkq show disk.img --libvirt >disk.xml && virsh attach-device guest disk.xml")]
pub struct Args {
    /// The devices, each by its name, image, URI or node in /dev
    #[arg(value_parser = device_parser(), add = device_names(), value_name = "DEVICE", required = true)]
    devices: Vec<String>,
    /// Print one JSON object per device, each on a line
    #[arg(long)]
    json: bool,
    /// Print the options with which QEMU uses the device as a disk, over vhost-user or NBD
    ///
    /// With TLS, the certificates of the client are expected in /etc/pki/qemu.
    #[arg(long, conflicts_with = "json")]
    qemu: bool,
    /// Print the disk element with which a libvirt domain uses the device, over vhost-user or NBD
    #[arg(long, conflicts_with_all = ["json", "qemu"])]
    libvirt: bool,
}

pub fn run(args: Args) -> Outcome<ExitCode> {
    let dir = StateDir::locate()?;
    let mut pages = 0;
    for_each(&args.devices, |device| {
        let entry = inspect(&dir, &named(&dir, device)?)?.ok_or_else(|| no_such_device(device))?;
        // An empty line separates the pages.
        let gap = if pages > 0 { "\n" } else { "" };
        pages += 1;
        match &entry {
            Entry::Device(_) | Entry::Remains(_) if args.json => print_json(&entry),
            Entry::Device(info) if args.qemu => {
                let lines = front_ends::qemu(info)?;
                memory_hint(info).iter().for_each(|hint| print_error(&Failure::new(hint)));
                print(&lines)
            }
            Entry::Device(info) if args.libvirt => print(&front_ends::libvirt(info)?),
            Entry::Device(info) => print(&format!("{gap}{}", page(info))),
            Entry::Remains(_) if args.qemu || args.libvirt => Ok(()),
            Entry::Remains(remains) => print(&format!("{gap}{}", page_of_remains(remains))),
            Entry::Configured(_) => Err(no_such_device(device)),
            Entry::Silent { .. } => Ok(()),
        }?;
        entry.failure().map_or(Ok(()), Err)
    })
}

fn page_of_remains(remains: &Remains) -> String {
    let Remains { name, state, pid, image, exports, log, log_lines, .. } = remains;
    let mut rows = vec![["name".to_owned(), name.clone()], ["state".to_owned(), state.name().to_owned()]];
    let mut row = |name: &str, value: String| rows.push([name.to_owned(), value]);
    row("image", image.clone());
    exports.iter().for_each(|export| row("export", export.clone()));
    let process = pid.map(|pid| format!("process {pid}, ")).unwrap_or_default();
    row("daemon", format!("{process}killed or crashed"));
    row("log", log.display().to_string());
    log_lines.iter().for_each(|line| row("", line.clone()));
    render([Align::Left, Align::Left], &rows)
}

fn page(info: &DeviceInfo) -> String {
    let mut rows: Vec<[String; 2]> = Vec::new();
    let mut row = |name: &str, value: String| rows.push([name.to_owned(), value]);
    let switch = |on: bool| if on { "yes" } else { "no" }.to_owned();
    row("name", info.name.clone());
    row("image", shown_path(info));
    info.exports.iter().for_each(|export| row("export", export.clone()));
    row("clients", info.clients.len().to_string());
    for client in &info.clients {
        let ClientInfo { peer, seconds, requests, errors, read_bytes, written_bytes, in_flight } = client;
        let did =
            format!("{requests} requests, {errors} errors, {read_bytes} bytes read, {written_bytes} written");
        row(&format!("  {peer}"), format!("{seconds} s, {did}, {in_flight} in flight"));
    }
    let uptime = Cell::Seconds(info.uptime_seconds).text();
    row("daemon", format!("process {}, up for {uptime}", info.pid));
    row("state directory", info.state_directory.display().to_string());
    row("log", info.log.as_ref().map_or("standard error".to_owned(), |log| log.display().to_string()));
    row("sandbox", info.sandbox.describe());
    row("size", format!("{} ({} bytes)", format_bytes(info.size), info.size));
    row("sector-size", format!("{} (physical {})", info.sector_size, info.physical_sector_size));
    row("read-only", switch(info.read_only));
    row("autoclear", switch(info.autoclear));
    if info.unsafe_flush_ignore {
        row("unsafe-flush-ignore", switch(true));
    }
    if info.held > 0 {
        let requests = quantity(info.held, "request");
        row("held", format!("{requests}, after I/O errors; run `blkq resume {}`", info.name));
    }
    if let Some(commit) = &info.commit {
        row("commit", format!("{}, by {}, into {}", shown_progress(commit), commit.by, commit.into));
    }
    row("partscan", switch(info.partscan));
    let direct = &info.direct_io;
    let reason = if direct.reason.is_empty() { String::new() } else { format!(": {}", direct.reason) };
    row("direct-io", format!("{} (requested: {}){reason}", direct.effective, direct.requested));
    row("capabilities", info.capabilities.join(" "));
    row("driver", info.driver.clone());
    info.driver_facts.iter().for_each(|(name, value)| row(&format!("  {name}"), value.clone()));
    row("settings", String::new());
    info.settings.iter().for_each(|(name, value)| row(&format!("  {name}"), value.clone()));
    info.warnings.iter().for_each(|warning| row("warning", warning.clone()));
    render([Align::Left, Align::Left], &rows)
}
