#!/usr/bin/python3
"""Copies the dirty ranges of an NBD export into a file: copy-dirty.py URI BITMAP FILE"""
import sys
import nbd

uri, bitmap, path = sys.argv[1:]
context = f"qemu:dirty-bitmap:{bitmap}"
source = nbd.NBD()
source.add_meta_context(context)
source.connect_uri(uri)
if not source.can_meta_context(context):
    sys.exit(f"{uri} offers no bitmap {bitmap}")
size, at, copied = source.get_size(), 0, 0
with open(path, "r+b") as target:
    while at < size:
        found = []
        source.block_status(min(size - at, 1 << 30), at, lambda name, offset, extents, error: found.extend(extents))
        for length, is_dirty in zip(found[::2], found[1::2]):
            for at in range(at, end := at + length, 1 << 20):
                if is_dirty:
                    target.seek(at)
                    copied += target.write(source.pread(min(end - at, 1 << 20), at))
            at = end
print(copied)
