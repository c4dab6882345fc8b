#!/usr/bin/python3
# Contract: complete, errors
"""A file system that runs full under random load, over and over: ENOSPC reaches the client, the
device lives on, what was answered stays, and when there is room again I/O continues.
full.py IMAGE BALLAST ROUNDS [ATTACH-OPTION...]: BALLAST is a file beside the sparse IMAGE; while
it is there the image cannot have all of its blocks."""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "nbd"))

import wire
from load import Load, read_all
from model import SECTOR, Model
from server import Server

KINDS = {"write": 60, "fua": 15, "flush": 8, "trim": 3, "zeroes": 4, "read": 10}
REFUSALS = 50


def verify(server, model):
    """Checks that the model allows the contents of the device."""
    wrong = model.check(read_all(server.socket, len(model.may_hold)), settle=True)
    if wrong:
        raise AssertionError(f"{len(wrong)} wrong sectors, such as: {'; '.join(wrong[:3])}")


def main(image, ballast, rounds, *options):
    size = os.stat(image).st_size
    model = Model(size // SECTOR)
    load = Load(model, 1, largest=128, kinds=KINDS, errors=(wire.ENOSPC,))
    taken = os.stat(ballast).st_size
    server = Server(image, *options)
    try:
        for number in range(int(rounds)):
            before = load.refused
            load.connect(server.socket, 2)
            load.run(16, lambda: load.refused >= before + REFUSALS)
            load.drain()
            verify(server, model)
            os.unlink(ballast)
            os.sync()
            # With space every request succeeds, on the connections whose requests failed too.
            load.errors, answered = (), dict(load.answered)
            load.run(16, lambda: load.answered["write"] > answered["write"] + 300)
            load.drain()
            load.close()
            verify(server, model)
            load.errors = (wire.ENOSPC,)
            if number % 2:
                server.kill()
                server = Server(image, *options)
                verify(server, model)
            # Fills the file system again, and punches holes where the image had data.
            with wire.Wire(server.socket) as client:
                client.ready(structured=False)
                client.request(wire.CMD_TRIM, 0, size)
                if client.simple_reply()[0]:
                    raise AssertionError("no trim")
            for sector in range(len(model.may_hold)):
                model.settle(sector, 0)
            with open(ballast, "wb") as file:
                file.write(os.urandom(1 << 20) * (taken >> 20))
        server.detach()
    except BaseException:
        server.kill()
        raise
    print(f"    {' '.join(options):22} {rounds} times full: {load.refused} requests refused with ENOSPC, "
          f"{sum(load.answered.values())} answered and kept")


if __name__ == "__main__":
    main(*sys.argv[1:])
