"""Settings of video jobs: types, defaults and descriptions only. Light to import: the command line reads them."""

from typing import Annotated, NamedTuple

from msgspec import Meta


class VideoSettings(NamedTuple):
    """How many videos a tenant may have generated at once, how long that may take, and how long the results are kept."""

    jobs_max: int = 16
    """Video jobs of one tenant that have not ended; one more is refused; 0: no bound."""
    timeout_s: int = 7200
    """Seconds after which a video job that has not completed fails, its time in queues included."""
    ttl_s: Annotated[
        int, Meta(ge=1, description="seconds after which a video that is completed, or failed, expires")
    ] = 24 * 3600
