//! A device for tests, and memory that a front end shares with it.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
#![allow(dead_code, reason = "each test file uses a part of this module")]

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use blkq::drivers::ram::Ram;
use blkq::testing::wait_until;
use blkq::{Disk, Driver, EngineThread, ErrorKind};
use blkq_drivers::r#loop::{DirectIo, DriverOptions, LoopDevice};
use blkq_export::Listen;
use blkq_export::vhost_user::{Event, RegistrationLimits, Report, VhostUserDevice, VhostUserOptions};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

pub const SIZE: u64 = 16 << 20;

pub fn ram() -> Box<dyn Driver> {
    Box::new(Ram::new(SIZE, 512, false).unwrap())
}

pub fn unique(what: &str) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("blkq-vhost-{}-{number}.{what}", std::process::id()))
}

/// An image of [`SIZE`] zeroes, whose file is removed when it has been opened.
pub fn image(direct_io: DirectIo, sector_size: Option<u32>) -> Box<dyn Driver> {
    // Not in the directory for temporary files, whose file system may not support direct I/O.
    let path = std::env::current_dir().unwrap().join(unique("img").file_name().unwrap());
    std::fs::File::create(&path).unwrap().set_len(SIZE).unwrap();
    let device = open_image(&path, direct_io, sector_size);
    std::fs::remove_file(&path).unwrap();
    device
}

/// Opens an image, once the kernel has completed the I/O of a killed process that had it open.
pub fn open_image(path: &Path, direct_io: DirectIo, sector_size: Option<u32>) -> Box<dyn Driver> {
    let options = DriverOptions { direct_io, logical_block_bytes: sector_size, ..DriverOptions::new(path) };
    let mut device = LoopDevice::open(&options);
    wait_until("no process has the image open", || {
        let is_busy = device.as_ref().is_err_and(|error| error.kind() == ErrorKind::Busy);
        if is_busy {
            device = LoopDevice::open(&options);
        }
        !is_busy
    });
    Box::new(device.unwrap())
}

pub struct Served {
    pub device: VhostUserDevice,
    pub path: PathBuf,
    pub disk: Arc<Disk>,
    _engines: Vec<EngineThread>,
}

pub fn serve(driver: Box<dyn Driver>, queues: usize) -> Served {
    serve_disk(Disk::builder(driver).queues(queues).build().unwrap(), unique("sock"))
}

/// As [`serve`], with guest memory registered.
pub fn serve_registered(driver: Box<dyn Driver>, queues: usize, limits: RegistrationLimits) -> Served {
    let disk = Disk::builder(driver).queues(queues).build().unwrap();
    serve_with(disk, unique("sock"), Some(limits))
}

pub fn serve_disk(disk: Arc<Disk>, path: PathBuf) -> Served {
    serve_with(disk, path, None)
}

fn serve_with(disk: Arc<Disk>, path: PathBuf, register_memory: Option<RegistrationLimits>) -> Served {
    let engines: Vec<EngineThread> = (0..disk.queue_count())
        .map(|queue| EngineThread::spawn("vhost-test", vec![(disk.clone(), queue)]).unwrap())
        .collect();
    let handles: Vec<_> = engines.iter().map(|engine| engine.handle().clone()).collect();
    let event = || Some(Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap()));
    let options = VhostUserOptions {
        serial: "a disk of a test with a long name".into(),
        report_event: event(),
        idle_event: event(),
        register_memory,
        ..VhostUserOptions::default()
    };
    let device = VhostUserDevice::listen(Listen::Unix(path.clone()), options, &disk, &handles).unwrap();
    device.serve().unwrap();
    Served { device, path, disk, _engines: engines }
}

impl Served {
    pub fn report(&self) -> Report {
        let mut reports = Vec::new();
        wait_until("a report", || {
            reports.extend(self.device.take_reports());
            !reports.is_empty()
        });
        reports.remove(0)
    }

    pub fn until_truncated(&self, ring: u32) {
        let report = self.report();
        let is_it = matches!(&report.event, Event::RingRejected(index, why) if *index == ring && why.contains("truncated"));
        assert!(is_it, "{report:?}");
    }

    pub fn until_idle(&self) {
        wait_until("the front end has disconnected", || self.device.connection_count() == 0);
    }
}

pub struct SharedMemory {
    pub file: OwnedFd,
    pub start: *mut u8,
    pub bytes: usize,
}

// SAFETY: the memory is only accessed by raw pointers, and stays mapped as long as the value.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    pub fn new(bytes: usize) -> SharedMemory {
        let file = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, bytes as u64).unwrap();
        SharedMemory::map(file, bytes)
    }

    pub fn map(file: OwnedFd, bytes: usize) -> SharedMemory {
        let (protection, null) = (ProtFlags::READ | ProtFlags::WRITE, std::ptr::null_mut());
        // SAFETY: the kernel chooses the address of the new mapping.
        let start = unsafe { mmap(null, bytes, protection, MapFlags::SHARED, file.as_fd(), 0) };
        SharedMemory { file, start: start.unwrap().cast(), bytes }
    }

    pub fn fd(&self) -> i32 {
        self.file.as_fd().as_raw_fd()
    }

    /// The bytes from offset `at` on, which the device must not use at this time.
    #[allow(
        clippy::mut_from_ref,
        reason = "a test accesses memory that the device does not use at that time"
    )]
    pub fn slice(&self, at: usize, bytes: usize) -> &mut [u8] {
        assert!(at + bytes <= self.bytes);
        // SAFETY: the bytes are inside the mapping.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at), bytes) }
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: the memory was mapped with this length.
        unsafe { munmap(self.start.cast(), self.bytes).unwrap() };
    }
}
