"""An exact model of every sector: what a device may contain after a crash, for clients that record
which of their requests were answered. Sectors are 512 bytes, times are counts of events."""

SECTOR = 512
ZEROES = bytes(SECTOR)


def content(sector, stamp):
    """Returns the content of a sector written with `stamp`; 0 is zeroes."""
    if stamp == 0:
        return ZEROES
    return (sector.to_bytes(8, "big") + stamp.to_bytes(8, "big")) * (SECTOR // 16)


def stamp_of(sector, held):
    """Returns the stamp of a sector's bytes, or None if no client wrote them there."""
    stamp = int.from_bytes(held[8:16], "big")
    return stamp if held == content(sector, stamp) else None


class Operation:
    """One write, discard or write zeroes of a client."""

    __slots__ = ("first", "count", "stamp", "fua", "begun", "completed", "safe")

    def __init__(self, first, count, stamp, fua=False):
        self.first, self.count, self.stamp, self.fua = first, count, stamp, fua
        self.begun, self.completed, self.safe = 0, None, False

    def sectors(self):
        """Returns the sectors that it changes."""
        return range(self.first, self.first + self.count)

    def data(self):
        """Returns the content that it writes."""
        return b"".join(content(sector, self.stamp) for sector in self.sectors())


class Model:
    """For each sector, the operations whose content it may have.

    One is out of the question as soon as another began after it had completed, and is safe. When
    only the process dies, what was answered is safe; at a power loss (`power`), what was
    answered with FUA, or before a flush began that was answered too."""

    def __init__(self, sectors, power=False):
        self.power, self.now, self.unsafe = power, 0, {}
        # Sectors that have changed since the last check, to check only those.
        self.touched = set()
        self.may_hold = [[] for _ in range(sectors)]
        for sector in range(sectors):
            self.settle(sector, 0)

    def settle(self, sector, stamp):
        """Records that the sector was found with this content, and keeps it until it is written."""
        settled = Operation(sector, 1, stamp)
        settled.completed, settled.safe = self.now, True
        self.may_hold[sector] = [settled]

    def begin(self, operation):
        """Records that the operation is about to be sent."""
        self.now += 1
        operation.begun = self.now
        self.touched.update(operation.sectors())
        for sector in operation.sectors():
            self.may_hold[sector].append(operation)

    def complete(self, operation):
        """Records that the operation completed without an error."""
        self.now += 1
        operation.completed = self.now
        if operation.fua or not self.power:
            self._make_safe(operation)
        else:
            self.unsafe[operation] = None

    def flush_began(self):
        """Returns the time of a flush that is about to be sent."""
        self.now += 1
        return self.now

    def flush_completed(self, began):
        """Records that the flush of that time completed without an error."""
        for operation in [each for each in self.unsafe if each.completed < began]:
            del self.unsafe[operation]
            self._make_safe(operation)

    def _make_safe(self, operation):
        operation.safe = True
        self.touched.update(operation.sectors())
        for sector in operation.sectors():
            older = self.may_hold[sector]
            if len(older) > 1:
                self.may_hold[sector] = [
                    each for each in older if each.completed is None or each.completed >= operation.begun]

    def allows(self, sector, stamp):
        """Whether the sector may have this content after a crash now."""
        return any(each.stamp == stamp for each in self.may_hold[sector])

    def check(self, image, settle=False, also=(), only=None):
        """Compares all sectors, or only `only`, with `image`; returns the differences as lines. `also`
        are operations that may have begun; with `settle` the model continues from what it found."""
        wrong = []
        further = {}
        for operation in also:
            for sector in operation.sectors():
                further.setdefault(sector, set()).add(operation.stamp)
        for sector in range(len(self.may_hold)) if only is None else only:
            may = self.may_hold[sector]
            held = image[sector * SECTOR:(sector + 1) * SECTOR]
            stamp = stamp_of(sector, held)
            if not any(each.stamp == stamp for each in may) and stamp not in further.get(sector, ()):
                found = f"stamp {stamp}" if stamp is not None else f"foreign bytes {held[:16].hex()}"
                wrong.append(f"sector {sector} holds {found}, want one of "
                             f"{[(each.stamp, each.begun, each.completed, each.safe) for each in may]}")
            elif settle and (len(may) > 1 or not may[0].safe):
                self.settle(sector, stamp)
        if settle:
            self.unsafe.clear()
        return wrong
