//! The `blkq` command.
fn main() -> std::process::ExitCode {
    blkq_cli::main()
}
