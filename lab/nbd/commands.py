#!/usr/bin/python3
"""Every NBD command with every flag, through libnbd."""

import os

import nbd

from checks import KIB, MIB, LeftOut, data, equal, main, refused, true

WORK = 4 * MIB  # where these checks write: [0, WORK) of the export
HOLE, ZERO = nbd.STATE_HOLE, nbd.STATE_ZERO


def fill(handle, offset, length, seed):
    """Writes pseudo-random data and returns it."""
    content = data(length, seed)
    handle.pwrite(content, offset)
    return content


def extents(handle, offset, length, flags=0):
    """Block status of the whole range as (offset, length, flags), asked for piece by piece."""
    found, at = [], offset
    while at < offset + length:
        piece = []
        handle.block_status(offset + length - at, at,
                            lambda context, _o, entries, _e: piece.extend(entries), flags)
        true(piece, f"no extents at {at}")
        for extent_length, state in zip(piece[::2], piece[1::2]):
            true(extent_length > 0, f"an empty extent at {at}")
            found.append((at, extent_length, state))
            at += extent_length
    return found


def allocated(target):
    """Bytes that the image file holds on disk."""
    if not target.image or not os.path.isfile(target.image):
        raise LeftOut("no image file to check")
    os.sync()
    return os.stat(target.image).st_blocks * 512


def check_export_properties(target):
    handle = target.connect()
    equal(handle.get_size(), target.size, "size")
    equal(handle.is_read_only(), target.read_only, "read-only")
    true(handle.can_flush(), "flush is not offered")
    true(handle.can_multi_conn(), "multi-conn is not offered")
    true(handle.can_cache(), "cache is not offered")
    true(handle.can_df(), "DF is not offered")
    true(handle.get_structured_replies_negotiated(), "no structured replies")
    true(handle.can_meta_context("base:allocation"), "no base:allocation")
    equal(handle.get_protocol(), "newstyle-fixed", "protocol")
    if not target.read_only:
        true(handle.can_fua(), "FUA is not offered")
        true(handle.can_zero(), "write zeroes is not offered")
        true(handle.can_fast_zero(), "fast zero is not offered")
        equal(handle.can_trim(), target.trim, "trim")


def check_block_sizes(target):
    handle = target.connect()
    minimum = handle.get_block_size(nbd.SIZE_MINIMUM)
    preferred = handle.get_block_size(nbd.SIZE_PREFERRED)
    maximum = handle.get_block_size(nbd.SIZE_MAXIMUM)
    equal(minimum, target.sector, "minimum block size")
    true(preferred >= minimum and preferred & (preferred - 1) == 0,
         f"preferred block size {preferred} is no power of two from {minimum}")
    true(maximum >= MIB and maximum % minimum == 0, f"maximum block size {maximum}")


def check_read_content(target):
    if not target.content:
        raise LeftOut("no file with the expected content given")
    handle = target.connect()
    with open(target.content, "rb") as file:
        for offset in range(0, target.size, MIB):
            length = min(MIB, target.size - offset)
            file.seek(offset)
            equal(bytes(handle.pread(length, offset)), file.read(length), f"read at {offset}")


def check_read_write_lengths(target):
    target.need_writable()
    handle = target.connect()
    lengths = [1, 2, 3, 7, 8, 9, 31, 32, 33, 127, 128, 129, 255, 256]
    for turn, sectors in enumerate(lengths):
        length = sectors * target.sector
        content = fill(handle, turn * target.sector, length, seed=turn)
        equal(bytes(handle.pread(length, turn * target.sector)), content, f"{length} bytes")


def check_longest_request(target):
    target.need_writable()
    handle = target.connect()
    length = min(handle.get_block_size(nbd.SIZE_MAXIMUM), 32 * MIB, target.size)
    length -= length % target.sector
    content = data(length, seed=99)
    handle.pwrite(content, target.size - length)
    equal(bytes(handle.pread(length, target.size - length)), content, f"{length} bytes")


def check_first_and_last_sector(target):
    target.need_writable()
    handle = target.connect()
    for offset in (0, target.size - target.sector):
        content = fill(handle, offset, target.sector, seed=offset)
        equal(bytes(handle.pread(target.sector, offset)), content, f"sector at {offset}")


def check_neighbours_stay_untouched(target):
    target.need_writable()
    handle = target.connect()
    whole = bytearray(fill(handle, 0, 64 * KIB, seed=1))
    for turn, sectors in enumerate((1, 3, 5)):
        offset, length = (7 + 17 * turn) % 11 * target.sector, sectors * target.sector
        whole[offset:offset + length] = fill(handle, offset, length, seed=2 + turn)
        equal(bytes(handle.pread(64 * KIB, 0)), bytes(whole), f"after a write at {offset}")


