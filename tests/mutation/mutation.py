"""A wrong version of a line, and the tests that have to notice."""

from typing import NamedTuple


class Mutation(NamedTuple):
    """In `file`, `before` (which occurs once) becomes `after`; `tests` are run and one must fail."""

    file: str
    before: str
    after: str
    why: str
    tests: tuple[str, ...]
