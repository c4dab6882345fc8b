//! An open image, with the connection to its cluster and its pool, which are closed in the opposite order. Every call
//! here may wait for the cluster, so all of them run on the thread of the image (`thread.rs`).

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;
use std::{fmt, io, thread};

use blkq::sync::{Mutex, lock};
use blkq::{Error, ErrorKind};
use rustix::event::{EventfdFlags, eventfd};

use super::library::{
    self, EVENT_TYPE_EVENTFD, FEATURE_EXCLUSIVE_LOCK, FEATURE_FAST_DIFF, Handle, ImageInfo, ImageSetting,
    LOCK_MODE_EXCLUSIVE, Library, Watcher,
};
use crate::errors::invalid;
use crate::options::DriverOptions;

/// Settings of the Ceph client that override those of the user, because other values would block the thread that
/// submits. The first two remove librados' limits on requests in flight, which the depth of the queue limits already.
const SETTINGS: [(&CStr, &CStr); 3] = [
    (c"objecter_inflight_ops", c"0"),
    (c"objecter_inflight_op_bytes", c"0"),
    // Otherwise the submitting thread would do librbd's work and take its locks.
    (c"rbd_non_blocking_aio", c"true"),
];
/// The setting for librbd's cache. The policy `writethrough` would be enough for writes, but it also caches reads, which
/// become stale if other clients write to the image.
const CACHE: &CStr = c"rbd_cache";
/// The setting for the smallest discard that has an effect, and its default in bytes.
const DISCARD_GRANULARITY: (&CStr, u32) = (c"rbd_discard_granularity_bytes", 65536);
/// First length of the list of an image's settings. If it is too short, the call is repeated.
const SETTINGS_OF_IMAGE: usize = 128;
/// First length of the list of clients that have an image open, extended like [`SETTINGS_OF_IMAGE`].
const WATCHERS: usize = 16;

/// The allocated ranges in bytes of the image, in any order.
pub type Allocated = Vec<Range<u64>>;

/// The callback of `rbd_diff_iterate2`, called for each range. `exists` is 0 for a range without data.
///
/// # Safety
/// `argument` must point to an [`Allocated`] that nothing else uses during the call.
pub unsafe extern "C" fn found(offset: u64, bytes: usize, exists: c_int, argument: *mut c_void) -> c_int {
    // SAFETY: the caller's promise.
    let allocated = unsafe { &mut *argument.cast::<Allocated>() };
    if exists != 0 {
        allocated.push(offset..offset.saturating_add(bytes as u64));
    }
    0
}

/// The name of an image in a cluster, or of one of its snapshots: `POOL[/NAMESPACE]/IMAGE[@SNAPSHOT]`, as in Ceph's `rbd`
/// command. No part is empty or contains a slash, and only the
/// name of the pool may contain an `@`. Only parsing creates it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RbdSpec {
    pub(super) pool: String,
    /// `None`: the default namespace of the pool.
    pub(super) namespace: Option<String>,
    /// The name without the pool and the namespace.
    pub image: String,
    /// A snapshot is read-only.
    pub snapshot: Option<String>,
}

impl FromStr for RbdSpec {
    type Err = Error;

    fn from_str(text: &str) -> Result<RbdSpec, Error> {
        let refuse = |why: &str| {
            let message =
                format!("{text:?} is not an RBD image: {why}; write rbd:POOL[/NAMESPACE]/IMAGE[@SNAPSHOT]");
            Err(invalid(message))
        };
        let (pool, namespace, image) = match text.split('/').collect::<Vec<_>>()[..] {
            [pool, image] => (pool, None, image),
            [pool, namespace, image] => (pool, Some(namespace), image),
            [_] => return refuse("the pool is missing"),
            _ => return refuse("it has more than two slashes"),
        };
        let (image, snapshot) =
            image.split_once('@').map_or((image, None), |(image, name)| (image, Some(name)));
        let parts = [Some(pool), namespace, Some(image), snapshot];
        if parts.iter().flatten().any(|part| part.is_empty()) {
            return refuse("a name in it is empty");
        }
        if [namespace, snapshot].iter().flatten().any(|part| part.contains('@')) {
            return refuse("a namespace or a snapshot contains @");
        }
        if CString::new(text).is_err() {
            return refuse("it contains a zero byte");
        }
        Ok(RbdSpec {
            pool: pool.to_owned(),
            namespace: namespace.map(str::to_owned),
            image: image.to_owned(),
            snapshot: snapshot.map(str::to_owned),
        })
    }
}

