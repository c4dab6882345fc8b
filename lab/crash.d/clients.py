#!/usr/bin/python3
# Contract: bounded-input
"""Clients that disconnect at every step of the protocol, over a unix socket and TCP, in every way of
going, beside one that works and verifies: afterwards no connection, no request in flight, no
descriptor and no memory is left. clients.py IMAGE ROUNDS [SEED]"""

import os
import pathlib
import random
import socket
import struct
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "nbd"))
sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))

import wire
from clock import wait_until
from load import Load, Wrong
from model import SECTOR, Model
from server import Server, blkq

KIB = 1024
BYTES = 16 << 20
# Sectors of the steady client, at the beginning; the others write after them.
STEADY_SECTORS = 4096
FAR = STEADY_SECTORS * SECTOR
ANON_GROWN_MAX_KIB = 2048
# Unused memory is freed within this time.
FREED_S = 2.2


def handshake():
    """Returns everything that a client sends before transmission."""
    option = struct.Struct(">QII")
    query = b"base:allocation"
    meta = struct.pack(">III", 0, 1, len(query)) + query
    go = struct.pack(">IHH", 0, 1, wire.INFO_BLOCK_SIZE)
    parts = [struct.pack(">I", wire.FLAG_FIXED_NEWSTYLE | wire.FLAG_NO_ZEROES)]
    for kind, payload in ((wire.OPT_STRUCTURED_REPLY, b""), (wire.OPT_SET_META_CONTEXT, meta),
                          (wire.OPT_LIST, b""), (wire.OPT_GO, go)):
        parts.append(option.pack(wire.IHAVEOPT, kind, len(payload)) + payload)
    return b"".join(parts)


def request(command, offset=0, length=0, cookie=1, flags=0):
    """Returns a compact request."""
    return struct.pack(">IHHQQI", wire.REQUEST_MAGIC, flags, command, cookie, offset, length)


def writes(count, length):
    """Returns writes of `length` bytes, which succeed."""
    return b"".join(request(wire.CMD_WRITE, FAR + cookie * length, length, cookie) + bytes(length)
                    for cookie in range(count))


def reads(count, length):
    """Returns reads whose replies the client does not read."""
    return b"".join(request(wire.CMD_READ, cookie % 8 * length, length, cookie) for cookie in range(count))


MIXED = b"".join([
    writes(8, 4 * KIB), request(wire.CMD_FLUSH), reads(16, 64 * KIB),
    request(wire.CMD_TRIM, FAR, 64 * KIB), request(wire.CMD_WRITE_ZEROES, FAR, 64 * KIB, flags=wire.CMD_FLAG_FUA),
    request(wire.CMD_BLOCK_STATUS, 0, BYTES), request(wire.CMD_CACHE, 0, 1 << 20), request(wire.CMD_FLUSH)])


def steps(chance):
    """Returns the bytes that precede the disconnection: each position of the handshake, each of a request's
    header, and some of a payload, of requests in flight and of replies that are not read."""
    hello = handshake()
    for end in range(len(hello) + 1):
        yield "handshake", hello[:end]
    header = request(wire.CMD_WRITE, FAR, 64 * KIB)
    for end in range(len(header) + 1):
        yield "header", hello + header[:end]
    payload = [0, 1, 511, 512, 513, 4095, 4096, 65535] + [chance.randrange(65536) for _ in range(8)]
    for end in payload:
        yield "payload", hello + header + bytes(end)
    for _ in range(24):
        yield "in flight", hello + MIXED[:chance.randrange(1, len(MIXED) + 1)]
    for _ in range(4):
        yield "replies unread", hello + reads(chance.randrange(1, 64), 256 * KIB)
    yield "disconnect", hello + MIXED + request(wire.CMD_DISC)
    yield "disconnect", hello + request(wire.CMD_DISC) + MIXED


def connect(address):
    """Connects to the server: a path, or a host and a port."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    client = socket.socket(family)
    client.settimeout(20)
    client.connect(address)
    return client


def send_words(client, words):
    """Sends as much as the server accepts; the server may close, or stop reading, before all is sent."""
    client.setblocking(False)
    deadline = time.monotonic() + 0.02
    try:
        while words and time.monotonic() < deadline:
            try:
                words = words[client.send(words):]
            except BlockingIOError:
                time.sleep(0.001)
    except (BrokenPipeError, ConnectionResetError):
        pass
    client.settimeout(20)


def vanish(client):
    """Closes the socket; the peer gets a reset if bytes are unread."""
    client.close()


def reset(client):
    """Closes with an immediate reset (TCP)."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def half_close(client):
    """Shuts down writing, and reads until the server closes."""
    try:
        client.shutdown(socket.SHUT_WR)
        while client.recv(1 << 20):
            pass
    except (ConnectionResetError, OSError) as error:
        if isinstance(error, TimeoutError):
            raise AssertionError("the server does not close a half-closed connection") from error
    client.close()


