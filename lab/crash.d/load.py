"""A client over raw NBD that keeps exact books: random requests, many at a time, over several
connections, and a model that knows of each whether it was answered."""

import random
import select

import wire
from model import SECTOR, Operation, content, stamp_of

KINDS = {"write": 50, "fua": 12, "flush": 8, "trim": 5, "zeroes": 7, "read": 18}


def is_mixed(sector, held, operations):
    """Whether a sector read holds parts of what several operations wrote, one of them in flight
    meanwhile: the page cache lets a reader see a write that is half done."""
    wanted = {content(sector, each.stamp) for each in operations}
    return len(wanted) > 1 and all(any(held[at:at + 8] == each[at:at + 8] for each in wanted)
                                   for at in range(0, SECTOR, 8))


class Wrong(Exception):
    """The server gave an answer that it must not give."""


class Request:
    """One request in flight."""

    def __init__(self, kind, first, count, operation=None):
        self.kind, self.first, self.count, self.operation = kind, first, count, operation
        self.began, self.allowed = 0, None


class Connection:
    """A socket in transmission, its requests in flight and its bytes on the way."""

    def __init__(self, path):
        self.wire = wire.Wire(path)
        self.wire.ready(structured=False)
        self.socket = self.wire.socket
        self.socket.setblocking(False)
        self.out, self.received, self.requests, self.closed = bytearray(), bytearray(), {}, False
        self.cookie = 0

    def send(self, request, command, flags=0, payload=b""):
        """Puts a request among what is to be sent."""
        self.cookie += 1
        self.requests[self.cookie] = request
        self.out += wire.struct.pack(">IHHQQI", wire.REQUEST_MAGIC, flags, command, self.cookie,
                                     request.first * SECTOR, request.count * SECTOR) + payload

    def push(self):
        """Sends what the socket takes."""
        try:
            while self.out:
                del self.out[:self.socket.send(self.out)]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            self.out.clear()

    def pull(self):
        """Receives the available replies; returns the answered requests, each with its error and data."""
        try:
            while part := self.socket.recv(1 << 20):
                self.received += part
            self.closed = True
        except BlockingIOError:
            pass
        except ConnectionResetError:
            self.closed = True
        at = 0
        while len(self.received) >= at + 16:
            magic, error, cookie = wire.struct.unpack_from(">IIQ", self.received, at)
            if magic != wire.SIMPLE_REPLY_MAGIC or cookie not in self.requests:
                raise Wrong(f"reply {magic:#x} with cookie {cookie}")
            request = self.requests[cookie]
            length = request.count * SECTOR if request.kind == "read" and not error else 0
            if len(self.received) < at + 16 + length:
                break
            data = bytes(self.received[at + 16:at + 16 + length])
            at += 16 + length
            del self.requests[cookie]
            yield request, error, data
        del self.received[:at]


