//! The kernel's interface: what of `include/uapi/linux/ublk_cmd.h` is used here, under its
//! names. Layouts are asserted at compile time.

use std::mem::offset_of;

use bitflags::bitflags;
use zerocopy::{FromBytes, Immutable, IntoBytes};

bitflags! {
    /// `UBLK_F_*`: what a kernel has, and what a device was made with.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct Features: u64 {
        /// The server refers to the pages of a request (Linux 6.15).
        const SUPPORT_ZERO_COPY = 1 << 0;
        /// Completions run in the task of the queue.
        const URING_CMD_COMP_IN_TASK = 1 << 1;
        /// The server asks for the data of each write.
        const NEED_GET_DATA = 1 << 2;
        /// The device outlives its server (6.1).
        const USER_RECOVERY = 1 << 3;
        /// Requests that the old server had in flight are reissued to the new one (6.1).
        const USER_RECOVERY_REISSUE = 1 << 4;
        /// Users other than root may have devices (6.3).
        const UNPRIVILEGED_DEV = 1 << 5;
        /// Commands are encoded as ioctls are (6.4).
        const CMD_IOCTL_ENCODE = 1 << 6;
        /// The server copies data by reading and writing the character device (6.5).
        const USER_COPY = 1 << 7;
        /// Zoned devices (6.6).
        const ZONED = 1 << 8;
        /// I/O of a device without a server fails (6.13).
        const USER_RECOVERY_FAIL_IO = 1 << 9;
        /// A device in use can be resized (6.16).
        const UPDATE_SIZE = 1 << 10;
        /// The pages of a request become a registered buffer of the ring (6.16).
        const AUTO_BUF_REG = 1 << 11;
        /// A device can be quiesced on command (6.16).
        const QUIESCE = 1 << 12;
        /// Any task may serve any tag (6.16).
        const PER_IO_DAEMON = 1 << 13;
        /// Buffers may be registered by other tasks (6.17).
        const BUF_REG_OFF_DAEMON = 1 << 14;
        /// Many requests per command (7.0).
        const BATCH_IO = 1 << 15;
        /// Integrity data (7.0).
        const INTEGRITY = 1 << 16;
        /// A device is stopped only if nobody has it open (7.0).
        const SAFE_STOP_DEV = 1 << 17;
        /// The kernel does not scan for partitions (7.0).
        const NO_AUTO_PART_SCAN = 1 << 18;
        /// Data in memory that is shared with the user of the device (7.1).
        const SHMEM_ZC = 1 << 19;
        const _ = !0;
    }
}

/// `_IOC` of asm-generic/ioctl.h, for the type `u`.
const fn ioc(direction: u32, number: u32, size: usize) -> u32 {
    direction << 30 | (size as u32) << 16 | (b'u' as u32) << 8 | number
}

const fn control_read(number: u32) -> u32 {
    ioc(2, number, size_of::<ControlCommand>())
}

const fn control_write(number: u32) -> u32 {
    ioc(3, number, size_of::<ControlCommand>())
}

/// `UBLK_U_CMD_*`: commands to `/dev/ublk-control`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Control {
    /// The processors of a queue.
    GetQueueAffinity = control_read(0x01),
    /// The [`DeviceInfo`] of a device.
    GetDevInfo = control_read(0x02),
    /// Makes a device.
    AddDev = control_write(0x04),
    /// Removes it, and waits until nobody refers to it.
    DelDev = control_write(0x05),
    /// Makes the block device appear.
    StartDev = control_write(0x06),
    /// Makes it disappear.
    StopDev = control_write(0x07),
    /// Sets the [`Parameters`], before it is started.
    SetParams = control_write(0x08),
    /// Reads them.
    GetParams = control_read(0x09),
    /// A new server takes over.
    StartUserRecovery = control_write(0x10),
    /// The new server serves.
    EndUserRecovery = control_write(0x11),
    /// As [`Control::GetDevInfo`], for other users than root.
    GetDevInfo2 = control_read(0x12),
    /// The [`Features`] of the kernel.
    GetFeatures = control_read(0x13),
    /// Changes the size of a device in use.
    UpdateSize = control_write(0x15),
    /// Takes a device away from its server, which answers what it has in flight.
    QuiesceDev = control_write(0x16),
    /// Stops a device unless it is open.
    TryStopDev = control_write(0x17),
}

/// `UBLK_U_IO_FETCH_REQ`: a tag is ready for its first request.
pub const FETCH: u32 = ioc(3, 0x20, size_of::<IoCommand>());
/// `UBLK_U_IO_COMMIT_AND_FETCH_REQ`: a request is done, and its tag ready for the next.
pub const COMMIT_AND_FETCH: u32 = ioc(3, 0x21, size_of::<IoCommand>());

