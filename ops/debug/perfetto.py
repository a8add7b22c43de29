"""A trace in Chrome's JSON format, as ui.perfetto.dev reads it, written event by event.

A process stands for an edge or a worker, a thread for one of its lanes: what is in one lane never overlaps, unless it is nested. Times
are microseconds since the trace's start.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO, Final, Literal, NamedTuple

import msgspec

EVENTS_LANE: Final = 1
"""The thread of a process's instants; its other lanes follow."""

Value = int | float


class Slice(NamedTuple):
    """Something that takes time, from one time to another in ns, with what is nested in it."""

    name: str
    category: str
    start_ns: int
    end_ns: int
    arguments: Mapping[str, Any] = {}
    nested: Sequence["Slice"] = ()


class _Process:
    """A process of the trace: its id, and the end of the last slice in each of its lanes."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.lanes: list[int] = []
        self.counters: dict[str, tuple[int, tuple[Value, ...]]] = {}

    def lane(self, start_ns: int, end_ns: int) -> int:
        """The first lane that is free from a time on; it is taken until another one."""
        for number, free_ns in enumerate(self.lanes):
            if free_ns <= start_ns:
                self.lanes[number] = end_ns
                return number
        self.lanes.append(end_ns)
        return len(self.lanes) - 1


class TraceWriter:
    """Writes the events of a trace to a file, in any order of processes; `close` ends it. Holds what is open, and nothing of what was written."""

    def __init__(self, file: BinaryIO, start_ns: int, about: Mapping[str, Any]) -> None:
        self.written = 0
        self._file = file
        self._start_ns = start_ns
        self._processes: dict[str, _Process] = {}
        self._encode = msgspec.json.Encoder().encode
        head = self._encode({"displayTimeUnit": "ms", "otherData": about})
        file.write(head[:-1] + b',"traceEvents":[\n')

    def _write(self, event: Mapping[str, Any]) -> None:
        self._file.write((b",\n" if self.written else b"") + self._encode(event))
        self.written += 1

    def _us(self, time_ns: int) -> float:
        return max(0, time_ns - self._start_ns) / 1000

    def process(self, name: str, order: int) -> None:
        """Name a process before its first event; `order` sorts processes, and those of one order are in that of their names' first use."""
        if name in self._processes:
            return
        made = self._processes[name] = _Process(len(self._processes) + 1)
        self._metadata(made.pid, EVENTS_LANE, "process_name", {"name": name})
        self._metadata(made.pid, EVENTS_LANE, "process_sort_index", {"sort_index": order})
        self._metadata(made.pid, EVENTS_LANE, "thread_name", {"name": "events"})

    def _metadata(self, pid: int, tid: int, name: str, arguments: Mapping[str, Any]) -> None:
        self._write({"ph": "M", "name": name, "pid": pid, "tid": tid, "args": arguments})

    def slices(self, process: str, several: Sequence[Slice], lane: str) -> None:
        """Write slices of which none overlaps another, in order, in one lane; new lanes are named `lane` and a number."""
        if not several:
            return
        owner = self._processes[process]
        lanes = len(owner.lanes)
        number = owner.lane(several[0].start_ns, several[-1].end_ns)
        tid = EVENTS_LANE + 1 + number
        if number == lanes:
            self._metadata(owner.pid, tid, "thread_name", {"name": f"{lane} {number + 1}"})
            self._metadata(owner.pid, tid, "thread_sort_index", {"sort_index": tid})
        self._slices(owner.pid, tid, several)

    def _slices(self, pid: int, tid: int, several: Iterable[Slice]) -> None:
        for one in several:
            start_us = self._us(one.start_ns)
            event = {
                "ph": "X",
                "name": one.name,
                "cat": one.category,
                "pid": pid,
                "tid": tid,
                "ts": start_us,
                "dur": max(0.0, self._us(one.end_ns) - start_us),
                "args": one.arguments,
            }
            self._write(event)
            self._slices(pid, tid, one.nested)

    def counter(self, process: str, name: str, time_ns: int, values: Mapping[str, Value]) -> None:
        """Write the values of a counter, if they differ from the last ones. Times of one counter must not fall."""
        owner = self._processes[process]
        now = tuple(values.values())
        known = owner.counters.get(name)
        if known is not None and known[1] == now:
            return
        time_ns = max(time_ns, known[0]) if known is not None else time_ns
        owner.counters[name] = (time_ns, now)
        self._write(
            {
                "ph": "C",
                "name": name,
                "pid": owner.pid,
                "tid": EVENTS_LANE,
                "ts": self._us(time_ns),
                "args": values,
            }
        )

    def instant(self, process: str, name: str, time_ns: int, arguments: Mapping[str, Any]) -> None:
        """Write a moment of a process."""
        scope: Literal["p"] = "p"
        self._write(
            {
                "ph": "i",
                "name": name,
                "s": scope,
                "pid": self._processes[process].pid,
                "tid": EVENTS_LANE,
                "ts": self._us(time_ns),
                "args": arguments,
            }
        )

    def close(self) -> None:
        """End the document."""
        self._file.write(b"\n]}\n")