impl fmt::Display for RbdSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RbdSpec { pool, namespace, image, snapshot } = self;
        let part = |before: &str, name: &Option<String>, after: &str| {
            name.as_ref().map_or(String::new(), |name| format!("{before}{name}{after}"))
        };
        write!(f, "{pool}/{}{image}{}", part("", namespace, "/"), part("@", snapshot, ""))
    }
}

/// The protection of an image against other writers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lock {
    /// No lock was taken, because the image is only read or is shared.
    None,
    /// The image does not have the feature `exclusive-lock`.
    Missing,
    /// This client holds the exclusive lock, and does not pass it to other clients.
    Held,
}

pub struct Facts {
    /// Size of the image, in bytes.
    pub size: u64,
    /// Size of an object, in bytes.
    pub object_size: u64,
    /// Number of consecutive bytes in one object, after which the next object of the stripe follows.
    pub stripe_unit: u64,
    pub stripe_count: u64,
    /// The smallest discard that has an effect, in bytes.
    pub discard_granularity: u32,
    pub lock: Lock,
    /// Whether librbd caches the image; `None` if that is unknown.
    pub cached: Option<bool>,
    /// The address under which the cluster lists this client as owner of the lock, if it holds the lock.
    pub owner: Option<String>,
}

/// The name of the Ceph user with `client.`, as librados requires it.
pub fn client(options: &DriverOptions) -> String {
    format!("client.{}", options.ceph_user.as_deref().unwrap_or("admin"))
}

/// Whether the image is never written to: by option, or because it is a snapshot.
pub fn reads_only(spec: &RbdSpec, options: &DriverOptions) -> bool {
    options.read_only || spec.snapshot.is_some()
}

/// The connection to a cluster.
struct Cluster {
    library: &'static Library,
    handle: Handle,
    /// The pool of the image; null until it is open.
    pool: Handle,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if !self.pool.is_null() {
            // SAFETY: made by `rados_ioctx_create`, and destroyed once; its image is closed.
            unsafe { (self.library.rados_ioctx_destroy)(self.pool) }
        }
        // SAFETY: made by `rados_create2`, and shut down once. The pool and the image that used it are closed.
        unsafe { (self.library.rados_shutdown)(self.handle) }
        library::CLIENTS.fetch_sub(1, Ordering::SeqCst);
    }
}

pub struct Image {
    library: &'static Library,
    handle: Handle,
    /// The registration for changes of the image, and the argument of its callback.
    watch: Option<(u64, *const OwnedFd)>,
    /// An eventfd, to which librbd writes for each completed I/O.
    completed: Arc<OwnedFd>,
    // Dropped after the image is closed.
    _cluster: Cluster,
}

// SAFETY: librbd's handles may be used by any thread, and the argument of the callback is not accessed here but only freed.
unsafe impl Send for Image {}

/// The parts of an open image that the data path needs.
#[derive(Clone)]
pub struct Submission {
    pub library: &'static Library,
    /// The handle of the image, which is open until its [`ImageThread`](super::thread::ImageThread) closes it.
    pub image: Handle,
    pub completed: Arc<OwnedFd>,
}

// SAFETY: librbd's handles may be used by any thread.
unsafe impl Send for Submission {}
// SAFETY: as above.
unsafe impl Sync for Submission {}

