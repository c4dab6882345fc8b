"""The log of what reached a file, and the contents that it may have after a crash: the method of
dm-log-writes. A write is durable when a sync that arrived after it had been answered was
answered; until then any of its sectors may be there or not."""

import struct
import threading

from model import SECTOR, ZEROES

HEADER = struct.Struct("=BIQQ")


class Entry:
    """One event at the file. `number` is the number of a mark; of a write, whether it is durable when it
    completes; of a completion, the completed entry."""

    MARK, WRITE, ZEROES, SYNC, COMPLETED = range(5)

    __slots__ = ("kind", "number", "offset", "length", "data")

    def __init__(self, kind, number=0, offset=0, length=0, data=b""):
        self.kind, self.number, self.offset, self.length, self.data = kind, number, offset, length, data


class Writer:
    """Appends entries to a file."""

    def __init__(self, path):
        self.file, self.count, self.lock = open(path, "ab", buffering=0), 0, threading.Lock()

    def add(self, entry):
        """Returns the entry's number in the log."""
        packed = HEADER.pack(entry.kind, entry.number, entry.offset, entry.length) + entry.data
        with self.lock:
            self.file.write(packed)
            self.count += 1
            return self.count - 1


def read(path):
    """Returns all entries of a log."""
    with open(path, "rb") as file:
        text = file.read()
    at, entries = 0, []
    while at < len(text):
        kind, number, offset, length = HEADER.unpack_from(text, at)
        at += HEADER.size
        data = text[at:at + length] if kind == Entry.WRITE else b""
        at += len(data)
        entries.append(Entry(kind, number, offset, length, data))
    return entries


class Replay:
    """The file at one entry of the log, with its durable part."""

    def __init__(self, size):
        self.durable = bytearray(size)
        # For each sector that is not durable: its later contents, oldest first, each with the entry that
        # wrote it.
        self.volatile = {}
        self.running, self.answered, self.syncs = {}, {}, {}
        self.boundaries, self.touched = 0, set()

    def apply(self, index, entry):
        """Applies the next entry. Returns True if data became durable."""
        if entry.kind in (Entry.WRITE, Entry.ZEROES):
            self.running[index] = entry
            for at in range(0, entry.length, SECTOR):
                held = entry.data[at:at + SECTOR] if entry.kind == Entry.WRITE else ZEROES
                self.volatile.setdefault((entry.offset + at) // SECTOR, []).append((index, held))
        elif entry.kind == Entry.SYNC:
            # A sync covers everything that had completed when it arrived.
            self.syncs[index] = set(self.answered)
        elif entry.kind == Entry.COMPLETED:
            return self._completed(entry.number)
        return False

    def _completed(self, index):
        if index in self.syncs:
            covered = self.syncs.pop(index)
            self.boundaries += 1
        elif index in self.running:
            entry = self.running.pop(index)
            self.answered[index] = entry
            covered = {index} if entry.number else set()
        else:  # a mark
            return False
        touched = set()
        for each in covered:
            entry = self.answered.pop(each, None)
            if entry:
                touched.update(range(entry.offset // SECTOR, (entry.offset + entry.length) // SECTOR))
        self.touched |= touched
        for sector in touched:
            versions = self.volatile.get(sector, [])
            last = max((at for at, (each, _) in enumerate(versions) if each in covered), default=None)
            if last is None:
                continue
            self.durable[sector * SECTOR:(sector + 1) * SECTOR] = versions[last][1]
            # Older versions are overwritten; newer ones may still follow.
            if versions[last + 1:]:
                self.volatile[sector] = versions[last + 1:]
            else:
                del self.volatile[sector]
        return bool(touched)

    def image(self, chance=None):
        """Returns the file after a power loss now: the durable contents, and of the rest nothing, or what
        `chance` (a random.Random) chooses for each sector."""
        held = bytearray(self.durable)
        if chance:
            share = chance.choice([0.1, 0.5, 0.9, 1])
            for sector, versions in self.volatile.items():
                if chance.random() < share:
                    held[sector * SECTOR:(sector + 1) * SECTOR] = chance.choice(versions)[1]
        return held
