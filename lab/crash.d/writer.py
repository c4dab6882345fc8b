#!/usr/bin/python3
"""writer.py write DIRECTORY STOP BOOKS SEED: changes files and makes them durable until the file STOP
exists, and writes what must be there to BOOKS; an error of any call is a failure.
writer.py compare DIRECTORY BOOKS: whether it is."""

import json
import pathlib
import random
import sys

from files import Books, User


def write(directory, stop, books, seed):
    user = User(random.Random(int(seed)))
    while not pathlib.Path(stop).exists():
        user.step(pathlib.Path(directory))
    names = {name: sorted(may, key=str) for name, may in user.books.names.items()}
    pathlib.Path(books).write_text(json.dumps(names), encoding="ascii")
    print(f"    {user.steps} changes made durable")


def compare(directory, books):
    must = Books()
    names = json.loads(pathlib.Path(books).read_text(encoding="ascii"))
    must.names = {name: set(may) for name, may in names.items()}
    wrong = must.wrong(pathlib.Path(directory))
    if wrong or not names:
        raise SystemExit(f"{len(wrong)} of {len(names)} files: {'; '.join(wrong[:5])}")


if __name__ == "__main__":
    {"write": write, "compare": compare}[sys.argv[1]](*sys.argv[2:])
