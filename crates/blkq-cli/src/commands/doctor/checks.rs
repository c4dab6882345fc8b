//! The parts of a machine that blkq uses, each with its state and cure.

use std::fs;
use std::path::Path;

use blkq::ErrorKind;
use blkq::drivers::rbd;
use blkq::ring;
use blkq::text::shell_word;
use blkq_export::nbd::TlsCertificates;
use blkq_export::ublk::{self, ControlDevice};
use rustix::fs::{Access, access};
use rustix::process::{Resource, geteuid, getrlimit};

use super::finding::Finding;
use crate::confine;
use crate::daemon::raise_limits;
use crate::state::StateDir;

/// The oldest kernel with all that engines need.
const KERNEL_MIN: (u32, u32) = (6, 1);
/// Locked memory of which buffers that are registered are a part; with less, some of a deep queue are not.
const LOCKED_BYTES: u64 = 64 << 20;
/// Locked memory of the ring of a device with one queue.
const LOCKED_BYTES_PER_DEVICE: u64 = 68 << 10;
/// Open files with which a device has its most connections.
const FILES: u64 = 2048;

/// All of them. Nothing is changed.
pub fn run_all(certificates: Option<&Path>) -> Vec<Finding> {
    let mut findings = vec![
        kernel(&kernel_release()),
        io_uring(),
        state_directory(),
        locked_memory(locked_memory_limit(), geteuid().is_root()),
        open_files(getrlimit(Resource::Nofile).maximum),
        landlock(confine::landlock_abi()),
        seccomp(confine::filter::is_there()),
        block_devices(),
        huge_pages(&read("/sys/kernel/mm/transparent_hugepage/enabled")),
        ceph(),
    ];
    findings.extend(certificates.map(tls));
    findings
}

/// The release of the kernel, as uname(1) prints it.
pub fn kernel_release() -> String {
    read("/proc/sys/kernel/osrelease")
}

/// The file's text; empty if it cannot be read.
fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

/// The error without the cure that it has for other commands.
fn reason(error: &blkq::Error) -> String {
    error.to_string().split("; ").next().unwrap_or_default().to_owned()
}

fn kernel(release: &str) -> Finding {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    match version >= KERNEL_MIN {
        true => Finding::ok("kernel", release),
        false => Finding::missing("kernel", release, "boot Linux 6.1 or newer: Debian 12 has it"),
    }
    .needed()
}

fn io_uring() -> Finding {
    let ready = ring::probe().and_then(|probe| {
        let lacking: Vec<_> = ring::ENGINE_OPERATIONS
            .iter()
            .filter(|(_, code)| !probe.supports(*code))
            .map(|(name, _)| *name)
            .collect();
        match lacking.is_empty() {
            true => Ok(()),
            false => Err(blkq::Error::new(ErrorKind::Unsupported, format!("without {}", lacking.join(", ")))),
        }
    });
    let disabled = read("/proc/sys/kernel/io_uring_disabled");
    match ready {
        Ok(()) if disabled == "1" => Finding::limited(
            "io_uring",
            "there for this user, and not for those without CAP_SYS_ADMIN outside of kernel.io_uring_group",
            "sysctl kernel.io_uring_disabled=0",
        ),
        Ok(()) => Finding::ok("io_uring", "there, with all operations of an engine"),
        Err(e) => Finding::missing("io_uring", reason(&e), io_uring_cure(&disabled)),
    }
    .needed()
}

/// `disabled` is the text of kernel.io_uring_disabled.
fn io_uring_cure(disabled: &str) -> &'static str {
    match disabled {
        "2" => "sysctl kernel.io_uring_disabled=0",
        "1" => "sysctl kernel.io_uring_disabled=0, or become a member of the group kernel.io_uring_group",
        _ => {
            "in a container, allow io_uring_setup, io_uring_enter and io_uring_register in its seccomp profile \
             (--security-opt seccomp=FILE); else raise the limits below, or boot Linux 6.1 or newer"
        }
    }
}

