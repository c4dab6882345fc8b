use std::mem::offset_of;

use blkq_protocol::failure::{Failure, Outcome};

use super::seccomp::{Argument, DEADLY, Lists};

/// `AUDIT_ARCH_*` of linux/audit.h. Other architectures of the same processor number the calls differently.
#[cfg(target_arch = "x86_64")]
pub(super) const ARCHITECTURE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
pub(super) const ARCHITECTURE: u32 = 0xc000_00b7;

/// Permanently restricts this thread and its new threads to `calls`. Returns `false` without kernel support.
pub fn enter(calls: Lists) -> Outcome<bool> {
    // The C library tries clone3 for each thread, so refusing clone3 must not be logged. A filter of its own
    // refuses it; the second filter logs every other refusal in the kernel's log.
    Ok(install(&mut but_for(libc::SYS_clone3, REFUSE), 0)?
        && install(&mut program(calls), libc::SECCOMP_FILTER_FLAG_LOG)?)
}

/// Keeps this thread, which is confined, and its new threads from creating io_uring instances. Returns
/// `false` if the kernel does not support filters.
pub fn without_rings() -> Outcome<bool> {
    install(&mut but_for(libc::SYS_io_uring_setup, libc::SECCOMP_RET_KILL_PROCESS), 0)
}

/// This thread and its new threads may register eventfds with io_uring, and nothing else. Returns `false` if
/// the kernel does not support filters.
pub fn register_eventfds_only() -> Outcome<bool> {
    install(&mut eventfds_only(), 0)
}

fn install(program: &mut [libc::sock_filter], flags: libc::c_ulong) -> Outcome<bool> {
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // This process runs no untrusted code, so the kernel's mitigation against speculative store bypass would
    // slow it down without a benefit.
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
            "cannot confine the daemon: seccomp: {error}; use --no-sandbox to run without confinement"
        ))),
    }
}

/// The result of a refused call: ENOSYS, as if the kernel did not have the call.
pub(super) const REFUSE: u32 = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;

fn statement(code: u32, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt: 0, jf: 0, k }
}

fn load(offset: usize) -> libc::sock_filter {
    statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset as u32)
}

fn masked(mask: u32) -> libc::sock_filter {
    statement(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, mask)
}

fn answer(action: u32) -> libc::sock_filter {
    statement(libc::BPF_RET | libc::BPF_K, action)
}

/// Continues if the loaded value is `k`, else skips the next `skip` instructions.
fn unless(k: u32, skip: u8) -> libc::sock_filter {
    libc::sock_filter { jf: skip, ..statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, k) }
}

/// Answers one call with `action`, and leaves all other calls to the other filters.
pub(super) fn but_for(number: libc::c_long, action: u32) -> [libc::sock_filter; 4] {
    let call = unless(number as u32, 1);
    [load(offset_of!(libc::seccomp_data, nr)), call, answer(action), answer(libc::SECCOMP_RET_ALLOW)]
}

/// Kills the process for any io_uring_register(2) except `IORING_REGISTER_EVENTFD` and the next number,
/// `IORING_UNREGISTER_EVENTFD`.
pub(super) fn eventfds_only() -> [libc::sock_filter; 8] {
    const REGISTER_EVENTFD: u32 = 4;
    [
        load(offset_of!(libc::seccomp_data, nr)),
        unless(libc::SYS_io_uring_register as u32, 5),
        load(offset_of!(libc::seccomp_data, args) + 8),
        masked(!1),
        unless(REGISTER_EVENTFD, 1),
        answer(libc::SECCOMP_RET_ALLOW),
        answer(libc::SECCOMP_RET_KILL_PROCESS),
        answer(libc::SECCOMP_RET_ALLOW),
    ]
}

/// The kernel runs the filter for each call, and caches the answer if it does not depend on arguments.
pub(super) fn program(calls: Lists) -> Vec<libc::sock_filter> {
    let calls = calls.concat();
    let mut program = vec![
        load(offset_of!(libc::seccomp_data, arch)),
        libc::sock_filter { jt: 1, ..unless(ARCHITECTURE, 0) },
        answer(libc::SECCOMP_RET_KILL_PROCESS),
        load(offset_of!(libc::seccomp_data, nr)),
    ];
    for call in &calls {
        match call.argument {
            // If the list also has the call without a condition, that entry decides.
            Some(_) if calls.iter().any(|other| other.number == call.number && other.argument.is_none()) => {}
            None => program.extend([unless(call.number as u32, 1), answer(libc::SECCOMP_RET_ALLOW)]),
            Some(Argument { index, mask, value }) => {
                let at = offset_of!(libc::seccomp_data, args) + 8 * usize::from(index);
                // Both supported architectures are little-endian, so the lower half comes first. A half that
                // the mask ignores is not tested.
                let lower = (at, mask as u32, value as u32);
                let upper = (at + 4, (mask >> 32) as u32, (value >> 32) as u32);
                let mut test = vec![answer(libc::SECCOMP_RET_ALLOW), answer(REFUSE)];
                for (at, mask, value) in [upper, lower].into_iter().filter(|half| half.1 != 0) {
                    // If a half differs, all instructions up to the last one are skipped.
                    let equal = unless(value, test.len() as u8 - 1);
                    test.splice(0..0, [load(at), masked(mask), equal]);
                }
                program.push(unless(call.number as u32, test.len() as u8));
                program.extend(test);
            }
        }
    }
    // The other filter refuses clone3.
    program.extend([unless(libc::SYS_clone3 as u32, 1), answer(libc::SECCOMP_RET_ALLOW)]);
    for call in DEADLY {
        program.extend([unless(call.number as u32, 1), answer(libc::SECCOMP_RET_KILL_PROCESS)]);
    }
    program.push(answer(REFUSE));
    program
}
