#!/usr/bin/python3
"""A killed daemon that has not fully exited: its first thread has, while another thread completes its I/O
and keeps its locks and sockets. An attach of its name waits for it. dying.py IMAGE"""

import ctypes
import fcntl
import os
import pathlib
import socket
import sys
import threading
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))

from clock import wait_until
from server import Server, is_alive

LINGERS_S = 2


def linger(name):
    """Returns the state of such a daemon: a zombie with a thread."""
    state = pathlib.Path(os.environ["BLKQ_STATE_DIR"])
    lock = open(state / f"{name}.lock", "w", encoding="ascii")
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    fcntl.flock(lock, fcntl.LOCK_EX)
    control = socket.socket(socket.AF_UNIX)
    control.bind(str(state / f"{name}.control"))
    control.listen()
    threading.Thread(target=lambda: (time.sleep(LINGERS_S), os._exit(0))).start()
    ctypes.CDLL(None).pthread_exit(None)


def main(image):
    pid = os.fork()
    if not pid:
        linger("crash")
    wait_until("its first thread has exited", lambda: not is_alive(pid))
    began = time.monotonic()
    server = Server(image)
    waited = time.monotonic() - began
    os.waitpid(pid, 0)
    server.detach()
    if waited < LINGERS_S / 2:
        raise SystemExit(f"attached after {waited:.2f} s, beside the one before")
    print(f"    waited {waited:.1f} s for the one before")


if __name__ == "__main__":
    main(*sys.argv[1:])
