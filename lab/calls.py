#!/usr/bin/python3
"""Compares the system calls of confined threads, in traces of strace -f, with the table of
docs/security.md: `calls.py [--cluster] TABLE TRACE...`. Fails if one was refused, or if a call of the table
is missing and not marked as seldom. With --cluster it checks the threads of a Ceph client, otherwise all others."""

import re
import sys

# The C library tries this call for each thread, and falls back.
EXPECTED = {"clone3"}
# The C library reads this file when a thread frees memory, and works without it.
EXPECTED_FILE = '"/proc/sys/vm/overcommit_memory"'
ROW = re.compile(r"^\| `(\w+)` *\| (engines|control plane|cluster) *\| *(seldom)?")
# The thread of an RBD image, whose creator creates the client's threads too.
IMAGE_THREAD = re.compile(r'\(PR_SET_NAME, "blkq-rbd"')
LINE = re.compile(r"^(\d+) +(<\.\.\. )?(\w+)")
CHILD = re.compile(r"^\d+ +(?:<\.\.\. )?clone3?\b.* = (\d+)$")


def whole_lines(path):
    """Yields thread, call and line; joins a line that another thread's output interrupted."""
    begun = {}
    with open(path, errors="replace") as trace:
        for line in map(str.rstrip, trace):
            found = LINE.match(line)
            if not found:
                continue
            thread, name = found[1], found[3]
            if line.endswith("<unfinished ...>"):
                begun[thread] = line
                continue
            if found[2]:
                line = f"{begun.pop(thread, '')} {line}".strip()
            yield thread, name, line


def of_cluster(lines):
    """Returns the threads of a Ceph client, and the confined thread that created them."""
    children, makers = {}, {}
    for thread, _, line in lines:
        child = CHILD.match(line)
        if child:
            children.setdefault(thread, []).append(child[1])
            makers[child[1]] = thread
    threads, found = set(), [makers[thread] for thread, _, line in lines if IMAGE_THREAD.search(line)]
    while found:
        thread = found.pop()
        threads.add(thread)
        found += children.get(thread, [])
    return threads


def calls(path, cluster):
    """Yields (call, line) of the threads of one kind, from the moment their filter is in force."""
    lines = list(whole_lines(path))
    chosen = of_cluster(lines)
    # Position in the trace from which the filter is in force. A thread of a confined thread has it from its start, and
    # its calls may precede the line of the creating call; so repeat until no further thread is found.
    since, before = {}, None
    while before != since:
        before = dict(since)
        for number, (thread, name, line) in enumerate(lines):
            if number >= since.get(thread, len(lines)):
                child = CHILD.match(line)
                if child:
                    since[child[1]] = 0
            elif name == "seccomp" and "SECCOMP_SET_MODE_FILTER" in line and line.endswith("= 0"):
                since[thread] = min(since.get(thread, number + 1), number + 1)
    return ((name, line) for number, (thread, name, line) in enumerate(lines)
            if number >= since.get(thread, len(lines)) and (thread in chosen) == cluster)


def main():
    cluster = sys.argv[1] == "--cluster"
    path, *traces = sys.argv[2:] if cluster else sys.argv[1:]
    with open(path) as table:
        rows = [found for found in map(ROW.match, table) if found and (found[2] == "cluster") == cluster]
    listed, seldom = {row[1] for row in rows}, {row[1] for row in rows if row[3]}
    made, refused = set(), set()
    for path in traces:
        for name, line in calls(path, cluster):
            made.add(name)
            if "ENOSYS" in line and name not in EXPECTED and EXPECTED_FILE not in line:
                refused.add(f"{name}: {line}")
    # The other filters of a client are installed together with the first one.
    made -= EXPECTED | ({"seccomp"} if cluster else set())
    print(f"{len(traces)} traces, {len(made)} calls made: {' '.join(sorted(made))}")
    wrong = [
        ("refused", sorted(refused)[:20]),
        ("made, and not listed", sorted(made - listed)),
        ("listed, and not made", sorted(listed - made - seldom)),
        ("called seldom, and made", sorted(seldom & made)),
    ]
    for what, names in wrong:
        for name in names:
            print(f"{what}: {name}")
    sys.exit(1 if not listed or not made or any(names for _, names in wrong[:3]) else 0)


if __name__ == "__main__":
    main()