fn state_directory() -> Finding {
    let name = "state directory";
    let dir = match StateDir::locate() {
        Ok(dir) => dir,
        Err(failure) => {
            return Finding::missing(name, failure.to_string(), "export XDG_RUNTIME_DIR=/run/user/$(id -u)")
                .needed();
        }
    };
    let shown = dir.path().display();
    if dir.path().exists() {
        // Of one that is there it only checks whose it is.
        return match dir.create() {
            Ok(()) => Finding::ok(name, shown.to_string()),
            Err(failure) => Finding::missing(
                name,
                failure.to_string(),
                format!("chmod 700 {}, as its owner", shell_word(dir.path())),
            ),
        }
        .needed();
    }
    let above = dir.path().ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    match access(above, Access::WRITE_OK) {
        Ok(()) => Finding::ok(name, format!("{shown}, which the first attach makes")),
        Err(e) => Finding::missing(
            name,
            format!("{shown} cannot be made in {}: {e}", above.display()),
            format!("install -d -m 700 -o $USER {}, as root", shell_word(dir.path())),
        ),
    }
    .needed()
}

/// The limit that a daemon has after it has raised its own. The kernel lets only processes with CAP_SYS_RESOURCE in the
/// first user namespace raise it further, and root of a container often is not one; so it is tried.
fn locked_memory_limit() -> Option<u64> {
    raise_limits();
    getrlimit(Resource::Memlock).current
}

/// All daemons of a user share the limit, whatever namespaces they are in.
fn locked_memory(limit: Option<u64>, is_root: bool) -> Finding {
    let name = "locked memory";
    let Some(bytes) = limit else { return Finding::ok(name, "no limit") };
    let amount =
        if bytes < 1 << 20 { format!("{} KiB", bytes >> 10) } else { format!("{} MiB", bytes >> 20) };
    let devices = bytes / LOCKED_BYTES_PER_DEVICE;
    let found = format!("{amount} for all devices of this user: enough for about {devices}");
    if bytes >= LOCKED_BYTES {
        return Finding::ok(name, found);
    }
    let hint = match is_root {
        true => "in a container, --ulimit memlock=-1 of Docker and Podman; LimitMEMLOCK=infinity of systemd",
        false => {
            "echo '* - memlock unlimited' >>/etc/security/limits.d/blkq.conf, and log in again; in a container, \
             --ulimit memlock=-1 of Docker and Podman; LimitMEMLOCK=infinity of systemd"
        }
    };
    Finding::limited(name, format!("{found}, and not for guests' memory"), hint)
}

fn open_files(limit: Option<u64>) -> Finding {
    let name = "open files";
    match limit {
        Some(files) if files < FILES => Finding::limited(
            name,
            format!("{files}: not enough for the most connections of a device"),
            "echo '* - nofile 65536' >>/etc/security/limits.d/blkq.conf, and log in again; LimitNOFILE=65536 of systemd",
        ),
        Some(files) => Finding::ok(name, files.to_string()),
        None => Finding::ok(name, "no limit"),
    }
}

fn landlock(abi: u32) -> Finding {
    let name = "Landlock";
    if abi > 0 {
        return Finding::ok(name, format!("version {abi}: a daemon keeps out of files that are not its own"));
    }
    let modules = read("/sys/kernel/security/lsm");
    let modules = if modules.is_empty() { "...".to_owned() } else { modules };
    Finding::limited(
        name,
        "a daemon could open other files of its user",
        format!("add lsm=landlock,{modules} to the kernel's command line (GRUB_CMDLINE_LINUX, update-grub)"),
    )
}

fn seccomp(is_there: bool) -> Finding {
    match is_there {
        true => Finding::ok("seccomp", "a daemon makes no system call but those that it needs"),
        false => Finding::limited(
            "seccomp",
            "a daemon could make any system call",
            "boot a kernel with CONFIG_SECCOMP_FILTER: Debian's have it",
        ),
    }
}

