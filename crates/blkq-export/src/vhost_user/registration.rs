//! Registers guest memory with the engines' io_urings: the kernel pins the pages once, not for each request.
//!
//! Each engine has its own table of guest memory, whose regions refer to the registrations with the engine's
//! ring. A request keeps its table, a table keeps its registrations, and a registration keeps its mapping. So
//! nothing is unregistered while a request uses it, and no other memory is ever mapped at an address that a
//! ring takes for guest memory.
//!
//! Memory is registered as a whole or not at all: if it exceeds the limits, engines serve it unregistered.

use std::error::Error as _;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blkq::ring::REGISTERED_MEMORY_MAX_BYTES;
use blkq::{EngineHandle, Error, ErrorKind, RegisteredMemory};

use super::memory::{GuestMemory, Registrations};
use crate::mapping::Mapping;
use crate::retry::retry;

/// Time for retries after ENOMEM: a killed daemon's locked memory counts until the kernel closes its rings.
const MEMORY_WAIT: Duration = Duration::from_secs(2);
const MEMORY_RETRY: Duration = Duration::from_millis(100);

/// Limits for the registration of guest memory. `None`: no limit.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct RegistrationLimits {
    /// Bytes that all engines together may lock: RLIMIT_MEMLOCK. `None` for engines with CAP_IPC_LOCK.
    pub locked_max: Option<u64>,
    /// The memory in bytes that the cgroup of this process can still allocate.
    pub memory_left: Option<u64>,
}

/// The tables of guest memory with the registrations of each engine.
pub struct RegisteredTables {
    engines: Vec<EngineHandle>,
    limits: RegistrationLimits,
    /// One table for each engine, or no table.
    tables: Vec<Arc<GuestMemory>>,
}

impl RegisteredTables {
    pub fn new(engines: Vec<EngineHandle>, limits: RegistrationLimits) -> RegisteredTables {
        RegisteredTables { engines, limits, tables: Vec::new() }
    }

    /// The table of engine `index`; `None` if no memory is registered.
    pub fn table(&self, index: usize) -> Option<&Arc<GuestMemory>> {
        self.tables.get(index)
    }

    /// Registers `memory` instead of the current memory; common regions stay registered. No ring of the guest
    /// may be served meanwhile. Takes as long as the kernel pins the pages. After an error (a limit, or the
    /// kernel's), no memory is registered.
    pub fn replace(&mut self, memory: &GuestMemory) -> Result<(), Error> {
        let table_of =
            |index| memory.with_registrations_of(self.tables.get(index).map(|table: &Arc<_>| &**table));
        let mut tables: Vec<GuestMemory> = (0..self.engines.len()).map(table_of).collect();
        // All engines release memory before any registers more, because one limit applies to all of them.
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
        let needed = bytes.saturating_mul(engines);
        let (guest_mib, needed_mib) = (bytes.div_ceil(1 << 20), needed.div_ceil(1 << 20));
        if let Some(most) = self.limits.locked_max.filter(|most| needed > *most) {
            let message = format!(
                "{guest_mib} MiB of guest memory, registered with each of {engines} engines, need {needed_mib} MiB of locked memory, but {} MiB may be locked (RLIMIT_MEMLOCK)",
                most >> 20
            );
            let hint = "raise the limit (ulimit -l, LimitMEMLOCK= of systemd)";
            return Err(Error::new(ErrorKind::Invalid, message).with_hint(hint));
        }
        if let Some(most) = self.limits.memory_left.filter(|most| bytes > *most) {
            let message = format!(
                "registration allocates all {guest_mib} MiB of guest memory, but {} MiB are left to the cgroup of this process",
                most >> 20
            );
            return Err(Error::new(ErrorKind::Invalid, message).with_hint("raise memory.max of the cgroup"));
        }
        Ok(())
    }

    fn release(&mut self) {
        self.tables.clear();
        for engine in &self.engines {
            // An error means that the engine has exited, and its registrations with it.
            let _ = engine.with_registrar(|mut registrar| registrar.unregister_dropped());
        }
    }
}

impl Drop for RegisteredTables {
    fn drop(&mut self) {
        self.release();
    }
}

fn register(engine: &EngineHandle, mapping: &Arc<Mapping>, bytes: u64) -> Result<Registrations, Error> {
    let pieces = (0..bytes).step_by(REGISTERED_MEMORY_MAX_BYTES as usize);
    pieces
        .map(|at| register_piece(engine, mapping, at, REGISTERED_MEMORY_MAX_BYTES.min(bytes - at)))
        .collect()
}

fn register_piece(
    engine: &EngineHandle,
    mapping: &Arc<Mapping>,
    at: u64,
    bytes: u64,
) -> Result<RegisteredMemory, Error> {
    let (at, bytes) = (at as usize, bytes as usize);
    // Allocates the pages on this thread, which is much faster than on the engine, and does not delay the
    // engine's I/O.
    mapping.populate(at, bytes);
    let register = || {
        let mapping = Arc::clone(mapping);
        let registered = engine.with_registrar(move |mut registrar| {
            // SAFETY: the caller passes a range inside the region.
            let start = unsafe { mapping.start().add(at) };
            // SAFETY: the bytes are mapped as long as the mapping exists. Only the handler of SIGBUS maps
            // other memory there; it marks the mapping as broken, and the rings that use it stop.
            unsafe { registrar.register_memory(start, bytes, mapping) }
        });
        registered.flatten()
    };
    let errno = |error: &Error| error.source().and_then(|it| it.downcast_ref::<io::Error>()?.raw_os_error());
    let lacks_memory = |error: &Error| errno(error) == Some(libc::ENOMEM);
    retry(Instant::now() + MEMORY_WAIT, MEMORY_RETRY, register, lacks_memory).map_err(|error| {
        let hint = match errno(&error) {
            Some(libc::ENOMEM) => {
                "the limit of locked memory is too small, or other processes of this user use it: raise it (ulimit -l, LimitMEMLOCK= of systemd)"
            }
            Some(libc::EFAULT | libc::EOPNOTSUPP) => {
                "guest memory must be on tmpfs or hugetlbfs (a memfd), and each region must be inside its file"
            }
            _ => "",
        };
        error.with_hint(hint)
    })
}
