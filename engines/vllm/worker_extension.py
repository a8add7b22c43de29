"""What runs inside vLLM's worker processes, by vLLM's own `worker_extension_cls`: one method more, and one mend."""

from typing import Any


class Extension:
    """Mixed into vLLM's worker class."""

    def headwater_release(self, requests: list[str]) -> int:
        """End the lease of the blocks kept for these (vLLM's own) request ids now. Returns how many there were.

        VLLM lets a decode engine tell a prefill engine that it will not fetch (its
        `notify_kv_transfer_request_rejected`), but not the prefill engine itself: it refuses to be its own remote
        side. Without this the blocks would stay until the lease ends, 30 s of a part of the cache. The connector
        frees them in its next step, as those whose time is over; the others are gone already.
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


def mend_mixed_batches() -> None:
    """On CPU, requests without an adapter get that of the last slot, once one in their batch has one.

    They have index -1, which the kernels for GPUs skip; those for CPUs take it as Python does. Seen in vLLM 0.32.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    try:
        from vllm.lora.ops.torch_ops import lora_ops
        from vllm.lora.punica_wrapper import punica_cpu
    except ImportError:
        # Another release has them elsewhere; the contract suite tells whether it needs the mend.
        return
    shrink = lora_ops.bgmv_shrink

    def shrink_and_skip(inputs: Any, weights: Any, output: Any, indices: Any, scaling: float = 1.0) -> None:
        shrink(inputs, weights, output, indices, scaling)
        # What comes next multiplies these rows and adds the product.
        output[: len(indices)][indices < 0] = 0

    for module in (lora_ops, punica_cpu):
        module.__dict__["bgmv_shrink"] = shrink_and_skip


# Workers import this module before they load a model.
mend_mixed_batches()
