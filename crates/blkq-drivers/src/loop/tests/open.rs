//! Tests of opening an image: errors, sizes, I/O modes and locks.

use super::*;
use crate::image_file::DirectAlign;
use blkq::Disk;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixListener;

/// The threads of the queues may be confined and unable to open files.
#[test]
fn files_for_syncs_are_opened_when_a_disk_is_built() {
    let directory = Directory::new();
    let path = directory.image(MIB);
    let descriptors = || {
        let entries = std::fs::read_dir("/proc/self/fd").unwrap();
        entries
            .filter(|entry| std::fs::read_link(entry.as_ref().unwrap().path()).is_ok_and(|to| to == path))
            .count()
    };
    let device = open(&path, DirectIo::Auto);
    assert_eq!(descriptors(), 2);
    let disk = Disk::builder(Box::new(device)).queues(3).build().unwrap();
    assert_eq!(descriptors(), 5);
    let queues: Vec<_> = (0..3).map(|index| disk.open_queue(index).unwrap()).collect();
    assert_eq!(descriptors(), 5);
    drop(queues);
}

// Contract: direct-io
#[test]
fn each_error_has_the_reason_and_a_hint() {
    let directory = Directory::new();
    let path = directory.image(10_000);
    let given = DriverOptions::new(&path);
    let cases: [(DriverOptions, &str); 10] = [
        (
            DriverOptions { offset: 100, ..given.clone() },
            "the offset 100 is not a multiple of the sector size 512",
        ),
        (DriverOptions { offset: 10_240, ..given.clone() }, "the offset 10240 is beyond the end of"),
        (DriverOptions { size_limit: Some(1000), ..given.clone() }, "the size 1000 is not a multiple"),
        (DriverOptions { size_limit: Some(0), ..given.clone() }, "the size limit must be more than 0"),
        (DriverOptions { size_limit: Some(10_240), ..given.clone() }, "beyond the end of"),
        (
            DriverOptions { offset: 512, size_limit: Some(9728), ..given.clone() },
            "choose less, or extend the image",
        ),
        (DriverOptions { offset: 1 << 63, ..given.clone() }, "is beyond the end of"),
        (
            DriverOptions { logical_block_bytes: Some(1234), ..given.clone() },
            "the sector size must be 512, 1024, 2048 or 4096, not 1234",
        ),
        (
            DriverOptions { logical_block_bytes: Some(4096), offset: 8192, ..given.clone() },
            "less than a sector of 4096",
        ),
        (
            DriverOptions { logical_block_bytes: Some(4096), offset: 512, ..given.clone() },
            "not a multiple of the sector size 4096",
        ),
    ];
    for (options, reason) in cases {
        let message = refusal(&options);
        assert!(message.contains(reason), "{message:?} lacks {reason:?}");
    }
}

#[test]
fn files_that_are_no_images_are_rejected_without_hanging() {
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
        (&directory.file("missing"), "cannot find the image", ErrorKind::NotFound),
        (&dangling, "cannot find the image", ErrorKind::NotFound),
        (&empty, "is empty; give it a size with `truncate", ErrorKind::Invalid),
        (&tiny, "less than a sector of 512; extend it", ErrorKind::Invalid),
    ];
    for (path, reason, kind) in cases {
        for read_only in [false, true] {
            let options = DriverOptions { read_only, ..DriverOptions::new(path) };
            let message = refusal(&options);
            assert!(message.contains(reason), "{message:?} lacks {reason:?}");
            assert_eq!(LoopDevice::open(&options).err().unwrap().kind(), kind);
        }
    }
}

