#!/usr/bin/python3
"""Several connections at once: multi-conn's promise, deep queues, clients that vanish."""

import random
import threading

import nbd

import wire
from checks import KIB, MIB, data, equal, main, true


def in_threads(count, work):
    """Runs work(i) in `count` threads; raises the first failure."""
    failures = []

    def guarded(index):
        try:
            work(index)
        except Exception as error:  # reported by the caller's thread
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def drain(handle, cookies):
    """Waits for the asynchronous commands; an error of any is raised."""
    for cookie in cookies:
        while not handle.aio_command_completed(cookie):
            handle.poll(-1)


# Contract: durability
def check_flush_covers_other_connections(target):
    """Written on one, flushed on the next, seen by the third and in the image."""
    target.need_writable()
    handles = [target.connect() for _ in range(target.connections)]
    true(all(handle.can_multi_conn() for handle in handles), "multi-conn is not offered")
    for turn in range(16):
        writer, flusher, reader = (handles[(turn + i) % len(handles)] for i in range(3))
        content = data(16 * KIB, seed=turn)
        writer.pwrite(content, turn * 16 * KIB)
        flusher.flush()
        equal(bytes(reader.pread(16 * KIB, turn * 16 * KIB)), content, f"turn {turn}")
        if target.image:
            with open(target.image, "rb") as file:
                file.seek(target.offset + turn * 16 * KIB)
                equal(file.read(16 * KIB), content, f"the image, turn {turn}")


def check_four_clients_verify(target):
    """Each connection writes, flushes, trims and verifies its own quarter at random."""
    target.need_writable()
    quarter = min(target.size // target.connections, 8 * MIB)
    quarter -= quarter % (64 * KIB)
    turns = 40 if target.quick else 200

    def client(index):
        chance, handle = random.Random(index), target.connect()
        base = index * quarter
        model = bytearray(handle.pread(quarter, base))
        for turn in range(turns):
            length = target.align(chance.randrange(1, 64 * KIB))
            offset = chance.randrange(0, (quarter - length) // target.sector) * target.sector
            act = chance.choice("wwwwrrzf")
            if act == "w":
                content = chance.randbytes(length)
                handle.pwrite(content, base + offset, chance.choice((0, 0, nbd.CMD_FLAG_FUA)))
                model[offset:offset + length] = content
            elif act == "z":
                handle.zero(length, base + offset, chance.choice((0, nbd.CMD_FLAG_NO_HOLE)))
                model[offset:offset + length] = bytes(length)
            elif act == "f":
                handle.flush()
            else:
                equal(bytes(handle.pread(length, base + offset)),
                      bytes(model[offset:offset + length]), f"client {index} turn {turn}")
        equal(bytes(handle.pread(quarter, base)), bytes(model), f"client {index} at the end")

    in_threads(target.connections, client)


def check_deep_queue(target):
    """256 reads in flight on one connection, then 256 writes where there may be."""
    handle = target.connect()
    buffers = [nbd.Buffer(4 * KIB) for _ in range(256)]
    drain(handle, [handle.aio_pread(buffer, i * 4 * KIB) for i, buffer in enumerate(buffers)])
    expected = bytes(handle.pread(MIB, 0))
    equal(b"".join(bytes(buffer.to_bytearray()) for buffer in buffers), expected, "reads")
    if target.read_only:
        return
    contents = [data(4 * KIB, seed=i) for i in range(256)]
    drain(handle, [handle.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(content)), i * 4 * KIB)
                   for i, content in enumerate(contents)])
    equal(bytes(handle.pread(MIB, 0)), b"".join(contents), "writes")


def check_flushes_among_writes(target):
    """Writes and flushes in flight together on every connection all complete."""
    target.need_writable()

    def client(index):
        handle = target.connect()
        content = data(4 * KIB, seed=100 + index)
        cookies = []
        for turn in range(32):
            buffer = nbd.Buffer.from_bytearray(bytearray(content))
            cookies.append(handle.aio_pwrite(buffer, (index * 32 + turn) * 4 * KIB))
            cookies.append(handle.aio_flush())
        drain(handle, cookies)
        equal(bytes(handle.pread(128 * KIB, index * 128 * KIB)), content * 32, "read back")

    in_threads(target.connections, client)


def check_vanishing_clients(target):
    """Clients that disconnect in the middle of their requests harm no others."""
    steady = target.connect()
    before = bytes(steady.pread(64 * KIB, 0))
    for turn in range(20):
        with wire.Wire(target.socket_path).ready(target.export, structured=False) as client:
            for cookie in range(turn + 1):
                client.request(wire.CMD_READ, length=256 * KIB, cookie=cookie)
    equal(bytes(steady.pread(64 * KIB, 0)), before, "another client's data")


def check_many_short_connections(target):
    for _ in range(20 if target.quick else 100):
        handle = target.connect()
        equal(handle.get_size(), target.size, "size")
        handle.shutdown()


if __name__ == "__main__":
    main(__doc__)
