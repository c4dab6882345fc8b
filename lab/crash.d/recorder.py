#!/usr/bin/python3
"""A file system of one file, whose every change is recorded in order: the far side of a block
device's server, seen from outside of it. recorder.py MOUNTPOINT BACKING LOG [direct]

MOUNTPOINT/image has the content of BACKING. LOG gets one entry when a write, fallocate or sync
of it arrives, and one when it is answered; MOUNTPOINT/mark takes marks of clients that know what
should be durable by then. Answers come late and out of order, so that a server that does not wait for
them is found out. It speaks the kernel's FUSE protocol (include/uapi/linux/fuse.h)."""

import errno
import os
import queue
import random
import struct
import subprocess
import sys
import threading
import time

from log import Entry, Writer

(LOOKUP, FORGET, GETATTR, SETATTR, OPEN, READ, WRITE, STATFS, RELEASE, FSYNC, FLUSH, INIT, OPENDIR, READDIR,
 RELEASEDIR, INTERRUPT, DESTROY, BATCH_FORGET, FALLOCATE) = (
    1, 2, 3, 4, 14, 15, 16, 17, 18, 20, 25, 26, 27, 28, 29, 36, 38, 42, 43)
IN_HEADER, OUT_HEADER = struct.Struct("=IIQQIIIHH"), struct.Struct("=IiQ")
ATTRIBUTES = struct.Struct("=QQQQQQIIIIIIIIII")
ROOT, IMAGE, MARK = 1, 2, 3
NAMES = {b"image": IMAGE, b"mark": MARK}
WRITE_BYTES_MAX = 1 << 20
FATTR_SIZE = 1 << 3
FOPEN_DIRECT_IO, FOPEN_PARALLEL_DIRECT_WRITES = 1 << 0, 1 << 6
INIT_FLAGS = (1 << 0) | (1 << 5) | (1 << 22)  # asynchronous reads, big writes, max_pages
WORKERS = 8
DELAY_MAX_S = 0.001


