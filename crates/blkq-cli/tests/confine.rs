//! Tries actions that confined threads must not take. Each case runs in a separate process: the test
//! program again, with the name of the case.
// Contract: bounded-input

use std::fs::{self, File};
use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, ExitStatus};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use blkq::drivers::null::{Null, NullOptions};
use blkq::{Bio, Completion, Cqe, Disk, EngineThread, IoBuffer, Sector, Setting, Source, SourceContext};
use blkq_daemon::sandbox::{self, Needs};
use blkq_protocol::system::landlock_abi;
use io_uring::{opcode, types};

const CASE: &str = "BLKQ_CONFINE_CASE";

fn run(case: &str) -> ExitStatus {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "confine::in_a_process_of_its_own", "--nocapture", "--ignored"]).env(CASE, case);
    let mut child = command.spawn().unwrap();
    let status = child.wait().unwrap();
    // The confined process cannot remove its files.
    let _ = fs::remove_dir_all(directory(child.id(), case));
    status
}

fn directory(process: u32, case: &str) -> PathBuf {
    std::env::temp_dir().join(format!("blkq-confine-{process}-{case}"))
}

fn errno(result: std::io::Result<impl Sized>) -> Option<i32> {
    result.err().and_then(|e| e.raw_os_error())
}

struct Files {
    dir: PathBuf,
    image: PathBuf,
}

impl Files {
    fn new(case: &str) -> Files {
        let dir = directory(std::process::id(), case);
        fs::create_dir(&dir).unwrap();
        let image = dir.join("image");
        fs::write(&image, "content").unwrap();
        Files { dir, image }
    }

    fn needs(&self) -> Needs {
        let image = File::options().read(true).custom_flags(libc::O_PATH).open(&self.image).unwrap();
        let removed = vec![self.dir.join("state/x.lock")];
        fs::create_dir(self.dir.join("state")).unwrap();
        for name in ["x.lock", "x.options", "x.json"] {
            fs::write(self.dir.join("state").join(name), "").unwrap();
        }
        Needs { image: Some(OwnedFd::from(image)), removed, ..Needs::default() }
    }
}

#[test]
#[ignore = "run by the other tests, each in a process of its own"]
fn in_a_process_of_its_own() {
    match std::env::var(CASE).unwrap().as_str() {
        "engine" => engine(),
        "control" => control(),
        "execve" => {
            sandbox::engine(false).unwrap();
            let _ = std::os::unix::process::CommandExt::exec(&mut Command::new("/bin/true"));
        }
        "mount" => {
            sandbox::control(&Needs::default()).unwrap();
            // SAFETY: the only memory passed is a string.
            unsafe { libc::umount2(c"/".as_ptr(), libc::MNT_DETACH) };
        }
        "ring" => {
            sandbox::control(&Needs::default()).unwrap();
            let _ = blkq::ring::probe();
        }
        "register" => {
            let ring = io_uring::IoUring::new(1).unwrap();
            let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
            sandbox::control(&Needs::default()).unwrap();
            let submitter = ring.submitter();
            submitter.register_eventfd(event.as_raw_fd()).unwrap();
            submitter.unregister_eventfd().unwrap();
            let _ = submitter.register_files(&[event.as_raw_fd()]);
        }
        case => panic!("no case {case}"),
    }
}

fn engine() {
    let files = Files::new("engine");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let null = Null::new(NullOptions::new(1 << 20)).unwrap();
    let disk = Disk::builder(Box::new(null)).build().unwrap();
    sandbox::engine(false).unwrap();
    assert_eq!(errno(File::open(&files.image)), Some(libc::ENOSYS));
    assert_eq!(errno(UnixStream::pair()), Some(libc::ENOSYS));
    assert_eq!(errno(TcpStream::connect(address)), Some(libc::ENOSYS));
    assert_eq!(errno(Command::new("/bin/true").spawn().map(drop)), Some(libc::ENOSYS));
    // Threads inherit the restrictions.
    let opened = std::thread::spawn(move || errno(File::open(&files.image)));
    assert_eq!(opened.join().unwrap(), Some(libc::ENOSYS));
    // The ring opens no files, creates no sockets and sends to no addresses either.
    let engine = EngineThread::spawn("engine", vec![(disk.clone(), 0)]).unwrap();
    let (results, received) = channel();
    engine.handle().add_source(move || Box::new(Opener(results))).unwrap();
    assert_eq!([(); 4].map(|()| received.recv()), [Ok(-libc::EACCES); 4]);
    // A confined engine has no membarrier(2) and cannot change settings; the device still serves requests.
    let changed = disk.clone();
    let _ = std::thread::spawn(move || changed.set(Setting::Merge(false))).join();
    let (done, completed) = channel();
    let bio = Bio::read(Sector(0), IoBuffer::zeroed(512), 0);
    disk.submitter().submit(bio, move |result, _| done.send(result).unwrap());
    assert_eq!(completed.recv_timeout(Duration::from_secs(60)), Ok(Ok(())));
}

