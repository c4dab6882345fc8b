//! The `blkq` command. Everything is in the library `blkq_cli`, which the tests use, too.
fn main() -> std::process::ExitCode {
    blkq_cli::main()
}
