#!/usr/bin/python3
"""The client inside of the machine that kernel.py kills. It writes its records to a disk before the recorded
of can reach the server. kernel_client.py SOCKET BOOKS SECTORS SEED"""

import mmap
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "nbd"))

from load import Load, read_all
from model import SECTOR, Model, Operation, stamp_of

BLOCK = 4096
ROOM = 1 << 20
STAMPS_OF_A_LIFE = 1 << 24


class Books:
    """Lines on a disk, written with direct I/O."""

    def __init__(self, path):
        self.file = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_DSYNC)
        self.memory, self.at, self.lines, self.numbers = mmap.mmap(-1, ROOM), 0, [], {}

    def note(self, what, subject):
        """Records one event of the load."""
        if not isinstance(subject, Operation):
            return self.lines.append(f"{what} {subject}")
        number = self.numbers.setdefault(subject, len(self.numbers))
        place = f" {subject.first} {subject.count} {subject.stamp} {int(subject.fua)}" if what == "begin" else ""
        return self.lines.append(f"{what} {number}{place}")

    def write(self):
        """Makes sure that the records are on the disk."""
        if not self.lines:
            return
        text = ("\n".join(self.lines) + "\n").encode("ascii")
        text += b"\n" * (-len(text) % BLOCK)
        self.memory[:len(text)] = text
        if os.pwritev(self.file, [memoryview(self.memory)[:len(text)]], self.at) != len(text):
            raise AssertionError("the books are full")
        self.at += len(text)
        self.lines.clear()


def main(path, books, sectors, seed):
    sectors, seed = int(sectors), int(seed)
    model, held = Model(sectors), read_all(path, sectors)
    for sector in range(sectors):
        model.settle(sector, stamp_of(sector, held[sector * SECTOR:(sector + 1) * SECTOR]))
    load, kept = Load(model, seed, largest=32), Books(books)
    load.stamp = seed * STAMPS_OF_A_LIFE
    load.on_event, load.before_sending = kept.note, kept.write
    load.connect(path, 2)
    load.run(8, lambda: False)


if __name__ == "__main__":
    main(*sys.argv[1:])
