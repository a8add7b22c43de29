"""What a check is: an async function whose assertions hold for every engine that has certain capabilities."""

import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

from headwater.schemas.tables.capability import Capability

Subject = Literal["one", "pair", "new"]
"""What a check runs on: a running engine, two that can hand over to each other, or engines that it starts itself."""


class Check(NamedTuple):
    """One check. `needs` are the capabilities without which it does not apply; `text` is what must hold."""

    name: str
    text: str
    run: Callable[..., Awaitable[None]]
    needs: tuple[Capability, ...] = ()
    subject: Subject = "one"


def check(*needs: Capability, subject: Subject = "one") -> Callable[[Callable[..., Awaitable[None]]], Check]:
    """Make a function a check, named after it; its docstring says what must hold."""

    def made(function: Callable[..., Awaitable[None]]) -> Check:
        name = getattr(function, "__name__", "").replace("_", " ")
        return Check(name, " ".join((function.__doc__ or "").split()), function, needs, subject)

    return made


@contextmanager
def raises(kind: type[Exception], match: str = "") -> Iterator[None]:
    """The block must raise an exception of this kind whose text matches."""
    try:
        yield
    except kind as error:
        raised: Exception = error
    else:
        raise AssertionError(f"no {kind.__name__} was raised")
    assert re.search(match, str(raised)), f"{raised!r} does not match {match!r}"
