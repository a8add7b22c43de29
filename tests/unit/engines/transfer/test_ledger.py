"""The ledger of leases: one reader each, no buffer to two, nothing lost, whatever happens in whatever order."""

from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headwater.engines.transfer.port import SlabFull
from headwater.engines.transfer.slab import REMEMBERED, SLACK, Hold, Slab, TransferLedger
from headwater.schemas.media import LeaseId, OfferClaim, OfferReleased, Outcome
from tests.support.worlds.clock import ManualClock

CLAIM_S, QUARANTINE_S = 5.0, 20.0
UNIT = 4096
EPOCH = 7


class Counted:
    """Lease ids in order."""

    def __init__(self) -> None:
        self._numbers = count(1)

    def __call__(self) -> bytes:
        """The next."""
        return next(self._numbers).to_bytes(16, "big")


def ledger_of(units: int) -> tuple[TransferLedger, ManualClock]:
    """An empty ledger, and its clock."""
    clock = ManualClock()
    slab = Slab(units * UNIT)
    return TransferLedger(slab, EPOCH, clock, Counted(), claim_s=CLAIM_S, quarantine_s=QUARANTINE_S), clock


def claim(lease: LeaseId, consumer: str = "c", attempt: int = 1, epoch: int = EPOCH) -> OfferClaim:
    """A claim."""
    return OfferClaim(lease, epoch, consumer, attempt)


def release(lease: LeaseId, outcome: Outcome, consumer: str = "c", epoch: int = EPOCH) -> OfferReleased:
    """A reader's last word."""
    return OfferReleased(lease, epoch, consumer, 1, outcome)


class Model:
    """What is known of one lease: when it may end by itself, and until when its bytes must not be given away."""

    def __init__(self, hold: Hold, expires_s: float) -> None:
        self.block = hold.block
        self.expires_s = expires_s
        self.claimed_s: float | None = None
        self.rests_until_s = 0.0
        self.over = False

    def uses_bytes(self, now_s: float) -> bool:
        """May somebody read these bytes by right, or in spite of it?"""
        if self.over:
            return False
        if self.rests_until_s:
            return now_s < self.rests_until_s
        if self.claimed_s is not None:
            return now_s < self.claimed_s + CLAIM_S + QUARANTINE_S
        return now_s < self.expires_s


class LedgerAgainstModel(RuleBasedStateMachine):
    """Offers, claims, releases, landings and time in any order, on a slab that is too small for all."""

    @initialize(units=st.integers(1, 10))
    def begin(self, units: int) -> None:
        """An empty ledger."""
        self.ledger, self.clock = ledger_of(units)
        self.capacity = units * UNIT
        self.leases: dict[LeaseId, Model] = {}
        self.held: list[Hold] = []
        self.resting: list[Model] = []

    def disjoint(self, hold: Hold) -> None:
        """What is given out now is nobody's."""
        mine = range(hold.block.offset, sum(hold.block))
        others = [m.block for m in [*self.leases.values(), *self.resting] if m.uses_bytes(self.clock.now_s)]
        for block in [*others, *(h.block for h in self.held)]:
            assert sum(block) <= mine.start or block.offset >= mine.stop, "bytes of two"

    @rule(nbytes=st.integers(1, 4 * UNIT))
    def take(self, nbytes: int) -> None:
        """A block to write, or to read into."""
        try:
            hold = self.ledger.take(nbytes)
        except SlabFull:
            return
        self.disjoint(hold)
        self.held.append(hold)

    @precondition(lambda self: self.held)
    @rule(ttl_s=st.floats(0.5, 30.0))
    def offer(self, ttl_s: float) -> None:
        """The oldest held block is offered."""
        hold = self.held.pop(0)
        lease = self.ledger.offer(hold, ttl_s)
        self.leases[lease] = Model(hold, self.clock.now_s + ttl_s)

    @precondition(lambda self: self.held)
    @rule(sure=st.booleans())
    def landed(self, sure: bool) -> None:
        """A reading into the oldest held block has ended, surely or not."""
        hold = self.held.pop(0)
        if sure:
            self.ledger.give_back(hold)
            return
        self.ledger.quarantine(hold)
        rests = Model(hold, 0.0)
        rests.rests_until_s = self.clock.now_s + QUARANTINE_S
        self.resting.append(rests)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), consumer=st.sampled_from("ab"), epoch=st.sampled_from([EPOCH, EPOCH, EPOCH - 1]))
    def claim(self, data: st.DataObject, consumer: str, epoch: int) -> None:
        """Granted exactly once, in time, in this epoch."""
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        model = self.leases[lease]
        may = model.claimed_s is None and self.clock.now_s < model.expires_s and not model.over
        got = self.ledger.claim(claim(lease, consumer, epoch=epoch))
        if epoch != EPOCH:
            assert got == "stale_epoch"
        elif may:
            assert isinstance(got, Hold)
            assert got.block == model.block
            model.claimed_s = self.clock.now_s
        else:
            assert got in ("expired", "consumed")

    @precondition(lambda self: self.leases)
    @rule(
        data=st.data(),
        consumer=st.sampled_from("ab"),
        outcome=st.sampled_from(["read", "checksum_mismatch", "unused", "timed_out", "failed"]),
    )
    def release(self, data: st.DataObject, consumer: str, outcome: Outcome) -> None:
        """Only the reader's own word counts, and only `read` and its like free a buffer at once."""
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        model = self.leases[lease]
        open_before = model.claimed_s is not None and model.uses_bytes(self.clock.now_s)
        known = self.ledger.release(release(lease, outcome, consumer))
        if not known:
            return
        assert open_before
        if outcome in ("read", "checksum_mismatch", "unused"):
            model.over = True
        elif not model.rests_until_s and self.clock.now_s < (model.claimed_s or 0.0) + CLAIM_S:
            model.rests_until_s = self.clock.now_s + QUARANTINE_S

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        """The owner changes its mind: at once free if nobody was let in."""
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        model = self.leases[lease]
        self.ledger.withdraw(lease)
        if model.claimed_s is None:
            model.over = True
        elif not model.rests_until_s and self.clock.now_s < model.claimed_s + CLAIM_S:
            model.rests_until_s = self.clock.now_s + QUARANTINE_S

    @rule(seconds=st.floats(0.0, 12.0))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.clock.now_s += seconds

    @invariant()
    def bytes_add_up(self) -> None:
        """Every byte is in exactly one state, and none that a reader may touch is free."""
        stats = self.ledger.stats()
        assert stats.capacity == self.capacity
        assert sum(stats[1:6]) == self.capacity
        models = [*self.leases.values(), *self.resting]
        used = sum(model.block.nbytes for model in models if model.uses_bytes(self.clock.now_s))
        assert stats.free == self.capacity - used - sum(hold.block.nbytes for hold in self.held)

    def teardown(self) -> None:
        """Nothing leaks: time alone brings back all but what is still held."""
        self.clock.now_s += 1000.0
        assert self.ledger.stats().free == self.capacity - sum(hold.block.nbytes for hold in self.held)
        for hold in self.held:
            self.ledger.give_back(hold)
        assert self.ledger.take(self.capacity).block.nbytes == self.capacity


