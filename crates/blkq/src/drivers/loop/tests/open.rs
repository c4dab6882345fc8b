//! Opening: refusals, sizes, locks.

use super::*;
use std::os::unix::net::UnixListener;

#[test]
fn each_refusal_says_what_why_and_the_cure() {
    let directory = Directory::new();
    let path = directory.image(10_000);
    let given = LoopOptions::new(&path);
    let cases: [(LoopOptions, &str); 10] = [
        (
            LoopOptions { offset: 100, ..given.clone() },
            "the offset 100 is not a multiple of the sector size 512",
        ),
        (LoopOptions { offset: 10_240, ..given.clone() }, "the offset 10240 is beyond the end of"),
        (LoopOptions { size_limit: Some(1000), ..given.clone() }, "the size 1000 is not a multiple"),
        (LoopOptions { size_limit: Some(0), ..given.clone() }, "the size 0 is not a multiple"),
        (LoopOptions { size_limit: Some(10_240), ..given.clone() }, "beyond the end of"),
        (
            LoopOptions { offset: 512, size_limit: Some(9728), ..given.clone() },
            "choose less, or extend the image",
        ),
        (LoopOptions { offset: 1 << 63, ..given.clone() }, "is beyond the end of"),
        (
            LoopOptions { sector_size: Some(1234), ..given.clone() },
            "a sector has 512, 1024, 2048 or 4096 bytes, not 1234",
        ),
        (
            LoopOptions { sector_size: Some(4096), offset: 8192, ..given.clone() },
            "less than a sector of 4096",
        ),
        (
            LoopOptions { sector_size: Some(4096), offset: 512, ..given.clone() },
            "not a multiple of the sector size 4096",
        ),
    ];
    for (options, says) in cases {
        let message = refusal(&options);
        assert!(message.contains(says), "{message:?} lacks {says:?}");
    }
}

#[test]
fn what_is_no_image_is_refused_and_a_pipe_does_not_hang() {
    let directory = Directory::new();
    let fifo = directory.file("fifo");
    run("mkfifo", &[fifo.to_str().unwrap()]);
    let socket = directory.file("socket");
    let _listener = UnixListener::bind(&socket).unwrap();
    let empty = directory.file("empty");
    File::create(&empty).unwrap();
    let tiny = directory.file("tiny");
    std::fs::write(&tiny, [0; 511]).unwrap();
    let dangling = directory.file("dangling");
    std::os::unix::fs::symlink("nowhere", &dangling).unwrap();
    let cases: [(&Path, &str, ErrorKind); 8] = [
        (&directory.path, "is a directory: an image must be", ErrorKind::Invalid),
        (&fifo, "is a pipe: an image must be", ErrorKind::Invalid),
        (&socket, "is a socket: an image must be", ErrorKind::Invalid),
        (Path::new("/dev/null"), "is a character device: an image must be", ErrorKind::Invalid),
        (&directory.file("missing"), "create it with `truncate -s SIZE", ErrorKind::NotFound),
        (&dangling, "cannot find the image", ErrorKind::NotFound),
        (&empty, "is empty; give it a size with `truncate", ErrorKind::Invalid),
        (&tiny, "less than a sector of 512; extend it", ErrorKind::Invalid),
    ];
    for (path, says, kind) in cases {
        for read_only in [false, true] {
            let options = LoopOptions { read_only, ..LoopOptions::new(path) };
            let message = refusal(&options);
            assert!(message.contains(says), "{message:?} lacks {says:?}");
            assert_eq!(LoopDevice::open(&options).err().unwrap().kind(), kind);
        }
    }
}

#[test]
fn an_image_that_cannot_be_written_is_refused_with_the_cure() {
    let directory = Directory::tmpfs("size=1m");
    let path = directory.image(65536);
    run("mount", &["-o", "remount,ro", directory.path.to_str().unwrap()]);
    let message = refusal(&LoopOptions::new(&path));
    assert!(
        message.contains("for writing; give write permission, or attach it with --read-only"),
        "{message}"
    );
    let device = LoopDevice::open(&LoopOptions { read_only: true, ..LoopOptions::new(&path) }).unwrap();
    assert!(device.limits().read_only && !device.limits().write_cache);
    let message = device.set("read-only", "off").unwrap_err().to_string();
    assert!(message.contains("for writing"), "{message}");
    assert!(device.limits().read_only);
    drop(device);
    run("mount", &["-o", "remount,rw", directory.path.to_str().unwrap()]);
}

#[test]
fn an_image_that_its_user_may_not_open_is_refused_with_the_cure() {
    let directory = Directory::new();
    let path = directory.image(65536);
    run("chmod", &["000", path.to_str().unwrap()]);
    run("chmod", &["755", directory.path.to_str().unwrap()]);
    // In a thread of its own, with its own identity and without root's capabilities.
    let refused = std::thread::spawn(move || {
        // SAFETY: the system call changes the credentials of this thread only.
        assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) }, 0);
        [true, false].map(|read_only| refusal(&LoopOptions { read_only, ..LoopOptions::new(&path) }))
    });
    let [reading, writing] = refused.join().unwrap();
    assert!(reading.contains("; give read permission, or attach it as its owner"), "{reading}");
    assert!(writing.contains("for writing; give write permission"), "{writing}");
}

