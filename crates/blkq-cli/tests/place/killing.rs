//! Kills a command at each of its steps. A step is a system call whose effect another process can observe.

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

/// Which process of a command is killed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Victim {
    /// The process that the user starts.
    Command,
    /// The process that the command forks to hand a device over.
    Owner,
    /// The process group of the command, as by a closed terminal, at a step of the owner.
    Terminal,
}

/// System calls before which the victim is killed.
const STEPS: [i64; 19] = [
    libc::SYS_connect,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_write,
    libc::SYS_pwrite64,
    libc::SYS_openat,
    libc::SYS_ftruncate,
    libc::SYS_rename,
    libc::SYS_renameat2,
    libc::SYS_unlink,
    libc::SYS_flock,
    libc::SYS_clone,
    libc::SYS_clone3,
    libc::SYS_execve,
    libc::SYS_wait4,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_poll,
    libc::SYS_exit_group,
];

/// System files that a program opens when it starts. Opening them is not a step.
const OPENED_AT_START: [&str; 4] = ["/etc/", "/lib", "/usr/", "/sys/"];

fn ptrace(request: libc::c_uint, pid: i32, data: usize) -> i64 {
    // SAFETY: requests that take a number, of a process that this thread traces.
    unsafe { libc::ptrace(request, pid, 0, data) }
}

/// Waits for the next stop of a traced process. Returns the process and its wait status.
fn next_stop() -> (i32, i32) {
    let mut status = 0;
    // SAFETY: the status lives through the call. Only this thread has children that it traces.
    let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::__WALL | libc::__WNOTHREAD) };
    assert!(pid > 0, "{}", std::io::Error::last_os_error());
    (pid, status)
}

/// Whether the process is about to make a system call of [`STEPS`].
fn is_step(pid: i32) -> bool {
    // SAFETY: zeroes are a valid value of the structure, and the call gets its size.
    let info = unsafe {
        let mut info: libc::ptrace_syscall_info = std::mem::zeroed();
        let size = size_of_val(&info);
        libc::ptrace(libc::PTRACE_GET_SYSCALL_INFO, pid, size, &raw mut info);
        info
    };
    if info.op != libc::PTRACE_SYSCALL_INFO_ENTRY {
        return false;
    }
    // SAFETY: the process is stopped at the entry of a system call.
    let entry = unsafe { info.u.entry };
    let number = entry.nr as i64;
    if number == libc::SYS_openat {
        let memory = std::fs::File::open(format!("/proc/{pid}/mem"));
        let mut path = [0; 8];
        let read =
            memory.and_then(|memory| std::os::unix::fs::FileExt::read_at(&memory, &mut path, entry.args[1]));
        return read.is_ok() && !OPENED_AT_START.iter().any(|prefix| path.starts_with(prefix.as_bytes()));
    }
    STEPS.contains(&number)
}

/// Kills the victim before its step `at`. Returns false if the victim exits before that step.
#[allow(clippy::zombie_processes, reason = "it is waited for by its number, as what it forks is")]
pub fn kill_at(mut command: Command, victim: Victim, at: usize) -> bool {
    // SAFETY: one system call between fork and exec.
    unsafe {
        command.pre_exec(|| match libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    let mut child = command.process_group(0).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let first = i32::try_from(child.id()).unwrap();
    let mut target = (victim == Victim::Command).then_some(first);
    let (mut is_new, mut steps) = (true, 0);
    loop {
        let (pid, status) = next_stop();
        if libc::WIFEXITED(status) || libc::WIFSIGNALED(status) {
            // Both processes were waited for: the parent waits for a forked victim.
            if pid == first {
                return Some(pid) != target && steps > at;
            }
            continue;
        }
        if pid == first && std::mem::take(&mut is_new) {
            let follow = if target.is_none() { libc::PTRACE_O_TRACEFORK } else { 0 };
            ptrace(libc::PTRACE_SETOPTIONS, pid, (libc::PTRACE_O_TRACESYSGOOD | follow) as usize);
        } else if pid != first && target.is_none() {
            target = Some(pid);
        }
        let signal = libc::WSTOPSIG(status);
        if Some(pid) == target && signal == libc::SIGTRAP | 0x80 && is_step(pid) {
            steps += 1;
            if steps > at {
                let killed = if victim == Victim::Terminal { -first } else { pid };
                // SAFETY: the processes are traced, so that their numbers cannot be reused.
                unsafe { libc::kill(killed, libc::SIGKILL) };
                if victim == Victim::Owner {
                    continue;
                }
                ptrace(libc::PTRACE_DETACH, pid, 0);
                child.wait().unwrap();
                return true;
            }
        }
        let is_signal = ![libc::SIGTRAP, libc::SIGTRAP | 0x80, libc::SIGSTOP].contains(&signal);
        let delivered = if is_signal { signal as usize } else { 0 };
        match Some(pid) == target {
            true => ptrace(libc::PTRACE_SYSCALL, pid, delivered),
            // Daemons that the command starts, and processes that only wait for the victim, continue.
            false if pid != first => ptrace(libc::PTRACE_DETACH, pid, delivered),
            false => ptrace(libc::PTRACE_CONT, pid, delivered),
        };
    }
}
