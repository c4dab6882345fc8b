"""How Python scripts of the lab wait: for a condition, with a limit that follows the machine, as clock.sh has it for
shell scripts."""

import os
import time

# As in clock.sh: the time of a turn of an empty loop on an idle machine of usual speed, and the most by which a second
# is stretched.
LOOP_NS = 50
LOOPS = 20_000
SLOWNESS_MAX = 10
POLL_S = 0.01


def slowness():
    """By how much this machine is now slower than an idle one of usual speed; at least 1."""
    begin = time.perf_counter()
    for _ in range(LOOPS):
        pass
    speed = (time.perf_counter() - begin) * 1e9 / (LOOPS * LOOP_NS)
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return min(max(speed, 1) * max(load, 1), SLOWNESS_MAX)


def wait_until(what, condition, seconds=20):
    """Waits until `condition` returns a true value, and returns that. Raises an error with `what` when the seconds of
    an idle machine are over."""
    begin, limit_s = time.monotonic(), seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() - begin >= limit_s:
            # They may be over only because the machine is slow or busy.
            limit_s = max(limit_s, seconds * slowness())
            if time.monotonic() - begin >= limit_s:
                raise AssertionError(f"waited for {limit_s:.0f} s in vain: {what}")
        time.sleep(POLL_S)
