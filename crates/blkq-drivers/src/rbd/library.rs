//! Ceph's libraries. They are loaded when the first RBD image is opened, so a program that opens none does not need them
//! installed. The declarations follow rados/librados.h and rbd/librbd.h of Ceph 15 and later.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use blkq::Error;

use crate::errors::unsupported;

/// `rados_t`, `rados_ioctx_t`, `rbd_image_t` and `rbd_completion_t`, which are opaque pointers.
pub type Handle = *mut c_void;

pub const EVENT_TYPE_EVENTFD: c_int = 2;
/// `RBD_WRITE_ZEROES_FLAG_THICK_PROVISION`: the zeroed range stays allocated.
pub const WRITE_ZEROES_THICK: c_int = 1;
/// `RBD_LOCK_MODE_EXCLUSIVE`, the first value of an enumeration.
pub const LOCK_MODE_EXCLUSIVE: c_int = 0;
pub const FEATURE_EXCLUSIVE_LOCK: u64 = 1 << 2;

/// `RBD_FEATURE_FAST_DIFF`: the cluster has a map of the objects that exist.
pub const FEATURE_FAST_DIFF: u64 = 1 << 4;

// `rbd_image_info_t`
#[repr(C)]
pub struct ImageInfo {
    pub size: u64,
    pub object_size: u64,
    pub objects: u64,
    order: c_int,
    block_name_prefix: [c_char; 24],
    parent_pool: i64,
    parent_name: [c_char; 96],
}
const _: () = assert!(size_of::<ImageInfo>() == 160 && std::mem::offset_of!(ImageInfo, parent_pool) == 56);

// `rbd_image_watcher_t`
#[repr(C)]
pub struct Watcher {
    pub address: *mut c_char,
    id: i64,
    cookie: u64,
}
const _: () = assert!(size_of::<Watcher>() == 24);

// `rbd_config_option_t`
#[repr(C)]
pub struct ImageSetting {
    pub name: *mut c_char,
    pub value: *mut c_char,
    source: c_int,
}
const _: () = assert!(size_of::<ImageSetting>() == 24);
// The layout that vectored calls expect, and that the argument of a completion can carry a number.
const _: () = assert!(size_of::<libc::iovec>() == 16 && size_of::<Handle>() == size_of::<usize>());

