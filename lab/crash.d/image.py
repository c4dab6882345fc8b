#!/usr/bin/python3
# Contract: complete
"""The image is truncated, deleted and replaced under load. image.py SCRATCH ROUNDS"""

import os
import pathlib
import random
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "nbd"))

import wire
from load import Load, read_all
from model import SECTOR, Model
from server import Refused, Server, blkq

SECTORS = 8192
BYTES = SECTORS * SECTOR
MODES = [["--direct-io", "on"], ["--direct-io", "off"]]


def fresh(image):
    """Creates a sparse image."""
    with open(image, "wb") as file:
        file.truncate(BYTES)
    return image


def loaded(image, options, seed, errors=()):
    """A served image, its model, and a load that runs on it."""
    server, model = Server(image, *options), Model(SECTORS)
    load = Load(model, seed, errors=errors)
    load.connect(server.socket, 2)
    load.run(16, lambda: load.answered["write"] > 200)
    return server, model, load


def verify(model, held, upto=SECTORS):
    """Checks that the model allows the bytes, up to that sector."""
    wrong = model.check(held, only=range(upto))
    if wrong:
        raise AssertionError(f"{len(wrong)} wrong sectors, such as: {'; '.join(wrong[:3])}")


def read(server, first, count):
    """Returns the error of a read, and its data."""
    with wire.Wire(server.socket) as client:
        client.ready(structured=False)
        client.request(wire.CMD_READ, first * SECTOR, count * SECTOR)
        error, _, data = client.simple_reply(count * SECTOR)
        return error, data


def truncated(image, options, chance):
    """Truncates the image under load: reads beyond the end return EIO, never zeroes or old data; before the end
    nothing changes; writes and a new size restore the range."""
    server, model, load = loaded(fresh(image), options, chance.random(), errors=(wire.EIO,))
    end = chance.randrange(8, SECTORS // 8) * 8
    # Only reads: a write beyond the end would extend the file.
    load.kinds, load.weights = ("read",), (1,)
    load.drain()
    os.truncate(image, end * SECTOR)
    before = load.answered["read"] + load.refused
    load.run(16, lambda: load.answered["read"] + load.refused > before + 500)
    load.drain()
    load.close()
    if not load.refused:
        raise AssertionError("no read failed")
    for first, count in ((end, 1), (SECTORS - 1, 1), (end - 1, 2), (end - 4, 16), (end, SECTORS - end)):
        error, _ = read(server, first, count)
        if error != wire.EIO:
            raise AssertionError(f"a read of {count} sectors at {first}, end {end}: error {error}")
    error, data = read(server, 0, end)
    if error:
        raise AssertionError(f"a read before the end: error {error}")
    verify(model, data, end)
    # The file is extended by writes, and by ftruncate: the restored range reads zeroes.
    os.truncate(image, BYTES)
    held = read_all(server.socket, SECTORS)
    verify(model, held, end)
    if any(held[end * SECTOR:]):
        raise AssertionError("bytes that were cut off came back")
    server.detach()
    return load.refused


def deleted(image, options, chance):
    """Removes the image under load: the daemon keeps running until the detach, list and show report the removal,"""
    server, model, load = loaded(fresh(image), options, chance.random())
    keep = os.open(image, os.O_RDONLY)
    os.unlink(image)
    goes_on(load)
    check_reported(server, "(deleted)")
    verify(model, read_all(server.socket, SECTORS))
    verify(model, os.pread(keep, BYTES, 0))
    server.detach()
    os.close(keep)
    try:
        Server(image, *options)
    except Refused as error:
        if "cannot find the image" in str(error):
            return 0
        raise
    raise AssertionError("attached what is not there")


def replaced(image, options, chance):
    """Renames another file over the image under load: the old file stays in use, and the other file is unchanged
    and is what the next attach serves, even beside the old one."""
    server, model, load = loaded(fresh(image), options, chance.random())
    keep = os.open(image, os.O_RDONLY)
    other = image.with_suffix(".other")
    noise = chance.randbytes(BYTES)
    other.write_bytes(noise)
    other.rename(image)
    goes_on(load)
    check_reported(server, "(deleted)")
    verify(model, read_all(server.socket, SECTORS))
    verify(model, os.pread(keep, BYTES, 0))
    # No process uses the new file: it can be attached immediately, under another name.
    second = Server(image, *options, name="second")
    if read_all(second.socket, SECTORS) != noise:
        raise AssertionError("the new file is not what it was")
    server.detach()
    second.detach()
    os.close(keep)
    if image.read_bytes() != noise:
        raise AssertionError("the new file was written to")
    return 0


def goes_on(load):
    """Checks that the device works as if the image had not changed."""
    before = load.answered["write"]
    load.run(16, lambda: load.answered["write"] > before + 300)
    load.drain()
    load.close()


def check_reported(server, words):
    """Checks that list and show report the state of the image."""
    for text in (blkq("list"), blkq("show", server.name), server.facts()["backing-file"]):
        if words not in text:
            raise AssertionError(f"nothing of {words!r} in: {text}")


def main(scratch, rounds):
    refused = 0
    for number in range(int(rounds)):
        for options in MODES:
            for what in (truncated, deleted, replaced):
                chance = random.Random(number)
                try:
                    refused += what(pathlib.Path(scratch, "changing.img"), options, chance)
                except BaseException as error:
                    raise SystemExit(f"{what.__name__}, {' '.join(options)}, round {number}: {error!r}") from error
    print(f"    truncated, deleted, replaced under load {rounds} times in {len(MODES)} modes; "
          f"{refused} reads beyond the end were EIO")


if __name__ == "__main__":
    main(*sys.argv[1:])
