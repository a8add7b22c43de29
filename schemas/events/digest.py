"""State digests that a pool's routers exchange: folds of one log must have equal states."""

import msgspec


class StateDigest(msgspec.Struct, frozen=True, array_like=True):
    """The digest of a router's fold of the log named `log` at a position, without its own undelivered decisions.

    Folds are comparable if they are of one `release` and started at the same position: `since` is the first position
    of a fold that restarted after a gap, 0 for a fold of the whole log.
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
        """Only digests that are equal in this are comparable."""
        return self.release, self.log, self.since
