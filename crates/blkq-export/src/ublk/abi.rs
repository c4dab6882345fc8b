//! The used part of `include/uapi/linux/ublk_cmd.h`, under the kernel's names.

use std::mem::offset_of;

use bitflags::bitflags;
use zerocopy::{FromBytes, Immutable, IntoBytes};

bitflags! {
    /// `UBLK_F_*`: the features that a kernel offers, or that a device was created with, as far as they are
    /// used here. In parentheses: the version of Linux that added a feature.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct Features: u64 {
        /// The device stays when its server exits, and another server can take it over (6.1).
        const USER_RECOVERY = 1 << 3;
        /// Requests that the old server had in flight are reissued to the new server (6.1).
        const USER_RECOVERY_REISSUE = 1 << 4;
        /// Users other than root may create devices (6.3).
        const UNPRIVILEGED_DEV = 1 << 5;
        /// Commands are encoded like ioctls (6.4).
        const CMD_IOCTL_ENCODE = 1 << 6;
        /// The server copies data by reading and writing the character device (6.5).
        const USER_COPY = 1 << 7;
        /// The size of a started device can change (6.16).
        const UPDATE_SIZE = 1 << 10;
        /// The kernel registers the pages of each request as a buffer of the server's ring (6.16).
        const AUTO_BUF_REG = 1 << 11;
        /// The device can be quiesced by a command (6.16).
        const QUIESCE = 1 << 12;
        /// Each tag of a queue may be served by another task (6.16).
        const PER_IO_DAEMON = 1 << 13;
        /// `UBLK_CMD_TRY_STOP_DEV` stops a device only if it is not open (7.0).
        const SAFE_STOP_DEV = 1 << 17;
        const _ = !0;
    }
}

/// The type of the kernel's ioctl codes for ublk.
const TYPE: u32 = b'u' as u32;

/// `UBLK_U_CMD_*`: commands to /dev/ublk-control.
pub mod command {
    use super::{ControlCommand, TYPE};

    const fn control_read(number: u32) -> u32 {
        libc::_IOR::<ControlCommand>(TYPE, number) as u32
    }

    const fn control_write(number: u32) -> u32 {
        libc::_IOWR::<ControlCommand>(TYPE, number) as u32
    }

    pub const GET_QUEUE_AFFINITY: u32 = control_read(0x01);
    pub const GET_DEV_INFO: u32 = control_read(0x02);
    pub const ADD_DEV: u32 = control_write(0x04);
    /// Removes a stopped device, with its character device and its number. The kernel completes this when no
    /// process has the character device open.
    pub const DEL_DEV: u32 = control_write(0x05);
    /// Makes the block device appear.
    pub const START_DEV: u32 = control_write(0x06);
    /// Makes the block device disappear, even if it is open. The kernel waits for I/O in flight, and fails later
    /// I/O.
    pub const STOP_DEV: u32 = control_write(0x07);
    /// Sets the [`Parameters`](super::Parameters) of a device that is not started.
    pub const SET_PARAMS: u32 = control_write(0x08);
    pub const GET_PARAMS: u32 = control_read(0x09);
    /// Begins the takeover of a device whose server has exited.
    pub const START_USER_RECOVERY: u32 = control_write(0x10);
    /// Completes the takeover: the calling server serves the device.
    pub const END_USER_RECOVERY: u32 = control_write(0x11);
    /// As [`GET_DEV_INFO`], for a user who names the device by its path.
    pub const GET_DEV_INFO2: u32 = control_read(0x12);
    pub const GET_FEATURES: u32 = control_read(0x13);
    /// Changes the size of a started device.
    pub const UPDATE_SIZE: u32 = control_write(0x15);
    /// Makes new requests wait for another server. The current server still completes its requests in flight.
    pub const QUIESCE_DEV: u32 = control_write(0x16);
    /// As [`STOP_DEV`], but fails with `EBUSY` if the block device is open
    /// ([`Features::SAFE_STOP_DEV`](super::Features::SAFE_STOP_DEV)).
    pub const TRY_STOP_DEV: u32 = control_write(0x17);
}

/// `UBLK_U_IO_FETCH_REQ`: the server is ready for the first request of a tag.
pub const FETCH: u32 = libc::_IOWR::<IoCommand>(TYPE, 0x20) as u32;
/// `UBLK_U_IO_COMMIT_AND_FETCH_REQ`: completes the request of a tag, and makes the tag ready for the next.
pub const COMMIT_AND_FETCH: u32 = libc::_IOWR::<IoCommand>(TYPE, 0x21) as u32;

pub const QUEUE_DEPTH_MAX: u16 = 4096; // UBLK_MAX_QUEUE_DEPTH
/// `ublksrv_ctrl_cmd.queue_id` of commands for a device as a whole.
pub const NO_QUEUE: u16 = u16::MAX;
/// `dev_id` with which the kernel chooses a free number for a new device.
pub const ANY_ID: u32 = u32::MAX;

