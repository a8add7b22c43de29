"""The engines on which the tests of this folder run: each test once on each, unless it is about one of them."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import pytest

from tests.support.processes.fleet import FleetProcess, fleet


class Case(NamedTuple):
    """An engine, and its worker in the fleet of both engines (`mixed`)."""

    engine: Literal["vllm", "sglang"]
    worker: str

    def fleet(
        self, folder: Path, *flags: str, ready_s: float = 300
    ) -> AbstractAsyncContextManager[FleetProcess]:
        """A fleet of this engine, forked from a process that has imported it."""
        vllm, sglang = (self.engine == name for name in ("vllm", "sglang"))
        return fleet(folder, "--engine", self.engine, *flags, ready_s=ready_s, vllm=vllm, sglang=sglang)

    def param(self, *values: object, name: str = "", marks: tuple[pytest.MarkDecorator, ...] = ()) -> Any:
        """This engine, and what a test with it is given, as a parameter in the lane of the engine's tests."""
        lane = pytest.mark.xdist_group(self.engine)
        own = (getattr(pytest.mark, self.engine), lane)
        words = " ".join(word for word in (self.engine, name) if word)
        return pytest.param(self, *values, id=words, marks=(*own, *marks))


VLLM: Final = Case("vllm", "worker-0")
SGLANG: Final = Case("sglang", "sglang-0")


VLLM_IN_EVERY_RUN: Final = pytest.mark.parametrize(
    "case", [VLLM.param(), SGLANG.param(marks=(pytest.mark.soak,))], indirect=True, scope="module"
)
"""For tests with fleets of their own whose code is the same for both engines: SGLang's are in `make soak`."""


def only(case: Case, *marks: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """For tests of what one engine has."""
    return pytest.mark.parametrize("case", [case.param(marks=marks)], indirect=True)
