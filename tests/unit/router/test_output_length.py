"""How long answers are expected to be: by their limit, prompt and tenant, as far as there are answers of such a class, else by coarser classes."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.router.estimates import (
    LENGTHS_REMEMBERED,
    TENANT_CLASSES_MAX,
    TENANTS_MAX,
    UNKNOWN_TOKENS,
    OutputLengths,
)
from headwater.schemas.hashing import tenant_digest

SHORT, LONG = 100, 30_000
"""Prompts of different octaves."""

TENANT_BLUE = 812195337


def test_until_there_is_an_answer_the_limit_is_expected() -> None:
    """Unless it is so large that hardly any answer reaches it."""
    nothing = OutputLengths()
    assert [nothing.expect(limit).mean for limit in (0, 1, 40, 100_000)] == [0, 1, 40, UNKNOWN_TOKENS]
    assert nothing.expect(40).deviation == 0


def test_answers_use_a_share_of_their_limit() -> None:
    """Limits below the next power of two form a class; a class without answers takes the mean of all, up to the limit."""
    lengths = OutputLengths()
    for _ in range(10):
        lengths.observe(100, 100)
        lengths.observe(8_000, 400)
    assert [lengths.expect(limit) for limit in (64, 100, 127)] == [(64, 0), (100, 0), (127, 0)]
    assert lengths.expect(4_800) == (240, 0)
    assert lengths.expect(2_000) == (250, 150)
    assert lengths.expect(30) == (30, 30)
    # Nothing generates more than its limit: one that says so counts for its limit.
    counted = OutputLengths()
    counted.observe(10, 9_000)
    assert counted.expect(2_000).mean == 10


def test_it_follows_other_answers() -> None:
    """A few times `MEMORY` later, only the new ones count."""
    lengths = OutputLengths()
    for _ in range(500):
        lengths.observe(1_000, 1_000)
    for _ in range(5 * LENGTHS_REMEMBERED):
        lengths.observe(1_000, 200)
    assert lengths.expect(1_000).mean == pytest.approx(200, rel=0.05)
    assert lengths.expect(1_000).deviation < 70


def test_prompts_and_tenants_have_lengths_of_their_own() -> None:
    """Each tenant writes short answers to short prompts, and one of them twice as long ones; who is new is expected to be like the pool."""
    lengths = OutputLengths()
    for _ in range(200):
        for tenant, factor in ((7, 1), (8, 2)):
            lengths.observe(1_000, 50 * factor, SHORT, tenant)
            lengths.observe(1_000, 400 * factor, LONG, tenant)
    found = {
        (prompt, tenant): lengths.expect(1_000, prompt, tenant).mean
        for prompt in (SHORT, LONG)
        for tenant in (7, 8, 9, 0)
    }
    for (prompt, tenant), (was, coarser) in {
        (SHORT, 7): (50, 225),
        (SHORT, 8): (100, 450),
        (LONG, 7): (400, 225),
        (LONG, 8): (800, 450),
        (SHORT, 9): (75, 337),
        (LONG, 0): (600, 337),
    }.items():
        # The mean of the coarser class counts for about a third.
        assert found[prompt, tenant] == pytest.approx(was, abs=0.4 * abs(was - coarser))
    assert found[SHORT, 9] == found[SHORT, 0]


def test_a_class_with_few_answers_adds_little() -> None:
    """The first answer of a tenant, ten times the pool's, is not expected again; the twentieth is, by more than half."""
    lengths = OutputLengths()
    for _ in range(100):
        lengths.observe(1_000, 50, SHORT)
    lengths.observe(1_000, 500, SHORT, 7)
    assert 50 < lengths.expect(1_000, SHORT, 7).mean < 120
    for _ in range(20):
        lengths.observe(1_000, 500, SHORT, 7)
        lengths.observe(1_000, 50, SHORT)
    assert 275 < lengths.expect(1_000, SHORT, 7).mean < 500
    assert lengths.expect(1_000, SHORT, 8).mean < 180


def test_the_deviation_is_that_of_the_answers() -> None:
    """Of two lengths that are as frequent it is half of their distance."""
    lengths = OutputLengths()
    draw = random.Random(1)
    for _ in range(2_000):
        lengths.observe(1_000, draw.choice((100, 500)), SHORT, 7)
    expected = lengths.expect(1_000, SHORT, 7)
    assert expected.mean == pytest.approx(300, rel=0.15)
    assert expected.deviation == pytest.approx(200, rel=0.1)


def test_tenants_and_their_classes_are_bounded() -> None:
    """Those with the oldest answers are forgotten; a tenant that comes again stays."""
    lengths = OutputLengths()
    for number in range(1, TENANTS_MAX + 1):
        lengths.observe(1_000, 100, SHORT, number)
    lengths.observe(1_000, 100, SHORT, 1)
    lengths.observe(1_000, 100, SHORT, 999)
    assert len(lengths.tenants) == TENANTS_MAX
    assert {"1", "999"} < set(lengths.tenants)
    assert "2" not in lengths.tenants
    for limit in range(1, 40):
        for prompt in range(3):
            lengths.observe(1 << limit, 1, 1 << prompt, 999)
    assert len(lengths.tenants["999"]) == TENANT_CLASSES_MAX


def test_a_copy_forgets_the_same_tenants() -> None:
    """A snapshot keeps the order in which tenants were seen last."""
    lengths = OutputLengths()
    for number in random.Random(2).choices(range(1, 2 * TENANTS_MAX), k=400):
        lengths.observe(1_000, number, SHORT, number)
    copied = msgspec.msgpack.decode(msgspec.msgpack.encode(lengths), type=OutputLengths)
    for number in range(500, 540):
        for one in (lengths, copied):
            one.observe(1_000, number, SHORT, number)
    assert list(copied.tenants) == list(lengths.tenants)
    assert copied == lengths


def test_the_log_has_a_digest_of_the_tenant() -> None:
    """Equal on every machine, and 0 for none."""
    assert tenant_digest("") == 0
    assert tenant_digest("blue") == TENANT_BLUE
    assert tenant_digest("red") != TENANT_BLUE


answers = st.lists(
    st.tuples(st.integers(-1, 1 << 70), st.integers(-1, 1 << 70), st.integers(-1, 1 << 70), st.integers(0, 3))
)


@given(answers, st.integers(1, 1 << 70), st.integers(0, 1 << 20), st.integers(0, 3))
def test_the_limit_bounds_it(
    answers: list[tuple[int, int, int, int]], limit: int, prompt: int, tenant: int
) -> None:
    """Whatever workers report."""
    lengths = OutputLengths()
    for answer in answers:
        lengths.observe(*answer)
    expected = lengths.expect(limit, prompt, tenant)
    assert 1 <= expected.mean <= limit
    assert 0 <= expected.deviation <= limit