#[test]
fn an_image_that_cannot_be_written_fails_with_a_hint() {
    let directory = Directory::tmpfs("size=1m");
    let path = directory.image(65536);
    run("mount", &["-o", "remount,ro", directory.path.to_str().unwrap()]);
    let message = refusal(&DriverOptions::new(&path));
    assert!(
        message.contains("for writing: ")
            && message.ends_with("; grant write permission, or open it read-only"),
        "{message}"
    );
    let device = LoopDevice::open(&DriverOptions { read_only: true, ..DriverOptions::new(&path) }).unwrap();
    assert!(device.limits().read_only && !device.limits().write_cache);
    let message = device.set_read_only(false).unwrap_err().to_string();
    assert!(message.contains("for writing"), "{message}");
    assert!(device.limits().read_only);
    drop(device);
    run("mount", &["-o", "remount,rw", directory.path.to_str().unwrap()]);
}

#[test]
fn an_image_whose_writes_would_fail_is_opened_for_reading_only() {
    let directory = Directory::new();
    let path = directory.image(MIB);
    let shown = path.to_str().unwrap();
    let read_only = KernelLoop::set_up(&["--read-only", shown]);
    let set_so = KernelLoop::set_up(&[shown]);
    run("blockdev", &["--setro", &set_so.0]);
    let huge = Directory::mount(&["-t", "hugetlbfs", "-o", "size=2M", "blkq-test"]);
    let page = huge.image(2 * MIB);
    for node in [Path::new(&read_only.0), Path::new(&set_so.0), &page] {
        let message = refusal(&DriverOptions::new(node));
        assert!(message.contains("for writing: ") && message.ends_with("; open it read-only"), "{message}");
        let options = DriverOptions { read_only: true, ..DriverOptions::new(node) };
        let device = LoopDevice::open(&options).unwrap();
        assert_eq!(device.set_read_only(false).unwrap_err().kind(), ErrorKind::Denied);
    }
}

// Contract: exclusive
#[test]
fn a_file_that_the_kernel_swaps_to_is_refused() {
    let directory = Directory::new();
    let path = directory.file("swap space");
    std::fs::write(&path, vec![0; MIB as usize]).unwrap();
    run("chmod", &["600", path.to_str().unwrap()]);
    run("mkswap", &[path.to_str().unwrap()]);
    run("swapon", &[path.to_str().unwrap()]);
    let options = DriverOptions { read_only: true, ..DriverOptions::new(&path) };
    let refused = [&DriverOptions::new(&path), &options].map(|options| LoopDevice::open(options).err());
    run("swapoff", &[path.to_str().unwrap()]);
    for error in refused {
        let error = error.unwrap();
        assert_eq!(error.kind(), ErrorKind::Claimed, "{error}");
        assert!(error.to_string().ends_with("it is swap space"), "{error}");
    }
    LoopDevice::open(&DriverOptions::new(&path)).unwrap();
}

#[test]
fn an_image_without_permission_fails_with_a_hint() {
    let directory = Directory::new();
    let path = directory.image(65536);
    run("chmod", &["000", path.to_str().unwrap()]);
    run("chmod", &["755", directory.path.to_str().unwrap()]);
    // In a separate thread, which drops its user id and with it root's capabilities.
    let refused = std::thread::spawn(move || {
        // SAFETY: the system call changes the credentials of this thread only.
        assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) }, 0);
        [true, false].map(|read_only| refusal(&DriverOptions { read_only, ..DriverOptions::new(&path) }))
    });
    let [reading, writing] = refused.join().unwrap();
    assert!(reading.contains("; grant read permission, or open it as its owner"), "{reading}");
    assert!(writing.contains("for writing: ") && writing.contains("; grant write permission"), "{writing}");
}

#[test]
fn a_partial_last_sector_is_not_served_and_a_warning_names_it() {
    let directory = Directory::new();
    let path = directory.image(10_000);
    let device = open(&path, DirectIo::Off);
    assert_eq!(device.limits().capacity_bytes, 9728);
    assert!(device.warnings().iter().any(|w| w.contains("the last 272 bytes of")), "{:?}", device.warnings());
    drop(device);
    let whole = DriverOptions {
        logical_block_bytes: Some(4096),
        size_limit: Some(8192),
        ..options(&path, DirectIo::Off)
    };
    let device = LoopDevice::open(&whole).unwrap();
    assert_eq!(device.warnings(), Vec::<String>::new());
    assert_eq!(device.limits().logical_block_bytes, 4096);
}

