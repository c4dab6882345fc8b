//! Devices for virtual machines. libblkio's front end (crate virtio-driver) represents the virtual machine.

use blkq::testing::{assert_stays, wait_until};
use std::fs;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use crate::place::*;
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags, mmap};
use virtio_driver::{
    VhostUser, VirtioBlkConfig, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkReqBuf, VirtioFeatureFlags,
    VirtioTransport,
};

const MEMORY: usize = 1 << 20;

/// A front end with a queue, and memory that it shares, which stays mapped.
struct Guest {
    queue: VirtioBlkQueue<'static, ()>,
    transport: Box<dyn VirtioTransport<VirtioBlkConfig, VirtioBlkReqBuf>>,
    memory: &'static mut [u8],
}

impl Guest {
    fn connect(path: &str) -> Guest {
        let features = VirtioFeatureFlags::VERSION_1.bits() | VirtioBlkFeatureFlags::FLUSH.bits();
        let transport = VhostUser::<VirtioBlkConfig, VirtioBlkReqBuf>::new(path, features).unwrap();
        let mut transport: Box<dyn VirtioTransport<_, _>> = Box::new(transport);
        let file = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, MEMORY as u64).unwrap();
        let (protection, null) = (ProtFlags::READ | ProtFlags::WRITE, std::ptr::null_mut());
        // SAFETY: a new mapping at an address of the kernel's choice, which is never unmapped.
        let memory = unsafe {
            let start = mmap(null, MEMORY, protection, MapFlags::SHARED, &file, 0).unwrap();
            std::slice::from_raw_parts_mut(start.cast::<u8>(), MEMORY)
        };
        transport.map_mem_region(memory.as_ptr().addr(), MEMORY, file.as_fd().as_raw_fd(), 0).unwrap();
        let queue = VirtioBlkQueue::setup_queues(&mut *transport, 1, 16).unwrap().remove(0);
        Guest { queue, transport, memory }
    }

    /// Waits for the one request, and returns its result.
    fn wait(&mut self) -> i32 {
        self.transport.get_submission_notifier(0).notify().unwrap();
        loop {
            if let Some(completion) = self.queue.completions().next() {
                return completion.ret;
            }
            self.transport.get_completion_fd(0).read().unwrap();
        }
    }

    fn sectors(&self) -> u64 {
        u64::from(self.transport.get_config().unwrap().capacity)
    }
}

// Contract: live-changes
#[test]
fn a_virtual_machine_has_the_device() {
    let place = Place::new("vhost");
    let image = place.image("image", 8 << 20);
    let exports = ["attach", "--name", "d", &image, "--export", "vhost-user-blk", "--export", "nbd"];
    let printed = place.done(&exports);
    let lines: Vec<&str> = printed.lines().collect();
    let path = lines[0].strip_prefix("vhost-user:").unwrap();
    assert_eq!(path, place.state().join("d.vhost").to_str().unwrap());
    assert!(lines[1].starts_with("nbd+unix:///?socket="), "{printed}");
    assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(place.done(&["list"]).contains("vhost-user:"), "{}", place.done(&["list"]));

    let mut guest = Guest::connect(path);
    guest.memory[..4096].fill(7);
    let memory = &guest.memory[..4096];
    guest.queue.write(1 << 20, memory, ()).unwrap();
    assert_eq!(guest.wait(), 0);
    guest.queue.flush(()).unwrap();
    assert_eq!(guest.wait(), 0);
    assert!(fs::read(&image).unwrap()[1 << 20..][..4096].iter().all(|byte| *byte == 7));

    // A second front end is rejected, and the log says so.
    assert!(VhostUser::<VirtioBlkConfig, VirtioBlkReqBuf>::new(path, 0).is_err());
    let log = || fs::read_to_string(place.state().join("d.log")).unwrap_or_default();
    wait_until("it is logged", || log().contains("): another front end is connected"));

    let info = place.json(&["show", "d", "--json"]);
    let clients = info["clients"].as_array().unwrap();
    assert_eq!((clients.len(), &clients[0]["requests"]), (1, &2.into()), "{info}");
    let counters = &place.json(&["stat", "d", "--json"])["vhost_user"];
    let count = |name: &str| counters[name].as_u64().unwrap();
    assert_eq!((count("connected"), count("requests"), count("refused_connections")), (1, 2, 1));
    assert!(place.done(&["stat", "d"]).contains("vhost-user"));

    // The guest sees another size, and keeps the device.
    assert_eq!(guest.sectors(), 8 << 11);
    assert_eq!(place.done(&["resize", "d", "16M"]), "16M\n");
    assert_eq!(guest.sectors(), 16 << 11);
    assert!(place.refused(&["resize", "d", "4M"]).contains("1 client is connected"));
    assert!(place.refused(&["detach", "d"]).contains("1 client is connected"));
    guest.queue.write((16 << 20) - 4096, &guest.memory[..4096], ()).unwrap();
    assert_eq!(guest.wait(), 0);

    place.done(&["detach", "d", "--force"]);
    assert!(place.files().iter().all(|file| !file.starts_with("d.")), "{:?}", place.files());
    assert!(!log().contains("panic"));
}

