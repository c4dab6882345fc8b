#!/usr/bin/python3
# Contract: durability, detach
"""kill -9 under load, over and over in every mode; after each kill the next daemon must serve
what docs/durability.md promises: every answered write, the unanswered ones old or new in each
sector, nothing else touched. kills.py SCRATCH KILLS [SEED]"""

import os
import pathlib
import random
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "nbd"))

from load import Load, read_all
from model import SECTOR, Model
from server import Server

# More options of attach, to see the test fail.
MORE = os.environ.get("CRASH_ATTACH", "").split()
SECTORS = 16384
# Name, attach options, connections, depth of each, sectors per unit of a request.
MODES = [
    ("direct", ["--direct-io", "on"], 1, 32, 1),
    ("buffered", ["--direct-io", "off"], 1, 32, 1),
    ("direct, serial", ["--direct-io", "on", "--dispatch", "serial"], 2, 8, 1),
    ("buffered, serial", ["--direct-io", "off", "--dispatch", "serial"], 2, 8, 1),
    ("direct, two queues", ["--direct-io", "on", "--queues", "2"], 4, 16, 1),
    ("buffered, two queues", ["--direct-io", "off", "--queues", "2"], 4, 16, 1),
    ("direct, mq-deadline", ["--direct-io", "on", "--scheduler", "mq-deadline"], 2, 64, 1),
    ("buffered, kyber", ["--direct-io", "off", "--scheduler", "kyber"], 2, 64, 1),
    ("direct, no merge, window", ["--direct-io", "on", "--no-merge", "--no-batching",
                                  "--offset", "1M", "--size-limit", SECTORS * SECTOR], 1, 128, 1),
    ("buffered, window at 3584", ["--direct-io", "off", "--offset", "3584",
                                  "--size-limit", SECTORS * SECTOR], 1, 1, 1),
    ("direct, sectors of 4096", ["--direct-io", "on", "--sector-size", "4096"], 2, 16, 8),
]


class Mode:
    """One mode of serving an image, used through all of its kills."""

    def __init__(self, scratch, number, seed):
        self.name, self.options, self.connections, self.depth, unit = MODES[number]
        self.image = pathlib.Path(scratch, f"killed-{number}.img")
        self.options = [*self.options] if "--sector-size" in self.options else [
            *self.options, "--sector-size", "512"]
        self.random = random.Random(seed * 1000 + number)
        offset = {"1M": 1 << 20, "3584": 3584}.get(
            self.options[self.options.index("--offset") + 1] if "--offset" in self.options else "", 0)
        self.before = self.random.randbytes(offset)
        self.after = self.random.randbytes(1 << 20) if offset else b""
        self.image.write_bytes(self.before + bytes(SECTORS * SECTOR) + self.after)
        self.model = Model(SECTORS)
        self.load = Load(self.model, self.random.random(), largest=256 // unit, unit=unit)
        self.kills = self.unanswered = 0

    def verify(self, server):
        """Checks that the model allows the contents of device and image."""
        held = read_all(server.socket, SECTORS)
        wrong = self.model.check(held, settle=True)
        if wrong:
            raise AssertionError(f"{len(wrong)} wrong sectors, such as: " + "; ".join(wrong[:3]))
        image = self.image.read_bytes()
        inside = image[len(self.before):len(image) - len(self.after)]
        if inside != held:
            raise AssertionError("the image differs from what the device reads")
        if image != self.before + inside + self.after:
            raise AssertionError("bytes outside of the window changed")

    def life(self):
        """One daemon from attach, where it must serve what the last one left, to its kill."""
        server = Server(self.image, *self.options, *MORE)
        try:
            self.verify(server)
            self.load.connect(server.socket, self.connections)
            # Often in the first moments, sometimes after many requests.
            end = time.monotonic() + min(self.random.expovariate(1 / 0.06), 0.5)
            # But not before a write was answered in this mode: without one, the kills test nothing.
            self.load.run(self.depth, lambda: time.monotonic() > end and self.load.answered["write"])
            self.unanswered += self.load.in_flight()
            server.kill()
            self.load.take_all_that_was_sent()
            self.load.close()
            self.kills += 1
        except BaseException:
            server.kill()
            raise

    def finish(self):
        """The last daemon detaches in order; the image stays as it was."""
        server = Server(self.image, *self.options, *MORE)
        self.verify(server)
        server.detach()
        self.image.unlink()


def main(scratch, kills, seed="1"):
    modes = [Mode(scratch, number, int(seed)) for number in range(len(MODES))]
    for kill in range(int(kills)):
        mode = modes[kill % len(modes)]
        try:
            mode.life()
        except Exception as error:
            raise SystemExit(f"{mode.name}, after {mode.kills} kills (seed {seed}): {error!r}") from error
    for mode in modes:
        mode.finish()
        answered = mode.load.answered
        counts = " ".join(f"{kind} {count}" for kind, count in answered.items())
        print(f"    {mode.name:26} {mode.kills:4} kills, answered: {counts}; unanswered {mode.unanswered}")
    total = sum(sum(mode.load.answered.values()) for mode in modes)
    lost = sum(mode.unanswered for mode in modes)
    print(f"    {int(kills)} kills survived in {len(modes)} modes: {total} answers kept, {lost} requests cut off")
    if not lost or any(mode.kills and not mode.load.answered["write"] for mode in modes):
        raise SystemExit("no request was cut off, or a mode wrote nothing: this tested nothing")


if __name__ == "__main__":
    main(*sys.argv[1:])