class Recorder:
    """The file system, on one /dev/fuse."""

    def __init__(self, device, backing, log, direct):
        self.device, self.backing, self.direct = device, os.open(backing, os.O_RDWR), direct
        self.log, self.requests = Writer(log), queue.SimpleQueue()
        # For each task: whether its last operation was a write that must be durable immediately.
        self.dsync = {}
        self.random = random.Random(1)

    def attributes(self, node):
        """struct fuse_attr."""
        size = os.fstat(self.backing).st_size if node == IMAGE else 0
        blocks = os.fstat(self.backing).st_blocks if node == IMAGE else 0
        mode = 0o40755 if node == ROOT else 0o100600
        return ATTRIBUTES.pack(node, size, blocks, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

    def serve(self):
        """Runs until the file system is unmounted."""
        for _ in range(WORKERS):
            threading.Thread(target=self.work, daemon=True).start()
        while True:
            try:
                request = os.read(self.device, WRITE_BYTES_MAX + 65536)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                    continue
                return
            # Immediately, and on this thread only: the order of arrival is the order of the log.
            _, opcode, unique, node, _, _, task, _, _ = IN_HEADER.unpack_from(request)
            body = memoryview(request)[IN_HEADER.size:]
            if opcode in (FORGET, BATCH_FORGET, INTERRUPT):
                continue
            entry = self.arrives(opcode, node, task, body)
            number = self.log.add(entry) if entry else 0
            self.requests.put((opcode, unique, node, body, entry, number))

    def work(self):
        """Answers requests, in parallel with the other workers."""
        while True:
            opcode, unique, node, body, entry, number = self.requests.get()
            if entry and entry.kind != Entry.MARK:
                time.sleep(self.random.random() ** 4 * DELAY_MAX_S)
            try:
                code, answer = 0, self.answer(opcode, node, body)
            except OSError as error:
                code, answer = -error.errno, b""
            if entry and not code:
                # Before the answer: everything that follows from it arrives later.
                self.log.add(Entry(Entry.COMPLETED, number))
            try:
                os.write(self.device, OUT_HEADER.pack(OUT_HEADER.size + len(answer), code, unique) + answer)
            except OSError as error:
                if error.errno != errno.ENOENT:  # the request was interrupted
                    raise

    def arrives(self, opcode, node, task, body):
        """Returns the log entry for a request that changes the file."""
        before, self.dsync[task] = self.dsync.get(task, False), False
        if opcode == WRITE and node == MARK:
            return Entry(Entry.MARK, int(bytes(body[40:]) or 0))
        if opcode == WRITE:
            offset, size, flags = struct.unpack_from("=8xQI4x8xI", body)
            dsync = bool(flags & os.O_DSYNC)
            self.dsync[task] = dsync
            return Entry(Entry.WRITE, int(dsync), offset, size, bytes(body[40:40 + size]))
        if opcode == FALLOCATE:
            offset, length = struct.unpack_from("=8xQQ", body)
            return Entry(Entry.ZEROES, 0, offset, length)
        if opcode == FSYNC:
            # The sync that follows a write with RWF_DSYNC belongs to that write, and covers nothing else.
            return None if before else Entry(Entry.SYNC)
        return None

    def answer(self, opcode, node, body):
        """Executes the request; returns the body of the answer."""
        if opcode == INIT:
            return struct.pack("=IIIIHHIIHHI28x", 7, 31, 1 << 20, INIT_FLAGS, 64, 48, WRITE_BYTES_MAX, 1,
                               WRITE_BYTES_MAX >> 12, 0, 0)
        if opcode == LOOKUP:
            found = NAMES.get(bytes(body).rstrip(b"\0"))
            if not found:
                raise OSError(errno.ENOENT, "")
            return struct.pack("=QQQQII", found, 0, 1, 0, 0, 0) + self.attributes(found)
        if opcode in (GETATTR, SETATTR):
            if opcode == SETATTR and struct.unpack_from("=I", body)[0] & FATTR_SIZE and node == IMAGE:
                raise OSError(errno.EPERM, "")
            return struct.pack("=QII", 0, 0, 0) + self.attributes(node)
        if opcode == OPEN:
            direct = self.direct or node == MARK
            flags = FOPEN_DIRECT_IO | FOPEN_PARALLEL_DIRECT_WRITES if direct else 0
            return struct.pack("=QII", node, flags, 0)
        if opcode == READ:
            offset, size = struct.unpack_from("=8xQI", body)
            return os.pread(self.backing, size, offset)
        if opcode == WRITE:
            offset, size = struct.unpack_from("=8xQI", body)
            if node == IMAGE:
                os.pwrite(self.backing, body[40:40 + size], offset)
            return struct.pack("=II", size, 0)
        if opcode == FALLOCATE:
            offset, length = struct.unpack_from("=8xQQ", body)
            zeroes = bytes(min(length, 1 << 20))
            for at in range(offset, offset + length, len(zeroes)):
                os.pwrite(self.backing, zeroes[:min(len(zeroes), offset + length - at)], at)
            return b""
        if opcode == OPENDIR:
            return struct.pack("=QII", 0, 0, 0)
        if opcode in (READDIR, RELEASE, RELEASEDIR, FSYNC, FLUSH, DESTROY):
            return b""
        if opcode == STATFS:
            return struct.pack("=QQQQQIIII24x", 1 << 20, 1 << 19, 1 << 19, 100, 50, 4096, 255, 4096, 0)
        raise OSError(errno.ENOSYS, "")


def main(mountpoint, backing, log, direct=""):
    sys.setswitchinterval(0.0002)
    device = os.open("/dev/fuse", os.O_RDWR)
    os.set_inheritable(device, True)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other,max_read={WRITE_BYTES_MAX}"
    subprocess.run(["mount", "-i", "-t", "fuse", "-o", options, "blkq-recorder", mountpoint],
                   pass_fds=[device], check=True)
    Recorder(device, backing, log, direct == "direct").serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
