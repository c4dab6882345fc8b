//! The `blkq` command. Everything is in libraries, which the tests use, too.
fn main() -> std::process::ExitCode {
    blkq_cli::main::<blkq_daemon::process::Daemon>()
}
