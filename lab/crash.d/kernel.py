#!/usr/bin/python3
"""The loss of the kernel: a user-mode Linux runs the daemon, on an image in an ext4 of its own, and
a client with exact books; killed, it loses its page cache. The image is then
found on the disk that it leaves, and must hold what docs/durability.md promises.
kernel.py SCRATCH CRASHES [SEED]"""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))

from clock import wait_until
from files import Mounted, run
from model import SECTOR, Model, Operation

# More options of attach, to see the test fail.
MORE = os.environ.get("CRASH_ATTACH", "").split()
SECTORS = 4096
DISK_BYTES, BOOKS_BYTES = 96 << 20, 32 << 20
MODES = [("direct", "on"), ("buffered", "off")]
BOOT_S = 90


class Machine:
    """A user-mode Linux with two disks: for the image, and for the client's records."""

    def __init__(self, scratch, disk, books, direct_io, seed):
        inside = pathlib.Path(__file__).parent / "kernel_inside"
        self.console = open(pathlib.Path(scratch, "console"), "w+b")
        options = pathlib.Path(scratch, "attach-options")
        options.write_text("\n".join(["--direct-io", direct_io, "--sector-size", "512", *MORE]), encoding="ascii")
        environment = {"BLKQ": os.environ["BLKQ"], "OPTIONS": options, "SEED": seed, "SECTORS": SECTORS}
        self.process = subprocess.Popen(
            ["linux.uml", "mem=256M", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", f"init={inside}",
             f"ubda={disk}", f"ubdb={books}", "con=null", "con0=null,fd:1", "quiet",
             *(f"{name}={value}" for name, value in environment.items())],
            stdin=subprocess.DEVNULL, stdout=self.console, stderr=subprocess.STDOUT, start_new_session=True)

    def kill(self):
        """Kills it with all of its processes."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        wait_until("the machine's processes exit", lambda: not members(self.process.pid))

    def console_tail(self):
        """Returns the last lines of its console."""
        self.console.seek(0)
        return self.console.read().decode(errors="replace")[-1500:]


def members(session):
    """Returns the processes of a session that are not zombies."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(path.parent.name)
    return found


def sparse(path, size):
    """Creates an empty file of that size."""
    with open(path, "wb") as file:
        file.truncate(size)
    return path


def replay(model, books):
    """Reads the client's records into the model. Returns the number of requests that began and of promises:
    completed flushes and FUA writes."""
    operations, flushes, promises = {}, {}, 0
    for line in books.split(b"\0", 1)[0].decode("ascii").split("\n"):
        words = line.split()
        if not words:
            continue
        kind, number, *rest = words
        if kind == "begin":
            first, count, stamp, fua = map(int, rest)
            operations[number] = Operation(first, count, stamp, bool(fua))
            model.begin(operations[number])
        elif kind == "complete":
            promises += operations[number].fua
            model.complete(operations[number])
        elif kind == "flush":
            flushes[number] = model.flush_began()
        else:
            model.flush_completed(flushes[number])
            promises += 1
    return len(operations), promises


def has_begun(machine, books):
    """Whether the machine, which must be running, has written its first record."""
    if machine.process.poll() is not None:
        raise AssertionError(f"the machine has stopped; its console: {machine.console_tail()}")
    return books.read_bytes()[:1].strip(b"\0")


def main(scratch, crashes, seed="1"):
    chance = random.Random(int(seed))
    for number, (name, direct_io) in enumerate(MODES):
        disk = sparse(pathlib.Path(scratch, "kernel.img"), DISK_BYTES)
        run("mkfs.ext4", "-qF", "-J", "size=4", disk)
        with Mounted(scratch, disk, "-o", "loop") as directory:
            sparse(directory / "image", SECTORS * SECTOR)
        model = Model(SECTORS, power=True)
        share, begun, promises = (int(crashes) + number) // len(MODES), 0, 0
        for crash in range(share):
            books = sparse(pathlib.Path(scratch, "books.img"), BOOKS_BYTES)
            machine = Machine(scratch, disk, books, direct_io, crash + 1)
            try:
                wait_until("the machine writes", lambda: has_begun(machine, books), BOOT_S)
                time.sleep(0.1 + min(chance.expovariate(1 / 0.5), 3))
            finally:
                machine.kill()
            replayed = replay(model, books.read_bytes())
            begun, promises = begun + replayed[0], promises + replayed[1]
            with Mounted(scratch, disk, "-o", "loop") as directory:
                held = (directory / "image").read_bytes()
            run("e2fsck", "-fn", disk)
            wrong = model.check(held, settle=True)
            if wrong:
                raise SystemExit(f"{name}, crash {crash + 1}: {len(wrong)} wrong sectors, such as: {'; '.join(wrong[:3])}; "
                                 f"its console: {machine.console_tail()}")
        if share and not promises:
            raise SystemExit(f"{name}: nothing was promised: this tested nothing")
        print(f"    {name}: {share} kernel crashes, {begun} requests, {promises} promises kept", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
