//! The system calls that confined threads may make (seccomp(2)). `lab/security` fails if a daemon makes a
//! call that is not listed here, or if it does not make a listed call that docs/security.md does not mark as seldom.
//!
//! A refused call fails with ENOSYS, as on a kernel that does not have it. So a newer C library falls back to
//! an older call. A call that no code of this program can make kills the process, because an attacker must
//! have taken control.

#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// The name of its constant in libc.
    name: &'static str,
    pub(super) number: libc::c_long,
    /// If set, the call is allowed only if this argument has this value in the bits of the mask.
    pub(super) argument: Option<Argument>,
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

    const fn only(mut self, index: u8, mask: u64, value: u64) -> Call {
        self.argument = Some(Argument { index, mask, value });
        self
    }
}

macro_rules! calls {
    ($($(#[$condition:meta])? $number:ident $(.only($($argument:expr),+))?),+ $(,)?) => {
        &[$(
            $(#[$condition])?
            Call { name: stringify!($number), number: libc::$number, argument: None }$(.only($($argument),+))?
        ),+]
    };
}

/// All bits of an argument that the kernel treats as an `int`.
const ALL: u64 = u32::MAX as u64;
/// All bits of an argument that is an address.
const ADDRESS: u64 = u64::MAX;
const EXECUTABLE: u64 = libc::PROT_EXEC as u64;
const THREAD: u64 = libc::CLONE_THREAD as u64;

/// The calls that a kind of thread may make: lists that it shares with other kinds, and its own.
pub type Lists = &'static [&'static [Call]];

/// The calls of an engine, its worker and a watcher of trigger files.
pub const ENGINE: Lists = &[BASE, THREADS, OF_ENGINES];

/// The calls of the main thread, and of the threads that execute commands.
pub const CONTROL: Lists = &[BASE, THREADS, OF_ENGINES, OF_CONTROL];

/// The calls of the threads of Ceph's client library, and of the thread that opens, resizes and closes the image.
pub const CLUSTER: Lists = &[BASE, THREADS, OF_CLUSTERS];

/// The calls of the process that sends commands to the ublk control device. It opens the device, and creates an
/// io_uring instance, for each command.
pub const UBLK_COMMANDS: Lists = &[BASE, OF_UBLK_COMMANDS];

/// The calls of the process that watches the users of a block device. It reads `/proc` and `/dev`.
pub const WATCHER: Lists = &[BASE, OF_WATCHERS];

/// The calls of every confined thread.
const BASE: &[Call] = calls! {
    // For files, eventfds, sockets and the log.
    SYS_read, SYS_write, SYS_close, SYS_fcntl,
    // For memory. It can never become executable, so that an attacker cannot run written data.
    SYS_mmap.only(2, EXECUTABLE, 0), SYS_munmap, SYS_mprotect.only(2, EXECUTABLE, 0), SYS_madvise,
    // For the heap.
    SYS_brk, SYS_mremap, SYS_futex,
    // For a clock without vDSO.
    SYS_clock_gettime, SYS_restart_syscall, SYS_rt_sigreturn, SYS_exit_group,
};

/// The calls of the threads of the daemon's own process, besides [`BASE`].
const THREADS: &[Call] = calls! {
    SYS_lseek, SYS_statx,
    // For threads, but not for processes.
    SYS_clone.only(0, THREAD, THREAD), SYS_rseq, SYS_set_robust_list, SYS_sigaltstack,
    SYS_rt_sigprocmask, SYS_sched_getaffinity, SYS_prctl.only(0, ALL, libc::PR_SET_NAME as u64),
    SYS_clock_nanosleep, SYS_exit, SYS_gettid,
    // For the SIGBUS handler, in case the memory of a guest is truncated.
    SYS_rt_sigaction,
    // For sockets.
    SYS_getsockopt, SYS_setsockopt, SYS_getpeername, SYS_shutdown,
    // For keys, for waiting for a lock, for a panic and its message.
    SYS_getrandom, SYS_sched_yield, SYS_tgkill, SYS_getpid,
};

const OF_ENGINES: &[Call] = calls! {
    SYS_io_uring_setup, SYS_io_uring_enter, SYS_io_uring_register, SYS_pread64,
    // Adding a filter can only reduce what is allowed.
    SYS_seccomp,
    // For tables of an image, which are written while no queue does I/O.
    SYS_pwrite64, SYS_fdatasync, SYS_fallocate,
    // For ublk, which the tests use only in guests.
    SYS_sched_setaffinity, SYS_capget,
    // For the sockets of clients.
    SYS_ioctl.only(1, ALL, libc::TIOCOUTQ as u32 as u64),
    // For User-mode Linux, which is called through a socket, and for answers and notifications of the control
    // plane. All these sockets are connected, so no other address is needed.
    SYS_sendto.only(4, ADDRESS, 0),
};

const OF_CONTROL: &[Call] = calls! {
    SYS_accept4, SYS_ppoll, SYS_recvfrom, SYS_ioctl, SYS_openat, SYS_ftruncate,
    // For the modification time of a raw image, which is stored with its bitmaps.
    SYS_fsync,
    // For joining a group, and for repairing its file.
    SYS_flock,
    // For a freeze.
    SYS_membarrier,
    // For virtual machines: messages with file descriptors, memory, and the record of requests in flight.
    SYS_recvmsg,
    // With TCP Fast Open a message has an address to connect to, which Landlock does not see.
    SYS_sendmsg.only(2, libc::MSG_FASTOPEN as u64, 0),
    SYS_fstat, SYS_fstatfs, SYS_memfd_create, SYS_fadvise64,
    // The metrics thread lowers its priority.
    SYS_setpriority,
    // To redirect standard output after the reply to the command that waits there.
    #[cfg(target_arch = "x86_64")] SYS_dup2,
    #[cfg(target_arch = "x86_64")] SYS_readlink,
    #[cfg(target_arch = "x86_64")] SYS_unlink,
    #[cfg(target_arch = "x86_64")] SYS_rename,
    #[cfg(not(target_arch = "x86_64"))] SYS_dup3,
    #[cfg(not(target_arch = "x86_64"))] SYS_readlinkat,
    #[cfg(not(target_arch = "x86_64"))] SYS_unlinkat,
    #[cfg(not(target_arch = "x86_64"))] SYS_renameat,
};

const OF_UBLK_COMMANDS: &[Call] = calls! {
    SYS_recvfrom, SYS_sendto, SYS_openat, SYS_io_uring_setup, SYS_io_uring_enter,
    SYS_io_uring_register, SYS_capget,
    // The process asks to be killed together with the daemon while it starts a device.
    SYS_prctl.only(0, ALL, libc::PR_SET_PDEATHSIG as u64), SYS_getppid,
};

/// Open flags that write, create or truncate.
const WRITES: u64 = (libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC) as u64;

const OF_WATCHERS: &[Call] = calls! {
    SYS_openat.only(2, WRITES, libc::O_RDONLY as u64), SYS_getdents64,
    #[cfg(target_arch = "x86_64")] SYS_readlink,
    SYS_readlinkat, SYS_statx, SYS_fstat, SYS_newfstatat, SYS_lseek, SYS_recvfrom, SYS_sendto,
    SYS_ppoll, SYS_inotify_init1, SYS_inotify_add_watch,
    // To flush the writes to a device that is about to stop.
    SYS_fsync, SYS_sync, SYS_getpid,
};

/// The bits that identify the address families of a cluster: `AF_INET` is 2, `AF_INET6` is 10.
const INTERNET: u64 = ALL & !8;

const OF_CLUSTERS: &[Call] = calls! {
    SYS_openat, SYS_newfstatat, SYS_fstat, SYS_uname, SYS_sysinfo, SYS_prlimit64, SYS_getuid,
    SYS_geteuid,
    // For the connections to the cluster: no other kind of socket, and no listening socket.
    SYS_socket.only(0, INTERNET, libc::AF_INET as u64), SYS_connect, SYS_getsockname, SYS_sendmsg,
    // To resolve the names of the monitors.
    SYS_sendto, SYS_sendmmsg, SYS_recvfrom, SYS_recvmsg,
    SYS_ioctl.only(1, ALL, libc::FIONREAD as u32 as u64),
    #[cfg(target_arch = "x86_64")] SYS_poll,
    SYS_ppoll,
    #[cfg(target_arch = "x86_64")] SYS_epoll_create,
    SYS_epoll_create1, SYS_epoll_ctl,
    #[cfg(target_arch = "x86_64")] SYS_epoll_wait,
    SYS_epoll_pwait, SYS_pipe2, SYS_eventfd2,
};

/// Calls that kill the process: no code of this program executes programs, accesses other processes, or
/// changes privileges, mounts or the kernel.
pub(super) const DEADLY: &[Call] = calls! {
    SYS_execve, SYS_execveat, SYS_ptrace, SYS_process_vm_readv, SYS_process_vm_writev,
    SYS_pidfd_getfd, SYS_kcmp, SYS_setuid, SYS_setgid, SYS_setreuid, SYS_setregid, SYS_setresuid,
    SYS_setresgid, SYS_setgroups, SYS_capset, SYS_setns, SYS_unshare, SYS_chroot, SYS_pivot_root,
    SYS_mount, SYS_umount2, SYS_move_mount, SYS_open_tree, SYS_fsopen, SYS_fsmount,
    SYS_open_by_handle_at, SYS_init_module, SYS_finit_module, SYS_delete_module, SYS_kexec_load,
    SYS_reboot, SYS_swapon, SYS_bpf, SYS_perf_event_open, SYS_userfaultfd, SYS_add_key,
    SYS_request_key, SYS_keyctl,
};

#[cfg(test)]
mod tests {
    use super::super::filter::{ARCHITECTURE, REFUSE, but_for, eventfds_only, program};
    use super::*;

    /// Computed as the kernel's interpreter does.
    fn run(calls: Lists, number: libc::c_long, arguments: [u64; 6], arch: u32) -> u32 {
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
        let rows: Vec<(&str, &str)> = table
            .filter_map(|(name, rest)| {
                let mut cells = rest.split('|').skip(1).map(str::trim);
                let by = cells.next().filter(|by| ["engines", "control plane", "cluster"].contains(by))?;
                assert!(["", "seldom"].contains(&cells.next()?), "{name}");
                Some((name, by))
            })
            .collect();
        let is_of_engines = |call: &&Call| OF_ENGINES.iter().any(|other| other.number == call.number);
        let more: Vec<Call> = OF_CONTROL.iter().filter(|call| !is_of_engines(call)).copied().collect();
        let listed = |lists: &[&[Call]], by| -> Vec<_> {
            lists.concat().iter().map(|call| (call.name(), by)).collect()
        };
        let [engines, cluster] = [listed(ENGINE, "engines"), listed(CLUSTER, "cluster")];
        assert_eq!(rows, [engines, listed(&[&more], "control plane"), cluster].concat());
    }

    // Contract: bounded-input
    #[test]
    fn the_filter_allows_listed_calls_and_kills_for_deadly_ones() {
        let none = [0; 6];
        let refused = REFUSE;
        for calls in [ENGINE, CONTROL] {
            let answer = |number, arguments| run(calls, number, arguments, ARCHITECTURE);
            let all = calls.concat();
            for call in all.iter().filter(|call| call.argument.is_none()) {
                assert_eq!(answer(call.number, none), libc::SECCOMP_RET_ALLOW, "{}", call.name());
            }
            for Call { number, .. } in DEADLY {
                assert!(!all.iter().any(|call| call.number == *number));
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
            |calls: Lists, request| run(calls, libc::SYS_ioctl, [3, request, 0, 0, 0, 0], ARCHITECTURE);
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
