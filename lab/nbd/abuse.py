#!/usr/bin/python3
# Contract: bounded-input
"""Sends what no honest client does, while an honest client works and verifies on the same server."""

import os
import pathlib
import socket
import struct
import sys
import threading

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))

import nbd

import wire
from checks import KIB, MIB, data, equal, main, true
from clock import wait_until


class Steady:
    """A client of its own that writes, reads back and compares until it is stopped."""

    def __init__(self, target):
        self.handle = target.connect()
        self.base = target.size - 4 * MIB
        self.turns, self.failure, self.stop = 0, None, threading.Event()
        self.thread = threading.Thread(target=self.work, daemon=True)

    def work(self):
        try:
            while not self.stop.is_set():
                at = self.base + self.turns % 64 * 64 * KIB
                content = data(64 * KIB, seed=self.turns)
                self.handle.pwrite(content, at)
                equal(bytes(self.handle.pread(64 * KIB, at)), content, "the steady client")
                self.turns += 1
        except Exception as error:  # raised where the client is stopped
            self.failure = error

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, kind, *_):
        before = self.turns
        try:
            if kind is None:
                wait_until("the steady client makes progress", lambda: self.failure or self.turns >= before + 2)
        finally:
            self.stop.set()
            self.thread.join(20)
        if kind is None and self.failure:
            raise self.failure


def abuse(target, conversations, must_close=True):
    """Runs each conversation (a function of a Wire) beside a steady client."""
    with Steady(target):
        for number, conversation in enumerate(conversations):
            with wire.Wire(target.socket_path) as client:
                try:
                    conversation(client)
                    if must_close:
                        true(client.closed(), f"conversation {number}: the connection stays open")
                except wire.Closed:
                    pass


def check_garbage_for_a_greeting(target):
    abuse(target, [lambda client, seed=seed: (client.receive(18), client.send(data(4096, seed)))
                   for seed in range(20)])


def check_unknown_client_flags(target):
    abuse(target, [lambda client: client.greet(0xFFFFFFFF)])


def check_wrong_option_magic(target):
    abuse(target, [lambda client: (client.greet(), client.send_option(wire.OPT_LIST, magic=1))])


def check_option_of_four_gibibytes(target):
    def conversation(client):
        client.greet()
        client.send_option(wire.OPT_INFO, b"x" * 64 * KIB, length=0xFFFFFFFF)
        for _ in range(64):
            client.send(bytes(MIB))
        raise AssertionError("64 MiB of one option were taken")

    def guarded(client):
        client.socket.settimeout(2)
        try:
            conversation(client)
        except TimeoutError:  # it stopped reading: as good as closing
            pass

    abuse(target, [guarded], must_close=False)


def check_transmission_before_the_handshake_is_done(target):
    abuse(target, [lambda client: (client.greet(), client.request(wire.CMD_READ, length=4096),
                                   client.send(bytes(64)))])


def check_wrong_request_magic(target):
    def conversation(magic):
        return lambda client: (client.ready(target.export),
                               client.request(wire.CMD_READ, length=4096, magic=magic))

    abuse(target, [conversation(magic) for magic in
                   (0, 0xFFFFFFFF, wire.SIMPLE_REPLY_MAGIC, wire.EXTENDED_REQUEST_MAGIC)])


def check_garbage_for_requests(target):
    abuse(target, [lambda client, seed=seed: (client.ready(target.export),
                                              client.send(data(64 * KIB, seed)))
                   for seed in range(20)])


def check_options_in_transmission(target):
    abuse(target, [lambda client: (client.ready(target.export),
                                   client.send_option(wire.OPT_LIST, bytes(12)))])


