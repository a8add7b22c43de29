"""Stalls: garbage collections, held locks and blocked event loops of every process of a benchmark.

    python -m headwater.ops.bench.gpu.serving --streams 256 --stalls      (writes and reports)
    python -m headwater.ops.bench.gpu.stalls FOLDER                       (reports again)

With `environment(folder)` every Python process records its stalls in a file of its own in the folder, without a change of
the measured code: Python imports `sitecustomize`, which imports this module. It uses only the standard library, as it runs
in every process.

    gc      a collection took GC_S or longer
    lock    a sleeping thread woke STALL_S late: the GIL was held (`cpu` near 1), or the process was not scheduled (near 0)
    loop    the event loop did not run a timer for STALL_S; with the stack of its thread during that time
    still   an engine's own process, without event loop, stayed in one line of code for STALL_S, waiting excluded

Times are `time.monotonic`, which is the same for all processes of a machine.
"""

import atexit
import contextlib
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = "HEADWATER_STALLS"
FREEZES = "HEADWATER_STALLS_FREEZES"
"""How many calls of `gc.freeze` take effect in Headwater's own processes; unset: all. 1: not those of engines."""

GC_S = 0.01
STALL_S = 0.1
BEAT_S = 0.02
SLEEP_S = 0.02
FRAMES = 14
WAITS = frozenset({"wait", "get", "select", "poll", "recv", "_recv", "_wait_for_tstate_lock", "acquire"})