/// `UBLK_MAX_QUEUE_DEPTH`.
pub const QUEUE_DEPTH_MAX: u16 = 4096;
/// `ublksrv_ctrl_cmd.queue_id` of commands that are for no queue.
pub const NO_QUEUE: u16 = u16::MAX;
/// `dev_id` of a device that shall get any free number.
pub const ANY_ID: u32 = u32::MAX;

/// `UBLK_IO_OP_*`: the low 8 bits of [`IoDescriptor::op_flags`].
pub const OP_READ: u32 = 0;
/// Memory to device.
pub const OP_WRITE: u32 = 1;
/// Make durable what has completed.
pub const OP_FLUSH: u32 = 2;
/// The content is no longer needed.
pub const OP_DISCARD: u32 = 3;
/// Reads as zeroes afterwards.
pub const OP_WRITE_ZEROES: u32 = 5;
/// `UBLK_IO_F_FUA`, not shifted: the whole word has it at this place.
pub const IO_FUA: u32 = 1 << 13;
/// `UBLK_IO_F_NOUNMAP`, not shifted.
pub const IO_NO_UNMAP: u32 = 1 << 15;
/// `UBLK_IO_F_NEED_REG_BUF`, not shifted: the kernel could not register the request's pages.
pub const IO_NEED_REGISTER: u32 = 1 << 17;

/// `UBLK_AUTO_BUF_REG_FALLBACK`: then the request comes with [`IO_NEED_REGISTER`], and does not fail.
const REGISTER_FALLBACK: u64 = 1 << 0;

/// `ublk_auto_buf_reg_to_sqe_addr`: the address of a command whose next request's pages become
/// the ring's registered buffer `index`.
pub const fn register_address(index: u16) -> u64 {
    index as u64 | REGISTER_FALLBACK << 16
}

/// Where the data of the request of `tag` in `queue` begins in the character device
/// (`UBLKSRV_IO_BUF_OFFSET`, `UBLK_TAG_OFF`, `UBLK_QID_OFF`).
pub const fn data_offset(queue: u16, tag: u16) -> u64 {
    0x8000_0000 + ((queue as u64) << 41 | (tag as u64) << 25)
}

/// `struct ublksrv_ctrl_cmd`: the command that a control submission carries.
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
pub struct ControlCommand {
    /// Which device.
    pub dev_id: u32,
    /// Which queue, or [`NO_QUEUE`].
    pub queue_id: u16,
    /// Length of the buffer in bytes.
    pub len: u16,
    /// Address of the buffer.
    pub addr: u64,
    /// An argument.
    pub data: u64,
    /// Length of the path, with its NUL, that the buffer begins with; 0 if there is none.
    pub dev_path_len: u16,
    pub(super) pad: u16,
    pub(super) reserved: u32,
}

/// `struct ublksrv_ctrl_dev_info`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct DeviceInfo {
    /// Hardware queues; the kernel takes at most one for each processor.
    pub nr_hw_queues: u16,
    /// Requests per queue.
    pub queue_depth: u16,
    /// `UBLK_S_DEV_*`.
    pub state: u16,
    pub(super) pad0: u16,
    /// Largest request.
    pub max_io_buf_bytes: u32,
    /// The number N of `/dev/ublkbN`.
    pub dev_id: u32,
    /// The server's process, -1 if there is none.
    pub ublksrv_pid: i32,
    pub(super) pad1: u32,
    /// [`Features`].
    pub flags: u64,
    /// The server's own, kept by the kernel.
    pub ublksrv_flags: u64,
    /// The user that made it.
    pub owner_uid: u32,
    /// The group of that user.
    pub owner_gid: u32,
    pub(super) reserved: [u64; 2],
}

/// `UBLK_S_DEV_DEAD`: not started, or stopped.
pub const STATE_DEAD: u16 = 0;

/// `struct ublksrv_io_desc`: a request, written by the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct IoDescriptor {
    /// Operation in the low 8 bits, flags above.
    pub op_flags: u32,
    /// Length.
    pub nr_sectors: u32,
    /// Place.
    pub start_sector: u64,
    /// The buffer.
    pub addr: u64,
}

/// `struct ublksrv_io_cmd`: the command that a queue's submission carries.
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
pub struct IoCommand {
    /// Queue.
    pub q_id: u16,
    /// Tag.
    pub tag: u16,
    /// Bytes done, or a negative errno.
    pub result: i32,
    /// The buffer for the next request.
    pub addr: u64,
}

