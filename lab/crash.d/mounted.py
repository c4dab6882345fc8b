#!/usr/bin/python3
"""ext4 (and xfs) on a served image, mounted by this machine's kernel (NBD, nbdfuse, loop device).
mounted.py kills SCRATCH KILLS [SEED]: kill -9 of the daemon under writers with fsync; after each
the next daemon's device is mounted, and must hold every file that was made durable, then fsck.
mounted.py log SCRATCH SECONDS BOUNDARIES [SEED]: a log of all that reached the image's file; at
each of so many sync boundaries (0: all) the image is mounted, compared, unmounted, checked."""

import os
import pathlib
import random
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "nbd"))

import log
from files import CHECK, MKFS, Books, Disk, Mounted, User, run, sync
from recording import Recording
from server import Server

# More options of attach, to see the test fail.
MORE = os.environ.get("CRASH_ATTACH", "").split()
IMAGE_BYTES = 48 << 20
XFS_BYTES = 320 << 20
MODES = [("direct", ["--direct-io", "on"]), ("buffered", ["--direct-io", "off"])]


def make(scratch, server, kind="ext4"):
    """Creates an empty file system on the device, and makes it durable."""
    with Disk(scratch, server.socket) as disk:
        run(*MKFS[kind], disk.device)


def verify(scratch, device, books, *options, kind="ext4"):
    """Mounts the file system, which replays its journal; compares, unmounts and checks it. Returns its contents."""
    held = Books()
    with Mounted(scratch, device, *options) as directory:
        wrong = books.wrong(directory)
        held.read(directory)
    run(*CHECK[kind], device)
    if wrong:
        raise AssertionError(f"{len(wrong)} files: {'; '.join(wrong[:3])}")
    return held


def killed_under_writers(scratch, disk, server, user, chance):
    """Stops a daemon while files are written: after some changes, and a moment more."""
    killer = threading.Timer(min(chance.expovariate(1 / 0.05), 0.5), server.kill)
    with Mounted(scratch, disk.device) as directory:
        try:
            for _ in range(chance.randrange(1, 12)):
                user.step(directory)
            killer.start()
            while True:
                user.step(directory)
        except OSError:
            killer.join()


def kills(scratch, count, seed="1"):
    cases = [(kind, *mode) for kind in MKFS for mode in MODES]
    for number, (kind, name, options) in enumerate(cases):
        chance = random.Random(int(seed) * 100 + number)
        image = pathlib.Path(scratch, f"mounted-{number}.img")
        with open(image, "wb") as file:
            file.truncate(XFS_BYTES if kind == "xfs" else IMAGE_BYTES)
        server, user = Server(image, *options, *MORE), User(chance)
        make(scratch, server, kind)
        share = (int(count) + number) // len(cases)
        for _ in range(share):
            with Disk(scratch, server.socket) as disk:
                killed_under_writers(scratch, disk, server, user, chance)
            server = Server(image, *options, *MORE)
            with Disk(scratch, server.socket) as disk:
                # Changes in progress at the kill are recorded by now.
                user.books = verify(scratch, disk.device, user.books, kind=kind)
        server.detach()
        print(f"    {kind}, {name}: {share} kills, {user.steps} changes made durable and kept, fsck clean", flush=True)
        image.unlink()


def record(scratch, options, seconds, chance):
    """The log of a file system's writes, with records: what each mark promises, and what was possible
    before it."""
    user, must, may = User(chance), [], [Books()]
    with Recording(scratch, IMAGE_BYTES, direct="on" in options, name="files") as recording:
        server = Server(recording.image, *options, "--sector-size", "512", *MORE)
        try:
            make(scratch, server)
            with Disk(scratch, server.socket) as disk, Mounted(scratch, disk.device) as directory:
                sync(directory)
                end = time.monotonic() + seconds
                while time.monotonic() < end:
                    must.append(user.books.copy())
                    recording.mark(len(must) - 1)
                    user.step(directory)
                    may.append(user.during)
                must.append(user.books.copy())
                recording.mark(len(must) - 1)
        finally:
            server.detach("--force")
        return must, may, recording.entries()


def check(scratch, must, may, entries, most, chance):
    """The moments of the log, from the first mark on, at which a flush completed or something was promised;
    how many there are, and how many images were mounted: at each chosen one what is durable, and
    that with some of what is not."""
    first = next(i for i, entry in enumerate(entries) if entry.kind == log.Entry.MARK)
    syncs = {i for i, entry in enumerate(entries) if entry.kind == log.Entry.SYNC}
    at = [i for i, entry in enumerate(entries) if i > first
          and (entry.kind == log.Entry.MARK or entry.kind == log.Entry.COMPLETED and entry.number in syncs)]
    chosen = set(at if not most or most >= len(at) else chance.sample(at, most))
    replay, reached, images = log.Replay(IMAGE_BYTES), 0, 0
    image = pathlib.Path(scratch, "replayed.img")
    for index, entry in enumerate(entries):
        replay.apply(index, entry)
        if entry.kind == log.Entry.MARK:
            reached = entry.number
        if index not in chosen:
            continue
        books = may[reached + 1] if reached + 1 < len(may) else must[reached]
        for held in (replay.image(), replay.image(chance)):
            image.write_bytes(held)
            try:
                verify(scratch, image, books, "-o", "loop")
            except AssertionError as error:
                raise AssertionError(f"at entry {index} of the log, after mark {reached}: {error}") from error
            images += 1
    return len(at), len(chosen), images


def logged(scratch, seconds, most, seed="1"):
    for name, options in MODES:
        chance = random.Random(int(seed))
        must, may, entries = record(scratch, options, float(seconds), chance)
        there, looked_at, images = check(scratch, must, may, entries, int(most), chance)
        print(f"    {name:10} {len(entries)} log entries, {len(must) - 1} changes of files, {looked_at} of {there} "
              f"boundaries: {images} images mounted, compared, e2fsck clean", flush=True)
        if not images or len(must) < 5:
            raise SystemExit("too little was written: this tested nothing")


if __name__ == "__main__":
    {"kills": kills, "log": logged}[sys.argv[1]](*sys.argv[2:])
