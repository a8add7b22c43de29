"""What all tests share: log lines that cost nothing, how many examples a property gets, and which tests run together."""

from collections.abc import Iterator

import pytest
import structlog
from hypothesis import settings

# Checks that ship with the package: a failed assertion shows its values in tests, too.
pytest.register_assert_rewrite("headwater.engines.conformance")

settings.register_profile("ci", max_examples=30, deadline=None)
settings.register_profile("soak", max_examples=500, deadline=None)
settings.load_profile("ci")

SHARING = ("contract", "docs", "durability", "faults", "packaging", "sglang", "system", "tidy", "vllm")
"""Folders whose modules share servers, fleets or parsed sources: each module runs in one worker, so that none is made twice."""

SHORT = ("tidy", "unit")
"""Folders of tests that take less than a second each."""


def pytest_configure() -> None:
    """Log as structlog does unless told otherwise, but for tracebacks.

    With rich installed (vLLM brings it) each would be drawn with the local variables of every frame: one second.
    """
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.StackInfoRenderer(),
            structlog.dev.set_exc_info,
            structlog.processors.TimeStamper("%Y-%m-%d %H:%M:%S", utc=False),
            structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
        ]
    )


@pytest.fixture(autouse=True)
def logging_of_all_tests() -> Iterator[None]:
    """A test that configures structlog, as commands do, leaves it to the next one as it was."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Group the tests that share processes. Those of vLLM and SGLang come first and the short ones last, so that workers end together.

    Those by folder: the fleet of one ends with it, since also idle engines need some processor time.
    """

    def order(item: pytest.Item) -> tuple[bool, str, bool, bool]:
        folder = _folder(config, item)
        first = item.get_closest_marker("vllm") is not None or folder == "sglang"
        last = item.get_closest_marker("last") is not None
        return not first, folder if first else "", folder in SHORT, last

    for item in items:
        if _folder(config, item) in SHARING and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(config.rootpath))))
    items.sort(key=order)


def _folder(config: pytest.Config, item: pytest.Item) -> str:
    return item.path.relative_to(config.rootpath / "tests").parts[0]