impl Image {
    /// Opens the image `spec`, and takes its exclusive lock. `step` is called with the name of each
    /// step before it, because any step may block forever. Fails with [`ErrorKind::Busy`] if another client
    /// holds the lock.
    pub fn open(
        spec: &RbdSpec,
        options: &DriverOptions,
        changed: Arc<OwnedFd>,
        step: Step<'_>,
    ) -> Result<(Image, Facts), Error> {
        let library = Library::get()?;
        step("reading the configuration");
        let mut cluster = Cluster::create(library, options)?;
        step("connecting to the monitors");
        // SAFETY: the handle was made and is not connected yet.
        let connected = unsafe { (library.rados_connect)(cluster.handle) };
        check(connected, || format!("cannot connect to the cluster as {}", client(options))).map_err(
            |e| e.with_hint("check the Ceph configuration and the keyring of the user, and whether the monitors are running"),
        )?;
        // Read after the connection, because the monitors have settings for their clients.
        let discard_granularity = cluster.number(DISCARD_GRANULARITY.0).unwrap_or(DISCARD_GRANULARITY.1);
        step("opening the pool");
        cluster.open_pool(spec)?;
        step("opening the image");
        let completed = eventfd(0, EventfdFlags::CLOEXEC)
            .map_err(|e| Error::system("cannot create an eventfd", e))
            .map(Arc::new)?;
        let handle = open_image(&cluster, spec, options)?;
        let mut image = Image { library, handle, watch: None, completed, _cluster: cluster };
        // SAFETY: the image is open, and the descriptor stays open until it is closed.
        let notified = unsafe {
            (library.rbd_set_image_notification)(handle, image.completed.as_raw_fd(), EVENT_TYPE_EVENTFD)
        };
        check(notified, || format!("cannot register for completions of rbd:{spec}"))?;
        let lock = image.take_lock(spec, options, step)?;
        step("reading the size of the image");
        if spec.snapshot.is_none() {
            // Before the size is read, so that no later change is missed.
            image.watch(changed)?;
        }
        let what = || format!("cannot read the layout of rbd:{spec}");
        // SAFETY: all fields are integers or arrays of them, for which zeroes are valid.
        let mut info: ImageInfo = unsafe { std::mem::zeroed() };
        // SAFETY: the image is open, and the call is given the size of the structure.
        check(unsafe { (library.rbd_stat)(handle, &mut info, size_of::<ImageInfo>()) }, what)?;
        let facts = Facts {
            size: info.size,
            object_size: info.object_size,
            stripe_unit: image.property(library.rbd_get_stripe_unit, what)?,
            stripe_count: image.property(library.rbd_get_stripe_count, what)?,
            discard_granularity,
            lock,
            cached: image.setting(CACHE).map(|value| !is_false(&value)),
            // Without the address, a successor has to wait until the cluster drops the lock.
            owner: if lock == Lock::Held { image.lock_owner().ok().flatten() } else { None },
        };
        Ok((image, facts))
    }

    /// The allocated parts of `range`, those of the parent image included if this is a clone. With the
    /// feature `fast-diff` they are whole objects. librbd flushes its cache before it queries the cluster.
    pub fn allocated(&self, range: Range<u64>) -> Result<Allocated, Error> {
        let what = || "cannot read the extents of the image".to_owned();
        let mut allocated = Allocated::new();
        let features = self.property(self.library.rbd_get_features, what)?;
        let whole_object = u8::from(features & FEATURE_FAST_DIFF != 0);
        let (library, length) = (self.library, range.end - range.start);
        // SAFETY: the image is open, and only the callback uses the list until the call returns.
        let result = unsafe {
            (library.rbd_diff_iterate2)(
                self.handle,
                std::ptr::null(),
                range.start,
                length,
                1,
                whole_object,
                Some(found),
                (&raw mut allocated).cast(),
            )
        };
        check(result, what)?;
        Ok(allocated)
    }

    pub fn submission(&self) -> Submission {
        Submission { library: self.library, image: self.handle, completed: self.completed.clone() }
    }

    /// The current size of the image, in bytes.
    pub fn size(&self) -> Result<u64, Error> {
        self.property(self.library.rbd_get_size, || "cannot read the size of the image".to_owned())
    }

    /// The number that `get` returns, a function of librbd for one property of the image.
    fn property(&self, get: GetCall, what: impl FnOnce() -> String) -> Result<u64, Error> {
        let mut number = 0;
        // SAFETY: the image is open.
        check(unsafe { get(self.handle, &mut number) }, what)?;
        Ok(number)
    }

    /// The value of a setting that is in force for the image. A setting of the image takes precedence over one of its pool,
    /// and that over the configuration.
    fn setting(&self, name: &CStr) -> Option<String> {
        let list = |settings: &mut [ImageSetting], count: &mut usize| {
            let mut number = *count as c_int;
            // SAFETY: the image is open, and there is room for as many as `number` says.
            let result = unsafe {
                (self.library.rbd_config_image_list)(self.handle, settings.as_mut_ptr(), &mut number)
            };
            *count = usize::try_from(number).unwrap_or(0);
            result
        };
        // SAFETY: the fields are integers and raw pointers, for which zeroes are valid.
        let mut settings = listed(SETTINGS_OF_IMAGE, || unsafe { std::mem::zeroed() }, list).ok()?;
        // SAFETY: the call has set name and value of each listed setting to C strings.
        let value = settings.iter().find_map(|setting| unsafe {
            let found = CStr::from_ptr(setting.name) == name;
            found.then(|| CStr::from_ptr(setting.value).to_string_lossy().into_owned())
        });
        let count = settings.len() as c_int;
        // SAFETY: freed once, by the library that made them.
        unsafe { (self.library.rbd_config_image_list_cleanup)(settings.as_mut_ptr(), count) };
        value
    }