/// `UBLK_IO_OP_*`, the low 8 bits of [`IoDescriptor::op_flags`].
pub const OP_READ: u32 = 0;
pub const OP_WRITE: u32 = 1;
pub const OP_FLUSH: u32 = 2;
pub const OP_DISCARD: u32 = 3;
pub const OP_WRITE_ZEROES: u32 = 5;
/// `UBLK_IO_F_FUA`, as a bit of the whole [`IoDescriptor::op_flags`].
pub const IO_FUA: u32 = 1 << 13;
/// `UBLK_IO_F_NOUNMAP`, as a bit of the whole word.
pub const IO_NO_UNMAP: u32 = 1 << 15;
/// `UBLK_IO_F_NEED_REG_BUF`, as a bit of the whole word: the request's pages could not be registered.
pub const IO_NEED_REGISTER: u32 = 1 << 17;

/// `UBLK_AUTO_BUF_REG_FALLBACK`: a request whose pages cannot be registered has [`IO_NEED_REGISTER`].
const REGISTER_FALLBACK: u64 = 1 << 0;

/// `ublk_auto_buf_reg_to_sqe_addr`: the address field of a command, with which the kernel registers the pages
/// of the tag's next request as buffer `index` of the ring.
pub const fn register_address(index: u16) -> u64 {
    index as u64 | REGISTER_FALLBACK << 16
}

/// Offset in the character device at which a server reads or writes the data of the request of `tag` in
/// `queue` (`UBLKSRV_IO_BUF_OFFSET`, `UBLK_TAG_OFF`, `UBLK_QID_OFF`).
pub const fn data_offset(queue: u16, tag: u16) -> u64 {
    0x8000_0000 + ((queue as u64) << 41 | (tag as u64) << 25)
}

/// `struct ublksrv_ctrl_cmd`, the payload of a submission to the control device.
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
pub struct ControlCommand {
    pub dev_id: u32,
    /// Index of a queue, or [`NO_QUEUE`].
    pub queue_id: u16,
    /// Length of the buffer in bytes, including the path.
    pub len: u16,
    pub addr: u64,
    pub data: u64,
    /// Length in bytes of the path, with its NUL, at the beginning of the buffer; 0 if there is no path.
    pub dev_path_len: u16,
    pub(super) pad: u16,
    pub(super) reserved: u32,
}

// struct ublksrv_ctrl_dev_info
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct DeviceInfo {
    /// Number of hardware queues. The kernel creates at most one for each CPU.
    pub nr_hw_queues: u16,
    pub queue_depth: u16,
    /// One of `UBLK_S_DEV_*`, such as [`STATE_DEAD`].
    pub state: u16,
    pub(super) pad0: u16,
    pub max_io_buf_bytes: u32,
    pub dev_id: u32,
    /// Process ID of the server, -1 without a server.
    pub ublksrv_pid: i32,
    pub(super) pad1: u32,
    // Features
    pub flags: u64,
    /// A number that the kernel stores for the server and does not interpret.
    pub ublksrv_flags: u64,
    pub owner_uid: u32,
    pub owner_gid: u32,
    pub(super) reserved: [u64; 2],
}

/// `UBLK_S_DEV_DEAD`: the device is not started, or stopped.
pub const STATE_DEAD: u16 = 0;

/// `struct ublksrv_io_desc`: a request, written by the kernel.
#[derive(Clone, Copy, Debug, FromBytes)]
#[repr(C)]
pub struct IoDescriptor {
    /// The operation in the low 8 bits, flags above.
    pub op_flags: u32,
    pub nr_sectors: u32,
    pub start_sector: u64,
    /// The address that the server passed with the command of the tag.
    pub addr: u64,
}

/// `struct ublksrv_io_cmd`, the payload of a submission to a queue.
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
pub struct IoCommand {
    pub q_id: u16,
    pub tag: u16,
    /// The number of bytes done, or a negative errno.
    pub result: i32,
    /// Address of the buffer for the tag's next request.
    pub addr: u64,
}

// UBLK_ATTR_*, bits of BasicParameters::attrs.
pub const ATTR_READ_ONLY: u32 = 1 << 0;
pub const ATTR_ROTATIONAL: u32 = 1 << 1;
/// The device has a volatile write cache, so the kernel sends flushes.
pub const ATTR_VOLATILE_CACHE: u32 = 1 << 2;
/// The device supports FUA; otherwise the kernel sends a flush after the write.
pub const ATTR_FUA: u32 = 1 << 3;