fn block_devices() -> Finding {
    let name = "ublk";
    match ControlDevice::open().and_then(|mut control| control.features()) {
        Ok(features) if features.contains(ublk::Features::USER_RECOVERY_REISSUE) => {
            let newer = [
                (ublk::Features::AUTO_BUF_REG, "data that nobody copies"),
                (ublk::Features::UPDATE_SIZE, "resizing in use"),
                (ublk::Features::PER_IO_DAEMON, "several threads for a queue"),
            ];
            let lacking: Vec<_> = newer
                .iter()
                .filter(|(feature, _)| !features.contains(*feature))
                .map(|(_, what)| *what)
                .collect();
            match lacking.is_empty() {
                true => Finding::ok(name, "block devices of the kernel, with all that blkq uses"),
                false => Finding::limited(
                    name,
                    format!("block devices of the kernel, without {}", lacking.join(", ")),
                    "boot Linux 6.16 or newer; blkq features has each",
                ),
            }
        }
        Ok(_) => Finding::limited(
            name,
            "block devices of the kernel, which do not outlive their daemon",
            "boot Linux 6.5 or newer",
        ),
        Err(e) => {
            // As attach has it, with what is known besides.
            let more = match e.kind() {
                ErrorKind::NotFound => ": Debian 13 has it, and Debian 12 in backports; NBD needs none",
                ErrorKind::Denied => ": packaging/udev/60-blkq-ublk.rules; then usermod -aG ublk $USER",
                _ => "",
            };
            Finding::missing(name, reason(&e), format!("{}{more}", e.cure()))
        }
    }
}

/// `enabled` is the text of /sys/kernel/mm/transparent_hugepage/enabled.
fn huge_pages(enabled: &str) -> Finding {
    let chosen = enabled.split(['[', ']']).nth(1).unwrap_or("not there");
    let reserved = read("/proc/sys/vm/nr_hugepages");
    let reserved = if reserved.is_empty() { "0" } else { &reserved };
    Finding::ok(
        "huge pages",
        format!("transparent: {chosen}; reserved for guests' memory: {reserved}; not needed"),
    )
}

fn ceph() -> Finding {
    match rbd::load() {
        Ok(()) => Finding::ok("Ceph's client", "rbd:POOL/IMAGE can be served"),
        Err(e) => Finding::missing("Ceph's client", reason(&e), "apt-get install librbd1"),
    }
}

fn tls(directory: &Path) -> Finding {
    match TlsCertificates::load(directory) {
        Ok(certificates) if certificates.verifies_clients() => {
            Finding::ok("TLS", "the certificates can be used; clients need one too")
        }
        Ok(_) => Finding::ok("TLS", "the certificates can be used; clients need none"),
        Err(e) => Finding::missing("TLS", e.to_string(), "docs/nbd.md has the commands that make them"),
    }
    .asked()
}

#[cfg(test)]
mod tests {
    use super::super::finding::State;
    use super::*;

    #[test]
    fn old_kernels_are_found_whatever_their_release() {
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
    fn limits_are_judged_by_what_a_daemon_can_raise() {
        let state = |limit, is_root| locked_memory(limit, is_root).state;
        assert_eq!(
            (state(Some(8 << 20), false), state(Some(8 << 20), true)),
            (State::Limited, State::Limited)
        );
        let of_root = locked_memory(Some(8 << 20), true);
        assert!(of_root.found.contains("8 MiB") && of_root.found.contains("about 120"), "{}", of_root.found);
        assert!(of_root.cure.is_some_and(|cure| cure.contains("--ulimit memlock")));
        assert_eq!((state(None, false), state(Some(1 << 30), false)), (State::Ok, State::Ok));
        assert!(locked_memory(Some(65536), false).found.starts_with("64 KiB"));
        assert_eq!(open_files(Some(1024)).state, State::Limited);
        assert_eq!(open_files(Some(1 << 20)).state, State::Ok);
    }

    #[test]
    fn each_reason_has_its_cure() {
        assert!(io_uring_cure("2").starts_with("sysctl"));
        assert!(io_uring_cure("1").contains("io_uring_group"));
        assert!(io_uring_cure("0").contains("seccomp") && io_uring_cure("").contains("seccomp"));
        assert!(landlock(0).cure.is_some_and(|cure| cure.contains("lsm=landlock,")));
        assert_eq!((landlock(4).state, seccomp(false).state), (State::Ok, State::Limited));
        let certificates = tls(Path::new("/nowhere"));
        assert_eq!(
            (certificates.state, certificates.needed, certificates.asked),
            (State::Missing, false, true)
        );
        assert!(huge_pages("always [madvise] never").found.contains("madvise"));
    }
}