    /// Takes the exclusive lock of an image that will be written, until the image is closed. A lock taken explicitly is not
    /// passed to a client that requests it. If another client has the lock and still has the image open, this fails. If
    /// the owner of the lock no longer has the image open, librbd breaks its lock, and the cluster blocklists that client.
    fn take_lock(&self, spec: &RbdSpec, options: &DriverOptions, step: Step<'_>) -> Result<Lock, Error> {
        if reads_only(spec, options) || options.shared {
            return Ok(Lock::None);
        }
        step("reading the features of the image");
        let what = || format!("cannot read the features of rbd:{spec}");
        let features = self.property(self.library.rbd_get_features, what)?;
        if features & FEATURE_EXCLUSIVE_LOCK == 0 {
            return Ok(Lock::Missing);
        }
        step("acquiring the exclusive lock of the image");
        let what = || format!("cannot acquire the exclusive lock of rbd:{spec}");
        let owner = || self.lock_owner().map_err(|errno| failed(errno, what()));
        let mut locked_by = owner()?;
        if let Some(address) = locked_by.as_ref().filter(|owner| options.predecessor.as_ref() == Some(owner))
        {
            step("breaking the lock of the previous process");
            let address = text(address.as_bytes())?;
            // The result is ignored: if the Ceph user may not break locks, the lock is free only once the cluster has
            // noticed that its owner exited.
            // SAFETY: the image is open, and the address is a C string.
            unsafe { (self.library.rbd_lock_break)(self.handle, LOCK_MODE_EXCLUSIVE, address.as_ptr()) };
            locked_by = owner()?;
        }
        if let Some(owner) = locked_by
            && self.clients().map_err(|errno| failed(errno, what()))?.contains(&owner)
        {
            let message = format!(
                "rbd:{spec} is locked by the client at {owner} (if that client was killed, its lock expires within 30 seconds)"
            );
            return Err(Error::new(ErrorKind::Busy, message));
        }
        // SAFETY: the image is open.
        match unsafe { (self.library.rbd_lock_acquire)(self.handle, LOCK_MODE_EXCLUSIVE) } {
            0 => Ok(Lock::Held),
            // Another client has taken the lock since the check, and does not release it.
            errno if [-libc::EROFS, -libc::EBUSY, -libc::EAGAIN].contains(&errno) => {
                let message = format!("rbd:{spec} is locked by another client");
                Err(Error::new(ErrorKind::Busy, message))
            }
            errno => Err(failed(errno, what())),
        }
    }

    /// The address of the client that has the exclusive lock, even if that client was killed.
    fn lock_owner(&self) -> Result<Option<String>, c_int> {
        let (mut mode, mut owner, mut count) = (0, std::ptr::null_mut(), 1);
        // SAFETY: the image is open, and there is room for as many owners as `count` says.
        let result =
            unsafe { (self.library.rbd_lock_get_owners)(self.handle, &mut mode, &mut owner, &mut count) };
        match result {
            0 if count == 0 || owner.is_null() => Ok(None),
            // SAFETY: the call has returned a C string, which is freed once, by the library that allocated it.
            0 => unsafe {
                let text = CStr::from_ptr(owner).to_string_lossy().into_owned();
                (self.library.rbd_lock_get_owners_cleanup)(&mut owner, count);
                Ok(Some(text))
            },
            errno if errno == -libc::ENOENT => Ok(None),
            errno => Err(errno),
        }
    }