def environment(folder: Path, *, freezes: int | None = None) -> dict[str, str]:
    """The environment variables for processes that are to write to `folder`."""
    hook = folder / "hook"
    hook.mkdir(parents=True, exist_ok=True)
    (hook / "sitecustomize.py").write_text(
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('headwater_stalls', {os.path.abspath(__file__)!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "sys.modules['headwater_stalls'] = module\n"
        "spec.loader.exec_module(module)\n"
        "module.install()\n"
    )
    paths = [str(hook.absolute()), os.environ.get("PYTHONPATH", "")]
    environ = {FOLDER: str(folder.absolute()), "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    return environ if freezes is None else environ | {FREEZES: str(freezes)}


class _Watch:
    """One process's records."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._pid = os.getpid()
        self._file: Any = None
        self._began = 0.0
        self._beat = 0.0
        self._looping = 0
        self._collections = [0, 0, 0]
        self._seconds = [0.0, 0.0, 0.0]
        self._freezes = 0

    def begin(self) -> None:
        """Start in this process, at its start or after a fork."""
        self._pid = os.getpid()
        self._file = None
        self._looping = 0
        threading.Thread(target=self._watch, name="stalls", daemon=True).start()

    def note(self, what: str, at_s: float, took_s: float, **more: Any) -> None:
        """Record a stall that started at `at_s` and lasted `took_s`."""
        if self._file is None:
            # Opened on first use: a process without stalls leaves no file.
            self._file = open(os.path.join(self._folder, f"{self._pid}.jsonl"), "a", buffering=1)  # noqa: SIM115 (open as long as the process)
        note = {"what": what, "at_s": at_s, "took_s": took_s, "pid": self._pid, "who": who(), **more}
        self._file.write(json.dumps(note) + "\n")

    def on_gc(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.monotonic()
            return
        took_s, generation = time.monotonic() - self._began, info["generation"]
        self._collections[generation] += 1
        self._seconds[generation] += took_s
        if took_s >= GC_S:
            counts = {"frozen": gc.get_freeze_count(), "collected": info.get("collected", 0)}
            self.note("gc", self._began, took_s, generation=generation, **counts)

    def on_freeze(self) -> int:
        """Which call of `gc.freeze` this is."""
        self._freezes += 1
        self.note("freeze", time.monotonic(), 0.0, call=self._freezes, tracked=len(gc.get_objects()))
        return self._freezes

    async def beat(self) -> None:
        """Timer in the event loop, until the loop ends."""
        import asyncio

        self._beat = time.monotonic()
        self._looping = threading.get_ident()
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(BEAT_S)

    def still(self) -> None:
        """The loop ended; another may start."""
        self._looping = 0

    def end(self) -> None:
        """Record the collector's sums, as short collections are not recorded singly."""
        if self._file is not None and self._pid == os.getpid():
            sums = {"collections": self._collections, "seconds": [round(s, 4) for s in self._seconds]}
            self.note("sums", time.monotonic(), 0.0, **sums)

    def _watch(self) -> None:
        reported = still_s = 0.0
        stack: list[str] = []
        place: tuple[int, int] | None = None
        while True:
            before, cpu = time.monotonic(), time.process_time()
            time.sleep(SLEEP_S)
            now = time.monotonic()
            if now - before - SLEEP_S >= STALL_S:
                share = (time.process_time() - cpu) / (now - before)
                self.note("lock", before, now - before, cpu=round(share, 2), stack=self._stack(self._looping))
            late_s = now - self._beat - BEAT_S
            if self._looping and late_s >= STALL_S and self._beat != reported:
                reported = self._beat
                self.note("loop", reported, late_s, stack=self._stack(self._looping))
            if not self._looping:
                was, place = place, self._place()
                if place is None or place != was:
                    if was is not None and now - still_s >= STALL_S and stack:
                        self.note("still", still_s, now - still_s, stack=stack)
                    still_s, stack = now, []
                elif not stack and now - still_s >= STALL_S:
                    stack = self._stack(0)

    def _place(self) -> tuple[int, int] | None:
        """Where the main thread of an engine's process is, None while it waits."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is None or frame.f_code.co_name in WAITS or not who().startswith("VLLM"):
            return None
        return id(frame), frame.f_lasti

    def _stack(self, thread: int) -> list[str]:
        frame = sys._current_frames().get(thread or threading.main_thread().ident or 0)
        lines: list[str] = []
        while frame is not None and len(lines) < FRAMES:
            code = frame.f_code
            lines.append(f"{'/'.join(code.co_filename.split('/')[-3:])}:{frame.f_lineno} {code.co_name}")
            frame = frame.f_back
        return lines


def who() -> str:
    """What this process is, from its command line and title."""
    words = [word for word in sys.orig_argv[1:] if word]
    with contextlib.suppress(OSError):
        # vLLM gives its processes titles.
        title = Path("/proc/self/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
        if title and "python" not in title:
            return title
    if "headwater.ops.cli" in words:
        return "headwater " + next(iter(words[words.index("headwater.ops.cli") + 1 :]), "")
    process = sys.modules.get("multiprocessing.process")
    name = process.current_process().name if process is not None else ""
    return f"child {name}" if name and name != "MainProcess" else " ".join(words)[:60]


def install() -> None:
    """Start to watch this process, if the environment requests it."""
    folder = os.environ.get(FOLDER)
    if not folder or not os.path.isdir(folder):
        return
    watch = _Watch(folder)
    gc.callbacks.append(watch.on_gc)
    _watch_freezes(watch)
    _watch_loops(watch)
    atexit.register(watch.end)
    os.register_at_fork(after_in_child=watch.begin)
    watch.begin()


def _watch_freezes(watch: _Watch) -> None:
    freeze, pid = gc.freeze, os.getpid()
    allowed = os.environ.get(FREEZES) if "headwater.ops.cli" in sys.orig_argv else None

    def counted() -> None:
        call = watch.on_freeze()
        # An engine's own process may be a fork of Headwater's: its freezes take effect.
        if allowed is None or call <= int(allowed) or os.getpid() != pid:
            freeze()

    gc.freeze = counted


def _watch_loops(watch: _Watch) -> None:
    import asyncio

    run = asyncio.Runner.run

    def watched(self: Any, coro: Any, **options: Any) -> Any:
        async def both() -> Any:
            beat = asyncio.ensure_future(watch.beat())
            try:
                return await coro
            finally:
                beat.cancel()
                watch.still()

        return run(self, both(), **options)

    asyncio.Runner.run = watched  # type: ignore[method-assign]  # the measurement wraps every event loop


def notes(folder: Path) -> list[dict[str, Any]]:
    """The records of all processes, by time."""
    found: list[dict[str, Any]] = []
    for file in folder.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            # A process that was killed may leave half a line.
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return sorted(found, key=lambda note: note["at_s"])


def during(found: list[dict[str, Any]], from_s: float, until_s: float) -> Iterator[dict[str, Any]]:
    """Those that overlap."""
    for note in found:
        if note["took_s"] and note["at_s"] < until_s and note["at_s"] + note["took_s"] > from_s:
            yield note


def line(note: dict[str, Any]) -> str:
    """A note for people."""
    more = ""
    if note["what"] == "gc":
        more = f"generation {note['generation']}, {note['collected']} collected, {note['frozen']} frozen"
    elif note["what"] == "lock":
        more = f"processor {note['cpu']}; " + " < ".join(note["stack"][:4])
    elif note["what"] in ("loop", "still"):
        more = " < ".join(note["stack"][:6])
    return f"{note['took_s'] * 1e3:6.0f} ms  {note['what']:4}  {note['who']} ({note['pid']}): {more}"


def report(
    found: list[dict[str, Any]], gaps: list[tuple[str, float, float]], *, since_s: float = 0.0
) -> None:
    """The stalls during each of the gaps, (name, from, until), and the totals of each process since the first."""
    for name, from_s, until_s in gaps:
        print(f"{name}: {(until_s - from_s) * 1e3:.0f} ms")
        for note in during(found, from_s, until_s):
            print(f"    {(note['at_s'] - from_s) * 1e3:+6.0f}  {line(note)}")
    groups: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for note in found:
        if note["took_s"] and note["at_s"] >= since_s:
            what = f"gc {note['generation']}" if note["what"] == "gc" else note["what"]
            groups.setdefault((note["who"], note["pid"], what), []).append(note)
        elif note["what"] == "freeze":
            print(f"{note['who']} ({note['pid']}): gc.freeze, call {note['call']}, {note['tracked']} objects")
    for (name, pid, what), those in sorted(groups.items()):
        longest = max(those, key=lambda note: float(note["took_s"]))
        print(f"{name} ({pid}) {what}: {len(those)} times, the longest {line(longest)}")


def main() -> int:
    """Command line."""
    folder = Path(sys.argv[1])
    report(notes(folder), [])
    return 0


if __name__ == "__main__":
    sys.exit(main())
