//! The system calls that confined threads may make (seccomp(2)). `lab/security` fails if a daemon makes a
//! call that is not listed here, or if a listed call is neither made nor marked as seldom.
//!
//! A refused call fails with ENOSYS, as on a kernel that does not have it. So a newer C library falls back to
//! an older call. A call that no code of this program can make kills the process, because an attacker must
//! have taken control.

#[derive(Clone, Copy, Debug)]
pub struct Call {
    name: &'static str,
    pub(super) number: libc::c_long,
    /// If set, the call is allowed only if this argument has this value in the bits of the mask.
    pub(super) argument: Option<Argument>,
    /// Whether no test makes this call: only errors, old kernels or other C libraries lead to it.
    seldom: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Argument {
    pub(super) index: u8,
    pub(super) mask: u64,
    pub(super) value: u64,
}

impl Call {
    /// The name as in the manual page of the call.
    pub fn name(&self) -> &'static str {
        self.name.trim_start_matches("SYS_")
    }

    pub fn is_seldom(&self) -> bool {
        self.seldom
    }

    const fn only(mut self, index: u8, mask: u64, value: u64) -> Call {
        self.argument = Some(Argument { index, mask, value });
        self
    }

    const fn seldom(mut self) -> Call {
        self.seldom = true;
        self
    }
}

macro_rules! call {
    ($number:ident) => {
        Call { name: stringify!($number), number: libc::$number, argument: None, seldom: false }
    };
}

/// All bits of an argument that the kernel treats as an `int`.
const ALL: u64 = u32::MAX as u64;
/// All bits of an argument that is an address.
const ADDRESS: u64 = u64::MAX;
const EXECUTABLE: u64 = libc::PROT_EXEC as u64;
const THREAD: u64 = libc::CLONE_THREAD as u64;

/// The calls of an engine, its worker and a watcher of trigger files.
pub const ENGINE: &[Call] = &[
    // Adding a filter can only reduce what is allowed.
    call!(SYS_seccomp),
    call!(SYS_io_uring_setup),
    call!(SYS_io_uring_enter),
    call!(SYS_io_uring_register),
    // For eventfds, the log, the extents of a file and trigger files.
    call!(SYS_read),
    call!(SYS_write),
    call!(SYS_close),
    call!(SYS_pread64),
    // For tables of an image, which are written while no queue does I/O.
    call!(SYS_pwrite64),
    call!(SYS_fdatasync),
    call!(SYS_fallocate),
    call!(SYS_lseek),
    call!(SYS_fcntl),
    call!(SYS_statx),
    // For memory. It can never become executable, so that an attacker cannot run written data.
    call!(SYS_mmap).only(2, EXECUTABLE, 0),
    call!(SYS_munmap),
    call!(SYS_mprotect).only(2, EXECUTABLE, 0),
    call!(SYS_madvise),
    // For the heap.
    call!(SYS_brk).seldom(),
    call!(SYS_mremap).seldom(),
    // For threads, but not for processes.
    call!(SYS_clone).only(0, THREAD, THREAD),
    call!(SYS_futex),
    call!(SYS_rseq),
    call!(SYS_set_robust_list),
    call!(SYS_sigaltstack),
    call!(SYS_rt_sigprocmask),
    call!(SYS_sched_getaffinity),
    // For ublk, which the tests use only in guests.
    call!(SYS_sched_setaffinity).seldom(),
    call!(SYS_capget).seldom(),
    call!(SYS_prctl).only(0, ALL, libc::PR_SET_NAME as u64),
    call!(SYS_clock_nanosleep),
    call!(SYS_exit),
    call!(SYS_gettid),
    // For the sockets of clients.
    call!(SYS_getsockopt),
    call!(SYS_setsockopt),
    call!(SYS_getpeername),
    call!(SYS_shutdown),
    call!(SYS_ioctl).only(1, ALL, libc::TIOCOUTQ as u32 as u64),
    // For User-mode Linux, which is called through a socket, and for answers and notifications of the control
    // plane. All these sockets are connected, so no other address is needed.
    call!(SYS_sendto).only(4, ADDRESS, 0),
    // For a clock without vDSO, for keys, for waiting for a lock, for a panic and its message.
    call!(SYS_clock_gettime).seldom(),
    call!(SYS_getrandom),
    call!(SYS_sched_yield).seldom(),
    call!(SYS_rt_sigreturn),
    // For the SIGBUS handler, in case the memory of a guest is truncated.
    call!(SYS_rt_sigaction),
    call!(SYS_restart_syscall).seldom(),
    call!(SYS_tgkill).seldom(),
    call!(SYS_getpid),
    call!(SYS_exit_group),
];

