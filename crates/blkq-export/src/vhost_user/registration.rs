//! Guest memory as registered buffers of the engines' rings: the kernel pins its pages once, and not for
//! each request.
//!
//! Each engine has a table of the guest's memory of its own, whose regions name their registrations with
//! its ring. A table lives as long as a request that has memory of it; a registration, and with it the
//! mapping, as long as a table that names it. So nothing is unregistered that a request still uses, and
//! nothing else is ever mapped where a ring knows guest memory.
//!
//! All or nothing: memory that does not fit is served unregistered, by all engines.

use std::error::Error as _;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blkq::ring::REGISTERED_MEMORY_MAX_BYTES;
use blkq::{EngineHandle, Error, ErrorKind, RegisteredMemory};

use super::memory::{GuestMemory, Registrations};
use crate::mapping::Mapping;

/// How long registering is tried again when too little memory may be locked (ENOMEM): that of a daemon
/// that was just killed counts until the kernel has closed its rings, some time later.
const MEMORY_WAIT: Duration = Duration::from_secs(2);
/// The time between two tries.
const MEMORY_RETRY: Duration = Duration::from_millis(100);

/// The limits within which guest memory is registered. `None`: as much as there is.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct RegistrationLimits {
    /// The memory in bytes that may be locked, by all engines together: RLIMIT_MEMLOCK, unless engines
    /// have the capability CAP_IPC_LOCK.
    pub locked_max: Option<u64>,
    /// The memory in bytes that is left to this process: of that of its cgroup.
    pub memory_left: Option<u64>,
}

/// The guest's memory as each engine has it registered.
pub struct RegisteredTables {
    engines: Vec<EngineHandle>,
    limits: RegistrationLimits,
    /// One for each engine, or none.
    tables: Vec<Arc<GuestMemory>>,
}

impl RegisteredTables {
    /// Of `engines`, without memory.
    pub fn new(engines: Vec<EngineHandle>, limits: RegistrationLimits) -> RegisteredTables {
        RegisteredTables { engines, limits, tables: Vec::new() }
    }

    /// The memory as engine `index` has it registered, if it is.
    pub fn table(&self, index: usize) -> Option<&Arc<GuestMemory>> {
        self.tables.get(index)
    }

    /// Registers `memory` in the place of what was: regions that both have stay registered. No ring of
    /// the guest may be served meanwhile. Takes as long as the kernel needs to pin the pages.
    ///
    /// # Errors
    /// The limit that it does not fit into; then nothing is registered.
    pub fn replace(&mut self, memory: &GuestMemory) -> Result<(), Error> {
        let table_of =
            |index| memory.with_registrations_of(self.tables.get(index).map(|table: &Arc<_>| &**table));
        let mut tables: Vec<GuestMemory> = (0..self.engines.len()).map(table_of).collect();
        // Everywhere, before anything is registered: it is one account.
        self.release();
        let registered = self.check_limits(memory.bytes()).and_then(|()| {
            self.engines.iter().zip(&mut tables).try_for_each(|(engine, table)| {
                table.register_missing(|mapping, bytes| register(engine, mapping, bytes))
            })
        });
        match registered {
            Ok(()) => self.tables = tables.into_iter().map(Arc::new).collect(),
            Err(_) => {
                drop(tables);
                self.release();
            }
        }
        registered
    }

    fn check_limits(&self, bytes: u64) -> Result<(), Error> {
        let engines = self.engines.len() as u64;
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        let needed = bytes.saturating_mul(engines);
        if let Some(most) = self.limits.locked_max.filter(|most| needed > *most) {
            let message = format!(
                "{} MiB of guest memory, registered with each of {engines} engines, take {} MiB of locked memory, and {} MiB may be locked (RLIMIT_MEMLOCK)",
                mib(bytes),
                mib(needed),
                most >> 20
            );
            let cure = "raise the limit (ulimit -l, LimitMEMLOCK= of systemd)";
            return Err(Error::new(ErrorKind::Invalid, message).with_cure(cure));
        }
        if let Some(most) = self.limits.memory_left.filter(|most| bytes > *most) {
            let message = format!(
                "{} MiB of guest memory are all taken when they are registered, and {} MiB were left to the cgroup of this process",
                mib(bytes),
                most >> 20
            );
            return Err(Error::new(ErrorKind::Invalid, message).with_cure("raise its memory.max"));
        }
        Ok(())
    }

    /// Unregisters what no table names any more.
    fn release(&mut self) {
        self.tables.clear();
        for engine in &self.engines {
            // An engine that has exited has nothing registered.
            let _ = engine.with_registrar(|mut registrar| registrar.unregister_dropped());
        }
    }
}

impl Drop for RegisteredTables {
    fn drop(&mut self) {
        self.release();
    }
}

/// Registers the `bytes` of `mapping`.
fn register(engine: &EngineHandle, mapping: &Arc<Mapping>, bytes: u64) -> Result<Registrations, Error> {
    let mut pieces = Vec::new();
    let mut at = 0;
    while at < bytes {
        let piece = REGISTERED_MEMORY_MAX_BYTES.min(bytes - at) as usize;
        // On this thread: the engine then finds all pages there, which is much faster.
        mapping.populate(at as usize, piece);
        pieces.push(register_piece(engine, mapping, at as usize, piece)?);
        at += piece as u64;
    }
    Ok(pieces.into())
}

fn register_piece(
    engine: &EngineHandle,
    mapping: &Arc<Mapping>,
    at: usize,
    bytes: usize,
) -> Result<RegisteredMemory, Error> {
    let begin = Instant::now();
    loop {
        let mapping = Arc::clone(mapping);
        let registered = engine.with_registrar(move |mut registrar| {
            // SAFETY: the caller's piece is inside the region.
            let start = unsafe { mapping.start().add(at) };
            // SAFETY: they are mapped as long as the mapping lives. The one that maps other memory in
            // their place is the handler of SIGBUS, which notes that, and rings on it stop.
            unsafe { registrar.register_memory(start, bytes, mapping) }
        })?;
        let error = match registered {
            Ok(memory) => return Ok(memory),
            Err(error) => error,
        };
        let errno = error.source().and_then(|it| it.downcast_ref::<io::Error>()?.raw_os_error());
        let cure = match errno {
            Some(libc::ENOMEM) if begin.elapsed() < MEMORY_WAIT => {
                std::thread::sleep(MEMORY_RETRY);
                continue;
            }
            Some(libc::ENOMEM) => {
                "others of this user lock memory too, or there is too little: raise the limit (ulimit -l, LimitMEMLOCK= of systemd)"
            }
            Some(libc::EFAULT | libc::EOPNOTSUPP) => {
                "guest memory must be of tmpfs or hugetlbfs (a memfd), and as long as its region"
            }
            _ => "",
        };
        return Err(error.with_cure(cure));
    }
}