// Contract: direct-io
#[test]
fn the_io_mode_follows_from_the_option_and_the_alignment() {
    let align = |offset, assumed| Ok(DirectAlign { memory: 512, offset, assumed });
    let path = Path::new("image");
    let mode = |requested, possible: &Result<_, _>, sector, offset| {
        choose_mode(requested, possible, path, sector, offset).map(|mode| mode.direct.is_some())
    };
    let (on, off, auto) = (DirectIo::On, DirectIo::Off, DirectIo::Auto);
    // A segment may be as short as a sector, so memory alignment limits the sector size as well.
    let fussy = Ok(DirectAlign { memory: 4096, offset: 512, assumed: false });
    assert!(mode(on, &fussy, 4096, 512).unwrap());
    assert!(mode(auto, &align(512, false), 512, 512).unwrap());
    assert!(mode(on, &align(4096, false), 4096, 8192).unwrap());
    assert!(!mode(off, &align(512, false), 512, 0).unwrap());
    assert!(mode(on, &align(512, true), 512, 0).unwrap());
    let sector = ErrorKind::DirectIoSector { needed_bytes: 4096, sector_bytes: 512 };
    let place = ErrorKind::DirectIoOffset { align_bytes: 4096, offset_bytes: 512 };
    let obstacles = [
        (align(4096, false), 512, 0, "the sector size is 512", sector),
        (fussy.clone(), 512, 0, "the sector size is 512", sector),
        (align(4096, false), 4096, 512, "the offset is 512", place),
        (align(65536, false), 4096, 0, "65536 bytes", ErrorKind::NoDirectIo),
        (Err("it is encrypted".to_owned()), 512, 0, "it is encrypted", ErrorKind::NoDirectIo),
    ];
    for (possible, sector, offset, reason, kind) in obstacles {
        let error = mode(on, &possible, sector, offset).unwrap_err();
        assert!(error.to_string().contains(reason), "{error}");
        assert_eq!(error.kind(), kind);
        let fallback = choose_mode(auto, &possible, path, sector, offset).unwrap();
        assert!(fallback.direct.is_none() && !fallback.reason.is_empty());
    }
    assert!(!mode(auto, &align(512, true), 512, 0).unwrap());
}

// Contract: direct-io
#[test]
fn direct_io_on_raises_the_sector_size_to_the_alignment() {
    let directory = Directory::new();
    let path = directory.image(MIB);
    let mut image = ImageFile::open(&path, false).unwrap();
    let sector =
        |image: &ImageFile, requested, direct_io| image.choose_logical_block(requested, direct_io).unwrap();
    image.direct = Ok(DirectAlign { memory: 512, offset: 4096, assumed: false });
    assert_eq!(sector(&image, None, DirectIo::On), 4096);
    image.direct = Ok(DirectAlign { memory: 4096, offset: 512, assumed: false });
    assert_eq!(sector(&image, None, DirectIo::On), 4096);
    assert_eq!(sector(&image, None, DirectIo::Auto), 512);
    assert_eq!(sector(&image, Some(512), DirectIo::On), 512);
}