#[test]
fn a_socket_elsewhere_is_for_its_group() {
    let place = Place::new("vhost-socket");
    let image = place.image("image", 1 << 20);
    let path = place.dir.join("vm.sock");
    let group = rustix::process::getegid().as_raw().to_string();
    let path = path.to_str().unwrap();
    let words = ["attach", &image, "--export", "vhost-user-blk", "--vhost-socket", path];
    let printed = place.done(&[&words[..], &["--socket-group", &group]].concat());
    assert_eq!(printed, format!("vhost-user:{path}\n"));
    assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o660);
    drop(Guest::connect(path));
    let gone = || place.json(&["show", "image", "--json"])["clients"].as_array().unwrap().is_empty();
    wait_until("the front end is gone", gone);
    place.done(&["detach", "image"]);
    assert!(!fs::exists(path).unwrap());
}

/// Kills a daemon under load, and attaches its device again: each request completes exactly once.
fn kill_under_load(test: &str, options: &[&str]) {
    use crate::front_end::{DATA, FEATURES, FrontEnd};
    let place = Place::new(test);
    let image = place.image("image", 8 << 20);
    let attach = ["attach", "--name", "d", &image, "--export", "vhost-user-blk", "--queues", "2"];
    // Some requests complete before the daemon is killed, and others do not.
    let slow = [&attach[..], options, &["--fault", "delay=400ms,op=write,rate=50%;seed=3"]].concat();
    // It warns of the faults.
    let attached = || assert!(place.run(&slow).status.success());
    attached();
    let path = place.state().join("d.vhost");
    let mut front = FrontEnd::new(&path, FEATURES, 2);
    let inflight = front.keep_record();
    (0..2).for_each(|ring| front.start(ring, 0));
    let mut next = 0u64;
    let mut resubmitted = 0;
    for round in 0..6 {
        let mut submitted: Vec<Vec<u16>> = vec![Vec::new(); 2];
        // Asked for before, lest all complete while a busy machine runs that command.
        let pid = place.pid("d");
        for number in 0..24 {
            let (ring, at) = (number % 2, DATA + number * 4096);
            front.memory.bytes(at, 4096).fill(next as u8 + 1);
            submitted[ring].push(front.submit(ring, 1, next * 8, at, 4096));
            front.kick(ring);
            next += 1;
        }
        std::thread::sleep(std::time::Duration::from_millis(10 * round));
        kill(pid);
        let used: u16 = (0..2).map(|ring| front.used_index(ring)).sum();
        resubmitted += next - u64::from(used);
        attached();
        front.reconnect(&path, FEATURES, &inflight);
        for (ring, heads) in submitted.iter_mut().enumerate() {
            let mut done: Vec<u16> =
                front.wait(ring, 12).iter().map(|it| (it.0, assert_eq!(it.1, 0)).0).collect();
            done.sort_unstable();
            heads.sort_unstable();
            assert_eq!(&done, heads, "each completes once");
        }
    }
    assert!(resubmitted > 0, "the daemon died in the middle");
    assert_stays("nothing completes twice", || (0..2).all(|ring| front.completed(ring).is_empty()));
    let bytes = fs::read(&image).unwrap();
    for number in 0..next as usize {
        let block = &bytes[number * 4096..][..4096];
        assert!(block.iter().all(|byte| *byte == number as u8 + 1), "block {number}");
    }
}

