#!/usr/bin/python3
"""Random requests over NBD against a model of the bytes: exercise.py URI MODEL SEED [ROUNDS]

MODEL is a raw file with what the device has at first, and then with what it has in the end. Requests begin and end
at any byte, several at a time that do not overlap, and meet in clusters, sectors and blocks of any size. A trimmed
byte is as it was, or zero."""

import random
import sys

import nbd

DEPTH = 16
# Lengths are drawn from one of these at a time: parts of sectors and clusters, and many clusters.
LONGEST = (100, 4096, 5000, 70000, 300000)


class Exercise:
    """A device, the bytes that it must have, and the requests of one batch."""

    def __init__(self, handle, model, seed):
        self.handle, self.model, self.random = handle, model, random.Random(seed)
        self.grain = max(1, handle.get_block_size(nbd.SIZE_MINIMUM))

    def places(self):
        """Ranges that do not overlap; each begins near the end of the one before, or anywhere."""
        size, taken, at = len(self.model), [], 0
        for _ in range(DEPTH):
            near = self.random.random() < 0.5
            at = at + self.random.choice((0, 0, 1, 512)) if near else self.random.randrange(size)
            at -= at % self.grain
            length = self.random.randint(1, self.random.choice(LONGEST))
            length = min(size - at, -(-length // self.grain) * self.grain)
            if length <= 0 or any(at < end and begin < at + length for begin, end in taken):
                continue
            taken.append((at, at + length))
            at += length
            yield taken[-1]

    def batch(self):
        """Sends requests together, waits for all, and checks what they did."""
        cookies, trimmed, buffers = [], [], []
        for begin, end in self.places():
            kind = self.random.choices(("write", "read", "zero", "trim"), (8, 3, 2, 2))[0]
            flags = nbd.CMD_FLAG_FUA if kind != "read" and self.random.random() < 0.05 else 0
            if kind == "write":
                data = self.random.randbytes(end - begin)
                cookies.append(self.handle.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(data)), begin, flags=flags))
                self.model[begin:end] = data
            elif kind == "read" or kind == "trim" and not self.handle.can_trim() or \
                    kind == "zero" and not self.handle.can_zero():
                buffer = nbd.Buffer(end - begin)
                buffers.append((begin, end, buffer))
                cookies.append(self.handle.aio_pread(buffer, begin))
            elif kind == "zero":
                flags |= nbd.CMD_FLAG_NO_HOLE if self.random.random() < 0.3 else 0
                cookies.append(self.handle.aio_zero(end - begin, begin, flags=flags))
                self.model[begin:end] = bytes(end - begin)
            else:
                cookies.append(self.handle.aio_trim(end - begin, begin, flags=flags))
                trimmed.append((begin, end))
        for cookie in cookies:
            while not self.handle.aio_command_completed(cookie):
                self.handle.poll(-1)
        for begin, end, buffer in buffers:
            self.compare(begin, bytes(buffer.to_bytearray()))
        for begin, end in trimmed:
            held, before = self.handle.pread(end - begin, begin), self.model[begin:end]
            if any(new not in (0, old) for new, old in zip(held, before)):
                raise SystemExit(f"trimmed bytes of {begin} to {end} are neither what they were nor zero")
            self.model[begin:end] = held

    def compare(self, begin, held):
        """The bytes of the device from `begin` on must be those of the model."""
        wanted = self.model[begin:begin + len(held)]
        if held != wanted:
            at = next(index for index, pair in enumerate(zip(held, wanted)) if pair[0] != pair[1])
            raise SystemExit(f"byte {begin + at} is {held[at]:#x}, want {wanted[at]:#x}")

    def compare_all(self):
        """As `compare`, of all bytes."""
        for begin in range(0, len(self.model), 1 << 20):
            self.compare(begin, self.handle.pread(min(1 << 20, len(self.model) - begin), begin))


def main(uri, path, seed, rounds="25"):
    handle = nbd.NBD()
    handle.connect_uri(uri)
    with open(path, "rb") as file:
        model = bytearray(file.read())
    if handle.get_size() != len(model):
        raise SystemExit(f"the device has {handle.get_size()} bytes, want {len(model)}")
    exercise = Exercise(handle, model, int(seed))
    exercise.compare_all()
    for number in range(int(rounds)):
        exercise.batch()
        if number % 8 == 7:
            handle.flush()
    exercise.compare_all()
    handle.shutdown()
    with open(path, "wb") as file:
        file.write(model)


if __name__ == "__main__":
    main(*sys.argv[1:])
