#!/usr/bin/python3
"""Every error a client can provoke: the right number, and a connection that lives on."""

import nbd

import wire
from checks import KIB, MIB, LeftOut, data, equal, main, refused, true

RANGE = ("EINVAL", "ENOSPC", "EOVERFLOW")


def calls(handle, length, offset):
    """Every command over one range, by name."""
    return {
        "read": lambda: handle.pread(length, offset),
        "write": lambda: handle.pwrite(data(length, 1), offset),
        "write FUA": lambda: handle.pwrite(data(length, 1), offset, nbd.CMD_FLAG_FUA),
        "trim": lambda: handle.trim(length, offset),
        "zero": lambda: handle.zero(length, offset),
        "zero no hole": lambda: handle.zero(length, offset, nbd.CMD_FLAG_NO_HOLE),
        "cache": lambda: handle.cache(length, offset),
        "block status": lambda: handle.block_status(length, offset, lambda *_: 0),
    }


def all_refused(target, names, length, offset, only=None):
    """Every command is refused over the range, on one connection that stays usable."""
    handle = target.connect()
    for name, call in calls(handle, length, offset).items():
        modifies = name.startswith(("write", "trim", "zero"))
        if (only and name not in only) or (name == "trim" and not target.trim):
            continue
        try:
            refused(names + ("EPERM",) if target.read_only and modifies else names, call)
        except AssertionError as error:
            raise AssertionError(f"{name} of {length} at {offset}: {error}") from None
        true(handle.aio_is_ready(), f"the connection is closed after {name}")
        equal(len(handle.pread(target.sector, 0)), target.sector, "a read after the refusal")


def check_across_the_end(target):
    all_refused(target, RANGE, 2 * target.sector, target.size - target.sector)


def check_at_the_end(target):
    all_refused(target, RANGE, target.sector, target.size)


def check_far_beyond_the_end(target):
    all_refused(target, RANGE, target.sector, (1 << 63) - MIB)


def check_offset_that_wraps(target):
    """offset + length passes 2^64: no client library sends it."""
    with wire.Wire(target.socket_path).ready(target.export, structured=False) as client:
        for command in (wire.CMD_READ, wire.CMD_TRIM, wire.CMD_WRITE_ZEROES, wire.CMD_CACHE):
            client.request(command, offset=(1 << 64) - target.sector, length=2 * target.sector)
            error = client.error_of_reply()
            allowed = (wire.EINVAL, wire.ENOSPC, wire.EPERM, wire.EOVERFLOW)
            true(error in allowed, f"command {command}: error {error}")


def check_unaligned(target):
    if not target.strict or target.sector == 1:
        raise LeftOut("the server takes any alignment")
    half = target.sector // 2
    all_refused(target, ("EINVAL",), target.sector, half)
    all_refused(target, ("EINVAL",), half, 0)
    all_refused(target, ("EINVAL",), target.sector + 1, target.sector)


def check_read_too_long(target):
    handle = target.connect()
    longest = handle.get_block_size(nbd.SIZE_MAXIMUM)
    length = longest + target.sector
    if not longest or length > min(64 * MIB, target.size):
        raise LeftOut(f"the longest request, {longest} bytes, is longer than the export "
                      "or than what the client library sends")
    refused(("EINVAL", "EOVERFLOW"), handle.pread, length, 0)
    equal(len(handle.pread(target.sector, 0)), target.sector, "a read after the refusal")


def check_length_beyond_memory(target):
    """A read and a write of 4 GiB less one sector: refused, or the connection is closed."""
    length = (1 << 32) - target.sector
    with wire.Wire(target.socket_path).ready(target.export, structured=False) as client:
        client.request(wire.CMD_READ, length=length)
        try:
            error = client.error_of_reply()
            true(error in (wire.EINVAL, wire.EOVERFLOW), f"read: error {error}")
        except wire.Closed:
            pass
    with wire.Wire(target.socket_path).ready(target.export, structured=False) as client:
        client.request(wire.CMD_WRITE, length=length)
        try:
            client.send(bytes(MIB))
            client.socket.settimeout(3)
            error = client.error_of_reply()
            true(error != 0, "a write of 4 GiB succeeded")
        except (wire.Closed, TimeoutError):  # it may want to discard the payload first
            pass
    equal(len(target.connect().pread(target.sector, 0)), target.sector, "a read afterwards")


def check_write_longer_than_advertised(target):
    target.need_writable()
    longest = target.connect().get_block_size(nbd.SIZE_MAXIMUM)
    if not longest:
        raise LeftOut("no longest request advertised")
    length = longest + target.sector
    with wire.Wire(target.socket_path).ready(target.export) as client:
        try:
            client.request(wire.CMD_WRITE, length=length, payload=data(length, 2))
            error = client.error_of_reply()
            true(error in (wire.EINVAL, wire.ENOSPC, wire.EOVERFLOW), f"error {error}")
        except wire.Closed:  # allowed by the specification
            pass
    equal(len(target.connect().pread(target.sector, 0)), target.sector, "a read afterwards")


def check_unknown_command(target):
    with wire.Wire(target.socket_path).ready(target.export) as client:
        for command in (8, 99, 0xFFFF):
            client.request(command, length=target.sector)
            equal(client.error_of_reply(), wire.EINVAL, f"error of command {command}")
        client.request(wire.CMD_READ, length=target.sector, flags=wire.CMD_FLAG_DF)
        equal(client.error_of_reply(), 0, "error of a read afterwards")


def check_unknown_flags(target):
    with wire.Wire(target.socket_path).ready(target.export) as client:
        for command in (wire.CMD_READ, wire.CMD_FLUSH, wire.CMD_TRIM, wire.CMD_WRITE_ZEROES,
                        wire.CMD_CACHE):
            client.request(command, length=target.sector, flags=0x8000)
            error = client.error_of_reply()
            true(error in (wire.EINVAL, wire.EPERM), f"command {command}: error {error}")


def check_block_status_without_context(target):
    with wire.Wire(target.socket_path).ready(target.export) as client:
        client.request(wire.CMD_BLOCK_STATUS, length=64 * KIB)
        equal(client.error_of_reply(), wire.EINVAL, "error")


def check_unknown_export(target):
    if not target.strict:
        raise LeftOut("the server takes any export name")
    handle = target.options()
    for name in ("no-such-export", "é" * 100, "x" * 4096):
        handle.set_export_name(name)
        refused(("ENOENT", "EINVAL", "ENOTSUP", "ENAMETOOLONG"), handle.opt_info)
        handle.set_export_name(name)
        refused(("ENOENT", "EINVAL", "ENOTSUP", "ENAMETOOLONG"), handle.opt_go)
    handle.set_export_name(target.export)
    handle.opt_go()
    equal(handle.get_size(), target.size, "size after the refusals")


def check_unknown_meta_context(target):
    handle = target.options()
    handle.add_meta_context("no-such:context")
    handle.opt_go()
    true(not handle.can_meta_context("no-such:context"), "an unknown context was granted")


if __name__ == "__main__":
    main(__doc__)
