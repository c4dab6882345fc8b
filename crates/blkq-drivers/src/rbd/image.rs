//! An open image: the connection to its cluster, its pool and itself, closed in the opposite order. Each
//! call here waits for the cluster, and is made on the image's own thread (`thread.rs`).

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blkq::{Error, ErrorKind};
use rustix::event::{EventfdFlags, eventfd};

use super::extents::{self, Allocated};
use super::library::{self, Handle, ImageInfo, ImageSetting, Library, Watcher};
use super::library::{EVENT_TYPE_EVENTFD, FEATURE_EXCLUSIVE_LOCK, FEATURE_FAST_DIFF, LOCK_MODE_EXCLUSIVE};
use super::options::RbdOptions;

/// Settings of Ceph's client that are not the user's, as others would block the thread that submits. The depth of
/// the queue is a limit of what is in flight already.
const SETTINGS: [(&CStr, &CStr); 3] = [
    (c"objecter_inflight_ops", c"0"),
    (c"objecter_inflight_op_bytes", c"0"),
    // Else the thread that submits does librbd's work, and takes its locks.
    (c"rbd_non_blocking_aio", c"true"),
];
/// librbd's cache. Its policy `writethrough` would do for writes, but has reads cached too, which goes wrong for an
/// image that other clients write.
const CACHE: &CStr = c"rbd_cache";
/// The least discard that has an effect, and its default in bytes.
const DISCARD_GRANULARITY: (&CStr, u32) = (c"rbd_discard_granularity_bytes", 65536);
/// Settings that an image has, of which one more makes a longer list.
const SETTINGS_OF_IMAGE: usize = 128;
/// Clients that have an image open, of which one more makes a longer list.
const WATCHERS: usize = 16;

/// How an image is kept from other writers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lock {
    /// It is read, or shared on purpose.
    None,
    /// It has no exclusive lock that could be taken.
    Missing,
    /// Its exclusive lock is held, and not passed to other clients.
    Held,
}

/// The facts of an image when it was opened.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Bytes of the image.
    pub size: u64,
    /// Bytes of an object.
    pub object_size: u64,
    /// Bytes that lie in one object until the next one follows.
    pub stripe_unit: u64,
    /// Objects that are written in turn.
    pub stripe_count: u64,
    /// The least discard that has an effect, in bytes.
    pub discard_granularity: u32,
    /// How it is kept from other writers.
    pub lock: Lock,
    /// Whether librbd has a cache for it, as far as that is known.
    pub cached: Option<bool>,
    /// The address by which the cluster knows this client, if it has the lock.
    pub owner: Option<String>,
}

/// A connection to a cluster.
struct Cluster {
    library: &'static Library,
    handle: Handle,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SAFETY: made by `rados_create2`, and shut down once; what used it is closed.
        unsafe { (self.library.rados_shutdown)(self.handle) }
        library::CLIENTS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A pool of it.
struct Pool {
    library: &'static Library,
    handle: Handle,
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: made by `rados_ioctx_create`, and destroyed once; its image is closed.
        unsafe { (self.library.rados_ioctx_destroy)(self.handle) }
    }
}

/// An open image.
pub struct Image {
    library: &'static Library,
    handle: Handle,
    /// The notification of changes of the image, and its argument.
    watch: Option<(u64, *const OwnedFd)>,
    /// librbd writes to it for each I/O that has completed.
    completed: Arc<OwnedFd>,
    _pool: Pool,
    _cluster: Cluster,
}

// SAFETY: librbd's handles may be used by any thread, and the argument of the notification is only freed.
unsafe impl Send for Image {}

/// The handle of an open image, and what the data path needs of it.
#[derive(Clone)]
pub struct Submission {
    /// The functions.
    pub library: &'static Library,
    /// The image, open for as long as its [`ImageThread`](super::thread::ImageThread).
    pub image: Handle,
    /// Readable when I/O has completed.
    pub completed: Arc<OwnedFd>,
}

// SAFETY: librbd's handles may be used by any thread.
unsafe impl Send for Submission {}
// SAFETY: as above.
unsafe impl Sync for Submission {}

