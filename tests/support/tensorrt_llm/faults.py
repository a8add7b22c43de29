"""What the double does wrong on demand: reported faults of TensorRT-LLM."""

import threading


class Faults:
    """What the double does wrong, for all its instances. Each is a reported fault of TensorRT-LLM."""

    def __init__(self) -> None:
        self.dead = ""
        """It has died of this: its health check says no."""
        self.hangs_health = threading.Event()
        """While set, its health check does not return."""
        self.kv_never_arrives = False
        self.leaks = False
        """All blocks stay in use, with health still good."""
        self.loses_events = 0
        """So many events are dropped from the buffer."""
        self.iteration: Exception | None = None
        """Raised while an output is awaited."""
        self.hangs_shutdown = False
        self.stats: Exception | None = None
        self.aborts: list[tuple[str, bool]] = []
        """(request type, had it output anything?) of each abort."""