const MORE: &[Call] = &[
    call!(SYS_accept4),
    call!(SYS_ppoll),
    call!(SYS_recvfrom),
    call!(SYS_ioctl),
    call!(SYS_openat),
    call!(SYS_ftruncate),
    // For the modification time of a raw image, which is stored with its bitmaps.
    call!(SYS_fsync).seldom(),
    // For joining a group, and for repairing its file.
    call!(SYS_flock).seldom(),
    // For a freeze.
    call!(SYS_membarrier),
    // For virtual machines: messages with file descriptors, memory, and the record of requests in flight.
    call!(SYS_recvmsg),
    // With TCP Fast Open a message has an address to connect to, which Landlock does not see.
    call!(SYS_sendmsg).only(2, libc::MSG_FASTOPEN as u64, 0),
    call!(SYS_fstat),
    call!(SYS_fstatfs),
    call!(SYS_memfd_create),
    call!(SYS_fadvise64),
    // The metrics thread lowers its priority.
    call!(SYS_setpriority),
    // To redirect standard output after the reply to the command that waits there.
    #[cfg(target_arch = "x86_64")]
    call!(SYS_dup2),
    #[cfg(target_arch = "x86_64")]
    call!(SYS_readlink),
    #[cfg(target_arch = "x86_64")]
    call!(SYS_unlink),
    #[cfg(target_arch = "x86_64")]
    call!(SYS_rename).seldom(),
    #[cfg(not(target_arch = "x86_64"))]
    call!(SYS_dup3),
    #[cfg(not(target_arch = "x86_64"))]
    call!(SYS_readlinkat),
    #[cfg(not(target_arch = "x86_64"))]
    call!(SYS_unlinkat),
    #[cfg(not(target_arch = "x86_64"))]
    call!(SYS_renameat).seldom(),
];

/// The calls of the main thread, and of the threads that execute commands.
pub const CONTROL: &[Call] = &{
    let mut calls = [ENGINE[0]; ENGINE.len() + MORE.len()];
    let mut at = 0;
    while at < calls.len() {
        calls[at] = if at < ENGINE.len() { ENGINE[at] } else { MORE[at - ENGINE.len()] };
        at += 1;
    }
    calls
};

/// The process that sends commands to the ublk control device opens it, and creates an io_uring instance, for
/// each command.
pub const UBLK_COMMANDS: &[Call] = &[
    call!(SYS_read),
    call!(SYS_recvfrom),
    call!(SYS_write),
    call!(SYS_sendto),
    call!(SYS_openat),
    call!(SYS_close),
    call!(SYS_fcntl),
    call!(SYS_io_uring_setup),
    call!(SYS_io_uring_enter),
    call!(SYS_io_uring_register),
    call!(SYS_capget),
    // The process asks to be killed together with the daemon while it starts a device.
    call!(SYS_prctl).only(0, ALL, libc::PR_SET_PDEATHSIG as u64),
    call!(SYS_getppid),
    call!(SYS_mmap).only(2, EXECUTABLE, 0),
    call!(SYS_munmap),
    call!(SYS_mprotect).only(2, EXECUTABLE, 0),
    call!(SYS_madvise),
    call!(SYS_brk),
    call!(SYS_mremap),
    call!(SYS_futex),
    call!(SYS_clock_gettime),
    call!(SYS_restart_syscall),
    call!(SYS_rt_sigreturn),
    call!(SYS_exit_group),
];

/// Open flags that write, create or truncate.
const WRITES: u64 = (libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC) as u64;

