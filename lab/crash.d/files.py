"""A client of a mounted file system that records what it made durable, and the path from the file system
to the device: nbdfuse makes the export a file, and the kernel's loop device makes that file a disk."""

import hashlib
import os
import pathlib
import subprocess
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))

from clock import wait_until

MKFS = {"ext4": ["mkfs.ext4", "-qF", "-J", "size=4"], "xfs": ["mkfs.xfs", "-qf"]}
ANY = "any"
CHECK = {"ext4": ["e2fsck", "-fn"], "xfs": ["xfs_repair", "-n"]}


def run(*command, timeout_s=60):
    """Runs a command that must succeed, and returns its output."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=timeout_s,
                          stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise AssertionError(f"{' '.join(map(str, command))}: exit code {done.returncode}: "
                             f"{(done.stdout + done.stderr)[-600:]}")
    return done.stdout.strip()


class Disk:
    """An NBD export as a block device of this machine's kernel."""

    def __init__(self, scratch, socket):
        self.directory = pathlib.Path(scratch, "nbdfuse")
        self.directory.mkdir(exist_ok=True)
        self.process = subprocess.Popen(["nbdfuse", self.directory / "disk", "--unix", socket],
                                        stderr=subprocess.DEVNULL)
        self.device = None
        try:
            disk = self.directory / "disk"
            wait_until("nbdfuse serves its file", lambda: disk.exists() or self.process.poll() is not None)
            if self.process.poll() is not None:
                raise AssertionError("nbdfuse has exited")
            self.device = run("losetup", "-f", "--show", self.directory / "disk")
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Removes both, even after the server has exited."""
        if self.device:
            run("losetup", "-d", self.device)
        subprocess.run(["umount", "-l", self.directory], check=False, stderr=subprocess.DEVNULL)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Mounted:
    """A mounted file system, for the duration of a `with`."""

    def __init__(self, scratch, device, *options):
        self.path = pathlib.Path(scratch, "mnt")
        self.path.mkdir(exist_ok=True)
        run("mount", *options, device, self.path)

    def __enter__(self):
        return self.path

    def __exit__(self, *_):
        run("umount", self.path)


def digest(data):
    """Returns the digest of a file's content for the records."""
    return hashlib.sha256(data).hexdigest()


class Books:
    """The permitted contents of a directory after a crash: for each name a set of digests; None is no file,
    ANY is any content."""

    def __init__(self):
        self.names = {}

    def copy(self):
        """Copies the present state."""
        copied = Books()
        copied.names = {name: set(may) for name, may in self.names.items()}
        return copied

    def read(self, directory):
        """Permits exactly the present contents."""
        self.names = {path.name: {digest(path.read_bytes())} for path in directory.iterdir() if path.is_file()}

    def may(self, name, *outcomes):
        """The name may have any of these contents meanwhile."""
        self.names.setdefault(name, {None}).update(outcomes)

    def must(self, name, outcome):
        """The name has this content from now on."""
        self.names[name] = {outcome}

    def wrong(self, directory):
        """Returns the differences between a directory and the permitted contents, as lines."""
        found = {path.name: digest(path.read_bytes()) for path in directory.iterdir() if path.is_file()}
        wrong = [f"{name} {'is missing' if name not in found else 'has other content'}"
                for name, may in self.names.items() if ANY not in may and found.get(name) not in may]
        return wrong + [f"{name}: not made by this test" for name in found.keys() - self.names.keys()]


class User:
    """Writes, overwrites, renames over and removes files, and makes each change durable. `books`
    have what must be, and of a step that failed all that may be; `during` what could be at any
    moment of the last step."""

    def __init__(self, random):
        self.random, self.books, self.during, self.steps = random, Books(), Books(), 0

    def step(self, directory):
        """Makes one change durable."""
        path = directory / f"file-{self.random.randrange(40)}"
        became = self._change(path, self.random.random(), self._data())
        self.during = self.books.copy()
        for name, outcome in became.items():
            self.books.must(name, outcome)
        self.steps += 1

    def _change(self, path, kind, data):
        """Returns the outcome for each affected name."""
        books, name = self.books, path.name
        if kind < 0.15:
            books.may(name, None)
            path.unlink(missing_ok=True)
            sync(path.parent)
            return {name: None}
        if kind < 0.55:
            # Written beside the file, then renamed over it: the old or the new content, nothing between.
            beside = path.with_suffix(".new")
            books.may(beside.name, ANY)
            books.may(name, digest(data))
            self._write(beside, data, os.O_CREAT | os.O_TRUNC)
            beside.rename(path)
            sync(path.parent)
            return {beside.name: None, name: digest(data)}
        books.may(name, ANY)
        if kind < 0.8 and path.exists():
            # Overwrites in place, with the same length.
            held = path.read_bytes()
            self._write(path, data[:len(held)], 0)
            return {name: digest(data[:len(held)] + held[len(data):])}
        self._write(path, data, os.O_CREAT | os.O_TRUNC)
        sync(path.parent)
        return {name: digest(data)}

    def _data(self):
        return self.random.randbytes(int(self.random.lognormvariate(9, 1.5)) % 200_000 + 1)

    def _write(self, path, data, flags):
        file = os.open(path, os.O_WRONLY | flags, 0o600)
        try:
            for at in range(0, len(data), 65536):
                os.write(file, data[at:at + 65536])
            (os.fsync if self.random.random() < 0.7 else os.fdatasync)(file)
        finally:
            os.close(file)


def sync(directory):
    """Makes the names in a directory durable."""
    file = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
