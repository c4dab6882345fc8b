"""The command under test, and its daemons."""

import json
import os
import pathlib
import signal
import subprocess
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))

from clock import wait_until

BLKQ = os.environ.get("BLKQ", "blkq")


class Refused(Exception):
    """The command failed; its one line contains the reason."""


def blkq(*arguments, timeout_s=60):
    """Runs the command, and returns its output."""
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
    def attached(cls, info):
        """Returns the daemon of this output of `attach --json`."""
        server = cls.__new__(cls)
        server.take(info)
        return server

    def take(self, info):
        """Stores the output of `attach --json`."""
        self.name, self.pid = info["name"], info["pid"]
        nbd = next(export for export in info["exports"] if export.startswith("nbd"))
        self.socket = nbd.partition("socket=")[2]

    def kill(self):
        """kill -9; waits until the process has exited."""
        os.kill(self.pid, signal.SIGKILL)
        wait_until(f"process {self.pid} exits after kill -9", lambda: not is_alive(self.pid), 30)

    def detach(self, *options):
        """Stops the daemon in order."""
        blkq("detach", self.name, *options)

    def show(self):
        """Returns the output of `blkq show`."""
        return json.loads(blkq("show", self.name, "--json"))

    def facts(self):
        """Returns the facts of the driver."""
        return self.show()["driver_facts"]


def is_alive(pid):
    """Whether the process exists and is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
