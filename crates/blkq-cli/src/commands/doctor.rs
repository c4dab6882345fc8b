//! `blkq doctor`: checks what this machine supports, and prints the commands that enable the rest.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use blkq::text::shell_word;
use blkq::{ErrorKind, ring};
use blkq_drivers::rbd;
use blkq_export::nbd::TlsCertificates;
use blkq_export::ublk::{self, ControlDevice};
use blkq_protocol::failure::Outcome;
use blkq_protocol::state::{STATE_DIR_VARIABLE, StateDir};
use blkq_protocol::system::{has_seccomp, landlock_abi, raise_limits};
use rustix::fs::{Access, access};
use rustix::process::{Resource, geteuid, getrlimit};
use serde::Serialize;

use crate::output::{Align, exit_code, print, print_json, render};

/// The oldest kernel whose io_uring has all operations that an engine needs.
const KERNEL_MIN: (u32, u32) = (6, 1);
/// The limit of locked memory that allows all buffers of a deep queue to be registered with io_uring.
const LOCKED_BYTES: u64 = 64 << 20;
/// The locked memory of a device with one queue: its io_uring ring.
const LOCKED_BYTES_PER_DEVICE: u64 = 68 << 10;
/// The number of open files that a device needs for the highest --max-connections.
const FILES: u64 = 2048;

#[derive(clap::Args, Debug)]
#[command(after_help = "\
Prints a line for each part of the machine that blkq uses: `ok`, `limited` (works, with
restrictions) or `missing`, and below it the command that enables the rest. Nothing is changed. The
exit status is 0 if images can be served over NBD to other programs of this machine and the
certificates, if given, can be used.

Examples:
  blkq doctor
  blkq doctor --tls-certificates /etc/blkq/tls
  blkq doctor --json | jq -r '.checks[] | select(.state != \"ok\") | .cure'")]
pub struct Args {
    /// Check also the certificates in DIR, as for `blkq attach --tls-certificates`
    #[arg(long, value_name = "DIR")]
    tls_certificates: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Page {
    version: &'static str,
    kernel: String,
    /// No part is missing that serving images needs.
    works: bool,
    checks: Vec<Finding>,
}

impl Page {
    fn new(checks: Vec<Finding>) -> Page {
        let works = !checks.iter().any(|check| check.needed && check.state == State::Missing);
        Page { version: env!("CARGO_PKG_VERSION"), kernel: kernel_release(), works, checks }
    }

    fn lacks_asked(&self) -> bool {
        self.checks.iter().any(|check| check.asked && check.state == State::Missing)
    }

    fn text(&self) -> String {
        let mut rows = Vec::new();
        for Finding { name, state, found, hint, .. } in &self.checks {
            rows.push([(*name).to_owned(), state.name().to_owned(), found.clone()]);
            rows.extend(hint.iter().map(|hint| [String::new(), String::new(), format!("hint: {hint}")]));
        }
        let all_ok = self.checks.iter().all(|check| check.state == State::Ok);
        let verdict = match (self.works, self.lacks_asked(), all_ok) {
            (true, false, true) => "This machine supports everything that blkq uses.",
            (true, false, false) => {
                "Images can be served over NBD. Everything not marked \"ok\" above is optional."
            }
            (true, true, _) => "Images can be served over NBD, but not with these certificates.",
            (false, ..) => "Images cannot be served on this machine. See the lines marked \"missing\" above.",
        };
        let Page { version, kernel, .. } = self;
        format!("blkq {version} on Linux {kernel}\n\n{}\n{verdict}\n", render([Align::Left; 3], &rows))
    }
}

pub fn run(args: Args) -> Outcome<ExitCode> {
    let page = Page::new(run_all(args.tls_certificates.as_deref()));
    let printed = if args.json { print_json(&page) } else { print(&page.text()) };
    printed.map(|()| exit_code(!page.works || page.lacks_asked()))
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    Ok,
    /// The part works, with restrictions.
    Limited,
    Missing,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            State::Ok => "ok",
            State::Limited => "limited",
            State::Missing => "missing",
        }
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
struct Finding {
    name: &'static str,
    state: State,
    /// No image can be served without this part.
    needed: bool,
    /// The user asked for this part with an option: the command fails if the part is missing.
    #[serde(skip)]
    asked: bool,
    found: String,
    /// A command, or the page that has the commands. The key in the JSON is older than the field's name.
    #[serde(rename = "cure")]
    hint: Option<String>,
}

impl Finding {
    fn ok(found: impl Into<String>) -> Finding {
        Finding { name: "", state: State::Ok, needed: false, asked: false, found: found.into(), hint: None }
    }

    fn limited(found: impl Into<String>, hint: impl Into<String>) -> Finding {
        Finding { state: State::Limited, hint: Some(hint.into()), ..Finding::ok(found) }
    }

