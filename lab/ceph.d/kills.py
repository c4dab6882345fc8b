#!/usr/bin/python3
# Contract: durability
"""kill -9 of the daemon of an RBD image under load, over and over. With librbd's cache, a kill is to what was
not flushed as a power loss; without it, every answered write is in the cluster.
kills.py IMAGE BYTES KILLS SEED cached|uncached ATTACH-OPTION..."""

import pathlib
import random
import sys
import time

LAB = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(LAB), str(LAB / "nbd"), str(LAB / "crash.d")]

from clock import wait_until
from load import Load, read_all
from model import SECTOR, Model
from server import Refused, Server

# No trim: a trim of a part of an object may do nothing, which a model of sectors does not allow.
KINDS = {"write": 50, "fua": 12, "flush": 8, "zeroes": 7, "read": 18}


def verify(server, model):
    """Checks that the model allows the contents of the device."""
    wrong = model.check(read_all(server.socket, len(model.may_hold)), settle=True)
    if wrong:
        raise AssertionError(f"{len(wrong)} wrong sectors, such as: {'; '.join(wrong[:3])}")


def attach(image, options):
    """Starts the next daemon. The image stays locked until the cluster has noticed that the previous daemon exited."""
    begun = time.monotonic()

    def attached():
        try:
            return Server(image, *options)
        except Refused as refusal:
            if "is locked by" not in str(refusal):
                raise
        return None

    return wait_until(f"{image} can be attached", attached, 120), time.monotonic() - begun


def main(image, size, kills, seed, cache, *options):
    model = Model(int(size) // SECTOR, power=cache == "cached")
    chance = random.Random(seed)
    load = Load(model, chance.random(), largest=256, kinds=KINDS)
    unanswered, longest_s = 0, 0
    for _ in range(int(kills)):
        server, seconds = attach(image, options)
        longest_s = max(longest_s, seconds)
        try:
            verify(server, model)
            load.connect(server.socket, 2)
            deadline = time.monotonic() + chance.uniform(0.05, 2)
            load.run(16, lambda: time.monotonic() > deadline)
            unanswered += load.in_flight()
        finally:
            server.kill()
        load.take_all_that_was_sent()
        load.close()
    server, _ = attach(image, options)
    verify(server, model)
    server.detach()
    counts = " ".join(f"{kind} {count}" for kind, count in load.answered.items() if count)
    print(f"    {kills} kills, {cache}: answered: {counts}; unanswered {unanswered}; attached again after {longest_s:.1f} s at most")
    if not unanswered or not load.answered["write"]:
        raise SystemExit("no request was cut off, or nothing was written: this tested nothing")


if __name__ == "__main__":
    main(*sys.argv[1:])