def check_write_fua(target):
    target.need_writable()
    handle = target.connect()
    content = data(64 * KIB, seed=3)
    handle.pwrite(content, 64 * KIB, nbd.CMD_FLAG_FUA)
    equal(bytes(handle.pread(64 * KIB, 64 * KIB)), content, "read back")
    if target.image:
        with open(target.image, "rb") as file:
            file.seek(target.offset + 64 * KIB)
            equal(file.read(64 * KIB), content, "the image after a FUA write")


def check_flush(target):
    handle = target.connect()
    if target.read_only:
        handle.flush()
        return
    content = fill(handle, 0, 64 * KIB, seed=4)
    handle.flush()
    if target.image:
        with open(target.image, "rb") as file:
            file.seek(target.offset)
            equal(file.read(64 * KIB), content, "the image after a flush")
    handle.flush()  # with nothing to flush


def check_trim(target):
    target.need_writable()
    handle = target.connect()
    if not target.trim:
        raise LeftOut("trim is not promised")
    for flags in (0, nbd.CMD_FLAG_FUA):
        content = fill(handle, 0, WORK, seed=5)
        handle.trim(MIB, MIB, flags)
        equal(bytes(handle.pread(MIB, 0)), content[:MIB], "before the trimmed range")
        equal(bytes(handle.pread(MIB, MIB)), bytes(MIB), "the trimmed range")
        equal(bytes(handle.pread(2 * MIB, 2 * MIB)), content[2 * MIB:], "after it")


def check_trim_gives_space_back(target):
    target.need_writable()
    if not (target.trim and target.sparse):
        raise LeftOut("holes are not promised")
    handle = target.connect()
    fill(handle, 0, WORK, seed=6)
    handle.flush()
    before = allocated(target)
    handle.trim(2 * MIB, MIB)
    handle.flush()
    true(allocated(target) <= before - 2 * MIB + 64 * KIB, "the image did not shrink")


def check_zero_every_flag(target):
    target.need_writable()
    handle = target.connect()
    for flags in range(8):
        bits = (nbd.CMD_FLAG_FUA if flags & 1 else 0) | (
            nbd.CMD_FLAG_NO_HOLE if flags & 2 else 0) | (
            nbd.CMD_FLAG_FAST_ZERO if flags & 4 else 0)
        content = bytearray(fill(handle, 0, 512 * KIB, seed=7 + flags))
        try:
            handle.zero(128 * KIB, 64 * KIB, bits)
            content[64 * KIB:192 * KIB] = bytes(128 * KIB)
        except nbd.Error as error:  # fast zero may fail, and then nothing has changed
            true(flags & 4 and error.errno in ("ENOTSUP", "EOPNOTSUPP"),
                 f"flags {bits:#x}: {error.string}")
        equal(bytes(handle.pread(512 * KIB, 0)), bytes(content), f"flags {bits:#x}")


def check_zero_of_one_sector(target):
    target.need_writable()
    handle = target.connect()
    for flags in (0, nbd.CMD_FLAG_NO_HOLE):
        content = bytearray(fill(handle, 0, 64 * KIB, seed=20 + flags))
        handle.zero(target.sector, 3 * target.sector, flags)
        content[3 * target.sector:4 * target.sector] = bytes(target.sector)
        equal(bytes(handle.pread(64 * KIB, 0)), bytes(content), "read back")


def check_zero_of_everything(target):
    target.need_writable()
    handle = target.connect()
    fill(handle, target.size - MIB, MIB, seed=21)
    handle.zero(target.size, 0)
    equal(bytes(handle.pread(WORK, 0)), bytes(WORK), "the start")
    equal(bytes(handle.pread(MIB, target.size - MIB)), bytes(MIB), "the end")


# Contract: no-unmap
def check_no_hole_keeps_the_space(target):
    target.need_writable()
    if not target.sparse:
        raise LeftOut("holes are not promised")
    handle = target.connect()
    fill(handle, 0, WORK, seed=22)
    handle.flush()
    before = allocated(target)
    handle.zero(2 * MIB, MIB, nbd.CMD_FLAG_NO_HOLE)
    handle.flush()
    true(allocated(target) >= before, "write zeroes with NO_HOLE freed space")


def check_cache(target):
    handle = target.connect()
    before = bytes(handle.pread(MIB, 0))
    handle.cache(MIB, 0)
    handle.cache(target.sector, target.size - target.sector)
    equal(bytes(handle.pread(MIB, 0)), before, "read after cache")