    fn missing(found: impl Into<String>, hint: impl Into<String>) -> Finding {
        Finding { state: State::Missing, ..Finding::limited(found, hint) }
    }
}

/// `certificates` is the directory of --tls-certificates.
fn run_all(certificates: Option<&Path>) -> Vec<Finding> {
    const NEEDED: bool = true;
    const OPTIONAL: bool = false;
    let findings = [
        ("kernel", NEEDED, kernel(&kernel_release())),
        ("io_uring", NEEDED, io_uring()),
        ("state directory", NEEDED, state_directory()),
        ("locked memory", OPTIONAL, locked_memory(locked_memory_limit(), geteuid().is_root())),
        ("open files", OPTIONAL, open_files(getrlimit(Resource::Nofile).maximum)),
        ("Landlock", OPTIONAL, landlock(landlock_abi())),
        ("seccomp", OPTIONAL, seccomp(has_seccomp())),
        ("ublk", OPTIONAL, block_devices()),
        ("huge pages", OPTIONAL, huge_pages(&read("/sys/kernel/mm/transparent_hugepage/enabled"))),
        ("Ceph's client", OPTIONAL, ceph()),
    ];
    let findings = findings.into_iter().map(|(name, needed, finding)| Finding { name, needed, ..finding });
    findings.chain(certificates.map(|dir| Finding { name: "TLS", asked: true, ..tls(dir) })).collect()
}

pub(super) fn kernel_release() -> String {
    read("/proc/sys/kernel/osrelease")
}

/// Empty if the file cannot be read.
fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

/// The error without its hint, which is meant for `blkq attach`.
fn reason(error: &blkq::Error) -> String {
    error.to_string().split("; ").next().unwrap_or_default().to_owned()
}

fn kernel(release: &str) -> Finding {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    match version >= KERNEL_MIN {
        true => Finding::ok(release),
        false => Finding::missing(release, "boot Linux 6.1 or newer (Debian 12 and newer)"),
    }
}

fn io_uring() -> Finding {
    let ready = ring::probe().and_then(|probe| {
        let lacking = ring::ENGINE_OPERATIONS.iter().filter(|(_, code)| !probe(*code));
        let lacking: Vec<_> = lacking.map(|(name, _)| *name).collect();
        let why = format!("lacks the operations {}", lacking.join(", "));
        if lacking.is_empty() { Ok(()) } else { Err(blkq::Error::new(ErrorKind::Unsupported, why)) }
    });
    let disabled = read("/proc/sys/kernel/io_uring_disabled");
    match ready {
        Ok(()) if disabled == "1" => Finding::limited(
            "available to this user, but not to users without CAP_SYS_ADMIN outside of kernel.io_uring_group",
            "sysctl kernel.io_uring_disabled=0",
        ),
        Ok(()) => Finding::ok("available, with all operations that blkq needs"),
        Err(e) => Finding::missing(reason(&e), io_uring_hint(&disabled)),
    }
}

/// `disabled` is the text of kernel.io_uring_disabled.
fn io_uring_hint(disabled: &str) -> &'static str {
    match disabled {
        "2" => "sysctl kernel.io_uring_disabled=0",
        "1" => "sysctl kernel.io_uring_disabled=0, or become a member of the group kernel.io_uring_group",
        _ => {
            "in a container, allow io_uring_setup, io_uring_enter and io_uring_register in the seccomp profile \
             (--security-opt seccomp=FILE); otherwise raise the limits below, or boot Linux 6.1 or newer"
        }
    }
}

fn state_directory() -> Finding {
    let dir = match StateDir::locate() {
        Ok(dir) => dir,
        Err(failure) => {
            return Finding::missing(failure.to_string(), "export XDG_RUNTIME_DIR=/run/user/$(id -u)");
        }
    };
    let shown = dir.path().display();
    if dir.path().exists() {
        // `create` only checks the owner and the mode of a directory that exists.
        let hint = || directory_hint(dir.path(), geteuid().as_raw());
        return match dir.create() {
            Ok(()) => Finding::ok(shown.to_string()),
            Err(failure) => Finding::missing(failure.to_string(), hint()),
        };
    }
    let parent = dir.path().ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    match access(parent, Access::WRITE_OK) {
        Ok(()) => Finding::ok(format!("{shown} (the first attach creates it)")),
        Err(e) => Finding::missing(
            format!("cannot create {shown} in {}: {e}", parent.display()),
            format!("sudo install -d -m 700 -o $USER {}", shell_word(dir.path())),
        ),
    }
}

/// How `user` gets a state directory instead of the one at `path`, which cannot be used.
fn directory_hint(path: &Path, user: u32) -> String {
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() && metadata.uid() == user => {
            format!("chmod 700 {}", shell_word(path))
        }
        _ => format!("export {STATE_DIR_VARIABLE}=DIR, with a directory that you own"),
    }
}