/// The process that watches the users of a block device reads `/proc` and `/dev`.
pub const WATCHER: &[Call] = &[
    call!(SYS_openat).only(2, WRITES, libc::O_RDONLY as u64),
    call!(SYS_getdents64),
    #[cfg(target_arch = "x86_64")]
    call!(SYS_readlink),
    call!(SYS_readlinkat),
    call!(SYS_statx),
    call!(SYS_fstat),
    call!(SYS_newfstatat),
    call!(SYS_read),
    call!(SYS_lseek),
    call!(SYS_recvfrom),
    call!(SYS_write),
    call!(SYS_sendto),
    call!(SYS_close),
    call!(SYS_fcntl),
    call!(SYS_ppoll),
    call!(SYS_inotify_init1),
    call!(SYS_inotify_add_watch),
    // To flush the writes to a device that is about to stop.
    call!(SYS_fsync),
    call!(SYS_sync),
    call!(SYS_mmap).only(2, EXECUTABLE, 0),
    call!(SYS_munmap),
    call!(SYS_mprotect).only(2, EXECUTABLE, 0),
    call!(SYS_madvise),
    call!(SYS_brk),
    call!(SYS_mremap),
    call!(SYS_futex),
    call!(SYS_getpid),
    call!(SYS_clock_gettime),
    call!(SYS_restart_syscall),
    call!(SYS_rt_sigreturn),
    call!(SYS_exit_group),
];

/// The bits that identify the address families of a cluster: `AF_INET` is 2, `AF_INET6` is 10.
const INTERNET: u64 = ALL & !8;

/// For the threads of Ceph's client library, and the thread that opens, resizes and closes the image.
pub const CLUSTER: &[Call] = &[
    call!(SYS_read),
    call!(SYS_write),
    call!(SYS_close),
    call!(SYS_lseek),
    call!(SYS_fcntl),
    call!(SYS_openat),
    call!(SYS_newfstatat),
    call!(SYS_fstat).seldom(),
    call!(SYS_statx).seldom(),
    call!(SYS_uname),
    call!(SYS_getrandom),
    call!(SYS_sysinfo).seldom(),
    call!(SYS_prlimit64).seldom(),
    call!(SYS_getuid).seldom(),
    call!(SYS_geteuid).seldom(),
    // For the connections to the cluster: no other kind of socket, and no listening socket.
    call!(SYS_socket).only(0, INTERNET, libc::AF_INET as u64),
    call!(SYS_connect),
    call!(SYS_shutdown),
    call!(SYS_getsockname),
    call!(SYS_getpeername).seldom(),
    call!(SYS_getsockopt).seldom(),
    call!(SYS_setsockopt),
    call!(SYS_sendmsg),
    // To resolve the names of the monitors.
    call!(SYS_sendto).seldom(),
    call!(SYS_sendmmsg).seldom(),
    call!(SYS_recvfrom).seldom(),
    call!(SYS_recvmsg).seldom(),
    call!(SYS_ioctl).only(1, ALL, libc::FIONREAD as u32 as u64).seldom(),
    #[cfg(target_arch = "x86_64")]
    call!(SYS_poll).seldom(),
    call!(SYS_ppoll).seldom(),
    #[cfg(target_arch = "x86_64")]
    call!(SYS_epoll_create),
    call!(SYS_epoll_create1).seldom(),
    call!(SYS_epoll_ctl),
    #[cfg(target_arch = "x86_64")]
    call!(SYS_epoll_wait),
    call!(SYS_epoll_pwait).seldom(),
    call!(SYS_pipe2),
    call!(SYS_eventfd2),
    call!(SYS_mmap).only(2, EXECUTABLE, 0),
    call!(SYS_munmap),
    call!(SYS_mprotect).only(2, EXECUTABLE, 0),
    call!(SYS_madvise),
    call!(SYS_brk).seldom(),
    call!(SYS_mremap).seldom(),
    call!(SYS_clone).only(0, THREAD, THREAD),
    call!(SYS_futex),
    call!(SYS_rseq),
    call!(SYS_set_robust_list),
    call!(SYS_sigaltstack),
    call!(SYS_rt_sigprocmask),
    call!(SYS_rt_sigaction).seldom(),
    call!(SYS_rt_sigreturn).seldom(),
    call!(SYS_restart_syscall).seldom(),
    call!(SYS_sched_getaffinity),
    call!(SYS_sched_yield).seldom(),
    call!(SYS_prctl).only(0, ALL, libc::PR_SET_NAME as u64),
    call!(SYS_clock_nanosleep).seldom(),
    call!(SYS_clock_gettime).seldom(),
    call!(SYS_gettid),
    call!(SYS_getpid).seldom(),
    call!(SYS_tgkill).seldom(),
    call!(SYS_exit),
    call!(SYS_exit_group).seldom(),
];