#[test]
fn the_tail_that_fills_no_sector_is_left_out_and_named() {
    let directory = Directory::new();
    let path = directory.image(10_000);
    let device = open(&path, DirectIo::Off);
    assert_eq!(device.limits().capacity_bytes, 9728);
    assert!(device.warnings().iter().any(|w| w.contains("the last 272 bytes of")), "{:?}", device.warnings());
    drop(device);
    let whole =
        LoopOptions { sector_size: Some(4096), size_limit: Some(8192), ..options(&path, DirectIo::Off) };
    let device = LoopDevice::open(&whole).unwrap();
    assert_eq!(device.warnings(), Vec::<String>::new());
    assert_eq!(device.limits().logical_block_bytes, 4096);
}

#[test]
fn the_mode_follows_from_what_is_asked_and_what_is_demanded() {
    let align = |offset, assumed| Ok(DirectAlign { memory: 512, offset, assumed });
    let path = Path::new("image");
    let mode = |requested, possible: &Result<_, _>, sector, offset| {
        choose_mode(requested, possible, path, sector, offset).map(|mode| mode.direct.is_some())
    };
    let (on, off, auto) = (DirectIo::On, DirectIo::Off, DirectIo::Auto);
    assert!(mode(auto, &align(512, false), 512, 512).unwrap());
    assert!(mode(on, &align(4096, false), 4096, 8192).unwrap());
    assert!(!mode(off, &align(512, false), 512, 0).unwrap());
    assert!(mode(on, &align(512, true), 512, 0).unwrap());
    let obstacles = [
        (align(4096, false), 512, 0, "attach with --sector-size 4096"),
        (align(4096, false), 4096, 512, "choose another offset"),
        (align(65536, false), 4096, 0, "use --direct-io off or auto"),
        (Err("it is encrypted".to_owned()), 512, 0, "it is encrypted; use --direct-io off or auto"),
    ];
    for (possible, sector, offset, says) in obstacles {
        let error = mode(on, &possible, sector, offset).unwrap_err();
        assert!(error.to_string().contains(says), "{error}");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        let fallback = choose_mode(auto, &possible, path, sector, offset).unwrap();
        assert!(fallback.direct.is_none() && !fallback.reason.is_empty());
    }
    assert!(!mode(auto, &align(512, true), 512, 0).unwrap());
}

#[test]
fn direct_io_on_raises_the_sector_to_what_is_demanded() {
    let directory = Directory::new();
    let path = directory.image(MIB);
    let mut backing = Backing::open(&path, false).unwrap();
    backing.direct = Ok(DirectAlign { memory: 512, offset: 4096, assumed: false });
    assert_eq!(choose_sector(&options(&path, DirectIo::On), &backing).unwrap(), 4096);
    assert_eq!(choose_sector(&options(&path, DirectIo::Auto), &backing).unwrap(), 512);
    let asked = LoopOptions { sector_size: Some(512), ..options(&path, DirectIo::On) };
    assert_eq!(choose_sector(&asked, &backing).unwrap(), 512);
}

#[test]
fn auto_says_why_it_is_buffered() {
    let directory = Directory::new();
    let path = directory.image(MIB);
    let device = open(&path, DirectIo::Auto);
    assert!(fact(&device, "direct-io").starts_with("on (offsets by "), "{}", fact(&device, "direct-io"));
    assert_eq!(fact(&device, "direct-io-requested"), "auto");
    assert_eq!(fact(&device, "backing-file"), path.canonicalize().unwrap().display().to_string());
    let directory = Directory::tmpfs("size=1m");
    let device = open(&directory.image(65536), DirectIo::Auto);
    assert!(fact(&device, "direct-io").starts_with("off ("), "{}", fact(&device, "direct-io"));
    assert!(device.warnings()[0].starts_with("direct I/O is off: "), "{:?}", device.warnings());
}

#[test]
fn overlapping_attaches_are_refused_unless_shared() {
    let directory = Directory::new();
    let path = directory.image(MIB);
    let window = |offset, size, read_only, shared| LoopOptions {
        offset,
        size_limit: Some(size),
        read_only,
        shared,
        ..LoopOptions::new(&path)
    };
    let half = MIB / 2;
    let writer = LoopDevice::open(&window(0, half, false, false)).unwrap();
    for (read_only, shared) in [(false, false), (true, false), (false, true), (true, true)] {
        let overlapping = window(half - 512, 1024, read_only, shared);
        let message = refusal(&overlapping);
        assert!(message.contains("is in use") && message.contains("--shared"), "{message}");
        assert_eq!(LoopDevice::open(&overlapping).err().unwrap().kind(), ErrorKind::Busy);
    }
    let other = LoopDevice::open(&window(half, half, false, false)).unwrap();
    // A queue keeps the file open, and the ring may: the lock ends with the device.
    let harness = Harness::open(&writer).unwrap();
    drop(writer);
    let reader = LoopDevice::open(&window(0, half, true, false)).unwrap();
    let readers = LoopDevice::open(&window(0, half, true, false)).unwrap();
    let sharing = LoopDevice::open(&window(0, half, false, true)).unwrap();
    refusal(&window(0, 512, false, false));
    drop((reader, readers, sharing, other));
    LoopDevice::open(&window(0, MIB, false, false)).unwrap();
    drop(harness);
}
