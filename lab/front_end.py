#!/usr/bin/python3
"""A vhost-user-blk front end: `front_end.py SOCKET` shares memory, has a request recorded while it
is in flight, reads the first sector of the disk, and prints it."""

import array
import mmap
import os
import socket
import struct
import sys

FEATURES = 1 << 32 | 1 << 30  # VERSION_1, protocol features
PROTOCOL = 1 << 3 | 1 << 12  # REPLY_ACK, INFLIGHT_SHMFD
NEED_REPLY = 8
MEMORY, GUEST, USER, SIZE = 1 << 20, 1 << 30, 1 << 32, 8
AVAILABLE, USED, HEADER, STATUS, DATA = 4096, 8192, 12288, 12304, 65536


def receive(connection):
    header, files, _, _ = socket.recv_fds(connection, 12, 1)
    code, _, size = struct.unpack("=III", header)
    return code, connection.recv(size, socket.MSG_WAITALL), files


def send(connection, code, payload=b"", files=(), flags=1):
    message = struct.pack("=III", code, flags, len(payload)) + payload
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
    connection.sendmsg([message], control)


def ask(connection, code, payload=b""):
    send(connection, code, payload)
    answered, reply, files = receive(connection)
    assert answered == code, (answered, code)
    return reply, files


def done(connection, code, payload, files=()):
    send(connection, code, payload, files, 1 | NEED_REPLY)
    answered, reply, _ = receive(connection)
    assert (answered, reply) == (code, bytes(8)), (code, answered, reply)


def main():
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(20)
    connection.connect(sys.argv[1])
    send(connection, 3)
    offered = struct.unpack("=Q", ask(connection, 1)[0])[0]
    assert offered & FEATURES == FEATURES, hex(offered)
    send(connection, 16, struct.pack("=Q", PROTOCOL))
    done(connection, 2, struct.pack("=Q", FEATURES))
    memory = os.memfd_create("guest")
    os.ftruncate(memory, MEMORY)
    view = mmap.mmap(memory, MEMORY)
    done(connection, 5, struct.pack("=II4Q", 1, 0, GUEST, MEMORY, USER, 0), [memory])
    area, files = ask(connection, 31, struct.pack("=QQHH", 0, 0, 1, SIZE))
    done(connection, 32, area, files)
    view[HEADER : HEADER + 16] = struct.pack("=IIQ", 0, 0, 0)
    view[STATUS] = 0xFF
    for index, (at, length, flags) in enumerate([(HEADER, 16, 1), (DATA, 512, 3), (STATUS, 1, 2)]):
        view[index * 16 : index * 16 + 16] = struct.pack("=QIHH", GUEST + at, length, flags, index + 1)
    view[AVAILABLE : AVAILABLE + 6] = struct.pack("=HHH", 0, 1, 0)
    kick, call = os.eventfd(1), os.eventfd(0)
    done(connection, 8, struct.pack("=II", 0, SIZE))
    done(connection, 10, struct.pack("=II", 0, 0))
    done(connection, 9, struct.pack("=II4Q", 0, 0, USER, USER + USED, USER + AVAILABLE, 0))
    done(connection, 13, struct.pack("=Q", 0), [call])
    done(connection, 12, struct.pack("=Q", 0), [kick])
    done(connection, 18, struct.pack("=II", 0, 1))
    os.eventfd_read(call)
    assert view[STATUS] == 0, view[STATUS]
    assert struct.unpack_from("=H", view, USED + 2) == (1,)
    base = struct.unpack("=II", ask(connection, 11, struct.pack("=II", 0, 0))[0])
    assert base == (0, 1), base
    sys.stdout.buffer.write(view[DATA : DATA + 512])


main()