/// `UBLK_ATTR_*`.
pub const ATTR_READ_ONLY: u32 = 1 << 0;
/// Seeks cost time.
pub const ATTR_ROTATIONAL: u32 = 1 << 1;
/// There is a write cache: flushes are sent.
pub const ATTR_VOLATILE_CACHE: u32 = 1 << 2;
/// Writes with FUA are sent as such.
pub const ATTR_FUA: u32 = 1 << 3;

/// `struct ublk_param_basic`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct BasicParameters {
    /// `UBLK_ATTR_*`.
    pub attrs: u32,
    /// Logical block, as a power of two.
    pub logical_bs_shift: u8,
    /// Physical block.
    pub physical_bs_shift: u8,
    /// Preferred size.
    pub io_opt_shift: u8,
    /// Smallest size without a penalty.
    pub io_min_shift: u8,
    /// Largest request in sectors.
    pub max_sectors: u32,
    /// Requests do not cross multiples of it; 0: no such boundary.
    pub chunk_sectors: u32,
    /// Size in sectors.
    pub dev_sectors: u64,
    /// Segments do not cross multiples of it plus one; 0: no such boundary.
    pub virt_boundary_mask: u64,
}

/// `struct ublk_param_discard`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct DiscardParameters {
    /// Offset of the first unit of discards in bytes.
    pub discard_alignment: u32,
    /// Unit of discards in bytes, not 0.
    pub discard_granularity: u32,
    /// Largest discard, 0 for none.
    pub max_discard_sectors: u32,
    /// Largest write zeroes, 0 for none.
    pub max_write_zeroes_sectors: u32,
    /// 1.
    pub max_discard_segments: u16,
    pub(super) reserved0: u16,
}

/// `struct ublk_param_dma_align`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct AlignParameters {
    /// Bits that are zero in the address and the length of each piece of memory, below a page.
    pub alignment: u32,
    pub(super) pad: u32,
}

/// `UBLK_PARAM_TYPE_BASIC`: [`Parameters::basic`] is meant.
pub const PARAM_BASIC: u32 = 1 << 0;
/// [`Parameters::discard`] is meant.
pub const PARAM_DISCARD: u32 = 1 << 1;
/// `UBLK_PARAM_TYPE_DMA_ALIGN`: [`Parameters::align`] is meant (Linux 6.15).
pub const PARAM_ALIGN: u32 = 1 << 4;

/// `struct ublk_params`, up to the last member that is used here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct Parameters {
    /// Size of this structure.
    pub len: u32,
    /// `UBLK_PARAM_TYPE_*`.
    pub types: u32,
    /// Parameters of every device.
    pub basic: BasicParameters,
    /// Discard and write zeroes.
    pub discard: DiscardParameters,
    pub(super) devt: [u32; 4],
    pub(super) zoned: [u32; 8],
    /// Memory of requests.
    pub align: AlignParameters,
    /// The kernel's continues here.
    pub(super) end: u32,
}

// As `pahole` and the header's own comments have them.
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
    assert!(offset_of!(Parameters, align) == 108 && size_of::<Parameters>() == 120);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_numbered_as_the_kernel_numbers_them() {
        // Printed by a C program that includes linux/ublk_cmd.h of Linux 7.3.
        assert_eq!(Control::GetQueueAffinity as u32, 0x8020_7501);
        assert_eq!(Control::GetDevInfo as u32, 0x8020_7502);
        assert_eq!(Control::AddDev as u32, 0xc020_7504);
        assert_eq!(Control::DelDev as u32, 0xc020_7505);
        assert_eq!(Control::StartDev as u32, 0xc020_7506);
        assert_eq!(Control::GetFeatures as u32, 0x8020_7513);
        assert_eq!(Control::UpdateSize as u32, 0xc020_7515);
        assert_eq!((FETCH, COMMIT_AND_FETCH), (0xc010_7520, 0xc010_7521));
        assert_eq!(Control::QuiesceDev as u32, 0xc020_7516);
    }

    #[test]
    fn requests_and_pages_are_addressed_as_the_kernel_reads_them() {
        // Bits 0 to 15 the index, bit 16 the flag, all above zero.
        assert_eq!(register_address(0x1234), 0x1_1234);
        assert_eq!(data_offset(0, 0), 0x8000_0000);
        // 25 bits of offset, 16 of tag, then the queue.
        assert_eq!(data_offset(3, 5), 0x8000_0000 + (5 << 25) + (3 << 41));
        assert_eq!(data_offset(4095, 0xffff) >> 63, 0, "a file offset");
    }
}
