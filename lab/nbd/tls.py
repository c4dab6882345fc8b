#!/usr/bin/python3
"""TLS under NBD by hand: what strangers, people in between and broken clients send. Called by
lab/security with the sockets of three servers, where plain NBD is refused, may be, and is all
there is, the directory of certificates, and the names of checks if not all are meant."""

import os
import socket
import ssl
import struct
import sys
import time
import warnings
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

import wire
from clock import wait_until

REP_ERR_TLS_REQD = wire.REP_ERROR + 5
# Of the handshake, as lab/security sets it.
TIMEOUT_S = 2


def true(value, what):
    if not value:
        raise AssertionError(what)


class Servers:
    """The servers under test."""

    def __init__(self, require, offer, off, certificates):
        self.require, self.offer, self.off = require, offer, off
        self.certificates = Path(certificates)

    def context(self, role="client"):
        """A client's side, with the certificate of `role`, or none."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(self.certificates / "ca-cert.pem")
        if role:
            context.load_cert_chain(self.certificates / f"{role}-cert.pem", self.certificates / f"{role}-key.pem")
        return context


def encrypt(client, context):
    """STARTTLS, then the handshake."""
    replies = client.option(wire.OPT_STARTTLS)
    true(replies == [(wire.REP_ACK, b"")], f"STARTTLS answered {replies}")
    client.socket = context.wrap_socket(client.socket)
    return client


def works(path, context):
    """A client under TLS writes and reads."""
    with wire.Wire(path) as client:
        client.greet()
        encrypt(client, context)
        true(client.go()[-1][0] == wire.REP_ACK, "GO")
        content = os.urandom(1 << 20)
        client.request(wire.CMD_WRITE, 0, len(content), payload=content)
        true(client.simple_reply()[0] == 0, "write")
        client.request(wire.CMD_READ, 0, len(content))
        true(client.simple_reply(len(content)) == (0, 1, content), "read")
        client.request(wire.CMD_DISC)
        true(client.socket.recv(1) == b"", "the end")


def check_works(servers):
    for path in (servers.require, servers.offer):
        works(path, servers.context())


def check_tls_1_2(servers):
    context = servers.context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    works(servers.require, context)


def check_older_versions_are_refused(servers):
    context = servers.context()
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    warnings.simplefilter("ignore", DeprecationWarning)
    context.minimum_version = ssl.TLSVersion.TLSv1
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    refused(servers, context)


def refused(servers, context):
    """The server does not continue with such a client, with any TLS version: nothing is sent."""
    try:
        with wire.Wire(servers.require) as client:
            client.greet()
            encrypt(client, context)
            client.option(wire.OPT_LIST)
    except (ssl.SSLError, wire.Closed, ConnectionError):
        works(servers.require, servers.context())
        return
    raise AssertionError("it was let in")


def check_no_certificate(servers):
    refused(servers, servers.context(None))


def check_certificate_of_another_authority(servers):
    refused(servers, servers.context("stranger"))


def check_expired_certificate(servers):
    refused(servers, servers.context("expired"))


def check_revoked_certificate(servers):
    refused(servers, servers.context("revoked"))


def check_certificate_of_a_server(servers):
    refused(servers, servers.context("server"))


def check_nothing_is_answered_in_clear(servers):
    with wire.Wire(servers.require) as client:
        client.greet()
        for option in (wire.OPT_LIST, wire.OPT_INFO, wire.OPT_GO, wire.OPT_STRUCTURED_REPLY,
                       wire.OPT_EXTENDED_HEADERS, wire.OPT_SET_META_CONTEXT, 99):
            [(kind, text)] = client.option(option)
            true(kind == REP_ERR_TLS_REQD, f"{option}: {kind:#x} {text}")
        encrypt(client, servers.context())
        true(client.option(wire.OPT_STARTTLS)[-1][0] == wire.REP_ERR_INVALID, "TLS in TLS")
    with wire.Wire(servers.require) as client:
        client.greet()
        client.send_option(wire.OPT_EXPORT_NAME, b"")
        true(client.closed(), "EXPORT_NAME in clear")


def check_tls_that_is_off(servers):
    with wire.Wire(servers.off) as client:
        client.greet()
        true(client.option(wire.OPT_STARTTLS)[-1][0] == wire.REP_ERR_POLICY, "STARTTLS")
        true(client.go()[-1][0] == wire.REP_ACK, "plain NBD continues")


def check_what_was_chosen_in_clear_is_forgotten(servers):
    """CVE-2021-3716: a man in the middle chose something before the client sent STARTTLS."""
    with wire.Wire(servers.offer) as client:
        client.greet()
        true(client.option(wire.OPT_STRUCTURED_REPLY)[-1][0] == wire.REP_ACK, "structured in clear")
        client.set_meta_context()
        encrypt(client, servers.context())
        # Without structured replies there are no contexts; and a read is answered simply.
        true(client.option(wire.OPT_SET_META_CONTEXT, bytes(8))[-1][0] == wire.REP_ERR_INVALID, "contexts")
        client.go()
        client.request(wire.CMD_READ, 0, 512)
        true(client.simple_reply(512)[0] == 0, "a simple reply")


def check_injected_after_starttls(servers):
    """What follows STARTTLS in the same packet is no command, now or under TLS."""
    inject = [b"", bytes(1), struct.pack(">QII", wire.IHAVEOPT, wire.OPT_STRUCTURED_REPLY, 0),
              struct.pack(">QII", wire.IHAVEOPT, wire.OPT_ABORT, 0), os.urandom(70000)]
    for path in (servers.require, servers.offer):
        for bytes_after in inject:
            with wire.Wire(path) as client:
                client.greet()
                try:
                    client.send(struct.pack(">QII", wire.IHAVEOPT, wire.OPT_STARTTLS, 0) + bytes_after)
                    if not bytes_after:
                        true(client.receive_option(wire.OPT_STARTTLS)[0] == wire.REP_ACK, "no acknowledgement")
                        continue
                    true(client.closed(), f"{len(bytes_after)} bytes in clear: it continues")
                except wire.Closed:
                    pass
    works(servers.require, servers.context())


def check_clear_bytes_after_the_acknowledgement(servers):
    """Commands in clear where TLS should begin, and garbage: the server closes at once."""
    go = struct.pack(">QIIIH", wire.IHAVEOPT, wire.OPT_GO, 6, 0, 0)
    hello = b"\x16\x03\x01"

    def seconds(garbage):
        with wire.Wire(servers.require) as client:
            client.greet()
            client.option(wire.OPT_STARTTLS)
            begin = time.monotonic()
            try:
                client.send(garbage)
                client.socket.shutdown(socket.SHUT_WR)
                true(client.closed(), f"{garbage[:20]}: it continues")
            except (wire.Closed, OSError):
                pass
            return time.monotonic() - begin

    for garbage in (go, b"GET / HTTP/1.0\r\n\r\n", bytes(64), b"\xff" * 70000, hello + b"\xff\xff" + bytes(70000),
                    hello + b"\x00\x04\x01\x00\x00\x00", b"\x17\x03\x03\x00\x10" + bytes(16),
                    b"\x15\x03\x03\x00\x02\x02\x28", os.urandom(100000)):
        # On a busy machine its time limit may be over before.
        wait_until(f"{garbage[:20]}: more than its time limit closes it", lambda sent=garbage: seconds(sent) < TIMEOUT_S / 2)
    works(servers.require, servers.context())


def check_time_of_the_handshake(servers):
    """A silent client, or one that sends a byte at a time, is dropped; and so is one that stops half-way."""
    def silent(_):
        time.sleep(0.05)

    hello = iter(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500))

    def trickle(client):
        client.send(bytes([next(hello)]))

    def after_tls(client):
        client.socket.recv(0)

    for begin_tls, then in ((False, silent), (False, trickle), (True, after_tls)):
        begin = time.monotonic()
        with wire.Wire(servers.require) as client:
            client.greet()
            if begin_tls:
                encrypt(client, servers.context())
            else:
                client.option(wire.OPT_STARTTLS)
            client.socket.settimeout(0.2)
            while time.monotonic() - begin < TIMEOUT_S + 20:
                try:
                    if not begin_tls:
                        then(client)
                    if not client.socket.recv(100):
                        break
                except TimeoutError:
                    continue
                except (wire.Closed, OSError):
                    break
        took = time.monotonic() - begin
        true(TIMEOUT_S - 0.5 < took < TIMEOUT_S + 20, f"it had {took:.1f} s")
    works(servers.require, servers.context())


def check_strangers_do_not_add_up(servers):
    """Many at a time that stop in the middle of the TLS handshake are closed at their time limit."""
    clients = []
    for _ in range(40):
        client = wire.Wire(servers.require)
        client.greet()
        client.option(wire.OPT_STARTTLS)
        client.send(b"\x16\x03\x01\x02\x00\x01")
        clients.append(client)
    works(servers.require, servers.context())
    for client in clients:
        true(client.closed(), "a stranger stays")
        client.socket.close()


def check_cut_off(servers):
    """A client that disconnects without close_notify, in the middle of a record or a payload."""
    for payload in (0, 100, 4096, 1 << 20):
        with wire.Wire(servers.require) as client:
            client.greet()
            encrypt(client, servers.context())
            client.go()
            client.request(wire.CMD_WRITE, 0, 2 << 20, payload=bytes(payload))
            client.socket.shutdown(socket.SHUT_RDWR)
    works(servers.require, servers.context())


def check_changed_on_the_way(servers):
    """One bit of a record is another: nothing of it is taken for a command."""
    with wire.Wire(servers.require) as client:
        client.greet()
        client.option(wire.OPT_STARTTLS)
        context, (incoming, outgoing) = servers.context(), (ssl.MemoryBIO(), ssl.MemoryBIO())
        tls = context.wrap_bio(incoming, outgoing)
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                client.send(outgoing.read())
                incoming.write(client.socket.recv(1 << 16))
        client.send(outgoing.read())
        tls.write(struct.pack(">QII", wire.IHAVEOPT, wire.OPT_LIST, 0))
        record = bytearray(outgoing.read())
        record[-1] ^= 1
        client.send(record)
        true(client.closed(), "it continues")
    works(servers.require, servers.context())


def check_records_of_every_size(servers):
    """Requests cut into records at every place, and many in one."""
    with wire.Wire(servers.require) as client:
        client.greet()
        encrypt(client, servers.context())
        client.go()
        content = os.urandom(4096)
        form = ">IHHQQI"
        write = struct.pack(form, wire.REQUEST_MAGIC, 0, wire.CMD_WRITE, 7, 8192, 4096) + content
        for byte in write[:100]:
            client.socket.send(bytes([byte]))
        client.send(write[100:])
        true(client.simple_reply()[:2] == (0, 7), "a write in small records")
        count = 200
        client.send(b"".join(struct.pack(form, wire.REQUEST_MAGIC, 0, wire.CMD_READ, at, 8192, 4096)
                             for at in range(count)))
        seen = set()
        for _ in range(count):
            error, cookie, data = client.simple_reply(4096)
            true((error, data) == (0, content), "a read of many")
            seen.add(cookie)
        true(seen == set(range(count)), "every read once")
        # The largest there are, both ways.
        content = os.urandom(8 << 20)
        client.request(wire.CMD_WRITE, 0, len(content), payload=content)
        true(client.simple_reply()[0] == 0, "a large write")
        client.request(wire.CMD_READ, 0, len(content))
        true(client.simple_reply(len(content))[2] == content, "a large read")


def main():
    servers = Servers(*sys.argv[1:5])
    failed = 0
    for name, check in list(globals().items()):
        if name.startswith("check_") and name[6:] in (sys.argv[5:] or [name[6:]]):
            begin = time.monotonic()
            try:
                check(servers)
                result = "ok"
            except Exception as error:  # reported, and counted
                failed += 1
                result = f"FAIL {type(error).__name__}: {error}"
            print(f"  {name[6:].replace('_', ' '):<46} {time.monotonic() - begin:5.1f} s  {result}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
