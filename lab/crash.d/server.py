"""The command under test, and its daemons."""

import json
import os
import signal
import subprocess
import time

BLKQ = os.environ.get("BLKQ", "blkq")


class Refused(Exception):
    """The command failed; its one line says why."""


def blkq(*arguments, timeout_s=60):
    """Runs the command; its output."""
    done = subprocess.run([BLKQ, *map(str, arguments)], capture_output=True, text=True,
                          timeout=timeout_s, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise Refused(done.stderr.strip())
    return done.stdout


class Server:
    """A daemon that serves an image over NBD."""

    def __init__(self, image, *options, name="crash"):
        self.take(json.loads(blkq("attach", image, "--name", name, "--export", "nbd", "--json", *options)))

    @classmethod
    def attached(cls, told):
        """The daemon of which `attach --json` told this."""
        server = cls.__new__(cls)
        server.take(told)
        return server

    def take(self, told):
        """Notes what `attach --json` told."""
        self.name, self.pid = told["name"], told["pid"]
        self.socket = told["exports"][0].partition("socket=")[2]

    def kill(self):
        """kill -9, and waits until the process has exited."""
        os.kill(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while is_alive(self.pid):
            if time.monotonic() > deadline:
                raise AssertionError(f"process {self.pid} has not exited 30 s after kill -9")
            time.sleep(0.0005)

    def detach(self, *options):
        """The orderly end."""
        blkq("detach", self.name, *options)

    def show(self):
        """What `blkq show` tells."""
        return json.loads(blkq("show", self.name, "--json"))

    def facts(self):
        """What the driver tells."""
        return self.show()["driver_facts"]


def is_alive(pid):
    """Whether there is such a process that is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