def check_half_open_connections(target):
    """Clients that stop at every stage and stay connected block no others."""
    stages = [
        lambda client: None,
        lambda client: client.receive(18),
        lambda client: client.greet(),
        lambda client: (client.greet(), client.send(struct.pack(">Q", wire.IHAVEOPT))),
        lambda client: (client.greet(), client.send_option(wire.OPT_GO, b"", length=100)),
        lambda client: client.ready(target.export),
        lambda client: (client.ready(target.export), client.send(b"\x25\x60")),
        lambda client: (client.ready(target.export),
                        client.request(wire.CMD_WRITE, length=MIB, payload=bytes(1000))),
    ]
    with Steady(target):
        clients = []
        for _ in range(3):
            for stage in stages:
                client = wire.Wire(target.socket_path)
                clients.append(client)
                stage(client)
        equal(len(target.connect().pread(target.sector, 0)), target.sector, "a new client")
        for client in clients:
            client.socket.close()


def check_reader_that_never_reads(target):
    """Replies pile up for a client that reads none: the other clients continue."""
    with Steady(target):
        with wire.Wire(target.socket_path, timeout_s=1) as client:
            client.ready(target.export, structured=False)
            try:
                for cookie in range(2000):
                    client.request(wire.CMD_READ, length=256 * KIB, cookie=cookie)
            except (TimeoutError, wire.Closed):
                pass
            equal(len(target.connect().pread(target.sector, 0)), target.sector, "a new client")


def check_same_cookie_for_all(target):
    """Cookies are the client's affair: sixteen requests with one cookie, sixteen answers."""
    with Steady(target), wire.Wire(target.socket_path) as client:
        client.ready(target.export, structured=False)
        for _ in range(16):
            client.request(wire.CMD_READ, length=target.sector, cookie=7)
        for _ in range(16):
            equal(client.simple_reply(target.sector)[:2], (0, 7), "reply")


def check_write_cut_off(target):
    """A write whose payload never fully arrives changes nothing."""
    handle = target.connect()
    before = data(64 * KIB, seed=1)
    handle.pwrite(before, MIB)

    def conversation(client):
        client.ready(target.export, structured=False)
        client.request(wire.CMD_WRITE, MIB, 64 * KIB, payload=bytes(32 * KIB))
        client.socket.shutdown(socket.SHUT_WR)

    abuse(target, [conversation])
    equal(bytes(handle.pread(64 * KIB, MIB)), before, "the range of the write that was cut off")


def is_served(target):
    """Whether a new client is served: the kernel or the server may have no resources for it yet."""
    try:
        return len(target.connect().pread(target.sector, 0)) == target.sector
    except nbd.Error:
        return False


def check_hundreds_of_connections(target):
    """More connections than needed: served or rejected, the steady client is served."""
    with Steady(target):
        clients = []
        try:
            for _ in range(300):
                clients.append(wire.Wire(target.socket_path))
        except OSError:
            pass
        finally:
            for client in clients:
                client.socket.close()
        wait_until("a new client is served", lambda: is_served(target))


def resident_kib():
    """Returns the anonymous memory of the server, whose process LAB_SERVER_PID names."""
    process = os.environ.get("LAB_SERVER_PID")
    true(process, "LAB_SERVER_PID is not set")
    with open(f"/proc/{process}/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))


def check_promised_writes_take_no_memory(target):
    """32 clients announce 32 MiB each and send 4 KiB: memory follows what has arrived."""
    before = resident_kib()
    with Steady(target):
        clients = []
        for _ in range(32):
            client = wire.Wire(target.socket_path)
            clients.append(client)
            client.ready(target.export, structured=False)
            client.request(wire.CMD_WRITE, length=32 * MIB, payload=bytes(4 * KIB))
        # The server has had its turn by then.
        equal(len(target.connect().pread(target.sector, 0)), target.sector, "a new client")
        grown = resident_kib() - before
        for client in clients:
            client.socket.close()
    true(grown < 256 * KIB, f"{grown} KiB more for 128 KiB that have arrived")


def check_memory_is_given_back(target):
    """After all of this, and large requests of clients that have left, the server uses little memory."""
    handles = [target.connect() for _ in range(8)]
    for handle in handles:
        equal(len(handle.pread(16 * MIB, 0)), 16 * MIB, "length read")
        handle.shutdown()
    wait_until("the server frees its memory", lambda: resident_kib() <= 32 * KIB)


if __name__ == "__main__":
    main(__doc__)
