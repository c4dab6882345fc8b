#!/usr/bin/python3
"""The handshake's options, and the three forms of replies: simple, structured, extended."""

import pathlib
import struct
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))

import nbd

import wire
from checks import KIB, MIB, LeftOut, data, equal, main, refused, true
from clock import wait_until


def check_list_and_info(target):
    handle = target.options()
    names = []
    handle.opt_list(lambda name, description: names.append(name))
    true(names, "an empty list of exports")
    for name in [target.export] + names:
        handle.set_export_name(name)
        handle.opt_info()
        equal(handle.get_size(), target.size, f"size of export {name!r}")
        equal(handle.is_read_only(), target.read_only, f"read-only of export {name!r}")
    handle.opt_abort()


def check_list_meta_contexts(target):
    handle = target.options()
    found = []
    handle.opt_list_meta_context(found.append)
    true("base:allocation" in found, f"contexts {found}")
    handle.opt_go()


def check_export_name_option(target):
    """The oldest way in, with and without the 124 zeroes."""
    for flags, padding in ((wire.FLAG_FIXED_NEWSTYLE, 124),
                           (wire.FLAG_FIXED_NEWSTYLE | wire.FLAG_NO_ZEROES, 0)):
        with wire.Wire(target.socket_path) as client:
            client.greet(flags)
            client.send_option(wire.OPT_EXPORT_NAME, target.export.encode())
            size, _ = struct.unpack(">QH", client.receive(10))
            equal(client.receive(padding), bytes(padding), "padding")
            equal(size, target.size, "size")
            client.request(wire.CMD_READ, length=target.sector, cookie=77)
            error, cookie, _ = client.simple_reply(target.sector)
            equal((error, cookie), (0, 77), "reply")


def check_options_that_are_refused(target):
    with wire.Wire(target.socket_path) as client:
        client.greet()
        for option in (wire.OPT_PEEK_EXPORT, 12, 9999):
            equal(client.option(option, b"x")[-1][0], wire.REP_ERR_UNSUP, f"option {option}")
        tls = client.option(wire.OPT_STARTTLS)[-1][0]
        true(tls in (wire.REP_ERR_UNSUP, wire.REP_ERR_POLICY, wire.REP_ACK), f"TLS: {tls:#x}")
    with wire.Wire(target.socket_path) as client:
        client.greet()
        for option, payload in ((wire.OPT_GO, b"\0\0"), (wire.OPT_GO, struct.pack(">IH", 99, 0)),
                                (wire.OPT_INFO, b""), (wire.OPT_LIST, b"surplus")):
            reply = client.option(option, payload)[-1][0]
            equal(reply, wire.REP_ERR_INVALID, f"option {option} with {payload!r}")
        equal(client.go(target.export)[-1][0], wire.REP_ACK, "OPT_GO afterwards")


def check_abort(target):
    with wire.Wire(target.socket_path) as client:
        client.greet()
        equal(client.option(wire.OPT_ABORT)[-1][0], wire.REP_ACK, "reply to abort")
        true(client.closed(), "the connection stays open after abort")


def check_simple_replies(target):
    """Structured replies off: all but block status works, errors come as numbers."""
    handle = target.connect(lambda h: h.set_request_structured_replies(False))
    true(not handle.get_structured_replies_negotiated(), "structured although not asked for")
    refused(RANGE, handle.pread, 2 * target.sector, target.size - target.sector)
    if target.read_only:
        refused(target.not_permitted, handle.pwrite, data(target.sector, 1), 0)
    else:
        content = data(64 * KIB, seed=1)
        handle.pwrite(content, 0, nbd.CMD_FLAG_FUA)
        equal(bytes(handle.pread(64 * KIB, 0)), content, "read back")
        handle.zero(64 * KIB, 0)
        equal(bytes(handle.pread(64 * KIB, 0)), bytes(64 * KIB), "zeroed")
        handle.flush()
    refused(("EINVAL", "ENOTSUP"), handle.block_status, 64 * KIB, 0, lambda *_: 0)


RANGE = ("EINVAL", "ENOSPC", "EOVERFLOW")


def check_pipelined_requests(target):
    """Many requests in one send: one reply for each, which its cookie identifies."""
    with wire.Wire(target.socket_path).ready(target.export, structured=False) as client:
        header = struct.Struct(">IHHQQI")
        count = 64
        client.send(b"".join(
            header.pack(wire.REQUEST_MAGIC, 0, wire.CMD_READ, 1000 + i,
                        i * target.sector, target.sector) for i in range(count)))
        cookies = []
        for _ in range(count):
            error, cookie, _ = client.simple_reply(target.sector)
            equal(error, 0, "error")
            cookies.append(cookie)
        equal(sorted(cookies), list(range(1000, 1000 + count)), "cookies")


def check_requests_byte_by_byte(target):
    with wire.Wire(target.socket_path).ready(target.export, structured=False) as client:
        message = struct.pack(">IHHQQI", wire.REQUEST_MAGIC, 0, wire.CMD_READ, 5, 0,
                              target.sector)
        for byte in message:
            client.send(bytes([byte]))
        equal(client.simple_reply(target.sector)[:2], (0, 5), "reply")


def check_disconnect_finishes_what_runs(target):
    """A write followed at once by a disconnect is done; the server closes."""
    target.need_writable()
    content = data(64 * KIB, seed=2)
    with wire.Wire(target.socket_path).ready(target.export, structured=False) as client:
        client.request(wire.CMD_WRITE, offset=MIB, length=64 * KIB, payload=content)
        client.request(wire.CMD_DISC, cookie=2)
        true(client.closed(), "the connection stays open after a disconnect")
    last = target.connect()
    if not target.strict:
        # Other servers close the connection first, and then the write completes.
        wait_until("the last write completes", lambda: bytes(last.pread(64 * KIB, MIB)) == content)
    equal(bytes(last.pread(64 * KIB, MIB)), content, "the last write")