#[test]
fn requests_survive_a_killed_daemon() {
    kill_under_load("vhost-kill", &[]);
}

#[test]
fn requests_in_registered_memory_survive_a_killed_daemon() {
    // Without a sandbox root's engines may lock as much as they like.
    kill_under_load("vhost-kill-reg", &["--register-memory", "--no-sandbox"]);
}

/// A front end fills its call eventfd, so that writes to it block: the confined daemon still serves the other
/// rings and NBD, and detaches.
// Contract: bounded-input
#[test]
fn a_full_call_eventfd_does_not_block_the_device() {
    use crate::front_end::{FEATURES, FrontEnd, withstand_refills};
    // Memory after the rings.
    const AT: usize = 6 << 20;
    let place = Place::new("vhost-filled");
    let image = place.image("image", 8 << 20);
    let printed =
        place.done(&["attach", "--name", "d", &image, "--export", "vhost-user-blk", "--export", "nbd"]);
    assert_eq!(place.json(&["show", "d", "--json"])["sandbox"]["seccomp"], true);
    let mut front = FrontEnd::started(&place.state().join("d.vhost"), FEATURES, 64);
    let mut nbd = session(printed.lines().nth(1).unwrap(), "d");
    // Every ring has its descriptor.
    for ring in 0..64 {
        assert_eq!(front.run(ring, 0, 0, AT, 512), 0);
    }
    let besides = || {
        request(&mut nbd, 0, 1, 0, 512);
        assert_eq!(reply(&mut nbd, 512), (0, 1));
    };
    withstand_refills(&mut front, AT, besides, || _ = place.done(&["detach", "d", "--force"]));
}

/// The limit of open files leaves no eventfds for all rings; a guest with one ring is served.
// Contract: bounded-input
#[test]
fn few_open_files_are_enough_for_one_ring() {
    use crate::front_end::{DATA, FEATURES, FrontEnd};
    let place = Place::new("vhost-few");
    let image = place.image("image", 8 << 20);
    let limited = ["-c", "ulimit -n 64 && exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_blkq")];
    let attach = ["attach", "--name", "d", &image, "--export", "vhost-user-blk", "--export", "nbd"];
    let output = std::process::Command::new("sh")
        .args(limited)
        .args(attach)
        .env("BLKQ_STATE_DIR", place.state())
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let warnings = String::from_utf8(output.stderr).unwrap();
    assert!(warnings.contains("some or all queues of virtual machines are not served"), "{warnings}");
    let mut front = FrontEnd::started(&place.state().join("d.vhost"), FEATURES, 1);
    let mut nbd = session(String::from_utf8(output.stdout).unwrap().lines().nth(1).unwrap(), "d");
    assert_eq!(front.run(0, 0, 0, DATA, 512), 0);
    request(&mut nbd, 0, 1, 0, 512);
    assert_eq!(reply(&mut nbd, 512), (0, 1));
    place.done(&["set", "d", "depth=32"]);
    place.done(&["detach", "d", "--force"]);
}