def test_the_ledger_agrees_with_its_model() -> None:
    """No buffer to two live leases, one grant a lease, quarantine, dead epochs, nothing leaked."""
    run_state_machine_as_test(LedgerAgainstModel, settings=settings(stateful_step_count=50))


def test_a_claim_that_timed_out_is_quarantined_for_the_stated_time() -> None:
    """To the second: nobody gets its bytes before."""
    ledger, clock = ledger_of(1)
    lease = ledger.offer(ledger.take(UNIT), 100.0)
    assert isinstance(ledger.claim(claim(lease)), Hold)
    clock.now_s = CLAIM_S + QUARANTINE_S - 0.01
    assert ledger.stats().quarantined == UNIT
    with pytest.raises(SlabFull):
        ledger.take(1)
    clock.now_s = CLAIM_S + QUARANTINE_S
    assert ledger.take(1)
    assert ledger.stats().ended == {"unreleased": 1}


def test_a_late_word_of_the_reader_ends_the_quarantine() -> None:
    """It has seen its reading end; a word of anyone else changes nothing."""
    ledger, clock = ledger_of(1)
    lease = ledger.offer(ledger.take(UNIT), 100.0)
    ledger.claim(claim(lease))
    clock.now_s = CLAIM_S + 1
    assert not ledger.release(release(lease, "read", consumer="another"))
    assert not ledger.release(release(lease, "read", epoch=EPOCH + 1))
    assert ledger.stats().quarantined == UNIT
    assert ledger.release(release(lease, "read"))
    assert ledger.stats().free == UNIT
    assert not ledger.release(release(lease, "read")), "only once"


def test_refusals_have_names() -> None:
    """Unknown, expired, withdrawn, consumed, another epoch, closing."""
    ledger, clock = ledger_of(4)
    expired, withdrawn, read, closing = (ledger.offer(ledger.take(1), 10.0 + n) for n in range(4))
    assert isinstance(ledger.claim(claim(read)), Hold)
    assert ledger.claim(claim(read)) == "consumed", "the same claim twice"
    ledger.release(release(read, "read"))
    ledger.withdraw(withdrawn)
    clock.now_s = 10.0
    assert ledger.claim(claim(expired)) == "expired"
    assert ledger.claim(claim(withdrawn)) == "expired"
    assert ledger.claim(claim(read)) == "consumed", "also after its end"
    assert ledger.claim(claim(closing, epoch=EPOCH - 1)) == "stale_epoch"
    assert ledger.claim(claim(bytes(16))) == "unknown"
    ledger.closing = True
    assert ledger.claim(claim(closing)) == "closing"


def test_what_it_remembers_is_bounded() -> None:
    """Neither ended leases nor outdated due times pile up."""
    ledger, _ = ledger_of(1)
    first = b""
    for number in range(REMEMBERED + 10):
        lease = ledger.offer(ledger.take(1), 1e9)
        first = first or lease
        ledger.claim(claim(lease))
        ledger.release(release(lease, "read"))
        assert len(ledger._due) <= SLACK + 3, number
    assert len(ledger._ended) == REMEMBERED
    assert ledger.claim(claim(first)) == "unknown"


def test_an_id_source_that_repeats_itself_is_noticed() -> None:
    """A lease must name one offer for ever."""
    ledger = TransferLedger(
        Slab(2 * UNIT), EPOCH, ManualClock(), lambda: bytes(16), claim_s=1, quarantine_s=1
    )
    ledger.offer(ledger.take(1), 1.0)
    with pytest.raises(ValueError, match="not unique"):
        ledger.offer(ledger.take(1), 1.0)


def test_a_block_is_given_on_from_held_only() -> None:
    """A mistake in its use is an error, not a buffer of two."""
    ledger, _ = ledger_of(1)
    hold = ledger.take(1)
    ledger.offer(hold, 1.0)
    for mistake in (ledger.give_back, ledger.quarantine):
        with pytest.raises(ValueError, match="offered, not held"):
            mistake(hold)
