"""What a pool's routers tell each other: they fold one log, and so must hold one state."""

import msgspec


class StateDigest(msgspec.Struct, frozen=True, array_like=True):
    """The digest of a router's fold of the log named `log` at a position, without its own undelivered decisions.

    Folds can be compared if they are of one `release` and were begun at one place: `since` is the first position of
    a fold that began anew behind a gap, 0 for a fold of everything.
    """

    router: str
    epoch: int
    release: str
    log: str
    since: int
    position: int
    digest: str

    @property
    def terms(self) -> tuple[str, str, int]:
        """Only what is equal in this can be compared."""
        return self.release, self.log, self.since