/// Calls that kill the process: no code of this program executes programs, accesses other processes, or
/// changes privileges, mounts or the kernel.
pub(super) const DEADLY: &[libc::c_long] = &[
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_setreuid,
    libc::SYS_setregid,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_setgroups,
    libc::SYS_capset,
    libc::SYS_setns,
    libc::SYS_unshare,
    libc::SYS_chroot,
    libc::SYS_pivot_root,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsmount,
    libc::SYS_open_by_handle_at,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
];

#[cfg(test)]
mod tests {
    use super::super::filter::{ARCHITECTURE, REFUSE, but_for, eventfds_only, program};
    use super::*;

    /// Computed as the kernel's interpreter does.
    fn run(calls: &[Call], number: libc::c_long, arguments: [u64; 6], arch: u32) -> u32 {
        interpret(&program(calls), number, arguments, arch)
    }

    fn interpret(program: &[libc::sock_filter], number: libc::c_long, arguments: [u64; 6], arch: u32) -> u32 {
        let mut data = vec![];
        data.extend((number as u32).to_ne_bytes());
        data.extend(arch.to_ne_bytes());
        data.extend(0u64.to_ne_bytes());
        arguments.iter().for_each(|argument| data.extend(argument.to_ne_bytes()));
        let (mut at, mut value) = (0, 0u32);
        loop {
            let libc::sock_filter { code, jt, jf, k } = program[at];
            at += 1;
            match u32::from(code) {
                0x20 => value = u32::from_ne_bytes(data[k as usize..][..4].try_into().unwrap()),
                0x15 => at += usize::from(if value == k { jt } else { jf }),
                0x54 => value &= k,
                0x06 => return k,
                other => panic!("code {other:#x}"),
            }
        }
    }

