"""Waits of the lab's Python scripts: for a condition, with a limit that follows the machine, as clock.sh does for
shell scripts."""

import os
import time

# As in clock.sh: the time of one iteration of an empty loop on an idle reference machine, and the largest factor by
# which a second is stretched.
LOOP_NS = 50
LOOPS = 20_000
SLOWNESS_MAX = 10
POLL_S = 0.01


def slowness():
    """Returns the current slowness of this machine relative to an idle reference machine; at least 1."""
    begin = time.perf_counter()
    for _ in range(LOOPS):
        pass
    speed = (time.perf_counter() - begin) * 1e9 / (LOOPS * LOOP_NS)
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return min(max(speed, 1) * max(load, 1), SLOWNESS_MAX)


def wait_until(what, condition, seconds=20):
    """Waits until `condition` returns a true value, and returns that value. Raises an error with `what` when the given
    number of seconds of an idle machine has passed."""
    begin, limit_s = time.monotonic(), seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() - begin >= limit_s:
            # The time may have passed only because the machine is slow or busy.
            limit_s = max(limit_s, seconds * slowness())
            if time.monotonic() - begin >= limit_s:
                raise AssertionError(f"waited for {limit_s:.0f} s in vain: {what}")
        time.sleep(POLL_S)