class Load:
    """Random requests from a seed. `on_event(what, subject)` gets every event that the model gets,
    `before_sending()` is called before a request that it was notified of can reach the server."""

    def __init__(self, model, seed, largest=64, kinds=None, unit=1, errors=()):
        self.model, self.random, self.largest, self.unit = model, random.Random(seed), largest, unit
        self.kinds, self.weights = zip(*(kinds or KINDS).items())
        self.stamp, self.errors = 0, errors
        self.connections, self.reads = [], []
        self.answered = {kind: 0 for kind in KINDS}
        self.refused = 0
        self.on_event = lambda what, subject: None
        self.before_sending = lambda: None

    def connect(self, path, connections):
        """Opens that many connections; what became of the ones before is history."""
        self.reads = []
        self.connections = [Connection(path) for _ in range(connections)]

    def close(self):
        """Closes all connections."""
        for connection in self.connections:
            connection.socket.close()
        self.connections = []

    def in_flight(self):
        """Requests that are not answered yet."""
        return sum(len(connection.requests) for connection in self.connections)

    def _place(self):
        sectors = len(self.model.may_hold) // self.unit
        most = self.largest if self.random.random() < 0.15 else min(8, self.largest)
        count = min(self.random.randint(1, most), sectors)
        # Now and then where others are, so that requests overlap and merge.
        first = self.random.randrange(sectors - count + 1)
        if self.random.random() < 0.2:
            first = min(first, self.random.randrange(64))
        return first * self.unit, count * self.unit

    def _begin(self, connection):
        kind = self.random.choices(self.kinds, self.weights)[0]
        first, count = (0, 0) if kind == "flush" else self._place()
        request = Request(kind, first, count)
        if kind == "flush":
            request.began = self.model.flush_began()
            self.on_event("flush", request.began)
            return connection.send(request, wire.CMD_FLUSH)
        if kind == "read":
            request.allowed = [list(self.model.may_hold[sector]) for sector in range(first, first + count)]
            self.reads.append(request)
            return connection.send(request, wire.CMD_READ)
        fua = kind == "fua" or (kind in ("trim", "zeroes") and self.random.random() < 0.3)
        self.stamp += 1
        written = self.stamp if kind in ("write", "fua") else 0
        request.operation = operation = Operation(first, count, written, fua)
        self.model.begin(operation)
        for read in self.reads:
            # It may come and go while they are on their way.
            for sector in set(operation.sectors()).intersection(range(read.first, read.first + read.count)):
                read.allowed[sector - read.first].append(operation)
        self.on_event("begin", operation)
        flags = wire.CMD_FLAG_FUA if fua else 0
        if kind == "trim":
            return connection.send(request, wire.CMD_TRIM, flags)
        if kind == "zeroes":
            flags |= wire.CMD_FLAG_NO_HOLE if self.random.random() < 0.5 else 0
            return connection.send(request, wire.CMD_WRITE_ZEROES, flags)
        return connection.send(request, wire.CMD_WRITE, flags, operation.data())

    def _complete(self, request, error, data):
        if request.kind == "read":
            self.reads.remove(request)
        if error:
            if error not in self.errors:
                raise Wrong(f"{request.kind} of {request.count} sectors at {request.first}: error {error}")
            self.refused += 1
            return
        self.answered[request.kind] += 1
        if request.kind == "flush":
            self.model.flush_completed(request.began)
            self.on_event("flushed", request.began)
        elif request.kind == "read":
            self._check_read(request, data)
        else:
            self.model.complete(request.operation)
            self.on_event("complete", request.operation)

    def _check_read(self, request, data):
        for index, before in enumerate(request.allowed):
            sector = request.first + index
            held = data[index * SECTOR:(index + 1) * SECTOR]
            stamp = stamp_of(sector, held)
            if not any(each.stamp == stamp for each in before) and not is_mixed(sector, held, before):
                raise Wrong(f"a read of sector {sector} got stamp {stamp}, want one of "
                            f"{sorted({each.stamp for each in before})}")

    def run(self, depth, until):
        """Keeps `depth` requests in flight on each connection until `until()`; returns early when
        the server closed them all. `until` is asked when all of them are on their way."""
        while not all(connection.closed for connection in self.connections):
            self.take()
            for connection in self.connections:
                while not connection.closed and len(connection.requests) < depth:
                    self._begin(connection)
                self.before_sending()
                connection.push()
            if until():
                return
            self._wait()

    def drain(self):
        """Sends nothing more, and takes every answer that still comes."""
        while any(c.requests and not c.closed for c in self.connections):
            for connection in self.connections:
                connection.push()
            self.take()
            self._wait()

    def take(self):
        """Takes the answers that have come."""
        for connection in self.connections:
            for answer in connection.pull():
                self._complete(*answer)

    def take_all_that_was_sent(self):
        """After the server died: every answer that it had given to the kernel."""
        for connection in self.connections:
            connection.out.clear()
            while not connection.closed:
                select.select([connection.socket], [], [], 5)
                for answer in connection.pull():
                    self._complete(*answer)

    def _wait(self):
        alive = [c for c in self.connections if not c.closed]
        if alive:
            select.select([c.socket for c in alive], [c.socket for c in alive if c.out], [], 0.05)


def read_all(path, sectors):
    """The content of a device, over a connection of its own."""
    parts = []
    with wire.Wire(path) as client:
        client.ready(structured=False)
        step = 2048
        for first in range(0, sectors, step):
            count = min(step, sectors - first)
            client.request(wire.CMD_READ, first * SECTOR, count * SECTOR)
            error, _, data = client.simple_reply(count * SECTOR)
            if error:
                raise Wrong(f"reading the device back: error {error} at sector {first}")
            parts.append(data)
    return b"".join(parts)