    /// The addresses of the clients that have the image open. A killed client stays in this list for up to 30 seconds.
    fn clients(&self) -> Result<Vec<String>, c_int> {
        // SAFETY: the image is open, and there is room for as many as `count` says.
        let list = |watchers: &mut [Watcher], count: &mut usize| unsafe {
            (self.library.rbd_watchers_list)(self.handle, watchers.as_mut_ptr(), count)
        };
        // SAFETY: the fields are integers and raw pointers, for which zeroes are valid.
        let mut watchers = listed(WATCHERS, || unsafe { std::mem::zeroed() }, list)?;
        // SAFETY: the call has set the address of each listed client to a C string.
        let address = |watcher: &Watcher| unsafe { CStr::from_ptr(watcher.address) };
        let addresses = watchers.iter().map(|one| address(one).to_string_lossy().into_owned()).collect();
        // SAFETY: freed once, by the library that made them.
        unsafe { (self.library.rbd_watchers_list_cleanup)(watchers.as_mut_ptr(), watchers.len()) };
        Ok(addresses)
    }

    /// Registers for changes of the image: `changed` becomes readable when its size may have changed.
    fn watch(&mut self, changed: Arc<OwnedFd>) -> Result<(), Error> {
        let (mut watch, argument) = (0, Arc::into_raw(changed));
        // SAFETY: the image is open, and the argument is freed only after the registration has ended.
        let result = unsafe {
            (self.library.rbd_update_watch)(
                self.handle,
                &mut watch,
                Some(image_changed),
                argument as *mut c_void,
            )
        };
        check(result, || "cannot watch the image for changes of its size".to_owned()).inspect_err(|_| {
            // SAFETY: the registration has failed, so librbd does not have the argument.
            drop(unsafe { Arc::from_raw(argument) });
        })?;
        self.watch = Some((watch, argument));
        Ok(())
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        if let Some((watch, argument)) = self.watch {
            // SAFETY: the watch is registered, and is unregistered once.
            let result = unsafe { (self.library.rbd_update_unwatch)(self.handle, watch) };
            if result == 0 {
                // SAFETY: the call has waited for callbacks that were running, and no further one begins.
                drop(unsafe { Arc::from_raw(argument) });
            }
        }
        // Closing the image also releases the lock. The result is ignored, because nothing can be done about a failure.
        // SAFETY: the image is open, is closed once, and has no I/O in flight.
        unsafe { (self.library.rbd_close)(self.handle) };
    }
}

/// The callback of `rbd_update_watch`. It runs on a thread of librbd, so it must not block.
unsafe extern "C" fn image_changed(argument: *mut c_void) {
    // SAFETY: the argument of `rbd_update_watch`, a reference that lives until after the last call.
    let changed = unsafe { &*(argument as *const OwnedFd) };
    notify(changed);
}

pub fn notify(event: &OwnedFd) {
    // The write fails only if the counter of the eventfd is at its maximum, and then the eventfd is readable anyway.
    let _ = rustix::io::write(event.as_fd(), &1u64.to_ne_bytes());
}

impl Cluster {
    /// Makes a client with the configuration of `options`, which is not connected yet.
    fn create(library: &'static Library, options: &DriverOptions) -> Result<Cluster, Error> {
        let name = client(options);
        let client = text(name.as_bytes())?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the names are C strings, which the call copies.
        let created = unsafe { (library.rados_create2)(&mut handle, c"ceph".as_ptr(), client.as_ptr(), 0) };
        check(created, || format!("cannot create the Ceph client {name}"))?;
        library::CLIENTS.fetch_add(1, Ordering::SeqCst);
        let cluster = Cluster { library, handle, pool: std::ptr::null_mut() };
        let file = options.ceph_conf.as_ref().map(|path| text(path.as_os_str().as_bytes())).transpose()?;
        let path = file.as_ref().map_or(std::ptr::null(), |file| file.as_ptr());
        // SAFETY: the handle is not connected, and the path is a C string or null.
        check(unsafe { (library.rados_conf_read_file)(handle, path) }, || {
            let name = options.ceph_conf.as_ref().map(|path| path.display().to_string());
            format!("cannot read the Ceph configuration {}", name.as_deref().unwrap_or("/etc/ceph/ceph.conf"))
        })?;
        if let Some(keyring) = &options.ceph_keyring {
            let path = text(keyring.as_os_str().as_bytes())?;
            // SAFETY: as above.
            check(unsafe { (library.rados_conf_set)(handle, c"keyring".as_ptr(), path.as_ptr()) }, || {
                format!("cannot use the keyring {}", keyring.display())
            })?;
        }
        let cache = options.write_through.then_some((CACHE, c"false"));
        for (name, value) in SETTINGS.into_iter().chain(cache) {
            // SAFETY: as above.
            check(unsafe { (library.rados_conf_set)(handle, name.as_ptr(), value.as_ptr()) }, || {
                format!("cannot set the Ceph option {}", name.to_string_lossy())
            })?;
        }
        Ok(cluster)
    }