/// The limit that applies to daemons, which raise it as far as the kernel allows. Raising the hard limit
/// needs CAP_SYS_RESOURCE in the initial user namespace, which even root in a container often lacks. So this
/// process raises its own limit.
fn locked_memory_limit() -> Option<u64> {
    raise_limits();
    getrlimit(Resource::Memlock).current
}

/// The kernel counts the locked memory of all daemons of a user together, even in different namespaces.
fn locked_memory(limit: Option<u64>, is_root: bool) -> Finding {
    let Some(bytes) = limit else { return Finding::ok("no limit") };
    let amount =
        if bytes < 1 << 20 { format!("{} KiB", bytes >> 10) } else { format!("{} MiB", bytes >> 20) };
    let devices = bytes / LOCKED_BYTES_PER_DEVICE;
    let found = format!("{amount} for all devices of this user, enough for about {devices} devices");
    if bytes >= LOCKED_BYTES {
        return Finding::ok(found);
    }
    let hint = match is_root {
        true => "use --ulimit memlock=-1 (Docker, Podman), or LimitMEMLOCK=infinity in a systemd unit",
        false => {
            "echo '* - memlock unlimited' >>/etc/security/limits.d/blkq.conf, as root, and log in again; or use \
             --ulimit memlock=-1 (Docker, Podman), or LimitMEMLOCK=infinity in a systemd unit"
        }
    };
    Finding::limited(format!("{found}, but not for --register-memory"), hint)
}

fn open_files(limit: Option<u64>) -> Finding {
    match limit {
        Some(files) if files < FILES => Finding::limited(
            format!("{files}, too few for a device with the highest --max-connections"),
            "echo '* - nofile 65536' >>/etc/security/limits.d/blkq.conf, as root, and log in again; or use \
             LimitNOFILE=65536 in a systemd unit",
        ),
        Some(files) => Finding::ok(files.to_string()),
        None => Finding::ok("no limit"),
    }
}

fn landlock(abi: u32) -> Finding {
    if abi > 0 {
        return Finding::ok(format!("version {abi}; daemons can open only the files of their devices"));
    }
    let modules = read("/sys/kernel/security/lsm");
    let modules = if modules.is_empty() { "...".to_owned() } else { modules };
    Finding::limited(
        "not available, so daemons can open all files of their users",
        format!("add lsm=landlock,{modules} to the kernel command line (GRUB_CMDLINE_LINUX, update-grub)"),
    )
}

fn seccomp(is_available: bool) -> Finding {
    match is_available {
        true => Finding::ok("daemons can make only the system calls that they need"),
        false => Finding::limited(
            "not available, so daemons can make all system calls",
            "boot a kernel with CONFIG_SECCOMP_FILTER, such as Debian's",
        ),
    }
}

fn block_devices() -> Finding {
    match ControlDevice::open().and_then(|mut control| control.features()) {
        Ok(features) if features.contains(ublk::Features::USER_RECOVERY_REISSUE) => {
            let newer = [
                (ublk::Features::AUTO_BUF_REG, "zero copy"),
                (ublk::Features::UPDATE_SIZE, "resizing devices in use"),
                (ublk::Features::PER_IO_DAEMON, "several threads per queue"),
            ];
            let lacking = newer.iter().filter(|(feature, _)| !features.contains(*feature));
            let lacking: Vec<_> = lacking.map(|(_, what)| *what).collect();
            match lacking.is_empty() {
                true => Finding::ok("available, with all features that blkq uses"),
                false => Finding::limited(
                    format!("available, without {}", lacking.join(", ")),
                    "boot Linux 6.16 or newer; `blkq features` lists each feature",
                ),
            }
        }
        Ok(_) => Finding::limited(
            "available, but the kernel removes a device when its daemon is killed",
            "boot Linux 6.5 or newer",
        ),
        Err(e) => {
            // The hint of `blkq attach`, with details for which an error message has no room.
            let more = match e.kind() {
                ErrorKind::NotFound => {
                    "; Debian 13 has ublk, and Debian 12 in backports; NBD works without it"
                }
                ErrorKind::Denied => {
                    "; the rules are packaging/udev/60-blkq-ublk.rules, for users in the group ublk: usermod -aG ublk $USER"
                }
                _ => "",
            };
            Finding::missing(reason(&e), format!("{}{more}", e.hint()))
        }
    }
}