impl Image {
    /// Opens the image of `options`, and takes its lock; `step` is called with what is done next, which
    /// may take for ever. `changed` is written to when the image may have changed its size.
    ///
    /// # Errors
    /// The step that failed, why, and the cure.
    pub fn open(
        options: &RbdOptions,
        changed: Arc<OwnedFd>,
        step: &dyn Fn(&'static str),
    ) -> Result<(Image, Facts), Error> {
        let library = Library::get()?;
        let spec = &options.spec;
        step("reading its configuration");
        let cluster = Cluster::create(library, options)?;
        step("connecting to its monitors");
        // SAFETY: the handle was made and is not connected yet.
        let connected = unsafe { (library.rados_connect)(cluster.handle) };
        check(connected, || format!("cannot connect to the cluster as {}", options.client())).map_err(
            |e| e.with_cure("check the configuration, the user's keyring, and that the monitors are running"),
        )?;
        // Monitors have settings for their clients, which come with the connection.
        let discard_granularity = cluster.number(DISCARD_GRANULARITY.0).unwrap_or(DISCARD_GRANULARITY.1);
        step("opening the pool");
        let pool = Pool::open(&cluster, options)?;
        step("opening the image");
        let completed = eventfd(0, EventfdFlags::CLOEXEC)
            .map_err(|e| Error::system("cannot create an eventfd", e))
            .map(Arc::new)?;
        let handle = open_image(library, &pool, options)?;
        let mut image = Image { library, handle, watch: None, completed, _pool: pool, _cluster: cluster };
        // SAFETY: the image is open, and the descriptor stays open until it is closed.
        let notified = unsafe {
            (library.rbd_set_image_notification)(handle, image.completed.as_raw_fd(), EVENT_TYPE_EVENTFD)
        };
        check(notified, || format!("cannot register for completions of rbd:{spec}"))?;
        let lock = image.take_lock(options, step)?;
        step("reading its size");
        if spec.snapshot().is_none() {
            // Before, so that no change comes in between.
            image.watch(changed)?;
        }
        let mut facts = image.facts(options, discard_granularity, lock)?;
        if lock == Lock::Held {
            // Without it a successor waits.
            facts.owner = image.lock_owner().ok().flatten();
        }
        Ok((image, facts))
    }

    /// The parts of `range` that are allocated, here or in the image that this is a clone of; whole objects where the
    /// image has a map of them. Asks the cluster, after what librbd has cached is written.
    ///
    /// # Errors
    /// The cluster's.
    pub fn allocated(&self, range: Range<u64>) -> Result<Allocated, Error> {
        let what = || "cannot read the extents of the image".to_owned();
        let (mut features, mut allocated) = (0, Allocated::new());
        // SAFETY: the image is open.
        check(unsafe { (self.library.rbd_get_features)(self.handle, &mut features) }, what)?;
        let whole_object = u8::from(features & FEATURE_FAST_DIFF != 0);
        let (library, length) = (self.library, range.end - range.start);
        // SAFETY: the image is open, and the list is borrowed to the function until the call returns.
        let result = unsafe {
            (library.rbd_diff_iterate2)(
                self.handle,
                std::ptr::null(),
                range.start,
                length,
                1,
                whole_object,
                Some(extents::found),
                (&raw mut allocated).cast(),
            )
        };
        check(result, what)?;
        Ok(allocated)
    }

    /// For the data path.
    pub fn submission(&self) -> Submission {
        Submission { library: self.library, image: self.handle, completed: self.completed.clone() }
    }

    /// The image's size in bytes, as it is now.
    ///
    /// # Errors
    /// The cluster's.
    pub fn size(&self) -> Result<u64, Error> {
        let mut size = 0;
        // SAFETY: the image is open.
        check(unsafe { (self.library.rbd_get_size)(self.handle, &mut size) }, || {
            "cannot read the size of the image".to_owned()
        })?;
        Ok(size)
    }

    fn facts(&self, options: &RbdOptions, discard_granularity: u32, lock: Lock) -> Result<Facts, Error> {
        let what = || format!("cannot read the layout of rbd:{}", options.spec);
        // SAFETY: zeroes are such a structure.
        let mut info: ImageInfo = unsafe { std::mem::zeroed() };
        // SAFETY: the image is open, and the call has the size of the structure.
        check(unsafe { (self.library.rbd_stat)(self.handle, &mut info, size_of::<ImageInfo>()) }, what)?;
        let (mut stripe_unit, mut stripe_count) = (0, 0);
        // SAFETY: the image is open.
        check(unsafe { (self.library.rbd_get_stripe_unit)(self.handle, &mut stripe_unit) }, what)?;
        // SAFETY: as above.
        check(unsafe { (self.library.rbd_get_stripe_count)(self.handle, &mut stripe_count) }, what)?;
        let (size, object_size) = (info.size, info.object_size);
        let cached = self.setting(CACHE).map(|value| !is_false(&value));
        Ok(Facts {
            size,
            object_size,
            stripe_unit,
            stripe_count,
            discard_granularity,
            lock,
            cached,
            owner: None,
        })
    }

    /// A setting of the image: its own in the cluster, else its pool's, else that of the configuration.
    fn setting(&self, name: &CStr) -> Option<String> {
        let mut count = c_int::try_from(SETTINGS_OF_IMAGE).ok()?;
        loop {
            let room = count;
            // SAFETY: zeroes are such structures.
            let mut settings: Vec<ImageSetting> = (0..room).map(|_| unsafe { std::mem::zeroed() }).collect();
            // SAFETY: the image is open, and there is room for as many as `count` says.
            let result = unsafe {
                (self.library.rbd_config_image_list)(self.handle, settings.as_mut_ptr(), &mut count)
            };
            match result {
                0 => {
                    let listed = &mut settings[..usize::try_from(count.min(room)).ok()?];
                    // SAFETY: the call has made two texts for each.
                    let value = listed.iter().find_map(|setting| unsafe {
                        let found = CStr::from_ptr(setting.name) == name;
                        found.then(|| CStr::from_ptr(setting.value).to_string_lossy().into_owned())
                    });
                    // SAFETY: freed once, by the library that made them.
                    unsafe { (self.library.rbd_config_image_list_cleanup)(listed.as_mut_ptr(), count) };
                    return value;
                }
                errno if errno == -libc::ERANGE && count > room => {}
                _ => return None,
            }
        }
    }

    /// Takes the exclusive lock of an image that is to be written, for as long as it is open: librbd then
    /// does not pass it to a client that asks for it. The lock of a client that has the image open
    /// is left to it; one that died has its lock broken, and is kept from writing by the cluster.
    fn take_lock(&self, options: &RbdOptions, step: &dyn Fn(&'static str)) -> Result<Lock, Error> {
        if options.reads_only() || options.shared {
            return Ok(Lock::None);
        }
        let spec = &options.spec;
        let mut features = 0;
        step("reading its features");
        // SAFETY: the image is open.
        check(unsafe { (self.library.rbd_get_features)(self.handle, &mut features) }, || {
            format!("cannot read the features of rbd:{spec}")
        })?;
        if features & FEATURE_EXCLUSIVE_LOCK == 0 {
            return Ok(Lock::Missing);
        }
        step("taking its exclusive lock");
        let what = || format!("cannot take the exclusive lock of rbd:{spec}");
        let owner = || self.lock_owner().map_err(|errno| failed(errno, what()));
        let mut locked_by = owner()?;
        if let Some(address) = locked_by.as_ref().filter(|owner| options.predecessor.as_ref() == Some(owner))
        {
            step("breaking the lock of the previous process");
            let address = text(address.as_bytes())?;
            // Where the user may not do that, the cluster notices in its own time.
            // SAFETY: the image is open, and the address a text.
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
            // Another client was faster, and keeps it.
            errno if [-libc::EROFS, -libc::EBUSY, -libc::EAGAIN].contains(&errno) => {
                let message = format!("rbd:{spec} is locked by another client");
                Err(Error::new(ErrorKind::Busy, message))
            }
            errno => Err(failed(errno, what())),
        }
    }

    /// The address of the client that has the exclusive lock, alive or not.
    fn lock_owner(&self) -> Result<Option<String>, c_int> {
        let (mut mode, mut owner, mut count) = (0, std::ptr::null_mut(), 1);
        // SAFETY: the image is open, and there is room for as many owners as `count` says.
        let result =
            unsafe { (self.library.rbd_lock_get_owners)(self.handle, &mut mode, &mut owner, &mut count) };
        match result {
            0 if count == 0 || owner.is_null() => Ok(None),
            0 => {
                // SAFETY: the call has made a text, which is freed once, by its library.
                unsafe {
                    let text = CStr::from_ptr(owner).to_string_lossy().into_owned();
                    (self.library.rbd_lock_get_owners_cleanup)(&mut owner, count);
                    Ok(Some(text))
                }
            }
            errno if errno == -libc::ENOENT => Ok(None),
            errno => Err(errno),
        }
    }

    /// The addresses of the clients that have the image open, as far as the cluster knows.
    fn clients(&self) -> Result<Vec<String>, c_int> {
        let mut count = WATCHERS;
        loop {
            let room = count;
            // SAFETY: zeroes are such structures.
            let mut watchers: Vec<Watcher> = (0..room).map(|_| unsafe { std::mem::zeroed() }).collect();
            // SAFETY: the image is open, and there is room for as many as `count` says.
            let result =
                unsafe { (self.library.rbd_watchers_list)(self.handle, watchers.as_mut_ptr(), &mut count) };
            match result {
                0 => {
                    let listed = &mut watchers[..count.min(room)];
                    // SAFETY: the call has made a text for each.
                    let address = |watcher: &Watcher| unsafe { CStr::from_ptr(watcher.address) };
                    let addresses = listed
                        .iter()
                        .map(|watcher| address(watcher).to_string_lossy().into_owned())
                        .collect();
                    // SAFETY: freed once, by the library that made them.
                    unsafe { (self.library.rbd_watchers_list_cleanup)(listed.as_mut_ptr(), listed.len()) };
                    return Ok(addresses);
                }
                errno if errno == -libc::ERANGE && count > room => {}
                errno => return Err(errno),
            }
        }
    }

    /// Has `changed` written to whenever the image may have another size.
    fn watch(&mut self, changed: Arc<OwnedFd>) -> Result<(), Error> {
        let (mut watch, argument) = (0, Arc::into_raw(changed));
        // SAFETY: the image is open, and the argument is freed only once nothing is notified any more.
        let result = unsafe {
            (self.library.rbd_update_watch)(
                self.handle,
                &mut watch,
                Some(image_changed),
                argument as *mut c_void,
            )
        };
        check(result, || "cannot watch the image for changes".to_owned()).inspect_err(|_| {
            // SAFETY: nothing has it: it was not registered.
            drop(unsafe { Arc::from_raw(argument) });
        })?;
        self.watch = Some((watch, argument));
        Ok(())
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        if let Some((watch, argument)) = self.watch {
            // SAFETY: registered, and unregistered once.
            let result = unsafe { (self.library.rbd_update_unwatch)(self.handle, watch) };
            if result == 0 {
                // SAFETY: the call has waited for notifications that are on their way.
                drop(unsafe { Arc::from_raw(argument) });
            }
        }
        // It releases the lock too. A failure leaves nothing that could be done.
        // SAFETY: open, closed once, and without I/O in flight.
        unsafe { (self.library.rbd_close)(self.handle) };
    }
}

/// Called on threads of librbd, which must not wait.
unsafe extern "C" fn image_changed(argument: *mut c_void) {
    // SAFETY: the argument of `rbd_update_watch`, a reference that lives until after the last call.
    let changed = unsafe { &*(argument as *const OwnedFd) };
    notify(changed);
}

/// Makes the eventfd readable.
pub fn notify(event: &OwnedFd) {
    // It fails only when the counter is at its end, and then it is readable.
    let _ = rustix::io::write(event.as_fd(), &1u64.to_ne_bytes());
}

impl Cluster {
    /// A client that is not connected yet, with the configuration of `options`.
    fn create(library: &'static Library, options: &RbdOptions) -> Result<Cluster, Error> {
        let client = text(options.client().as_bytes())?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the names are texts, which are copied.
        let created = unsafe { (library.rados_create2)(&mut handle, c"ceph".as_ptr(), client.as_ptr(), 0) };
        check(created, || format!("cannot create the Ceph client {}", options.client()))?;
        library::CLIENTS.fetch_add(1, Ordering::SeqCst);
        let cluster = Cluster { library, handle };
        let file = options.conf.as_ref().map(|path| text(path.as_os_str().as_bytes())).transpose()?;
        let path = file.as_ref().map_or(std::ptr::null(), |file| file.as_ptr());
        // SAFETY: the handle is not connected, and the path a text or null.
        check(unsafe { (library.rados_conf_read_file)(handle, path) }, || {
            let name = options.conf.as_ref().map(|path| path.display().to_string());
            format!("cannot read the Ceph configuration {}", name.as_deref().unwrap_or("/etc/ceph/ceph.conf"))
        })?;
        if let Some(keyring) = &options.keyring {
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

    /// The number that a setting has, if it has one.
    fn number(&self, name: &CStr) -> Option<u32> {
        let mut value: [c_char; 32] = [0; 32];
        // SAFETY: the call writes as many bytes as there are, with a zero at the end.
        let result = unsafe {
            (self.library.rados_conf_get)(self.handle, name.as_ptr(), value.as_mut_ptr(), value.len())
        };
        // SAFETY: it has written a text.
        (result == 0).then(|| unsafe { CStr::from_ptr(value.as_ptr()) }.to_str().ok()?.parse().ok())?
    }
}

impl Pool {
    /// The pool and namespace of `options`.
    fn open(cluster: &Cluster, options: &RbdOptions) -> Result<Pool, Error> {
        let (library, spec) = (cluster.library, &options.spec);
        let name = text(spec.pool().as_bytes())?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the cluster is connected, and the name a text.
        let created = unsafe { (library.rados_ioctx_create)(cluster.handle, name.as_ptr(), &mut handle) };
        check(created, || format!("cannot open the pool {} of rbd:{spec}", spec.pool()))?;
        let pool = Pool { library, handle };
        if let Some(namespace) = spec.namespace() {
            let name = text(namespace.as_bytes())?;
            // SAFETY: the name is a text, which is copied.
            unsafe { (library.rados_ioctx_set_namespace)(handle, name.as_ptr()) };
        }
        Ok(pool)
    }
}

/// Opens the image itself. One that is only read is opened as one that is written, so that its size is
/// watched, unless the user may not do that.
fn open_image(library: &'static Library, pool: &Pool, options: &RbdOptions) -> Result<Handle, Error> {
    let spec = &options.spec;
    let image = text(spec.image().as_bytes())?;
    let snapshot = spec.snapshot().map(|name| text(name.as_bytes())).transpose()?;
    let snapshot = snapshot.as_ref().map_or(std::ptr::null(), |name| name.as_ptr());
    let mut handle = std::ptr::null_mut();
    // SAFETY: the pool is open, and the names are texts or null.
    let mut open = |open: OpenCall| unsafe { open(pool.handle, image.as_ptr(), &mut handle, snapshot) };
    let opened = match open(if snapshot.is_null() { library.rbd_open } else { library.rbd_open_read_only }) {
        errno if options.read_only && [-libc::EPERM, -libc::EACCES].contains(&errno) => {
            open(library.rbd_open_read_only)
        }
        result => result,
    };
    check(opened, || format!("cannot open rbd:{spec}"))?;
    Ok(handle)
}

type OpenCall = unsafe extern "C" fn(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;

/// Whether Ceph takes the text of a setting as no.
pub(super) fn is_false(value: &str) -> bool {
    let value = value.trim();
    value.eq_ignore_ascii_case("false") || value.parse() == Ok(0)
}

/// An argument for C.
fn text(bytes: &[u8]) -> Result<CString, Error> {
    CString::new(bytes).map_err(|_| Error::new(ErrorKind::Invalid, "a name contains a zero byte"))
}

fn check(result: c_int, what: impl FnOnce() -> String) -> Result<(), Error> {
    if result < 0 { Err(failed(result, what())) } else { Ok(()) }
}

/// The error of a call that returned `result`, a negative errno.
fn failed(result: c_int, what: String) -> Error {
    Error::system(what, io::Error::from_raw_os_error(-result))
}
