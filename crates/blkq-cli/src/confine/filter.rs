//! The filter program of a list of system calls, and its way into the kernel.

use std::mem::offset_of;

use super::seccomp::{Argument, Call, DEADLY};
use crate::failure::{Failure, Outcome};

/// `AUDIT_ARCH_*` of linux/audit.h: what else the processor can run has other numbers.
#[cfg(target_arch = "x86_64")]
pub(super) const ARCHITECTURE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
pub(super) const ARCHITECTURE: u32 = 0xc000_00b7;

/// Whether this kernel has filters.
pub fn is_there() -> bool {
    let action = libc::SECCOMP_RET_ALLOW;
    // SAFETY: the kernel reads one word, and only returns whether it knows the action.
    let result =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_ACTION_AVAIL, 0u32, &raw const action) };
    result == 0
}

/// Filters the calls of this thread, and of those that it makes, for good. False where the kernel
/// has no such thing.
///
/// # Errors
/// If the kernel refuses.
pub fn enter(calls: &[Call]) -> Outcome<bool> {
    // The C library tries clone3 for each thread. That is no news, and all else is: what the second
    // filter refuses is in the kernel's log.
    Ok(install(&mut but_for(libc::SYS_clone3, REFUSE), 0)?
        && install(&mut program(calls), libc::SECCOMP_FILTER_FLAG_LOG)?)
}

/// Lets this thread, which is confined, and those that it makes, make no more rings. False where
/// the kernel has no filters.
///
/// # Errors
/// If the kernel refuses.
pub fn without_rings() -> Outcome<bool> {
    install(&mut but_for(libc::SYS_io_uring_setup, libc::SECCOMP_RET_KILL_PROCESS), 0)
}

/// Lets this thread, and those that it makes, register eventfds with rings and nothing else. False where
/// the kernel has no filters.
///
/// # Errors
/// If the kernel refuses.
pub fn register_eventfds_only() -> Outcome<bool> {
    install(&mut eventfds_only(), 0)
}

fn install(program: &mut [libc::sock_filter], flags: libc::c_ulong) -> Outcome<bool> {
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // No code of others runs here: a mitigation that would slow the thread down protects nobody.
    let flags = flags | libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW;
    // SAFETY: filter and program live through the call, which copies them.
    let result =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const filter) };
    if result == 0 {
        return Ok(true);
    }
    let error = std::io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::ENOSYS | libc::EINVAL) => Ok(false),
        _ => Err(Failure::new(format!(
            "cannot confine the daemon: seccomp: {error}; --no-sandbox leaves it out"
        ))),
    }
}

/// The result of a refused call: as if the kernel had none.
pub(super) const REFUSE: u32 = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;

fn statement(code: u32, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt: 0, jf: 0, k }
}

fn load(offset: usize) -> libc::sock_filter {
    statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset as u32)
}

fn answer(action: u32) -> libc::sock_filter {
    statement(libc::BPF_RET | libc::BPF_K, action)
}

/// Continues if what was loaded is `k`, else behind the next `skip`.
fn unless(k: u32, skip: u8) -> libc::sock_filter {
    libc::sock_filter { jf: skip, ..statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, k) }
}

/// A filter that answers one call with `action`, and leaves all others to the other filters.
pub(super) fn but_for(number: libc::c_long, action: u32) -> [libc::sock_filter; 4] {
    let call = unless(number as u32, 1);
    [load(offset_of!(libc::seccomp_data, nr)), call, answer(action), answer(libc::SECCOMP_RET_ALLOW)]
}

/// A filter of io_uring_register(2), of which `IORING_REGISTER_EVENTFD` and the next number, which undoes it,
/// are left.
pub(super) fn eventfds_only() -> [libc::sock_filter; 8] {
    const REGISTER_EVENTFD: u32 = 4;
    [
        load(offset_of!(libc::seccomp_data, nr)),
        unless(libc::SYS_io_uring_register as u32, 5),
        load(offset_of!(libc::seccomp_data, args) + 8),
        statement(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, !1),
        unless(REGISTER_EVENTFD, 1),
        answer(libc::SECCOMP_RET_ALLOW),
        answer(libc::SECCOMP_RET_KILL_PROCESS),
        answer(libc::SECCOMP_RET_ALLOW),
    ]
}

/// The filter: the kernel runs it for each call, and keeps the answer where no argument counts.
pub(super) fn program(calls: &[Call]) -> Vec<libc::sock_filter> {
    let mut program = vec![
        load(offset_of!(libc::seccomp_data, arch)),
        libc::sock_filter { jt: 1, ..unless(ARCHITECTURE, 0) },
        answer(libc::SECCOMP_RET_KILL_PROCESS),
        load(offset_of!(libc::seccomp_data, nr)),
    ];
    for call in calls {
        match call.argument {
            // A later entry may allow it whatever its arguments are.
            Some(_) if calls.iter().any(|other| other.number == call.number && other.argument.is_none()) => {}
            None => program.extend([unless(call.number as u32, 1), answer(libc::SECCOMP_RET_ALLOW)]),
            Some(Argument { index, mask, value }) => {
                let at = offset_of!(libc::seccomp_data, args) + 8 * usize::from(index);
                // Both architectures put the lower half first. The kernel has no other in most arguments.
                let lower = (at, mask as u32, value as u32);
                let upper = (at + 4, (mask >> 32) as u32, (value >> 32) as u32);
                let halves: Vec<_> = [lower, upper].into_iter().filter(|half| half.1 != 0).collect();
                program.push(unless(call.number as u32, 3 * halves.len() as u8 + 2));
                for (index, (at, mask, value)) in halves.iter().copied().enumerate() {
                    let behind = 3 * (halves.len() - 1 - index) as u8 + 1;
                    program.extend([
                        load(at),
                        statement(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, mask),
                        unless(value, behind),
                    ]);
                }
                program.extend([answer(libc::SECCOMP_RET_ALLOW), answer(REFUSE)]);
            }
        }
    }
    // Refused by the other filter.
    program.extend([unless(libc::SYS_clone3 as u32, 1), answer(libc::SECCOMP_RET_ALLOW)]);
    for number in DEADLY {
        program.extend([unless(*number as u32, 1), answer(libc::SECCOMP_RET_KILL_PROCESS)]);
    }
    program.push(answer(REFUSE));
    program
}
