"""What runs inside vLLM's worker processes: one method more, by vLLM's own `worker_extension_cls`.

VLLM lets a decode engine tell a prefill engine that it will not fetch (`notify_kv_transfer_request_rejected`), but
not the prefill engine itself: it refuses to be its own remote side. Without this the blocks would stay until the
lease ends, 30 s of a part of the cache.
"""

from typing import Any

NAME = "headwater.engines.vllm.worker_extension.Release"


class Release:
    """Mixed into vLLM's worker class."""

    def headwater_release(self, requests: list[str]) -> int:
        """End the lease of the blocks kept for these (vLLM's own) request ids now. Returns how many there were.

        The connector frees them in its next step, as those whose time is over; the others are gone already.
        """
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        if not has_kv_transfer_group():
            return 0
        group: Any = get_kv_transfer_group()
        released = 0
        # A MultiConnector keeps its parts in a private list.
        for connector in getattr(group, "_connectors", None) or [group]:
            worker = getattr(connector, "connector_worker", None)
            leases: dict[str, float] = getattr(worker, "_reqs_to_send", None) or {}
            for request in requests:
                if request in leases:
                    leases[request] = 0.0
                    released += 1
        return released
