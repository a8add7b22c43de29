"""The shipped checks of engines as tests."""

from collections.abc import Sequence

import pytest

from headwater.engines.conformance.case import Check, EngineCase, Inapplicable


def parametrized(checks: Sequence[Check], *subjects: str) -> pytest.MarkDecorator:
    """One test per check on one of these subjects, as the argument `one`."""
    wanted = [one for one in checks if one.subject in subjects]
    return pytest.mark.parametrize("one", wanted, ids=[one.name.replace(" ", "_") for one in wanted])


async def hold(one: Check, *cases: EngineCase) -> None:
    """The check holds; skipped by name where it does not apply."""
    lacks = set(one.needs) - cases[0].engine.capabilities
    if lacks:
        pytest.skip(f"{cases[0].engine.name} has no {', '.join(sorted(lacks))} here")
    try:
        await one.run(*cases)
    except Inapplicable as error:
        pytest.skip(str(error))
