#!/usr/bin/python3
"""One honest client while the world misbehaves: trouble.py full|truncated|acknowledged URI ...

full URI           writes until the disk is full: ENOSPC, everything before it intact, and room
                   again after a trim
truncated URI IMAGE  cuts the image in half: EIO beyond, data before it
acknowledged URI IMAGE LOG  writes numbered blocks, a flush now and then, until the server
                   exits; then every acknowledged block must be in IMAGE. Creates LOG when busy.
"""

import os
import pathlib
import sys

import nbd

from checks import KIB, MIB, data, equal, refused, true


def connect(uri):
    """A handle that sends any request, right or wrong."""
    handle = nbd.NBD()
    handle.set_strict_mode(0)
    handle.connect_uri(uri)
    return handle


def full(uri):
    handle = connect(uri)
    size, written, refusals = handle.get_size(), [], 0
    for offset in range(0, size, MIB):
        try:
            handle.pwrite(data(MIB, seed=offset), offset)
            written.append(offset)
        except nbd.Error as error:
            equal(error.errno, "ENOSPC", f"error of the write at {offset}")
            refusals += 1
            if refusals == 8:
                break
    true(written, "nothing could be written at all")
    true(refusals, "the disk never became full")
    for offset in written:
        equal(bytes(handle.pread(MIB, offset)), data(MIB, seed=offset), f"read at {offset}")
    handle.trim(MIB, written[0])
    handle.flush()
    handle.pwrite(data(512 * KIB, seed=1), written[0], nbd.CMD_FLAG_FUA)
    equal(bytes(connect(uri).pread(512 * KIB, written[0])), data(512 * KIB, seed=1),
          "a write into the room that a trim made")


def truncated(uri, image):
    handle = connect(uri)
    size = handle.get_size()
    length = size // 2
    handle.pwrite(data(64 * KIB, seed=0), 0)
    handle.flush()
    os.truncate(image, length)
    for offset in (length, length + MIB, size - 4 * KIB):
        refused(("EIO",), handle.pread, 4 * KIB, offset)
    refused(("EIO",), handle.pread, 64 * KIB, length - 32 * KIB)
    equal(bytes(handle.pread(64 * KIB, 0)), data(64 * KIB, seed=0), "data before the cut")
    handle.pwrite(data(64 * KIB, seed=2), MIB)
    equal(bytes(handle.pread(64 * KIB, MIB)), data(64 * KIB, seed=2), "a write before the cut")
    handle.flush()


def acknowledged(uri, image, log):
    handle = connect(uri)
    size, block, depth = handle.get_size(), 16 * KIB, 32
    running, done, number = {}, {}, 0
    try:
        while number < 1_000_000:
            while len(running) < depth:
                slot = number % (size // block)
                if slot in running.values():  # a slot is never written twice at once
                    break
                content = data(64, number) * (block // 64)
                cookie = handle.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(content)),
                                           slot * block)
                running[cookie] = slot
                done.pop(slot, None)
                done[slot] = [number, False]
                number += 1
            handle.poll(-1)
            for cookie in [c for c in running if handle.aio_command_completed(c)]:
                done[running.pop(cookie)][1] = True
            if number > 100:
                pathlib.Path(log).touch()
    except nbd.Error:
        true(handle.aio_is_dead() or handle.aio_is_closed(), "an error on a living connection")
    count = 0
    with open(image, "rb") as file:
        for slot, (wrote, acknowledged_) in done.items():
            if acknowledged_:
                file.seek(slot * block)
                equal(file.read(block), data(64, wrote) * (block // 64), f"block {slot}")
                count += 1
    true(count > 50, f"only {count} acknowledged blocks to check")
    print(f"{number} writes, {count} acknowledged blocks verified")


if __name__ == "__main__":
    {"full": full, "truncated": truncated, "acknowledged": acknowledged}[sys.argv[1]](
        *sys.argv[2:])
