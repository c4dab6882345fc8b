#!/usr/bin/python3
# Contract: errors
"""Deprives a daemon of a resource while a load runs whose data is verified: memory, address space,
descriptors, processor time, space in its state directory. pressure.py SCRATCH WHAT"""

import errno
import json
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "nbd"))
sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))

import wire
from clock import wait_until
from load import Load, read_all
from model import SECTOR, Model
from server import BLKQ, Refused, Server, blkq, is_alive

MIB = 1 << 20
BYTES = 64 * MIB
# Errors of a system that permits no control group here; any other error is a failure.
NO_GROUPS = (errno.ENOENT, errno.EROFS, errno.EACCES, errno.EPERM)
MODES = [["--direct-io", "on"], ["--direct-io", "off"]]


def fresh(scratch):
    """Creates a sparse image."""
    image = pathlib.Path(scratch, "pressed.img")
    with open(image, "wb") as file:
        file.truncate(BYTES)
    return image


def verify(server, model):
    """Checks that the model allows the contents of the device."""
    wrong = model.check(read_all(server.socket, len(model.may_hold)))
    if wrong:
        raise AssertionError(f"{len(wrong)} wrong sectors, such as: {'; '.join(wrong[:3])}")


def work(load, writes, depth=16):
    """Runs the load until `writes` more writes have completed."""
    before = load.answered["write"]
    load.run(depth, lambda: load.answered["write"] >= before + writes)