// Contract: direct-io
#[test]
fn direct_io_auto_reports_why_it_is_buffered() {
    let directory = Directory::new();
    let path = directory.image(MIB);
    let device = open(&path, DirectIo::Auto);
    assert_eq!(fact(&device, "direct-io"), "on");
    assert!(fact(&device, "direct-io-reason").starts_with("alignment "));
    assert_eq!(fact(&device, "direct-io-requested"), "auto");
    assert_eq!(fact(&device, "backing-file"), path.canonicalize().unwrap().display().to_string());
    let directory = Directory::tmpfs("size=1m");
    let device = open(&directory.image(65536), DirectIo::Auto);
    assert_eq!(fact(&device, "direct-io"), "off");
    assert!(!fact(&device, "direct-io-reason").is_empty());
    assert_eq!(device.warnings(), ["direct I/O is off: tmpfs stores files only in the page cache"]);
    // The kernel lets O_DIRECT be set on tmpfs, but the driver refuses it. The warning disappears with its cause.
    device.set(&LoopSetting::DirectIo(DirectIo::Off)).unwrap();
    let on = LoopSetting::DirectIo(DirectIo::On);
    assert_eq!(device.prepare_set(&on).unwrap_err().kind(), ErrorKind::NoDirectIo);
    assert!(device.warnings().is_empty() && device.set(&on).is_err());
    drop(device);
    assert!(refusal(&options(&directory.file("image"), DirectIo::On)).contains("no direct I/O on"));
}

// Contract: direct-io
#[test]
fn files_without_extents_have_no_direct_io() {
    // The kernel serves ext2 and ext3 with its ext4 driver; their files have no extents.
    for kind in ["ext2", "ext3"] {
        let directory = Directory::ext(kind, 1024);
        let path = directory.image(MIB);
        let device = open(&path, DirectIo::Auto);
        let reason = "the file has no extents (ext2, ext3), so its holes are written through the page cache";
        assert_eq!(fact(&device, "direct-io"), "off");
        assert_eq!(device.warnings(), [format!("direct I/O is off: {reason}")]);
        drop(device);
        let refused = LoopDevice::open(&options(&path, DirectIo::On)).err().unwrap();
        assert_eq!(refused.kind(), ErrorKind::NoDirectIo);
        assert!(refused.to_string().ends_with(reason), "{refused}");
    }
    let directory = Directory::ext("ext4", 1024);
    assert_eq!(fact(&open(&directory.image(MIB), DirectIo::Auto), "direct-io"), "on");
}