/// Pages that the kernel counts as pinned by a process, in KiB.
fn pinned_kib(pid: i32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPin:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn registered_memory_is_shown_and_survives_an_upgrade() {
    use crate::front_end::{DATA, FEATURES, FrontEnd};
    // Less than what a user may lock by default.
    const SHARED: usize = 2 << 20;
    let place = Place::new("vhost-reg");
    let image = place.image("image", 8 << 20);
    let attach = ["attach", "--name", "d", &image, "--export", "vhost-user-blk", "--register-memory"];
    let null = ["attach", "null:1M", "--export", "vhost-user-blk", "--register-memory"];
    assert!(place.refused(&null).contains("--register-memory is for image files"));
    let nbd = ["attach", &image, "--export", "nbd", "--register-memory"];
    assert!(place.refused(&nbd).contains("add --export vhost-user-blk"));
    place.done(&attach);
    let shown = || place.json(&["show", "d", "--json"])["settings"]["register-memory"].clone();
    assert_eq!(shown(), "on, without a virtual machine yet");
    let before = pinned_kib(place.pid("d"));

    let path = place.state().join("d.vhost");
    let mut front = FrontEnd::sharing(&path, FEATURES, 1, SHARED);
    let inflight = front.keep_record();
    front.start(0, 0);
    assert_eq!(front.run(0, 1, 0, DATA, 4096), 0);
    assert_eq!(shown(), "on, 2 MiB with each engine");
    let registered = || place.json(&["stat", "d", "--json"])["vhost_user"]["registered"].as_u64().unwrap();
    wait_until("it is counted", || registered() == 1);
    assert!(place.done(&["stat", "d"]).contains(" 1 in registered memory\n"));
    assert!(pinned_kib(place.pid("d")) >= before + (SHARED as u64 >> 10));

    place.done(&["upgrade", "d"]);
    assert_eq!(shown(), "on, without a virtual machine yet");
    front.reconnect(&path, FEATURES, &inflight);
    assert_eq!(front.run(0, 0, 0, DATA, 4096), 0);
    assert_eq!(shown(), "on, 2 MiB with each engine");
    drop(front);
    let pid = place.pid("d");
    wait_until("it is unpinned", || pinned_kib(pid) < SHARED as u64 >> 10);
    // The option is one of the record only if it is given: an earlier program reads the others.
    let options = &place.json(&["show", "d", "--json"])["attach_options"]["options"];
    assert_eq!(options["register_memory"], true);
}

/// A daemon without privileges, of a user that may lock exactly as much as the guest has: the ring
/// takes some of that, and the kernel refuses.
#[test]
fn a_limit_of_locked_memory_is_named_and_serves_all_the_same() {
    use crate::front_end::{DATA, FEATURES, FrontEnd, MEMORY};
    use std::os::unix::fs::chown;
    use std::os::unix::process::CommandExt;
    const USER: u32 = 61_234;
    if !rustix::process::geteuid().is_root() {
        eprintln!("not run: only root becomes another user");
        return;
    }
    for (bytes, says) in [
        (MEMORY as u64 - 4096, "8 MiB of locked memory, but 7 MiB may be locked"),
        (MEMORY as u64, "Cannot allocate memory (os error 12); the limit of locked memory is too small"),
    ] {
        let place = Place::new("vhost-limit");
        let image = place.image("image", 8 << 20);
        // A program that the other user may run.
        let program = place.dir.join("blkq");
        fs::copy(env!("CARGO_BIN_EXE_blkq"), &program).unwrap();
        for path in [place.dir.to_str().unwrap(), &image] {
            chown(path, Some(USER), Some(USER)).unwrap();
        }
        let words = ["attach", "--name", "d", &image, "--export", "vhost-user-blk", "--register-memory"];
        let mut attach = std::process::Command::new(&program);
        attach.args(words).env("BLKQ_STATE_DIR", place.state()).uid(USER).gid(USER);
        // SAFETY: one system call, which allocates nothing.
        unsafe {
            attach.pre_exec(move || {
                let limit = rustix::process::Rlimit { current: Some(bytes), maximum: Some(bytes) };
                Ok(rustix::process::setrlimit(rustix::process::Resource::Memlock, limit)?)
            })
        };
        let output = attach.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let path = place.state().join("d.vhost");
        let mut front = FrontEnd::started(&path, FEATURES, 1);
        assert_eq!(front.run(0, 1, 0, DATA, 4096), 0);
        // The daemon writes what the device has reported a little later.
        let log = || fs::read_to_string(place.state().join("d.log")).unwrap();
        wait_until(&format!("the log has {says}"), || {
            log().contains("without --register-memory") && log().contains(says)
        });
        let info = place.json(&["show", "d", "--json"]);
        assert_eq!(
            info["settings"]["register-memory"],
            "on, but the memory of the guest is not registered (see the warning)"
        );
        assert!(info["warnings"].to_string().contains(says), "{info}");
    }
}

#[test]
fn an_upgrade_hands_a_guest_over() {
    hand_over("vhost-upgrade", "raw");
}

#[test]
fn an_upgrade_hands_a_guest_of_a_qcow2_image_over() {
    hand_over("vhost-upgrade-qcow2", "qcow2");
}

/// `blkq upgrade` hands the disk to a new daemon, with its settings, and no request is lost.
fn hand_over(test: &str, format: &str) {
    use crate::front_end::{DATA, FEATURES, FrontEnd, GET_CONFIG, SET_CONFIG, words};
    let place = Place::new(test);
    let image = place.dir.join("image").to_str().unwrap().to_owned();
    let create = ["create", "-q", "-f", format, &image, "8M"];
    assert!(std::process::Command::new("qemu-img").args(create).status().unwrap().success());
    place.done(&["attach", "--name", "d", &image, "--format", format, "--export", "vhost-user-blk"]);
    place.done(&["set", "d", "depth=32", "limit=iops=100000", "on-error=hold", "hang-warning=7"]);
    let path = place.state().join("d.vhost");
    let mut front = FrontEnd::started(&path, FEATURES, 1);
    assert!(place.refused(&["upgrade", "d"]).contains("does not track requests in flight"));
    assert_eq!(front.run(0, 1, 0, DATA, 4096), 0);
    front.stop(0);
    let inflight = front.keep_record();
    front.start(0, 1);
    let write_cache = |value: u8| [words(&[32, 1, 0]), vec![value]].concat();
    front.connection.done(SET_CONFIG, &write_cache(0), &[]);
    let old = place.pid("d");
    for _ in 0..8 {
        front.submit(0, 1, 0, DATA, 4096);
    }
    front.kick(0);
    let printed = place.done(&["upgrade", "d"]);
    assert_eq!(printed, format!("vhost-user:{}\n", path.display()));
    assert_ne!(place.pid("d"), old);
    let settings = &place.json(&["show", "d", "--json"])["settings"];
    assert_eq!((&settings["depth"], &settings["hang-warning"]), (&32.into(), &7.into()));
    assert_eq!((&settings["limit"], &settings["on-error"]), (&"iops=100000".into(), &"hold".into()));
    front.reconnect(&path, FEATURES, &inflight);
    assert!(front.wait(0, 8).iter().all(|it| it.1 == 0));
    assert_eq!(front.run(0, 0, 0, DATA, 4096), 0);
    // A front end does not switch the write cache off again.
    assert_eq!(front.connection.ask(GET_CONFIG, &write_cache(1)).payload[12..], [0]);
}

#[test]
fn the_options_of_virtual_machines_are_printed() {
    let place = Place::new("paste");
    let image = place.image("disk.img", 1 << 20);
    place.done(&["attach", &image, "--name", "d", "--export-name", "a,b <c>"]);
    let socket = place.state().join("d.nbd").display().to_string();
    let lines = place.done(&["show", "d", "--qemu"]);
    let expected = format!(
        "-blockdev 'driver=nbd,node-name=blkq-d,server.type=unix,server.path={socket},export=a,,b <c>,discard=unmap' \\\n\
         -device virtio-blk-pci,drive=blkq-d\n"
    );
    assert_eq!(lines, expected);
    // A shell and QEMU can parse the lines.
    let read = format!("set -- {lines}\nqemu-io --image-opts \"$2\" -c 'read -P 0 0 1M'");
    let read = Command::new("sh").args(["-c", &read]).output().unwrap();
    assert!(String::from_utf8_lossy(&read.stdout).contains("read 1048576/1048576"), "{read:?}");
    let element = place.done(&["show", "d", "--libvirt"]);
    let expected = format!(
        "<disk type='network' device='disk'>\n  <driver name='qemu' type='raw' discard='unmap'/>\n  \
         <source protocol='nbd' name='a,b &lt;c&gt;'>\n    <host transport='unix' socket='{socket}'/>\n  \
         </source>\n  <target dev='vda' bus='virtio'/>\n</disk>\n"
    );
    assert_eq!(element, expected);

    place.done(&["attach", "null:1M", "--name", "v", "--export", "vhost-user-blk", "--export", "nbd"]);
    let socket = place.state().join("v.vhost").display().to_string();
    let output = place.run(&["show", "v", "--qemu"]);
    let expected = format!(
        "-chardev socket,id=blkq-v,path={socket},reconnect-ms=1000 \\\n\
         -device vhost-user-blk-pci,chardev=blkq-v,num-queues=1\n"
    );
    assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
    assert!(String::from_utf8(output.stderr).unwrap().contains("memory-backend-memfd,id=mem,share=on"));
    let element = place.done(&["show", "v", "--libvirt"]);
    assert!(element.contains(&format!("<source type='unix' path='{socket}'><reconnect")), "{element}");
    place.done(&["detach", "--all"]);
}