    fn number(&self, name: &CStr) -> Option<u32> {
        let mut value: [c_char; 32] = [0; 32];
        // SAFETY: the call writes at most as many bytes as it is given, with a zero at the end.
        let result = unsafe {
            (self.library.rados_conf_get)(self.handle, name.as_ptr(), value.as_mut_ptr(), value.len())
        };
        // SAFETY: the call has succeeded, so the buffer contains a C string.
        (result == 0).then(|| unsafe { CStr::from_ptr(value.as_ptr()) }.to_str().ok()?.parse().ok())?
    }

    fn open_pool(&mut self, spec: &RbdSpec) -> Result<(), Error> {
        let name = text(spec.pool.as_bytes())?;
        let mut pool = std::ptr::null_mut();
        // SAFETY: the cluster is connected, and the name is a C string.
        let created = unsafe { (self.library.rados_ioctx_create)(self.handle, name.as_ptr(), &mut pool) };
        check(created, || format!("cannot open the pool {} of rbd:{spec}", spec.pool))?;
        self.pool = pool;
        if let Some(namespace) = &spec.namespace {
            let name = text(namespace.as_bytes())?;
            // SAFETY: the name is a C string, which the call copies.
            unsafe { (self.library.rados_ioctx_set_namespace)(pool, name.as_ptr()) };
        }
        Ok(())
    }
}

/// Opens the image itself. An image that will only be read is opened for writing as well, because librbd reports changes of
/// the size only then. If the Ceph user may not do that, it is opened read-only.
fn open_image(cluster: &Cluster, spec: &RbdSpec, options: &DriverOptions) -> Result<Handle, Error> {
    let library = cluster.library;
    let image = text(spec.image.as_bytes())?;
    let snapshot = spec.snapshot.as_ref().map(|name| text(name.as_bytes())).transpose()?;
    let snapshot = snapshot.as_ref().map_or(std::ptr::null(), |name| name.as_ptr());
    let mut handle = std::ptr::null_mut();
    // SAFETY: the pool is open, and the names are C strings or null.
    let mut open = |open: OpenCall| unsafe { open(cluster.pool, image.as_ptr(), &mut handle, snapshot) };
    let opened = match open(if snapshot.is_null() { library.rbd_open } else { library.rbd_open_read_only }) {
        errno if options.read_only && [-libc::EPERM, -libc::EACCES].contains(&errno) => {
            open(library.rbd_open_read_only)
        }
        result => result,
    };
    check(opened, || format!("cannot open rbd:{spec}"))?;
    Ok(handle)
}