// Contract: exclusive
#[test]
fn overlapping_attaches_are_refused_unless_shared() {
    let directory = Directory::new();
    let path = directory.image(MIB);
    let window = |offset, size, read_only, shared| DriverOptions {
        offset,
        size_limit: Some(size),
        read_only,
        shared,
        ..DriverOptions::new(&path)
    };
    let half = MIB / 2;
    let writer = LoopDevice::open(&window(0, half, false, false)).unwrap();
    for (read_only, shared) in [(false, false), (true, false), (false, true), (true, true)] {
        let overlapping = window(half - 512, 1024, read_only, shared);
        let message = refusal(&overlapping);
        assert!(message.contains("is in use: bytes 523776 to 524800 are locked"), "{message}");
        assert_eq!(LoopDevice::open(&overlapping).err().unwrap().kind(), ErrorKind::Busy);
    }
    let other = LoopDevice::open(&window(half, half, false, false)).unwrap();
    // A queue and its ring may keep the file open, but the lock is released when the device is dropped.
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

struct KernelLoop(String);

impl KernelLoop {
    fn set_up(words: &[&str]) -> KernelLoop {
        KernelLoop(run("losetup", &[&["-f", "--show"], words].concat()).trim().to_owned())
    }
}

impl Drop for KernelLoop {
    fn drop(&mut self) {
        // The read-only flag would stay for the next user of the loop device.
        run("blockdev", &["--setrw", &self.0]);
        run("losetup", &["-d", &self.0]);
    }
}

fn is_claimed(options: &DriverOptions, reason: &str) {
    let message = refusal(options);
    assert!(message.contains(reason), "{message:?} lacks {reason:?}");
    assert_eq!(LoopDevice::open(options).err().unwrap().kind(), ErrorKind::Claimed);
    LoopDevice::open(&DriverOptions { shared: true, ..options.clone() }).unwrap();
}

// Contract: exclusive
#[test]
fn bytes_used_by_a_kernel_loop_device_are_refused_unless_shared() {
    let directory = Directory::new();
    let path = directory.image(MIB);
    let shown = path.to_str().unwrap();
    let given = DriverOptions::new(&path);
    let kernel = KernelLoop::set_up(&["--offset", "65536", "--sizelimit", "65536", shown]);
    let reason = format!("the kernel's loop device {} uses it", kernel.0);
    is_claimed(&given, &reason);
    is_claimed(&DriverOptions { read_only: true, ..given.clone() }, &reason);
    is_claimed(&DriverOptions { offset: 131_072 - 512, ..given.clone() }, &reason);
    for (offset, size_limit) in [(0, Some(65536)), (131_072, None)] {
        LoopDevice::open(&DriverOptions { offset, size_limit, ..given.clone() }).unwrap();
    }
    // The conflict is found under other names, too: a symbolic link, a hard link, and after the first name is removed.
    let (hard, link) = (directory.file("hard"), directory.file("link"));
    std::fs::hard_link(&path, &hard).unwrap();
    std::os::unix::fs::symlink(&path, &link).unwrap();
    is_claimed(&DriverOptions::new(&hard), &reason);
    is_claimed(&DriverOptions::new(&link), &reason);
    std::fs::remove_file(&path).unwrap();
    is_claimed(&DriverOptions::new(&hard), &reason);
    std::fs::rename(&hard, &path).unwrap();
    drop(kernel);
    // A reader may use the bytes together with a read-only loop device.
    let _kernel = KernelLoop::set_up(&["--read-only", shown]);
    LoopDevice::open(&DriverOptions { read_only: true, ..given.clone() }).unwrap();
    is_claimed(&given, "the kernel's loop device ");
}

// Contract: exclusive
#[test]
fn a_mounted_or_claimed_block_device_is_refused_unless_shared() {
    let directory = Directory::new();
    let path = directory.image(16 * MIB);
    run("mkfs.ext4", &["-q", "-F", path.to_str().unwrap()]);
    let device = KernelLoop::set_up(&[path.to_str().unwrap()]);
    let given = DriverOptions::new(&device.0);
    LoopDevice::open(&given).unwrap();
    let point = directory.file("mounted here");
    std::fs::create_dir(&point).unwrap();
    let point = point.to_str().unwrap();
    for options in ["rw", "ro"] {
        run("mount", &["-o", options, &device.0, point]);
        is_claimed(&given, &format!("is in use: it is mounted on {point}"));
        is_claimed(&DriverOptions { read_only: true, ..given.clone() }, "is in use: it is mounted on");
        unmount(Path::new(point));
    }
    let exclusive = OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(&device.0).unwrap();
    is_claimed(&given, "is in use: the kernel or another program has claimed it");
    drop(exclusive);
    LoopDevice::open(&given).unwrap();
}

// Contract: exclusive
#[test]
fn another_format_is_rejected_unless_raw_is_set() {
    let directory = Directory::new();
    let path = directory.image(MIB);
    for (at, magic, format) in [(0, &b"QFI\xfb"[..], "qcow2"), (MIB - 512, b"conectix", "VHD")] {
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(magic, at).unwrap();
        for direct_io in [DirectIo::On, DirectIo::Off] {
            let given = DriverOptions { direct_io, ..DriverOptions::new(&path) };
            assert!(refusal(&given).ends_with(&format!("is a {format} image, not raw data")));
            assert_eq!(LoopDevice::open(&given).err().unwrap().kind(), ErrorKind::Format);
            // A window of the image is rejected as well.
            refusal(&DriverOptions { offset: 4096, size_limit: Some(4096), ..given.clone() });
            refusal(&DriverOptions { read_only: true, ..given.clone() });
            LoopDevice::open(&DriverOptions { format: ImageFormat::Raw, ..given }).unwrap();
        }
        file.write_all_at(&[0; 8], at).unwrap();
    }
    // Opening leaves no pages in the page cache.
    run("sync", &[path.to_str().unwrap()]);
    File::open(&path)
        .and_then(|file| Ok(rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed)?))
        .unwrap();
    drop(open(&path, DirectIo::On));
    assert_eq!(cached(&path), (0, 0));
}