macro_rules! libraries {
    ($($file:literal { $($name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)* })*) => {
        /// The functions that this driver calls, under their names in C.
        pub struct Library {
            $($(pub $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*)*
        }

        impl Library {
            fn open() -> Result<Library, Error> {
                $(let library = load($file)?;
                $(
                    // SAFETY: the symbol is a function of this type in every version of the library.
                    let $name = unsafe {
                        std::mem::transmute::<Handle, unsafe extern "C" fn($($argument),*) $(-> $result)?>(
                            symbol($file, library, stringify!($name))?,
                        )
                    };
                )*)*
                Ok(Library { $($($name,)*)* })
            }
        }
    };
}

libraries! {
    "librados.so.2" {
        rados_create2: fn(*mut Handle, *const c_char, *const c_char, u64) -> c_int;
        rados_conf_read_file: fn(Handle, *const c_char) -> c_int;
        rados_conf_set: fn(Handle, *const c_char, *const c_char) -> c_int;
        rados_conf_get: fn(Handle, *const c_char, *mut c_char, usize) -> c_int;
        rados_connect: fn(Handle) -> c_int;
        rados_shutdown: fn(Handle);
        rados_ioctx_create: fn(Handle, *const c_char, *mut Handle) -> c_int;
        rados_ioctx_set_namespace: fn(Handle, *const c_char);
        rados_ioctx_destroy: fn(Handle);
    }
    "librbd.so.1" {
        rbd_version: fn(*mut c_int, *mut c_int, *mut c_int);
        rbd_open: fn(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
        rbd_open_read_only: fn(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
        rbd_close: fn(Handle) -> c_int;
        rbd_stat: fn(Handle, *mut ImageInfo, usize) -> c_int;
        rbd_get_features: fn(Handle, *mut u64) -> c_int;
        rbd_get_stripe_unit: fn(Handle, *mut u64) -> c_int;
        rbd_get_stripe_count: fn(Handle, *mut u64) -> c_int;
        rbd_get_size: fn(Handle, *mut u64) -> c_int;
        rbd_lock_acquire: fn(Handle, c_int) -> c_int;
        rbd_lock_break: fn(Handle, c_int, *const c_char) -> c_int;
        rbd_lock_get_owners: fn(Handle, *mut c_int, *mut *mut c_char, *mut usize) -> c_int;
        rbd_lock_get_owners_cleanup: fn(*mut *mut c_char, usize);
        rbd_watchers_list: fn(Handle, *mut Watcher, *mut usize) -> c_int;
        rbd_watchers_list_cleanup: fn(*mut Watcher, usize);
        rbd_config_image_list: fn(Handle, *mut ImageSetting, *mut c_int) -> c_int;
        rbd_config_image_list_cleanup: fn(*mut ImageSetting, c_int);
        rbd_update_watch: fn(Handle, *mut u64, Option<unsafe extern "C" fn(*mut c_void)>, *mut c_void) -> c_int;
        rbd_update_unwatch: fn(Handle, u64) -> c_int;
        rbd_diff_iterate2: fn(Handle, *const c_char, u64, u64, u8, u8, Option<unsafe extern "C" fn(u64, usize, c_int, *mut c_void) -> c_int>, *mut c_void) -> c_int;
        rbd_set_image_notification: fn(Handle, c_int, c_int) -> c_int;
        rbd_poll_io_events: fn(Handle, *mut Handle, c_int) -> c_int;
        rbd_aio_create_completion: fn(*mut c_void, Option<unsafe extern "C" fn(Handle, *mut c_void)>, *mut Handle) -> c_int;
        rbd_aio_get_arg: fn(Handle) -> *mut c_void;
        rbd_aio_get_return_value: fn(Handle) -> isize;
        rbd_aio_release: fn(Handle);
        rbd_aio_readv: fn(Handle, *const libc::iovec, c_int, u64, Handle) -> c_int;
        rbd_aio_writev: fn(Handle, *const libc::iovec, c_int, u64, Handle) -> c_int;
        rbd_aio_discard: fn(Handle, u64, u64, Handle) -> c_int;
        rbd_aio_write_zeroes: fn(Handle, u64, usize, Handle, c_int, c_int) -> c_int;
        rbd_aio_flush: fn(Handle, Handle) -> c_int;
    }
}

impl Library {
    /// The libraries. The first call loads them, and they stay loaded until the process exits. Fails with
    /// [`blkq::ErrorKind::Unsupported`] if a library is missing or older than Ceph 15.
    pub fn get() -> Result<&'static Library, Error> {
        static LIBRARY: OnceLock<Library> = OnceLock::new();
        if let Some(library) = LIBRARY.get() {
            return Ok(library);
        }
        let library = Library::open()?;
        Ok(LIBRARY.get_or_init(|| {
            exit_without_destructors();
            library
        }))
    }

    pub fn version(&self) -> String {
        let [mut major, mut minor, mut extra] = [0; 3];
        // SAFETY: the function writes one integer to each of these.
        unsafe { (self.rbd_version)(&mut major, &mut minor, &mut extra) };
        format!("{major}.{minor}.{extra}")
    }
}

/// Loads the library `file`.
fn load(file: &str) -> Result<Handle, Error> {
    let name = std::ffi::CString::new(file).expect("the name has no zero byte");
    // SAFETY: loading runs the initialisers of Ceph's libraries, which any program may run.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        let why = last_error();
        let message = format!("RBD images need the libraries of Ceph: {why}; install the package librbd1");
        return Err(unsupported(message));
    }
    Ok(handle)
}

fn symbol(file: &str, library: Handle, name: &str) -> Result<Handle, Error> {
    let symbol = std::ffi::CString::new(name).expect("the name has no zero byte");
    // SAFETY: the library is loaded, and is never unloaded.
    let address = unsafe { libc::dlsym(library, symbol.as_ptr()) };
    if address.is_null() {
        return Err(unsupported(format!(
            "RBD images need Ceph 15 or newer, and {file} has no function {name}; update the package librbd1"
        )));
    }
    Ok(address)
}

/// The number of Ceph clients that were not shut down, and may therefore have running threads.
pub static CLIENTS: AtomicUsize = AtomicUsize::new(0);

/// Lets the process exit without running exit handlers while there are [`CLIENTS`]. The destructors of Ceph's libraries must
/// not run while their threads do, and those threads stay if the cluster does not answer or images are still open. A process
/// without clients exits as usual, because its own exit handlers must run.
fn exit_without_destructors() {
    #[cfg(target_env = "gnu")]
    {
        unsafe extern "C" {
            fn on_exit(function: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
        }
        extern "C" fn exit_immediately(status: c_int, _: *mut c_void) {
            if CLIENTS.load(Ordering::SeqCst) > 0 {
                // SAFETY: the function does not return. The standard library has flushed its buffers before.
                unsafe { libc::_exit(status) }
            }
        }
        // Handlers run in the reverse order of their registration. The libraries have registered theirs while they were
        // loaded, so this one runs before them.
        // SAFETY: a function of the C library, given a function that may be called at any time.
        unsafe { on_exit(exit_immediately, std::ptr::null_mut()) };
    }
}

fn last_error() -> String {
    // SAFETY: the result is null or a C string that is valid until the next call of the loader on this thread.
    unsafe {
        let text = libc::dlerror();
        if text.is_null() {
            return "the dynamic loader reports no reason".to_owned();
        }
        CStr::from_ptr(text).to_string_lossy().into_owned()
    }
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use super::*;
    use blkq::ErrorKind;

    #[test]
    fn a_missing_library_is_named_with_a_hint() {
        let error = load("libblkq-missing.so.1").err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        let text = error.to_string();
        assert!(text.contains("libblkq-missing.so.1") && text.contains("install"), "{text}");
        let old = symbol("libc.so.6", load("libc.so.6").unwrap(), "rbd_open").unwrap_err().to_string();
        assert!(old.contains("rbd_open") && old.contains("Ceph 15"), "{old}");
    }

    #[test]
    #[cfg(target_env = "gnu")]
    fn only_a_process_with_an_open_image_skips_exit_handlers() {
        const SKIPPED: c_int = 3;
        const AS_USUAL: c_int = 7;
        extern "C" fn registered_before() {
            // SAFETY: the function does not return.
            unsafe { libc::_exit(AS_USUAL) }
        }
        let status = |clients| {
            // SAFETY: the child calls only functions of the C library that do not depend on other threads.
            let child = unsafe { libc::fork() };
            if child == 0 {
                CLIENTS.store(clients, Ordering::SeqCst);
                // SAFETY: as above.
                unsafe {
                    libc::atexit(registered_before);
                    exit_without_destructors();
                    libc::exit(SKIPPED)
                }
            }
            let mut status = 0;
            // SAFETY: a child of this process, and room for its status.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            libc::WEXITSTATUS(status)
        };
        assert_eq!(status(1), SKIPPED);
        assert_eq!(status(0), AS_USUAL);
    }
}
