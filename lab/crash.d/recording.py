"""An image in the recorder's file system, for the duration of a test."""

import os
import pathlib
import subprocess
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))

import log
from clock import wait_until


class Recording:
    """Mounts the file system; `image` is the file to serve. Always unmounts at the end."""

    def __init__(self, scratch, size, direct=False, name="recorded"):
        self.mountpoint = pathlib.Path(scratch, f"{name}.mnt")
        self.backing = pathlib.Path(scratch, f"{name}.img")
        self.log = pathlib.Path(scratch, f"{name}.log")
        self.image, self.size, self.direct = self.mountpoint / "image", size, direct
        self.process = self.marks = None

    def __enter__(self):
        self.mountpoint.mkdir(exist_ok=True)
        self.log.unlink(missing_ok=True)
        with open(self.backing, "wb") as file:
            file.truncate(self.size)
        recorder = pathlib.Path(__file__).parent / "recorder.py"
        self.process = subprocess.Popen([sys.executable, recorder, self.mountpoint, self.backing, self.log,
                                         "direct" if self.direct else ""])
        wait_until("the recorder's file system appears", lambda: self.image.exists() or self.process.poll() is not None)
        if self.process.poll() is not None:
            raise AssertionError("the recorder has exited")
        self.marks = os.open(self.mountpoint / "mark", os.O_WRONLY)
        return self

    def mark(self, number):
        """Writes a mark into the log: everything that completed before it precedes this mark."""
        os.write(self.marks, str(number).encode())

    def entries(self):
        """Returns the log."""
        return log.read(self.log)

    def __exit__(self, *_):
        os.close(self.marks)
        subprocess.run(["umount", "-l", self.mountpoint], check=False)
        self.process.kill()
        self.process.wait()
        self.mountpoint.rmdir()