def extended(target):
    """A connection with extended headers, and the id of base:allocation."""
    client = wire.Wire(target.socket_path)
    client.greet()
    reply = client.option(wire.OPT_EXTENDED_HEADERS)[-1][0]
    if reply != wire.REP_ACK:
        if target.extended:
            raise AssertionError(f"extended headers are refused with {reply:#x}")
        raise LeftOut("the server has no extended headers")
    context = client.set_meta_context(target.export)
    equal(client.go(target.export)[-1][0], wire.REP_ACK, "OPT_GO")
    client.extended = True
    return client, context


def read_extended(client, offset, length, flags=0):
    """A read over extended headers, put together from its chunks."""
    client.request(wire.CMD_READ, offset, length, flags, cookie=9)
    content, done = bytearray(length), 0
    covered = 0
    while not done:
        reply_flags, kind, cookie, echoed, payload = client.chunk()
        equal((cookie, echoed), (9, offset), "cookie and offset of the reply")
        done = reply_flags & wire.REPLY_FLAG_DONE
        if kind == wire.REPLY_NONE:
            continue
        at = struct.unpack(">Q", payload[:8])[0] - offset
        if kind == wire.REPLY_OFFSET_DATA:
            content[at:at + len(payload) - 8] = payload[8:]
            covered += len(payload) - 8
        elif kind == wire.REPLY_OFFSET_HOLE:
            covered += struct.unpack(">I", payload[8:12])[0]
        else:
            raise AssertionError(f"chunk type {kind:#x}")
    equal(covered, length, "bytes in the chunks")
    return bytes(content)


def command_extended(client, command, offset=0, length=0, flags=0, payload=b""):
    """Any other command over extended headers; its error."""
    client.request(command, offset, length, flags, cookie=10, payload=payload)
    reply_flags, kind, cookie, echoed, answer = client.chunk()
    equal((cookie, echoed), (10, offset), "cookie and offset of the reply")
    true(reply_flags & wire.REPLY_FLAG_DONE, "not the last chunk")
    return struct.unpack(">I", answer[:4])[0] if kind & (1 << 15) else 0


def check_extended_headers_read_write(target):
    client, _ = extended(target)
    with client:
        if target.read_only:
            equal(len(read_extended(client, 0, 64 * KIB)), 64 * KIB, "length read")
            error = command_extended(client, wire.CMD_WRITE_ZEROES, 0, 4 * KIB)
            true(error == wire.EPERM or error and not target.strict, f"write zeroes: {error}")
            return
        content = data(64 * KIB, seed=3)
        flags = wire.CMD_FLAG_PAYLOAD_LEN | wire.CMD_FLAG_FUA
        equal(command_extended(client, wire.CMD_WRITE, MIB, len(content), flags, content), 0,
              "write")
        equal(read_extended(client, MIB, len(content)), content, "read back")
        equal(read_extended(client, MIB, len(content), wire.CMD_FLAG_DF), content, "DF read")
        equal(command_extended(client, wire.CMD_WRITE_ZEROES, MIB, 4 * KIB), 0, "write zeroes")
        equal(command_extended(client, wire.CMD_FLUSH), 0, "flush")
        equal(read_extended(client, MIB, 4 * KIB), bytes(4 * KIB), "zeroed")


def check_extended_headers_write_without_payload_flag(target):
    """The specification wants the flag on every write; QEMU 10 leaves it out all the same."""
    target.need_writable()
    client, _ = extended(target)
    with client:
        content = data(MIB, seed=4)
        equal(command_extended(client, wire.CMD_WRITE, MIB, MIB, 0, content), 0, "write")
        equal(read_extended(client, MIB, MIB), content, "read back")


def check_extended_headers_block_status(target):
    client, context = extended(target)
    with client:
        client.request(wire.CMD_BLOCK_STATUS, 0, target.size, cookie=11)
        flags, kind, cookie, offset, payload = client.chunk()
        equal((kind, cookie, offset), (wire.REPLY_BLOCK_STATUS_EXT, 11, 0), "reply")
        true(flags & wire.REPLY_FLAG_DONE, "not the last chunk")
        found, count = struct.unpack(">II", payload[:8])
        equal(found, context, "context id")
        equal(len(payload), 8 + 16 * count, "payload length")
        lengths = [struct.unpack_from(">QQ", payload, 8 + 16 * i)[0] for i in range(count)]
        true(count > 0 and all(lengths), f"extents {lengths}")


def check_extended_headers_errors(target):
    client, _ = extended(target)
    with client:
        for length in (target.size + target.sector, 1 << 40, 1 << 63):
            error = command_extended(client, wire.CMD_CACHE, 0, length)
            true(error in (wire.EINVAL, wire.EOVERFLOW), f"cache of {length}: error {error}")
        error = command_extended(client, wire.CMD_READ, target.size, target.sector)
        equal(error, wire.EINVAL, "read beyond the end")
        equal(len(read_extended(client, 0, target.sector)), target.sector, "a read afterwards")


def check_extended_headers_refuse_compact_requests(target):
    client, _ = extended(target)
    with client:
        client.extended = False
        client.request(wire.CMD_READ, 0, target.sector, payload=bytes(4))  # an extended length
        client.socket.settimeout(20)
        true(client.closed(), "a compact request was taken after extended headers")


if __name__ == "__main__":
    main(__doc__)
