#!/usr/bin/python3
# Contract: durability
"""kill -9 of daemons that serve qcow2 images, under load, over and over: each next daemon must serve every answered
write, the unanswered ones old or new in each sector; and QEMU must find no error in the image once that one has
detached, only leaks. qcow2.py SCRATCH KILLS [SEED]

The same on a tmpfs that is full from time to time: qcow2.py full DIRECTORY KILLS [SEED]"""

import errno
import os
import pathlib
import random
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "nbd"))

from load import Load, read_all
from model import SECTOR, Model, content
from server import Server

SECTORS = 16384
# Written to the backing file before.
BEHIND = 1 << 40
# Options of qemu-img create, whether a backing file exists, options of attach. With clusters of 512 bytes the
# refcount table of this size is reallocated several times.
KINDS = [
    ("cluster_size=512,refcount_bits=64", None, []),
    ("cluster_size=512", "raw", []),
    ("cluster_size=512,refcount_bits=64", "qcow2", ["--direct-io", "off"]),
    ("cluster_size=4k", "qcow2", []),
    ("cluster_size=64k", "raw", []),
    ("cluster_size=64k,lazy_refcounts=on", None, ["--direct-io", "off"]),
    ("cluster_size=2M", "qcow2", []),
]
# A trimmed part of a cluster may keep its data, which the model does not allow.
OPERATIONS = {"write": 55, "fua": 8, "flush": 4, "zeroes": 15, "read": 18}
# Free bytes of a tmpfs, until a daemon is killed, and when everything must succeed.
ROOMS = [0, 100 << 10, 1 << 20, 4 << 20]
ROOM_ENOUGH = 64 << 20


def qemu_img(*arguments, codes=(0,)):
    """Runs qemu-img, and returns its exit code."""
    done = subprocess.run(["qemu-img", *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode not in codes:
        raise AssertionError(f"qemu-img {arguments}: exit code {done.returncode}: {done.stdout}{done.stderr}")
    return done.returncode


class Image:
    """An image, used through all of its kills."""

    def __init__(self, scratch, number, seed, errors=()):
        self.kind, behind, self.options = KINDS[number]
        self.options = ["--format", "qcow2", "--sector-size", "512", *self.options]
        self.random = random.Random(seed * 1000 + number)
        self.path = pathlib.Path(scratch, f"killed-{number}.qcow2")
        self.model = Model(SECTORS)
        backing = []
        if behind:
            base = self.path.with_suffix(".base")
            raw = base if behind == "raw" else base.with_suffix(".raw")
            raw.write_bytes(b"".join(content(sector, BEHIND) for sector in range(SECTORS // 2)))
            if behind == "qcow2":
                qemu_img("convert", "-f", "raw", "-O", "qcow2", "-o", "cluster_size=1k", raw, base)
            for sector in range(SECTORS // 2):
                self.model.settle(sector, BEHIND)
            backing = ["-b", base.name, "-F", behind]
        qemu_img("create", "-q", "-f", "qcow2", "-o", self.kind, *backing, self.path, SECTORS * SECTOR)
        self.load = Load(self.model, self.random.random(), largest=256, kinds=OPERATIONS, errors=errors)
        self.kills = self.unanswered = self.leaks = self.snapshots = 0

    def verify(self, held):
        """Checks that the model allows the contents."""
        wrong = self.model.check(held, settle=True)
        if wrong:
            raise AssertionError(f"{len(wrong)} wrong sectors, such as: " + "; ".join(wrong[:3]))

    def life(self):
        """Runs one daemon from attach, when it must serve what its predecessor left, to its kill."""
        server = Server(self.path, *self.options)
        try:
            self.verify(read_all(server.socket, SECTORS))
            self.load.connect(server.socket, 2)
            end = time.monotonic() + min(self.random.expovariate(1 / 0.1), 0.7)
            self.load.run(32, lambda: time.monotonic() > end)
            self.unanswered += self.load.in_flight()
        finally:
            server.kill()
        self.load.take_all_that_was_sent()
        self.load.close()
        self.kills += 1

    def detached(self):
        """Detaches a daemon in order, and lets QEMU check the image; takes a snapshot from time to time."""
        Server(self.path, *self.options).detach()
        if qemu_img("check", "-q", "-f", "qcow2", self.path, codes=(0, 3)):
            self.leaks += 1
            qemu_img("check", "-q", "-f", "qcow2", "-r", "leaks", self.path)
        raw = self.path.with_suffix(".content")
        qemu_img("convert", "-f", "qcow2", "-O", "raw", self.path, raw)
        self.verify(raw.read_bytes())
        raw.unlink()
        if self.random.random() < 0.5:
            qemu_img("snapshot", "-c" if self.snapshots % 2 == 0 else "-d", "one", self.path)
            self.snapshots += 1


def set_room(directory, room):
    """Gives the tmpfs `room` bytes more than it uses."""
    now = os.statvfs(directory)
    used = (now.f_blocks - now.f_bfree) * now.f_frsize
    subprocess.run(["mount", "-o", f"remount,size={used + room}", directory], check=True)


def full(directory, kills, seed="1"):
    """Tests the images on the tmpfs, one after the other."""
    refused = 0
    for number, kind in enumerate(KINDS):
        try:
            image = Image(directory, number, int(seed), errors=(errno.ENOSPC,))
            for kill in range(int(kills) // len(KINDS)):
                set_room(directory, ROOMS[kill % len(ROOMS)])
                image.life()
            set_room(directory, ROOM_ENOUGH)
            image.detached()
        except Exception as error:
            raise SystemExit(f"{kind}, full (seed {seed}): {error!r}") from error
        print(f"    {image.kind:36} {image.kills:4} kills, {image.load.answered}, {image.load.refused} without room")
        refused += image.load.refused
        for file in pathlib.Path(directory).iterdir():
            file.unlink()
    if not refused:
        raise SystemExit("there was room for all: this tested nothing")


def main(scratch, kills, seed="1"):
    images = [Image(scratch, number, int(seed)) for number in range(len(KINDS))]
    for kill in range(int(kills)):
        image = images[kill % len(images)]
        try:
            image.life()
            if image.random.random() < 0.3:
                image.detached()
        except Exception as error:
            raise SystemExit(f"{image.kind}, after {image.kills} kills (seed {seed}): {error!r}") from error
    for image in images:
        image.detached()
        print(f"    {image.kind:36} {image.kills:4} kills, {image.load.answered}, unanswered {image.unanswered}, "
              f"{image.leaks} with leaks, {image.snapshots} snapshots made or deleted")
    if not sum(image.unanswered for image in images):
        raise SystemExit("no request was cut off: this tested nothing")


if __name__ == "__main__":
    if sys.argv[1] == "full":
        full(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