class Group:
    """A control group that limits the memory of a process, page cache included."""

    def __init__(self, pid, limit_bytes):
        hierarchy = pathlib.Path("/sys/fs/cgroup")
        first = (hierarchy / "memory" / "memory.limit_in_bytes").exists()
        self.path = hierarchy / ("memory" if first else "") / f"blkq-crash-{pid}"
        try:
            self.path.mkdir()
            limit = "memory.limit_in_bytes" if first else "memory.max"
            (self.path / limit).write_text(str(limit_bytes))
            self.peak = self.path / ("memory.max_usage_in_bytes" if first else "memory.peak")
            self.hits = self.path / ("memory.failcnt" if first else "memory.events")
            (self.path / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            if self.path.is_dir():
                self.path.rmdir()
            if error.errno not in NO_GROUPS:
                raise
            print(f"    left out memory.max: no control group for memory here ({error.strerror})")
            raise SystemExit(0) from error

    def close(self):
        """Removes the group after the process has exited."""
        def is_removed():
            try:
                self.path.rmdir()
            except OSError:
                return False
            return True

        wait_until(f"{self.path} is removed", is_removed)


def memory(scratch):
    """16 MiB for everything, page cache included, under a load that needs more."""
    for options in MODES:
        image = fresh(scratch)
        server, model = Server(image, *options), Model(BYTES // SECTOR)
        group = Group(server.pid, 16 * MIB)
        try:
            # The I/O in flight fits into the limit; the pages of the buffered writes do not.
            load = Load(model, 1, largest=256)
            load.connect(server.socket, 2)
            work(load, 1500)
            load.drain()
            load.close()
            verify(server, model)
            words = group.hits.read_text().split()
            hits = words[0] if len(words) == 1 else words[words.index("max") + 1]
            server.detach()
        finally:
            if is_alive(server.pid):
                server.kill()
            group.close()
        if "off" in options and not int(hits):
            raise AssertionError("the limit was never met: this tested nothing")
        print(f"    {' '.join(options)}: {sum(load.answered.values())} answers, the limit of 16 MiB met {hits} times")


def address_space(scratch):
    """Large requests without memory fail with ENOMEM; others succeed."""
    image = fresh(scratch)
    server, model = Server(image), Model(BYTES // SECTOR)
    with open(f"/proc/{server.pid}/status", encoding="ascii") as file:
        now = next(int(line.split()[1]) for line in file if line.startswith("VmSize")) * 1024
    resource.prlimit(server.pid, resource.RLIMIT_AS, (now + 24 * MIB, now + 24 * MIB))
    load = Load(model, 1)
    load.connect(server.socket, 1)
    work(load, 100)
    refused = 0
    for _ in range(20):
        with wire.Wire(server.socket) as client:
            client.ready(structured=False)
            client.request(wire.CMD_READ, 0, 32 * MIB)
            client.request(wire.CMD_WRITE, 0, 32 * MIB, payload=bytes(32 * MIB))
            client.request(wire.CMD_READ, 0, 4096, cookie=2)
            errors = [client.simple_reply(32 * MIB)[0], client.simple_reply()[0], client.simple_reply(4096)[0]]
            if errors != [wire.ENOMEM, wire.ENOMEM, 0]:
                raise AssertionError(f"errors {errors}, want ENOMEM twice, and then a read without one")
            refused += 2
        work(load, 20)
    load.drain()
    load.close()
    verify(server, model)
    server.detach()
    print(f"    {refused} requests of 32 MiB failed with ENOMEM, {sum(load.answered.values())} others answered")


def processor_seconds(pid):
    """Returns the processor time that a process has used."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def limited(image, limit):
    """Starts a daemon with a limit of open files, and any number of clients."""
    done = subprocess.run(["prlimit", f"--nofile={limit}:{limit}", BLKQ, "attach", image, "--name", "crash",
                           "--export", "nbd", "--json", "--max-connections", "1000"], stdout=subprocess.PIPE, timeout=30, check=True)
    return Server.attached(json.loads(done.stdout))


def crowd(server, count):
    """Connects `count` clients; returns how many are accepted."""
    clients, greeted = [], 0

    def has_connected():
        try:
            clients.append(wire.Wire(server.socket, timeout_s=2))
        except BlockingIOError:  # the backlog is full
            return False
        return True

    for _ in range(count):
        wait_until("the server accepts connections", has_connected)
    for client in clients:
        try:
            client.greet()
            greeted += 1
        except (wire.Closed, TimeoutError):
            pass
    return clients, greeted


def is_shown(server):
    """Whether the daemon answers."""
    try:
        return server.show()
    except Refused:
        return None


def descriptors(scratch):
    """With few descriptors, the daemon rejects clients and keeps some descriptors for commands. With none
    left, commands wait, the daemon uses no processor time for them, and connected clients are served."""
    image = fresh(scratch)
    server, model = limited(image, 192), Model(BYTES // SECTOR)
    load = Load(model, 1)
    load.connect(server.socket, 1)
    work(load, 100)
    clients, greeted = crowd(server, 180)
    blkq("set", server.name, "depth=64")
    used = max(int(name) for name in os.listdir(f"/proc/{server.pid}/fd")) + 1
    if not 1 < greeted < 180 or used > 180:
        raise AssertionError(f"{greeted} of 180 clients were accepted, {used} descriptors of 192 are used")
    print(f"    192 descriptors: {greeted} of 180 clients accepted, commands are answered")

    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (used, used))
    commands = []
    for _ in range(8):
        commands.append(socket.socket(socket.AF_UNIX))
        commands[-1].connect(os.path.join(os.environ["BLKQ_STATE_DIR"], f"{server.name}.control"))
    before, began = processor_seconds(server.pid), time.monotonic()
    time.sleep(2)
    spent = (processor_seconds(server.pid) - before) / (time.monotonic() - began)
    work(load, 100)
    load.drain()
    for each in [client.socket for client in clients] + commands:
        each.close()
    load.close()
    wait_until("commands are answered again", lambda: is_shown(server))
    verify(server, model)
    server.detach()
    if spent > 0.05:
        raise AssertionError(f"{100 * spent:.1f} % of a processor")
    print(f"    none left: {100 * spent:.1f} % of a processor while commands wait; connected clients were served")


def stopped(scratch):
    """SIGSTOP under load, then SIGCONT: nothing is lost; meanwhile commands do not wait forever."""
    for options in MODES:
        image = fresh(scratch)
        server, model = Server(image, *options), Model(BYTES // SECTOR)
        load = Load(model, 1)
        load.connect(server.socket, 2)
        for number in range(4):
            work(load, 200)
            os.kill(server.pid, signal.SIGSTOP)
            load.run(16, lambda end=time.monotonic() + 0.3: time.monotonic() > end)
            if number == 0 and options is MODES[0]:
                # Must answer although this daemon is stopped; the helper `blkq` has a time limit.
                if "crash" not in blkq("list"):
                    raise AssertionError("list leaves out a daemon that is stopped")
            os.kill(server.pid, signal.SIGCONT)
        work(load, 200)
        load.drain()
        load.close()
        verify(server, model)
        server.detach()
    print(f"    stopped and continued {4 * len(MODES)} times under load")


def state_directory(scratch):
    """A state directory without space: a running device keeps running, and new ones fail in
    one line and leave nothing."""
    place = pathlib.Path(scratch, "tiny")
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "none", place], check=True)
    os.environ["BLKQ_STATE_DIR"] = str(place)
    try:
        image = fresh(scratch)
        server, model = Server(image), Model(BYTES // SECTOR)
        load = Load(model, 1)
        load.connect(server.socket, 1)
        work(load, 100)
        with open(place / "ballast", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
        before = sorted(os.listdir(place))
        other = pathlib.Path(scratch, "other.img")
        other.write_bytes(bytes(MIB))
        try:
            blkq("attach", other, "--name", "other", "--export", "nbd")
            raise AssertionError("attached without room for its state")
        except Refused as error:
            if "\n" in str(error) or "No space left" not in str(error):
                raise AssertionError(f"the refusal: {error}") from error
        if sorted(os.listdir(place)) != before:
            raise AssertionError(f"left behind: {set(os.listdir(place)) - set(before)}")
        try:
            blkq("set", server.name, "depth=32")
        except Refused as error:
            if "set, but not saved" not in str(error):
                raise
        if server.show()["settings"]["depth"] != 32:
            raise AssertionError("the depth was not set")
        blkq("list")
        work(load, 100)
        load.drain()
        load.close()
        verify(server, model)
        server.detach()
        if sorted(os.listdir(place)) != ["ballast", "journals"]:
            raise AssertionError(f"left behind: {os.listdir(place)}")
    finally:
        subprocess.run(["umount", "-l", place], check=True)
    print("    full state directory: attach failed, the running device kept running and was detached")


if __name__ == "__main__":
    {"memory": memory, "address-space": address_space, "descriptors": descriptors, "stopped": stopped,
     "state-directory": state_directory}[sys.argv[2]](sys.argv[1])
