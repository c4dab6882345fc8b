"""What the NBD scripts share: the target's expected properties, and a runner.

A script defines functions named check_*, each taking a Target. A check passes by returning,
fails by raising, and is named as left out, with the reason, by raising LeftOut.
"""

import argparse
import inspect
import random
import sys
import time
import traceback
from dataclasses import dataclass
from urllib.parse import parse_qs, urlparse

import nbd

KIB = 1024
MIB = 1024 * KIB


class LeftOut(Exception):
    """Raised by a check that does not apply to this target; the message contains the reason."""


@dataclass
class Target:
    """The server under test and what is promised about it. Sizes are in bytes."""

    uri: str
    size: int
    sector: int
    read_only: bool
    trim: bool
    sparse: bool
    zero_length: bool
    extended: bool
    strict: bool
    image: str | None
    offset: int
    content: str | None
    connections: int
    quick: bool

    @property
    def socket_path(self):
        """The path of the unix socket in the URI."""
        return parse_qs(urlparse(self.uri).query)["socket"][0]

    @property
    def export(self):
        """The export name in the URI; empty for the default export."""
        return urlparse(self.uri).path.lstrip("/")

    def connect(self, prepare=None):
        """Returns a ready libnbd handle that sends any request, also invalid ones."""
        handle = nbd.NBD()
        handle.set_strict_mode(0)
        handle.add_meta_context("base:allocation")
        if prepare:
            prepare(handle)
        handle.connect_uri(self.uri)
        return handle

    def options(self):
        """Returns a handle that stopped after the handshake, while options are negotiated."""
        handle = nbd.NBD()
        handle.set_opt_mode(True)
        handle.connect_uri(self.uri)
        return handle

    @property
    def not_permitted(self):
        """The errors of a modifying command on a read-only export."""
        return ("EPERM",) if self.strict else ("EPERM", "EINVAL")

    def align(self, length):
        """`length` rounded up to whole sectors."""
        return -(-length // self.sector) * self.sector

    def need_writable(self):
        """Skips the check if the target is read-only."""
        if self.read_only:
            raise LeftOut("the export is read-only")


def data(length, seed):
    """`length` bytes without a run of zeroes, the same for the same seed."""
    return random.Random(seed).randbytes(length).replace(b"\0", b"\x5a")


def equal(actual, expected, what):
    """Fails unless the two are equal; long byte strings are compared, not printed."""
    if actual == expected:
        return
    if isinstance(expected, (bytes, bytearray)):
        at = next((i for i, (a, b) in enumerate(zip(actual, expected)) if a != b), None)
        raise AssertionError(
            f"{what}: {len(actual)} bytes, want {len(expected)}, first difference at {at}"
        )
    raise AssertionError(f"{what}: {actual!r}, want {expected!r}")


def true(condition, what):
    """Fails with `what` unless the condition holds."""
    if not condition:
        raise AssertionError(what)


def refused(names, call, *arguments, **named):
    """Runs `call`, which must fail with one of the errno names, such as ("EINVAL",)."""
    try:
        call(*arguments, **named)
    except nbd.Error as error:
        true(error.errno in names, f"failed with {error.errno} ({error.string}), want {names}")
        return error.errno
    raise AssertionError(f"succeeded, want {names}")


def parse_target(description):
    """The target of the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("uri")
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--sector", type=int, required=True)
    parser.add_argument("--read-only", action="store_true")
    parser.add_argument("--no-trim", dest="trim", action="store_false")
    parser.add_argument("--no-sparse", dest="sparse", action="store_false",
                        help="block status does not report holes")
    parser.add_argument("--no-zero-length", dest="zero_length", action="store_false",
                        help="requests of no bytes are not survived")
    parser.add_argument("--no-extended", dest="extended", action="store_false",
                        help="extended headers are not promised")
    parser.add_argument("--lenient", dest="strict", action="store_false",
                        help="skip what the specification leaves to the server")
    parser.add_argument("--image", help="the file that the export serves")
    parser.add_argument("--offset", type=int, default=0, help="where the export starts in it")
    parser.add_argument("--content", help="a file with the bytes a read-only export must show")
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--quick", action="store_true")
    return Target(**vars(parser.parse_args()))


def run(module, description):
    """Runs every check of `module`; prints failures and a closing line; returns the exit code."""
    target = parse_target(description)
    checks = [(name, function) for name, function in vars(module).items()
              if name.startswith("check_") and inspect.isfunction(function)]
    passed, failed, left_out = 0, 0, 0
    for name, function in checks:
        label = name.removeprefix("check_").replace("_", " ")
        begin = time.monotonic()
        try:
            function(target)
            passed += 1
            print(f"    ok       {label} ({time.monotonic() - begin:.1f} s)")
        except LeftOut as reason:
            left_out += 1
            print(f"    left out {label}: {reason}")
        except Exception as error:  # every way to fail is a failed check
            failed += 1
            where = traceback.extract_tb(error.__traceback__)
            line = next((f.lineno for f in reversed(where) if f.filename == module.__file__), 0)
            print(f"    FAIL     {label}: {error or type(error).__name__} "
                  f"({module.__file__}:{line})")
    print(f"    {passed} passed, {failed} failed, {left_out} left out")
    return 1 if failed or not passed else 0


def main(description):
    """The body of a script: runs the checks defined in it."""
    sys.exit(run(sys.modules["__main__"], description))
