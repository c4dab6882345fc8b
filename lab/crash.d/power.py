#!/usr/bin/python3
"""Power losses from a log of what reached the file: random requests on a device whose image lies in
the recorder's file system; then, for every moment at which something became durable, the images
that a loss of power could leave, against the promises of docs/durability.md.
power.py SCRATCH SECONDS [SEED]"""

import os
import pathlib
import random
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "nbd"))

import log
from load import Load
from model import SECTOR, Model, Operation
from recording import Recording
from server import Server

# More options of attach, to see the test fail.
MORE = os.environ.get("CRASH_ATTACH", "").split()
SECTORS = 4096
MODES = [
    ("buffered", ["--direct-io", "off"], 2, 16),
    ("direct", ["--direct-io", "on"], 2, 16),
    ("buffered, serial", ["--direct-io", "off", "--dispatch", "serial"], 1, 8),
    ("direct, two queues", ["--direct-io", "on", "--queues", "2"], 4, 8),
    ("direct, mq-deadline", ["--direct-io", "on", "--scheduler", "mq-deadline"], 1, 32),
]


class History:
    """The client's operations in order, with marks in the log for their progress."""

    def __init__(self, recording):
        self.recording, self.events = recording, []

    def note(self, what, subject):
        """Records an event; completions that promise durability are marked in the log."""
        if isinstance(subject, Operation):
            copy = Operation(subject.first, subject.count, subject.stamp, subject.fua)
            subject = (id(subject), copy)
            promises = what == "complete" and copy.fua
        else:
            promises = what == "flushed"
        self.events.append((what, subject))
        if promises:
            self.recording.mark(len(self.events))


def record(scratch, name, options, connections, depth, seconds, seed):
    """The history of a client, and the log of the file below the device."""
    with Recording(scratch, SECTORS * SECTOR, direct="on" in options) as recording:
        server = Server(recording.image, *options, "--sector-size", "512", *MORE)
        try:
            load = Load(Model(SECTORS, power=True), seed, largest=32,
                        kinds={"write": 60, "fua": 10, "flush": 8, "trim": 5, "zeroes": 7, "read": 10})
            history = History(recording)
            load.on_event = history.note
            load.connect(server.socket, connections)
            end = time.monotonic() + seconds
            load.run(depth, lambda: time.monotonic() > end)
            load.drain()
            load.close()
        finally:
            server.detach("--force")
    return history.events, recording.entries()


def check(events, entries, chance, name):
    """Checks every boundary of the log; returns the number of boundaries and of images."""
    model, replay = Model(SECTORS, power=True), log.Replay(SECTORS * SECTOR)
    marks = [(index, entry.number) for index, entry in enumerate(entries) if entry.kind == log.Entry.MARK]
    began, done, next_mark, images = {}, 0, 0, 0

    def advance(upto):
        nonlocal done
        for what, subject in events[done:upto]:
            if what == "begin":
                began[subject[0]] = subject[1]
                model.begin(subject[1])
            elif what == "complete":
                model.complete(began.pop(subject[0]))
            elif what == "flush":
                model.now += 1
            else:
                model.flush_completed(subject)
        done = upto

    def verify(image):
        # By the next mark the client may have sent everything that it had sent by then.
        upto = marks[next_mark][1] if next_mark < len(marks) else len(events)
        also = [subject[1] for what, subject in events[done:upto] if what == "begin"]
        # Compares everything from time to time; otherwise only the differences since the last check.
        only = replay.touched | replay.volatile.keys() | model.touched if images % 200 else None
        wrong = model.check(image, also=also, only=only)
        if wrong:
            raise AssertionError(f"{name}: at entry {index} of the log, event {done} of the client, "
                                 f"{len(wrong)} sectors, such as: {'; '.join(wrong[:3])}")

    for index, entry in enumerate(entries):
        became_durable = replay.apply(index, entry)
        if entry.kind == log.Entry.MARK:
            next_mark += 1
            advance(entry.number)
        if entry.kind == log.Entry.MARK or became_durable:
            for image in (replay.image(), replay.image(chance)):
                verify(image)
                images += 1
            replay.touched.clear()
            model.touched.clear()
    return replay.boundaries, len(marks), images


def main(scratch, seconds, seed="1"):
    total = [0, 0, 0]
    for name, options, connections, depth in MODES:
        events, entries = record(scratch, name, options, connections, depth, float(seconds), int(seed))
        found = check(events, entries, random.Random(int(seed)), name)
        print(f"    {name:22} {len(entries):6} log entries, {found[0]} syncs, {found[1]} promises, "
              f"{found[2]} images checked", flush=True)
        total = [a + b for a, b in zip(total, found)]
    print(f"    {total[0]} sync boundaries, {total[1]} promises, {total[2]} power losses replayed, nothing lost")


if __name__ == "__main__":
    main(*sys.argv[1:])