    /// docs/security.md has this list as a table, to which lab/security holds the daemon.
    // Contract: bounded-input
    #[test]
    #[cfg(target_arch = "x86_64")]
    fn the_documentation_lists_what_is_allowed() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/security.md");
        let text = std::fs::read_to_string(path).unwrap();
        let table = text.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
        let rows: Vec<(&str, &str, bool)> = table
            .filter_map(|(name, rest)| {
                let mut cells = rest.split('|').skip(1).map(str::trim);
                let by = cells.next().filter(|by| ["engines", "control plane", "cluster"].contains(by))?;
                Some((name, by, cells.next()? == "seldom"))
            })
            .collect();
        let more = MORE.iter().filter(|call| !ENGINE.iter().any(|other| other.number == call.number));
        let listed =
            ENGINE.iter().map(|call| (call, "engines")).chain(more.map(|call| (call, "control plane")));
        let listed = listed.chain(CLUSTER.iter().map(|call| (call, "cluster")));
        let listed: Vec<_> = listed.map(|(call, by)| (call.name(), by, call.is_seldom())).collect();
        assert_eq!(rows, listed);
    }

    // Contract: bounded-input
    #[test]
    fn the_filter_allows_listed_calls_and_kills_for_deadly_ones() {
        let none = [0; 6];
        let refused = REFUSE;
        for calls in [ENGINE, CONTROL] {
            let answer = |number, arguments| run(calls, number, arguments, ARCHITECTURE);
            for call in calls.iter().filter(|call| call.argument.is_none()) {
                assert_eq!(answer(call.number, none), libc::SECCOMP_RET_ALLOW, "{}", call.name());
            }
            for number in DEADLY {
                assert!(!calls.iter().any(|call| call.number == *number));
                assert_eq!(answer(*number, none), libc::SECCOMP_RET_KILL_PROCESS);
            }
            assert_eq!(
                interpret(&but_for(libc::SYS_clone3, REFUSE), libc::SYS_clone3, none, ARCHITECTURE),
                refused
            );
            assert_eq!(answer(libc::SYS_read, none), libc::SECCOMP_RET_ALLOW);
            assert_eq!(answer(libc::SYS_socketpair, none), refused);
            assert_eq!(answer(libc::SYS_clone, none), refused, "no new processes");
            assert_eq!(answer(libc::SYS_clone, [0x3d0f00, 0, 0, 0, 0, 0]), libc::SECCOMP_RET_ALLOW);
            for number in [libc::SYS_mmap, libc::SYS_mprotect] {
                assert_eq!(answer(number, [0, 0, 3, 0, 0, 0]), libc::SECCOMP_RET_ALLOW);
                assert_eq!(answer(number, [0, 0, 7, 0, 0, 0]), refused, "no executable memory");
            }
            // x32 has other call numbers on the same processor.
            assert_eq!(run(calls, libc::SYS_read, none, 0x4000_0003), libc::SECCOMP_RET_KILL_PROCESS);
            assert_eq!(answer(libc::SYS_read | 0x4000_0000, none), refused);
        }
        let ioctl =
            |calls: &[Call], request| run(calls, libc::SYS_ioctl, [3, request, 0, 0, 0, 0], ARCHITECTURE);
        assert_eq!(ioctl(ENGINE, libc::TIOCSTI), REFUSE);
        assert_eq!(ioctl(ENGINE, libc::TIOCOUTQ), libc::SECCOMP_RET_ALLOW);
        assert_eq!(ioctl(CONTROL, 0x125d), libc::SECCOMP_RET_ALLOW);
        let send = |to| run(ENGINE, libc::SYS_sendto, [3, 0, 8, 0, to, 16], ARCHITECTURE);
        assert_eq!(send(0), libc::SECCOMP_RET_ALLOW);
        for address in [0x7fff_0000, 0x7f00_0000_0000, 0x7f00_7fff_0000] {
            assert_eq!(send(address), REFUSE, "no other address: {address:#x}");
        }
        let send = |flags| run(CONTROL, libc::SYS_sendmsg, [3, 0, flags as u64, 0, 0, 0], ARCHITECTURE);
        assert_eq!(send(libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL), libc::SECCOMP_RET_ALLOW);
        assert_eq!(send(libc::MSG_NOSIGNAL | libc::MSG_FASTOPEN), REFUSE, "no other address");
        for number in [libc::SYS_openat, libc::SYS_socket, libc::SYS_accept4, libc::SYS_unlinkat] {
            assert_eq!(run(ENGINE, number, none, ARCHITECTURE), REFUSE, "an engine opens no files");
        }
    }

    #[test]
    fn the_control_plane_registers_eventfds_only() {
        let register = libc::SYS_io_uring_register;
        let answer =
            |number, operation| interpret(&eventfds_only(), number, [0, operation, 0, 0, 0, 0], ARCHITECTURE);
        for operation in 0..40 {
            let is_eventfd = operation == 4 || operation == 5;
            let expected = if is_eventfd { libc::SECCOMP_RET_ALLOW } else { libc::SECCOMP_RET_KILL_PROCESS };
            assert_eq!(answer(register, operation), expected, "{operation}");
            assert_eq!(answer(libc::SYS_io_uring_enter, operation), libc::SECCOMP_RET_ALLOW);
        }
    }

    #[test]
    fn a_signal_can_be_forwarded_by_every_thread() {
        for program in [program(ENGINE), program(CONTROL)] {
            for call in [libc::SYS_write, libc::SYS_rt_sigreturn] {
                assert_eq!(interpret(&program, call, [0; 6], ARCHITECTURE), libc::SECCOMP_RET_ALLOW);
            }
        }
    }

    #[test]
    fn a_watcher_of_users_reads_and_does_nothing_else() {
        let answer = |number, arguments| run(WATCHER, number, arguments, ARCHITECTURE);
        let open = |flags: i32| answer(libc::SYS_openat, [0, 0, flags as u64, 0, 0, 0]);
        assert_eq!(open(libc::O_RDONLY | libc::O_CLOEXEC | libc::O_EXCL), libc::SECCOMP_RET_ALLOW);
        for flags in [libc::O_RDWR, libc::O_WRONLY, libc::O_CREAT, libc::O_TRUNC] {
            assert_eq!(open(flags), REFUSE);
        }
        for number in [libc::SYS_getdents64, libc::SYS_fsync, libc::SYS_sync] {
            assert_eq!(answer(number, [0; 6]), libc::SECCOMP_RET_ALLOW, "{number}");
        }
        let others = [
            libc::SYS_clone,
            libc::SYS_openat2,
            libc::SYS_truncate,
            libc::SYS_ftruncate,
            libc::SYS_unlinkat,
            libc::SYS_renameat2,
            libc::SYS_kill,
            libc::SYS_socket,
            libc::SYS_connect,
            libc::SYS_ioctl,
            libc::SYS_io_uring_setup,
            libc::SYS_fchmodat,
            libc::SYS_linkat,
        ];
        for number in others {
            assert_eq!(answer(number, [0; 6]), REFUSE, "{number}");
        }
        #[cfg(target_arch = "x86_64")]
        for number in [libc::SYS_open, libc::SYS_creat, libc::SYS_unlink, libc::SYS_rename] {
            assert_eq!(answer(number, [0; 6]), REFUSE, "{number}");
        }
        assert_eq!(answer(libc::SYS_execve, [0; 6]), libc::SECCOMP_RET_KILL_PROCESS);
    }

    #[test]
    fn the_threads_of_a_cluster_connect_and_run_nothing() {
        let answer = |number, arguments| run(CLUSTER, number, arguments, ARCHITECTURE);
        let socket = |family: i32| answer(libc::SYS_socket, [family as u64, 1, 0, 0, 0, 0]);
        assert_eq!(socket(libc::AF_INET), libc::SECCOMP_RET_ALLOW);
        assert_eq!(socket(libc::AF_INET6), libc::SECCOMP_RET_ALLOW);
        for family in [libc::AF_UNIX, libc::AF_NETLINK, libc::AF_PACKET, libc::AF_VSOCK, libc::AF_ALG] {
            assert_eq!(socket(family), REFUSE, "{family}");
        }
        for number in [
            libc::SYS_bind,
            libc::SYS_listen,
            libc::SYS_accept4,
            libc::SYS_unlinkat,
            libc::SYS_renameat2,
            libc::SYS_io_uring_setup,
            libc::SYS_kill,
        ] {
            assert_eq!(answer(number, [0; 6]), REFUSE, "{number}");
        }
        for number in [libc::SYS_mmap, libc::SYS_mprotect] {
            assert_eq!(answer(number, [0, 0, 7, 0, 0, 0]), REFUSE, "no executable memory");
        }
        assert_eq!(answer(libc::SYS_clone, [0; 6]), REFUSE, "no new processes");
        assert_eq!(answer(libc::SYS_execve, [0; 6]), libc::SECCOMP_RET_KILL_PROCESS);
    }

    #[test]
    fn the_process_that_gives_commands_does_nothing_else() {
        let answer = |number, arguments| run(UBLK_COMMANDS, number, arguments, ARCHITECTURE);
        for number in [libc::SYS_socket, libc::SYS_clone, libc::SYS_kill, libc::SYS_ioctl, libc::SYS_unlinkat]
        {
            assert_eq!(answer(number, [0; 6]), REFUSE, "{number}");
        }
        assert_eq!(answer(libc::SYS_io_uring_setup, [0; 6]), libc::SECCOMP_RET_ALLOW);
        assert_eq!(answer(libc::SYS_ptrace, [0; 6]), libc::SECCOMP_RET_KILL_PROCESS);
    }
}