def check_block_status_covers_the_export(target):
    handle = target.connect()
    at = 0
    for offset, length, state in extents(handle, 0, target.size):
        equal(offset, at, "extent start")
        true(length % target.sector == 0, f"an extent of {length} bytes at {offset}")
        true(state & ~(HOLE | ZERO) == 0, f"state {state}")
        if state & ZERO:
            piece = min(length, MIB)
            equal(bytes(handle.pread(piece, offset)), bytes(piece), f"a zero extent at {offset}")
        at += length
    equal(at, target.size, "end of the last extent")


def check_block_status_tells_the_layout(target):
    target.need_writable()
    if not target.sparse:
        raise LeftOut("holes are not promised")
    handle = target.connect()
    handle.trim(target.size, 0)
    for offset in (MIB, 3 * MIB):
        fill(handle, offset, 256 * KIB, seed=23)
    handle.flush()
    states = [(state & (HOLE | ZERO), offset, offset + length)
              for offset, length, state in extents(handle, 0, WORK)]
    holes = sum(end - begin for state, begin, end in states if state)
    equal(holes, WORK - 512 * KIB, "bytes in holes")
    for state, begin, end in states:
        written = any(begin < at + 256 * KIB and end > at for at in (MIB, 3 * MIB))
        equal(state, 0 if written else HOLE | ZERO, f"state of [{begin}, {end})")


def check_block_status_one_extent(target):
    handle = target.connect()
    for offset in (0, MIB - 64 * KIB, MIB, target.size - target.sector):
        found = []
        length = min(2 * MIB, target.size - offset)
        handle.block_status(length, offset, lambda c, o, entries, e: found.extend(entries),
                            nbd.CMD_FLAG_REQ_ONE)
        equal(len(found), 2, "numbers in the answer to REQ_ONE")
        true(0 < found[0] <= length, f"an extent of {found[0]} of {length} bytes")


def check_read_chunks(target):
    """Chunks cover what was asked for exactly once; holes in them are zeroes."""
    handle = target.connect()
    if not target.read_only:
        handle.zero(WORK, 0)
        fill(handle, MIB, 256 * KIB, seed=24)
    chunks = []

    def chunk(part, offset, kind, _error):
        chunks.append((offset, len(part), kind))

    content = bytes(handle.pread_structured(2 * MIB, 512 * KIB, chunk))
    equal(content, bytes(handle.pread(2 * MIB, 512 * KIB)), "structured against plain read")
    at = 512 * KIB
    for offset, length, kind in sorted(chunks):
        equal(offset, at, "chunk start")
        true(kind in (nbd.READ_DATA, nbd.READ_HOLE), f"chunk type {kind}")
        at += length
    equal(at, 512 * KIB + 2 * MIB, "end of the last chunk")


def check_read_do_not_fragment(target):
    handle = target.connect()
    chunks = []
    length = 64 * KIB
    content = bytes(handle.pread_structured(
        length, MIB - 32 * KIB, lambda part, o, kind, e: chunks.append(len(part)),
        nbd.CMD_FLAG_DF))
    equal(chunks, [length], "chunks of a DF read")
    equal(content, bytes(handle.pread(length, MIB - 32 * KIB)), "content")


def check_zero_length_is_survived(target):
    """The specification leaves zero lengths undefined: any answer, and a living connection."""
    if not target.zero_length:
        raise LeftOut("not promised for this export")
    handle = target.connect()
    for call in (lambda: handle.pread(0, 0), lambda: handle.cache(0, 0)):
        try:
            call()
        except nbd.Error as error:
            true(not handle.aio_is_dead(), f"the connection died: {error.string}")
    handle.pread(target.sector, 0)


def check_modifying_commands_on_read_only(target):
    if not target.read_only:
        raise LeftOut("the export is writable")
    handle = target.connect()
    before = bytes(handle.pread(64 * KIB, 0))
    for name, call in {
        "write": lambda: handle.pwrite(data(4 * KIB, 1), 0),
        "write FUA": lambda: handle.pwrite(data(4 * KIB, 1), 0, nbd.CMD_FLAG_FUA),
        "trim": lambda: handle.trim(4 * KIB, 0),
        "zero": lambda: handle.zero(4 * KIB, 0),
        "zero no hole": lambda: handle.zero(4 * KIB, 0, nbd.CMD_FLAG_NO_HOLE),
    }.items():
        try:
            refused(target.not_permitted, call)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
    equal(bytes(handle.pread(64 * KIB, 0)), before, "content after the refusals")


if __name__ == "__main__":
    main(__doc__)
