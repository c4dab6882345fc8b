#!/usr/bin/python3
"""The system calls of confined threads in traces of strace -f, against the table of
docs/security.md: `calls.py [--cluster] TABLE TRACE...`. Fails if one was refused, or if a call of the table
was not made and is not marked as seldom. With --cluster the threads of a Ceph client, else all others."""

import re
import sys

# The C library tries it for each thread, and falls back.
EXPECTED = {"clone3"}
# It reads this when a thread frees memory, and does without.
EXPECTED_FILE = '"/proc/sys/vm/overcommit_memory"'
ROW = re.compile(r"^\| `(\w+)` *\| (engines|control plane|cluster) *\| *(seldom)?")
# The thread of an image, whose maker makes those of the client too.
IMAGE_THREAD = re.compile(r'\(PR_SET_NAME, "blkq-rbd"')
LINE = re.compile(r"^(\d+) +(<\.\.\. )?(\w+)")
CHILD = re.compile(r"^\d+ +(?:<\.\.\. )?clone3?\b.* = (\d+)$")


def whole_lines(path):
    """Thread, call and line; a line that another thread's interrupted is whole."""
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
    """The threads of a Ceph client, and the confined one that made them."""
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
    """Pairs of call and line of threads of one kind, from when their filter holds."""
    lines = list(whole_lines(path))
    chosen = of_cluster(lines)
    # Where in the trace it holds. A thread of a confined one has it from its begin, and may have made
    # calls before its maker's line is printed: so until nothing is found any more.
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
    # The rest of a client's filters comes when the first one holds.
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