def deafen(client):
    """Reads nothing more, and disconnects a little later."""
    try:
        client.shutdown(socket.SHUT_RD)
    except OSError:
        pass
    time.sleep(0.001)
    client.close()


WAYS = [vanish, reset, half_close, deafen]


class Steady:
    """A client on a separate thread that records exactly what was answered."""

    def __init__(self, load, path):
        self.load, self.stop, self.failure = load, False, None
        self.load.connect(path, 1)
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self):
        """Runs until it is stopped."""
        try:
            self.load.run(2, lambda: time.sleep(0.002) or self.stop)
            if not self.stop:
                raise Wrong("the steady client's connection was closed")
            self.load.drain()
        except Exception as error:  # raised in the thread that stops the client
            self.failure = error

    def done(self):
        """Returns the number of answers."""
        return sum(self.load.answered.values())

    def finish(self):
        """Stops the client, and raises the error that it met."""
        self.stop = True
        self.thread.join(20)
        if self.failure:
            raise self.failure
        if self.thread.is_alive():
            raise AssertionError("the steady client has come to a halt")
        self.load.close()


def at_rest(server, clients):
    """Waits until that number of clients is left, with nothing in flight; returns the resources of the process."""
    def is_idle():
        connected = server.show()["clients"]
        return len(connected) == clients and not any(client["in_flight"] for client in connected)

    wait_until("the last client has left, and nothing is in flight", is_idle)
    seen = []

    def is_steady():
        with open(f"/proc/{server.pid}/status", encoding="ascii") as file:
            anonymous = next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))
        seen.append((time.monotonic(), (len(os.listdir(f"/proc/{server.pid}/fd")), anonymous)))
        # Unused buffers are freed after a second, maps a little later.
        last = [what for at, what in seen if at >= seen[-1][0] - FREED_S]
        return seen[0][0] < seen[-1][0] - FREED_S and len(set(last)) == 1

    wait_until("the process frees unused resources", is_steady, 60)
    return seen[-1][1]


def round_of(addresses, chance):
    """Tests every step, each with one way of disconnecting; returns the number of clients."""
    count = 0
    for _, words in steps(chance):
        address = chance.choice(addresses)
        client = connect(address)
        send_words(client, words)
        if chance.random() < 0.3:
            time.sleep(0.0005)
        way = chance.choice(WAYS)
        (vanish if way is reset and isinstance(address, str) else way)(client)
        count += 1
    return count


def main(image, rounds, seed="1"):
    chance = random.Random(int(seed))
    with open(image, "wb") as file:
        file.truncate(BYTES)
    server = Server(image, "--listen", f"unix:{image}.sock", "--listen", "tcp:127.0.0.1:0")
    exports = server.show()["exports"]
    path = next(uri.partition("socket=")[2] for uri in exports if "unix" in uri)
    host, _, port = next(uri for uri in exports if "unix" not in uri).rpartition("/")[2].rpartition(":")
    addresses = [path, (host.lstrip("/"), int(port))]
    # The process keeps memory that the first clients use, which is no leak.
    count = round_of(addresses, chance)
    before = at_rest(server, 0)
    load = Load(Model(STEADY_SECTORS), 1)
    for number in range(int(rounds)):
        steady = Steady(load, path)
        count += round_of(addresses, chance)
        done = steady.done()
        wait_until(f"round {number}: the steady client makes progress", lambda: steady.failure or steady.done() > done)
        steady.finish()
    after = at_rest(server, 0)
    in_flight = blkq("stat", server.name, "--json")
    if '"in_flight":0' not in in_flight:
        raise AssertionError(f"requests in flight: {in_flight}")
    server.detach()
    print(f"    {count} clients disconnected in {int(rounds) + 1} rounds; descriptors {before[0]} before, {after[0]} after; "
          f"anonymous memory {before[1]} KiB before, {after[1]} KiB after", flush=True)
    if after[0] != before[0] or after[1] > before[1] + ANON_GROWN_MAX_KIB:
        raise SystemExit("something was left behind")


if __name__ == "__main__":
    main(*sys.argv[1:])
