"""The suite: all checks, and a run of them over one engine."""

import asyncio
import traceback
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final, Literal, NamedTuple

from headwater.engines.conformance import cache, case, control, generation, handoff
from headwater.engines.conformance.case import (
    Check,
    EngineCase,
    Inapplicable,
    MakeAdapter,
    MakeEngine,
    checks_of,
    has_died,
    started,
)

MODULES: Final = (generation, cache, control, handoff, case)

SUITE: Final[tuple[Check, ...]] = tuple(one for module in MODULES for one in checks_of(module))

CHECK_S_MAX: Final = 120.0
START_S_MAX: Final = 1800.0

Outcome = Literal["passed", "failed", "unsupported", "inapplicable"]


class CheckResult(NamedTuple):
    """How one check ended. `detail`: the assertion that failed, the missing capabilities, or why it does not apply."""

    name: str
    outcome: Outcome
    detail: str = ""


class ConformanceRun:
    """A run of the suite. Checks share running engines; after a failure the next check gets new ones."""

    def __init__(
        self,
        make: MakeEngine,
        *,
        make_adapter: MakeAdapter | None = None,
        check_s_max: float = CHECK_S_MAX,
    ) -> None:
        if not __debug__:
            raise RuntimeError("checks are assertions: run Python without -O")
        self._make = make
        self._adapters = (make_adapter,) if make_adapter is not None else ()
        self._check_s_max = check_s_max
        self._stack = AsyncExitStack()
        self._cases: list[EngineCase] = []

    async def results(self, suite: tuple[Check, ...] = SUITE) -> AsyncIterator[CheckResult]:
        """The result of each check, as it ends. Raises what the engine's start raises."""
        try:
            [running] = await self._running(1)
            for check in suite:
                lacks = [name for name in check.needs if name not in running.engine.capabilities]
                if lacks:
                    yield CheckResult(check.name, "unsupported", ", ".join(lacks))
                    continue
                result = await self._run(check)
                if result.outcome == "failed" or await has_died(running):
                    await self._stop()
                    [running] = await self._running(1)
                yield result
        finally:
            await self._stop()

    async def _running(self, count: int) -> list[EngineCase]:
        while len(self._cases) < count:
            async with asyncio.timeout(START_S_MAX):
                self._cases.append(
                    await self._stack.enter_async_context(started(self._make(), *self._adapters))
                )
        return self._cases[:count]

    async def _stop(self) -> None:
        self._cases.clear()
        try:
            await self._stack.aclose()
        except AssertionError:
            # The reader of events ended with a check that failed, and was its cause.
            pass

    async def _run(self, check: Check) -> CheckResult:
        try:
            async with asyncio.timeout(self._check_s_max):
                if check.subject == "new":
                    await check.run(self._make)
                else:
                    await check.run(*await self._running(2 if check.subject == "pair" else 1))
                    await self._cases[0].engine.check()
        except Inapplicable as error:
            return CheckResult(check.name, "inapplicable", str(error))
        except TimeoutError as error:
            return CheckResult(check.name, "failed", str(error) or f"not done within {self._check_s_max:g} s")
        except Exception as error:
            return CheckResult(check.name, "failed", _place_of(error))
        return CheckResult(check.name, "passed")


def _place_of(error: Exception) -> str:
    """The error, and the line of the check that it came from."""
    suite_frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).parent == Path(__file__).parent
    ]
    text = ": ".join(filter(None, (type(error).__name__, str(error).partition("\n")[0])))
    return (
        f"{Path(suite_frames[-1].filename).name}:{suite_frames[-1].lineno} `{suite_frames[-1].line}`: {text}"
        if suite_frames
        else text
    )