/// `enabled` is the text of /sys/kernel/mm/transparent_hugepage/enabled.
fn huge_pages(enabled: &str) -> Finding {
    let chosen = enabled.split(['[', ']']).nth(1).unwrap_or("not available");
    let reserved = read("/proc/sys/vm/nr_hugepages");
    let reserved = if reserved.is_empty() { "0" } else { &reserved };
    Finding::ok(format!("optional; transparent: {chosen}; reserved (vm.nr_hugepages): {reserved}"))
}

fn ceph() -> Finding {
    match rbd::load() {
        Ok(()) => Finding::ok("available; rbd:POOL/IMAGE can be served"),
        Err(e) => Finding::missing(reason(&e), "apt-get install librbd1"),
    }
}

fn tls(directory: &Path) -> Finding {
    let hint = "docs/nbd.md shows how to create certificates";
    match TlsCertificates::load(directory) {
        Ok(certificates) if !certificates.warnings().is_empty() => {
            Finding::limited(certificates.warnings().join("; "), hint)
        }
        Ok(certificates) if certificates.verifies_clients() => {
            Finding::ok("the certificates are usable; clients need a certificate, too")
        }
        Ok(_) => Finding::ok("the certificates are usable; clients need no certificate"),
        Err(e) => Finding::missing(e.to_string(), hint),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_works_unless_a_needed_part_is_missing() {
        let parts = [
            Finding { name: "a", needed: true, ..Finding::ok("available") },
            Finding { name: "b", needed: true, ..Finding::limited("less", "raise it") },
            Finding { name: "c", ..Finding::missing("not found", "install it") },
        ];
        let page = Page::new(parts.to_vec());
        assert!(page.works && page.text().contains("served over NBD"), "{}", page.text());
        let lines: Vec<String> =
            page.text().lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(
            lines[2..7],
            ["a ok available", "b limited less", "hint: raise it", "c missing not found", "hint: install it"]
        );
        let all_ok = Page::new(vec![Finding { name: "a", ..Finding::ok("available") }]).text();
        assert!(all_ok.ends_with("This machine supports everything that blkq uses.\n"), "{all_ok}");
        let page =
            Page::new(vec![Finding { name: "TLS", asked: true, ..Finding::missing("not found", "make it") }]);
        assert!(page.works && page.lacks_asked() && page.text().contains("but not with these certificates"));
        let page = Page::new(vec![Finding {
            name: "c",
            needed: true,
            ..Finding::missing("not found", "install it")
        }]);
        assert!(!page.works && page.text().contains("cannot be served"));
    }

    #[test]
    fn kernels_older_than_the_minimum_are_missing() {
        for (release, state) in [
            ("6.1.0-18-amd64", State::Ok),
            ("6.18.44-fc", State::Ok),
            ("7.0", State::Ok),
            ("6.0.19", State::Missing),
            ("5.15.0", State::Missing),
            ("", State::Missing),
        ] {
            assert_eq!(kernel(release).state, state, "{release}");
        }
    }

    #[test]
    fn low_limits_are_reported_as_limited() {
        let state = |limit, is_root| locked_memory(limit, is_root).state;
        assert_eq!(
            (state(Some(8 << 20), false), state(Some(8 << 20), true)),
            (State::Limited, State::Limited)
        );
        let root = locked_memory(Some(8 << 20), true);
        assert!(root.found.contains("8 MiB") && root.found.contains("about 120"), "{}", root.found);
        assert!(root.hint.is_some_and(|hint| hint.contains("--ulimit memlock")));
        assert_eq!((state(None, false), state(Some(1 << 30), false)), (State::Ok, State::Ok));
        assert!(locked_memory(Some(65536), false).found.starts_with("64 KiB"));
        assert_eq!(open_files(Some(1024)).state, State::Limited);
        assert_eq!(open_files(Some(1 << 20)).state, State::Ok);
    }

    #[test]
    fn the_hint_depends_on_the_reason() {
        assert!(io_uring_hint("2").starts_with("sysctl"));
        assert!(io_uring_hint("1").contains("io_uring_group"));
        assert!(io_uring_hint("0").contains("seccomp") && io_uring_hint("").contains("seccomp"));
        assert!(landlock(0).hint.is_some_and(|hint| hint.contains("lsm=landlock,")));
        assert_eq!((landlock(4).state, seccomp(false).state), (State::Ok, State::Limited));
        let certificates = tls(Path::new("/nowhere"));
        assert_eq!(certificates.state, State::Missing);
        let (directory, own) = (std::env::temp_dir(), fs::metadata(std::env::temp_dir()).unwrap().uid());
        assert!(directory_hint(&directory, own).starts_with("chmod 700 "));
        assert!(directory_hint(&directory, own + 1).starts_with("export BLKQ_STATE_DIR="));
        assert!(directory_hint(Path::new("/nowhere"), own).starts_with("export BLKQ_STATE_DIR="));
        assert!(huge_pages("always [madvise] never").found.contains("madvise"));
    }
}
