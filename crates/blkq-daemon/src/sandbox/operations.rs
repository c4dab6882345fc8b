//! The io_uring operations that a daemon uses.

use io_uring::opcode;

/// The operations: name, number and purpose. The rings of a confined daemon allow no others. None of them
/// takes an address: SEND and SENDMSG could connect a socket (MSG_FASTOPEN) or send a datagram to any path.
pub const OPERATIONS: [(&str, u8, &str); 17] = [
    ("IORING_OP_READ", opcode::Read::CODE, "reading files"),
    ("IORING_OP_READV", opcode::Readv::CODE, "reading into several buffers"),
    ("IORING_OP_READ_FIXED", opcode::ReadFixed::CODE, "direct reads into registered buffers"),
    ("IORING_OP_WRITE", opcode::Write::CODE, "writing files, NBD under TLS"),
    ("IORING_OP_WRITEV", opcode::Writev::CODE, "writing from several buffers, NBD replies"),
    ("IORING_OP_WRITE_FIXED", opcode::WriteFixed::CODE, "direct writes from registered buffers"),
    ("IORING_OP_READV_FIXED", opcode::ReadvFixed::CODE, "reading into several pieces of registered memory"),
    ("IORING_OP_WRITEV_FIXED", opcode::WritevFixed::CODE, "writing from several pieces of registered memory"),
    ("IORING_OP_FSYNC", opcode::Fsync::CODE, "flush"),
    ("IORING_OP_FALLOCATE", opcode::Fallocate::CODE, "discard, write zeroes"),
    ("IORING_OP_POLL_ADD", opcode::PollAdd::CODE, "waking an engine"),
    ("IORING_OP_TIMEOUT", opcode::Timeout::CODE, "freeing memory that is not used"),
    ("IORING_OP_ASYNC_CANCEL", opcode::AsyncCancel::CODE, "detach, closing connections"),
    ("IORING_OP_URING_CMD", opcode::UringCmd16::CODE, "ublk, discard of block devices"),
    ("IORING_OP_ACCEPT", opcode::Accept::CODE, "NBD connections"),
    ("IORING_OP_RECV", opcode::Recv::CODE, "NBD requests"),
    ("IORING_OP_RECVMSG", opcode::RecvMsg::CODE, "NBD payloads"),
];
