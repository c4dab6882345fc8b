#!/usr/bin/python3
"""A client of a device of zeroes that keeps requests in flight and exact books while its server's cluster is disturbed: no request may
fail, and at the end the device holds what the model allows. steady.py SOCKET BYTES FILE: it runs until FILE
exists; FILE.answered has the number of replies so far."""

import os
import pathlib
import sys
import time

LAB = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(LAB / "nbd"), str(LAB / "crash.d")]

from load import Load, read_all
from model import SECTOR, Model

# No trim: a trim of a part of an object may do nothing, which a model of sectors does not allow.
KINDS = {"write": 50, "fua": 12, "flush": 8, "zeroes": 7, "read": 18}


class Progress:
    """Publishes the number of answered requests from time to time."""

    def __init__(self, path, load):
        self.path, self.load, self.next_s = path, load, 0

    def until_stopped(self):
        """Whether the file that stops the client exists."""
        if time.monotonic() >= self.next_s:
            self.next_s = time.monotonic() + 0.1
            partial = self.path + ".partial"
            pathlib.Path(partial).write_text(f"{sum(self.load.answered.values())}\n")
            os.rename(partial, self.path + ".answered")
        return os.path.exists(self.path)


def main(path, size, stop):
    model = Model(int(size) // SECTOR)
    load = Load(model, 1, kinds=KINDS)
    load.connect(path, 2)
    load.run(16, Progress(stop, load).until_stopped)
    load.drain()
    if load.in_flight():
        raise SystemExit(f"{load.in_flight()} requests were never answered: the server closed the connection")
    load.close()
    wrong = model.check(read_all(path, len(model.may_hold)))
    if wrong:
        raise SystemExit(f"{len(wrong)} wrong sectors, such as: {'; '.join(wrong[:3])}")
    print(*(f"{kind} {count}" for kind, count in load.answered.items() if count))


if __name__ == "__main__":
    main(*sys.argv[1:])