/// Submits operations that open a file, create a socket, and send to an address.
struct Opener(Sender<i32>);

// SAFETY: this is the only source of its engine.
unsafe impl Source for Opener {
    fn start(&mut self, cx: &mut SourceContext<'_>) -> Result<(), blkq::Error> {
        let path = c"/etc/passwd";
        let open = opcode::OpenAt::new(types::Fd(libc::AT_FDCWD), path.as_ptr()).build();
        let socket = opcode::Socket::new(libc::AF_UNIX, libc::SOCK_STREAM, 0).build();
        let send = opcode::Send::new(types::Fd(0), path.as_ptr().cast(), 1).build();
        // SAFETY: a msghdr of zeroes is an empty message.
        let message = Box::leak(Box::new(unsafe { std::mem::zeroed::<libc::msghdr>() }));
        let send_message = opcode::SendMsg::new(types::Fd(0), &raw const *message).build();
        for entry in [open, socket, send, send_message] {
            // SAFETY: path and message live as long as the program.
            unsafe { cx.push(entry, 0) };
        }
        Ok(())
    }

    fn on_cqe(&mut self, _: &mut SourceContext<'_>, cqe: Cqe) {
        self.0.send(cqe.result).unwrap();
    }

    fn on_bio(&mut self, _: &mut SourceContext<'_>, _: Completion) {}
    fn on_turn(&mut self, _: &mut SourceContext<'_>) {}
    fn stop(&mut self, _: &mut SourceContext<'_>, _: bool) {}

    fn is_stopped(&self) -> bool {
        true
    }
}

fn control() {
    let files = Files::new("control");
    let needs = files.needs();
    let abi = landlock_abi();
    assert!(abi > 0, "this kernel has no Landlock");
    let null = Null::new(NullOptions::new(1 << 20)).unwrap();
    let disk = Disk::builder(Box::new(null)).build().unwrap();
    let state = sandbox::control(&needs).unwrap();
    assert!(state.no_new_privileges && state.seccomp);
    assert_eq!((state.capabilities.as_str(), state.landlock_abi), ("none", abi));
    // The declared needs are met.
    File::options().read(true).write(true).open(&files.image).unwrap();
    File::options().write(true).truncate(true).open(&files.image).unwrap();
    fs::remove_file(&needs.removed[0]).unwrap();
    disk.set(Setting::Merge(false)).unwrap();
    assert_eq!(errno(UnixStream::pair()), Some(libc::ENOSYS));
    // Everything else is denied.
    for path in ["/etc/passwd", "/dev/null", "/proc/self/maps"] {
        assert_eq!(File::open(path).err().unwrap().kind(), ErrorKind::PermissionDenied, "{path}");
    }
    assert_eq!(errno(File::create(files.dir.join("state/new"))), Some(libc::EACCES));
    assert_eq!(errno(fs::remove_file(&files.image)), Some(libc::EACCES));
    // The next daemon trusts these files.
    let [options, json] = ["state/x.options", "state/x.json"].map(|name| files.dir.join(name));
    assert_eq!(errno(File::options().write(true).open(&options)), Some(libc::EACCES));
    assert_eq!(errno(fs::rename(&json, &options)), Some(libc::EACCES));
    assert_eq!(errno(fs::hard_link(&json, files.dir.join("state/new"))), Some(libc::ENOSYS));
    let mode = fs::Permissions::from_mode(0o600);
    assert_eq!(errno(fs::set_permissions(&json, mode)), Some(libc::ENOSYS));
    // New sockets are denied too.
    assert_eq!(errno(std::os::unix::net::UnixDatagram::unbound()), Some(libc::ENOSYS));
    assert_eq!(errno(TcpListener::bind("127.0.0.1:0")), Some(libc::ENOSYS));
}

#[test]
fn a_confined_engine_opens_no_files_and_makes_no_sockets() {
    assert!(run("engine").success());
}

#[test]
fn the_control_plane_has_the_image_and_what_it_removes() {
    assert!(run("control").success());
}

#[test]
fn a_deadly_call_kills_the_process() {
    for case in ["execve", "mount", "ring", "register"] {
        assert_eq!(run(case).signal(), Some(libc::SIGSYS), "{case}");
    }
}