/// Reports the step that begins.
type Step<'a> = &'a dyn Fn(&'static str);
type GetCall = unsafe extern "C" fn(Handle, *mut u64) -> c_int;
type OpenCall = unsafe extern "C" fn(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;

/// The entries that `list`, a call of librbd, writes to an array of at first `count` entries, which `empty` makes. The
/// call sets the count to the number of entries. If there are more than fit, it fails with ERANGE, and is repeated.
fn listed<T>(
    mut count: usize,
    empty: impl Fn() -> T,
    list: impl Fn(&mut [T], &mut usize) -> c_int,
) -> Result<Vec<T>, c_int> {
    loop {
        let room = count;
        let mut entries: Vec<T> = (0..room).map(|_| empty()).collect();
        match list(&mut entries, &mut count) {
            0 => {
                entries.truncate(count);
                return Ok(entries);
            }
            errno if errno == -libc::ERANGE && count > room => {}
            errno => return Err(errno),
        }
    }
}

/// Whether Ceph reads this value of a boolean setting as false.
pub(super) fn is_false(value: &str) -> bool {
    let value = value.trim();
    value.eq_ignore_ascii_case("false") || value.parse() == Ok(0)
}

fn text(bytes: &[u8]) -> Result<CString, Error> {
    CString::new(bytes).map_err(|_| invalid("a name, path or address for the RBD image contains a zero byte"))
}

fn check(result: c_int, what: impl FnOnce() -> String) -> Result<(), Error> {
    if result < 0 { Err(failed(result, what())) } else { Ok(()) }
}

/// The error of a call that returned `result`, a negative errno.
fn failed(result: c_int, what: String) -> Error {
    Error::system(what, io::Error::from_raw_os_error(-result))
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use proptest::prelude::*;

    use crate::extents::describe;

    use super::*;

    proptest! {
        #[test]
        fn extents_agree_with_a_model_byte_by_byte(
            range in (0u64..64, 1u64..64).prop_map(|(start, length)| start..start + length),
            parts in proptest::collection::vec((0u64..128, 0usize..16, 0..2), 0..12),
            max in 1usize..8,
        ) {
            let mut allocated = Allocated::new();
            let mut bytes = [false; 256];
            for (offset, length, exists) in parts {
                // SAFETY: a list, borrowed for the call.
                unsafe { found(offset, length, exists, (&raw mut allocated).cast()) };
                bytes[offset as usize..][..length].iter_mut().for_each(|byte| *byte |= exists != 0);
            }
            let extents = describe(range.clone(), allocated, max);
            prop_assert!(!extents.is_empty() && extents.len() <= max);
            prop_assert!(extents.windows(2).all(|pair| pair[0].hole != pair[1].hole));
            let described = extents.iter().flat_map(|extent| (0..extent.length).map(|_| extent.hole));
            let mut at = range.start as usize;
            for hole in described {
                prop_assert_eq!(hole, !bytes[at]);
                at += 1;
            }
            prop_assert!(at as u64 == range.end || extents.len() == max);
        }
    }

    fn parts(text: &str) -> Option<(String, Option<String>, String, Option<String>)> {
        let RbdSpec { pool, namespace, image, snapshot } = text.parse().ok()?;
        Some((pool, namespace, image, snapshot))
    }

    #[test]
    fn the_parts_of_a_name_are_found() {
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(parts("p/i"), Some(("p".into(), None, "i".into(), None)));
        assert_eq!(parts("p/n/i"), Some(("p".into(), some("n"), "i".into(), None)));
        assert_eq!(parts("p/i@s"), Some(("p".into(), None, "i".into(), some("s"))));
        assert_eq!(parts("p@q/n/i@s"), Some(("p@q".into(), some("n"), "i".into(), some("s"))));
        for bad in
            ["", "i", "p/", "/i", "p//i", "p/n/", "p/@s", "p/i@", "p/i@s@t", "p/n@m/i", "a/b/c/d", "p/i\0"]
        {
            let error = bad.parse::<RbdSpec>().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{bad:?}");
            assert!(error.to_string().contains("POOL[/NAMESPACE]/IMAGE[@SNAPSHOT]"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn a_name_that_parses_is_formatted_as_the_same_text(text in "[a-c@/\0. ]{0,12}|\\PC{0,12}") {
            if let Ok(spec) = text.parse::<RbdSpec>() {
                prop_assert_eq!(spec.to_string(), text);
                prop_assert!(!spec.image.contains(['@', '/']) && !spec.image.is_empty());
            }
        }

        #[test]
        fn every_combination_of_parts_parses_as_formatted(
            pool in "[^/\0]{1,8}",
            namespace in proptest::option::of("[^/@\0]{1,8}"),
            image in "[^/@\0]{1,8}",
            snapshot in proptest::option::of("[^/@\0]{1,8}"),
        ) {
            let spec = RbdSpec { pool, namespace, image, snapshot };
            prop_assert_eq!(spec.to_string().parse::<RbdSpec>().ok(), Some(spec));
        }
    }
}

/// How long opening an image may take. Ceph drops a killed client's lock after 30 seconds.
const OPEN_TIMEOUT: Duration = Duration::from_secs(60);
/// How long closing an image may take. librbd flushes its cache and releases the lock in that time.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Size of the thread's stack, in bytes. Calls of librbd run on it.
const STACK_BYTES: usize = 2 << 20;

type Job = Box<dyn FnOnce(&Image) + Send>;

/// The thread that opens an image, queries the cluster, and closes the image. Each of these calls may block
/// forever if the cluster does not respond. Other threads wait for this thread with a timeout instead of
/// calling librbd themselves. The data path never waits for this thread. Dropping this value closes the image.
pub struct ImageThread {
    /// The handle for the data path. It is valid until [`ImageThread::close`] or the drop of this value.
    pub submission: Submission,
    /// Jobs for the thread. `None` after a close was requested: without a sender the thread leaves its loop.
    jobs: Mutex<Option<Sender<Job>>>,
    /// Nothing is ever sent. The channel disconnects when the thread has closed the image.
    closed: Mutex<Receiver<()>>,
}

impl ImageThread {
    /// Starts the thread and opens the image `spec`. Fails as [`Image::open`] does, and with
    /// [`ErrorKind::System`] if the cluster does not answer within a minute.
    pub fn open(
        spec: &RbdSpec,
        options: &DriverOptions,
        changed: Arc<OwnedFd>,
    ) -> Result<(ImageThread, Facts), Error> {
        let (sender, opened) = channel();
        let (jobs, queue) = channel::<Job>();
        let (closing, closed) = channel::<()>();
        let step = Arc::new(Mutex::new("starting"));
        let (spec_of_thread, options, own_step) = (spec.clone(), options.clone(), step.clone());
        let body = move || {
            // Declared first, so dropped last, after the image; also if this thread panics.
            let _closing = closing;
            let result = Image::open(&spec_of_thread, &options, changed, &|step| *lock(&own_step) = step);
            // Sending fails once the caller has stopped waiting. The image is then closed immediately.
            match result {
                Ok((image, facts)) => {
                    if sender.send(Ok((image.submission(), facts))).is_ok() {
                        drop(sender);
                        queue.into_iter().for_each(|job| job(&image));
                    }
                }
                Err(error) => _ = sender.send(Err(error)),
            }
        };
        thread::Builder::new()
            .name("blkq-rbd".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(body)
            .map_err(|e| Error::system("cannot start the thread of an RBD image", e))?;
        // If opening has failed, the thread has already closed everything again. After the timeout it keeps waiting, and
        // closes the image if the cluster ever answers.
        let (submission, facts) = opened.recv_timeout(OPEN_TIMEOUT).unwrap_or_else(|e| {
            let message = match e {
                RecvTimeoutError::Timeout => format!(
                    "rbd:{spec}: the cluster did not answer within {} seconds (step: {}); check whether its monitors and OSDs are running and reachable",
                    OPEN_TIMEOUT.as_secs(),
                    *lock(&step)
                ),
                RecvTimeoutError::Disconnected => "the thread of the RBD image has exited".to_owned(),
            };
            Err(Error::new(ErrorKind::System, message))
        })?;
        Ok((ImageThread { submission, jobs: Mutex::new(Some(jobs)), closed: Mutex::new(closed) }, facts))
    }

    /// Closes the image. Returns false if the cluster does not answer in time, and the image stays open.
    ///
    /// # Safety
    /// No [`Submission`] of the image may be used during or after this call.
    pub unsafe fn close(&self) -> bool {
        drop(lock(&self.jobs).take());
        // A thread that blocks forever is not stopped. The image stays open until the process exits.
        lock(&self.closed).recv_timeout(CLOSE_TIMEOUT) != Err(RecvTimeoutError::Timeout)
    }

    /// Runs `job` on the thread, and waits for its result for at most `timeout`. If the job finishes later,
    /// the thread drops the result and calls `late`. Fails with the error of the job, or
    /// [`ErrorKind::System`] if the cluster did not answer in time.
    pub fn call<R: Send + 'static>(
        &self,
        timeout: Duration,
        job: impl FnOnce(&Image) -> Result<R, Error> + Send + 'static,
        late: impl FnOnce() + Send + 'static,
    ) -> Result<R, Error> {
        let (sender, receiver) = channel();
        let job: Job = Box::new(move |image| {
            if sender.send(job(image)).is_err() {
                late();
            }
        });
        // Sending fails only if the thread has exited. Then `receiver` is disconnected.
        let _ = lock(&self.jobs).as_ref().map(|jobs| jobs.send(job));
        receiver.recv_timeout(timeout).unwrap_or_else(|_| {
            let message = format!("the cluster did not answer within {} seconds", timeout.as_secs());
            Err(Error::new(ErrorKind::System, message))
        })
    }
}

impl Drop for ImageThread {
    fn drop(&mut self) {
        // SAFETY: a queue that uses the `Submission` shares the owner of this value, so there is no such queue now.
        unsafe { self.close() };
    }
}
