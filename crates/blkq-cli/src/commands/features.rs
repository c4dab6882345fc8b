//! `blkq features`: what this kernel offers, what is missing, and what for.

use blkq::Ring;
use io_uring::opcode;

use crate::failure::Outcome;
use crate::print;
use crate::table::{Align, render};

/// Options of `features`.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Example:
  blkq features | grep missing")]
pub struct Args {}

/// Operations of io_uring: name, number, what they are for.
const OPERATIONS: [(&str, u8, &str); 14] = [
    ("IORING_OP_READ", opcode::Read::CODE, "reading files"),
    ("IORING_OP_READV", opcode::Readv::CODE, "reading into several buffers"),
    ("IORING_OP_READ_FIXED", opcode::ReadFixed::CODE, "direct reads into registered buffers"),
    ("IORING_OP_WRITE", opcode::Write::CODE, "writing files"),
    ("IORING_OP_WRITEV", opcode::Writev::CODE, "writing from several buffers"),
    ("IORING_OP_WRITE_FIXED", opcode::WriteFixed::CODE, "direct writes from registered buffers"),
    ("IORING_OP_FSYNC", opcode::Fsync::CODE, "flush"),
    ("IORING_OP_FALLOCATE", opcode::Fallocate::CODE, "discard, write zeroes"),
    ("IORING_OP_POLL_ADD", opcode::PollAdd::CODE, "waiting for sockets"),
    ("IORING_OP_ASYNC_CANCEL", opcode::AsyncCancel::CODE, "detach, ending connections"),
    ("IORING_OP_ACCEPT", opcode::Accept::CODE, "NBD connections"),
    ("IORING_OP_RECV", opcode::Recv::CODE, "NBD requests"),
    ("IORING_OP_SEND", opcode::Send::CODE, "NBD replies"),
    ("IORING_OP_SENDMSG", opcode::SendMsg::CODE, "NBD replies with data"),
];

impl Args {
    /// Prints the table.
    ///
    /// # Errors
    /// If it cannot be printed.
    pub fn run(self) -> Outcome {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let mut rows = vec![["kernel".into(), release.trim().to_owned(), String::new()]];
        match Ring::new(8) {
            Ok(ring) => {
                rows.push(["io_uring".into(), "yes".into(), "everything".into()]);
                for (name, code, purpose) in OPERATIONS {
                    rows.push([name.into(), yes(ring.supports(code)), purpose.into()]);
                }
            }
            Err(e) => rows.push(["io_uring".into(), "missing".into(), format!("everything: {e}")]),
        }
        let ublk = std::path::Path::new("/dev/ublk-control").exists();
        rows.push(["ublk".into(), yes(ublk), "kernel block devices; this build does not use it yet".into()]);
        print(&render([Align::Left; 3], &rows))
    }
}

fn yes(there: bool) -> String {
    if there { "yes" } else { "missing" }.to_owned()
}
