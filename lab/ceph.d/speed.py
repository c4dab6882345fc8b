#!/usr/bin/python3
"""blkq's rbd driver over NBD beside its peers on one image: fio's own rbd engine, which is the limit, and
qemu-nbd's rbd driver. speed.py SCRATCH CLUSTER SECONDS ROUNDS CACHES PEER...

Each run is one fio at 4 KiB and 64 in flight, with librbd's cache on or off. librbd writes through its cache until
the first flush (rbd_cache_writethrough_until_flush), which for a guest's file system is soon: so all peers begin with it
written back. Processor times are those of all threads of the process: `server` is the one that has librbd.
`OSD ops` are what reached the storage daemons."""

import json
import os
import pathlib
import socket
import statistics
import struct
import subprocess
import sys
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))

from clock import wait_until

IMAGE = "speed"
WORKLOADS = ["randread", "randwrite", "write"]
TICK_US = 1_000_000 / os.sysconf("SC_CLK_TCK")


def osd_operations(cluster):
    """Returns what all OSDs have done for clients: operations and bytes written."""
    operations = 0
    for path in cluster.glob("run/osd.*.asok"):
        with socket.socket(socket.AF_UNIX) as admin:
            admin.connect(str(path))
            admin.sendall(b'{"prefix": "perf dump", "logger": "osd"}\0')
            (length,) = struct.unpack(">I", receive(admin, 4))
            operations += json.loads(receive(admin, length))["osd"]["op"]
    return operations


def receive(stream, length):
    """Formats a number of bytes."""
    data = b""
    while len(data) < length:
        part = stream.recv(length - len(data))
        if not part:
            raise EOFError("the admin socket closed")
        data += part
    return data


def cpu_us(pid):
    """Returns the processor time of all threads of a process."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_US


def osd_cpu_us(cluster):
    """Returns the processor time of the OSDs."""
    return sum(cpu_us(int(path.read_text())) for path in cluster.glob("run/osd.*.pid"))


class Fio:
    """fio's rbd engine: the client itself contains librbd."""

    def __init__(self, conf, scratch, cache):
        self.arguments = ["--ioengine=rbd", "--clientname=admin", "--pool=rbd", f"--rbdname={IMAGE}"]
        self.environment = {"CEPH_CONF": str(conf)}
        self.pid = None

    def stop(self):
        """Does nothing: no server runs."""


class QemuNbd:
    """qemu-nbd's rbd driver; cache=none turns librbd's cache off."""

    def __init__(self, conf, scratch, cache):
        path = scratch / "qemu-nbd.sock"
        path.unlink(missing_ok=True)
        root = pathlib.Path(os.environ["QEMU_NBD_ROOT"])
        self.process = subprocess.Popen(
            [root / "usr/bin/qemu-nbd", "-f", "raw", "-t", "-k", path,
             "--cache=writeback" if cache == "on" else "--cache=none", f"rbd:rbd/{IMAGE}:conf={conf}:id=admin"],
            env={**os.environ, "QEMU_MODULE_DIR": str(root / "usr/lib/x86_64-linux-gnu/qemu")})
        wait_until("qemu-nbd listens", lambda: path.exists() or self.process.poll() is not None)
        if self.process.poll() is not None:
            raise SystemExit("qemu-nbd has exited")
        self.pid, self.environment = self.process.pid, {}
        self.arguments = ["--ioengine=nbd", f"--uri=nbd+unix:///?socket={path}"]

    def stop(self):
        """Stops the server."""
        self.process.terminate()
        self.process.wait()


class Blkq:
    """blkq over NBD."""

    def __init__(self, conf, scratch, cache):
        done = subprocess.run([os.environ["BLKQ"], "attach", f"rbd:rbd/{IMAGE}", "--name", "speed", "--ceph-conf", conf,
                               "--export", "nbd", "--json"], capture_output=True, text=True, check=True)
        info = json.loads(done.stdout)
        self.pid, self.environment = info["pid"], {}
        self.arguments = ["--ioengine=nbd", f"--uri={info['exports'][0]}"]

    def stop(self):
        """Detaches the device."""
        subprocess.run([os.environ["BLKQ"], "detach", "speed"], check=True)


PEERS = {"fio": Fio, "qemu-nbd": QemuNbd, "blkq": Blkq}


def run(cluster, scratch, peer, cache, workload, seconds):
    """Runs once: I/Os per second; µs of server and clients, OSD operations and µs, each per I/O; p99 in µs."""
    conf = scratch / "client.conf"
    cached = "true" if cache == "on" else "false"
    conf.write_text((cluster / "ceph.conf").read_text()
                    + f"\n[client]\nrbd cache = {cached}\nrbd cache writethrough until flush = false\n")
    server = PEERS[peer](conf, scratch, cache)
    output = scratch / "fio.json"
    try:
        operations, osd_us = osd_operations(cluster), osd_cpu_us(cluster)
        server_us = cpu_us(server.pid) if server.pid else 0
        child = subprocess.Popen(
            ["fio", "--name=speed", *server.arguments, f"--rw={workload}", "--bs=4k", "--iodepth=64", "--size=1g",
             "--time_based", f"--runtime={seconds}", "--randrepeat=0", "--output-format=json", f"--output={output}"],
            env={**os.environ, **server.environment}, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        if status:
            raise SystemExit(f"fio failed: {output.read_text()}")
        client_us = (usage.ru_utime + usage.ru_stime) * 1_000_000
        server_us = cpu_us(server.pid) - server_us if server.pid else client_us
    finally:
        server.stop()
    time.sleep(0.5)
    operations, osd_us = osd_operations(cluster) - operations, osd_cpu_us(cluster) - osd_us
    # The JSON of fio follows lines that its engines print.
    text = output.read_text()
    side = json.loads(text[text.index("{"):])["jobs"][0]["read" if workload == "randread" else "write"]
    count = side["total_ios"]
    return [side["iops"], server_us / count, client_us / count if server.pid else 0, operations / count, osd_us / count,
            side["clat_ns"]["percentile"]["99.000000"] / 1000]


def main(scratch, cluster, seconds, rounds, caches, *peers):
    scratch, cluster = pathlib.Path(scratch), pathlib.Path(cluster)
    head = ("I/Os per s", "server µs", "client µs", "OSD ops", "OSD µs", "p99 µs")
    print(f"{'workload':10} {'cache':5} {'peer':9}" + "".join(f"{name:>12}" for name in head) + "   per I/O; medians")
    for cache in caches.split(","):
        for workload in WORKLOADS:
            found = {peer: [] for peer in peers}
            for _ in range(int(rounds)):
                for peer in peers:
                    found[peer].append(run(cluster, scratch, peer, cache, workload, seconds))
            for peer, runs in found.items():
                figures = [statistics.median(column) for column in zip(*runs)]
                print(f"{workload:10} {cache:5} {peer:9}{figures[0]:12.0f}"
                      + "".join(f"{figure:12.2f}" for figure in figures[1:]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