// struct ublk_param_basic
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct BasicParameters {
    pub attrs: u32,
    /// Logical block size, as the exponent of a power of two. So are the next three sizes.
    pub logical_bs_shift: u8,
    pub physical_bs_shift: u8,
    pub io_opt_shift: u8,
    /// Preferred minimum size of a request (`minimum_io_size` in sysfs).
    pub io_min_shift: u8,
    pub max_sectors: u32,
    /// The kernel splits requests at multiples of this number of sectors; 0: no such boundary.
    pub chunk_sectors: u32,
    pub dev_sectors: u64,
    /// The kernel splits segments at multiples of this plus one, in bytes of memory; 0: no such boundary.
    pub virt_boundary_mask: u64,
}

// struct ublk_param_discard
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct DiscardParameters {
    /// Offset in bytes of the first unit of discards.
    pub discard_alignment: u32,
    /// Unit of discards in bytes, not 0.
    pub discard_granularity: u32,
    /// Largest discard; 0 if the device has no discard.
    pub max_discard_sectors: u32,
    /// Largest write zeroes; 0 if the device has no write zeroes.
    pub max_write_zeroes_sectors: u32,
    /// Must be 1; the kernel accepts no other number.
    pub max_discard_segments: u16,
    pub(super) reserved0: u16,
}

// UBLK_PARAM_TYPE_*, bits of Parameters::types: which members are present.
pub const PARAM_BASIC: u32 = 1 << 0;
pub const PARAM_DISCARD: u32 = 1 << 1;
// Since Linux 6.15.
pub const PARAM_ALIGN: u32 = 1 << 4;

/// `struct ublk_params`, up to the last member that is used here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct Parameters {
    pub len: u32,
    pub types: u32,
    pub basic: BasicParameters,
    pub discard: DiscardParameters,
    pub(super) devt: [u32; 4],
    pub(super) zoned: [u32; 8],
    // struct ublk_param_dma_align
    /// A mask below the page size: these bits are zero in the address and length of each memory segment.
    pub alignment: u32,
    pub(super) align_pad: u32,
    /// Beginning of `struct ublk_param_segment`, unused. It avoids implicit padding, as `IntoBytes` demands.
    pub(super) end: u32,
}

// The offsets are those that `pahole` prints for the structures of the kernel.
const _: () = {
    assert!(size_of::<ControlCommand>() == 32);
    assert!(offset_of!(ControlCommand, addr) == 8 && offset_of!(ControlCommand, data) == 16);
    assert!(offset_of!(ControlCommand, dev_path_len) == 24);
    assert!(size_of::<DeviceInfo>() == 64);
    assert!(offset_of!(DeviceInfo, max_io_buf_bytes) == 8 && offset_of!(DeviceInfo, dev_id) == 12);
    assert!(offset_of!(DeviceInfo, ublksrv_pid) == 16 && offset_of!(DeviceInfo, flags) == 24);
    assert!(offset_of!(DeviceInfo, ublksrv_flags) == 32 && offset_of!(DeviceInfo, owner_uid) == 40);
    assert!(size_of::<IoDescriptor>() == 24 && size_of::<IoCommand>() == 16);
    assert!(offset_of!(IoDescriptor, start_sector) == 8 && offset_of!(IoCommand, addr) == 8);
    assert!(size_of::<BasicParameters>() == 32 && offset_of!(BasicParameters, dev_sectors) == 16);
    assert!(size_of::<DiscardParameters>() == 20);
    assert!(offset_of!(Parameters, basic) == 8 && offset_of!(Parameters, discard) == 40);
    assert!(offset_of!(Parameters, devt) == 60 && offset_of!(Parameters, zoned) == 76);
    assert!(offset_of!(Parameters, alignment) == 108 && size_of::<Parameters>() == 120);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_numbered_as_the_kernel_numbers_them() {
        // Printed by a C program that includes linux/ublk_cmd.h of Linux 7.3.
        assert_eq!(command::GET_QUEUE_AFFINITY, 0x8020_7501);
        assert_eq!(command::GET_DEV_INFO, 0x8020_7502);
        assert_eq!(command::ADD_DEV, 0xc020_7504);
        assert_eq!(command::DEL_DEV, 0xc020_7505);
        assert_eq!(command::START_DEV, 0xc020_7506);
        assert_eq!(command::GET_FEATURES, 0x8020_7513);
        assert_eq!(command::UPDATE_SIZE, 0xc020_7515);
        assert_eq!((FETCH, COMMIT_AND_FETCH), (0xc010_7520, 0xc010_7521));
        assert_eq!(command::QUIESCE_DEV, 0xc020_7516);
    }

    #[test]
    fn requests_and_pages_are_addressed_as_the_kernel_reads_them() {
        // Bits 0 to 15 are the index, bit 16 is the flag, and all bits above are zero.
        assert_eq!(register_address(0x1234), 0x1_1234);
        assert_eq!(data_offset(0, 0), 0x8000_0000);
        // Layout: 25 bits of offset, 16 bits of tag, then the queue.
        assert_eq!(data_offset(3, 5), 0x8000_0000 + (5 << 25) + (3 << 41));
        assert_eq!(data_offset(4095, 0xffff) >> 63, 0, "a file offset");
    }
}
