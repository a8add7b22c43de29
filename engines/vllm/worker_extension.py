"""Extension of vLLM's worker processes, by its `worker_extension_cls`: an additional method, and a bug fix."""

from typing import Any

from headwater.engines import process


class Extension:
    """Mixed into vLLM's worker class."""

    def headwater_release(self, requests: list[str]) -> int:
        """End the lease of the blocks kept for these (vLLM's own) request ids now. Returns how many there were.

        A decode engine can notify a prefill engine that it will not fetch (vLLM's
        `notify_kv_transfer_request_rejected`), but a prefill engine cannot do so for itself, as it cannot be its own
        remote. Without this the blocks would be pinned until the lease expires after 30 s. The connector frees them in its
        next step, like expired ones; unknown ids were freed before.
        """
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        if not has_kv_transfer_group():
            return 0
        group: Any = get_kv_transfer_group()
        released = 0
        # A MultiConnector has its parts in a private list.
        for connector in getattr(group, "_connectors", None) or [group]:
            worker = getattr(connector, "connector_worker", None)
            leases: dict[str, float] = getattr(worker, "_reqs_to_send", None) or {}
            for request in requests:
                if request in leases:
                    leases[request] = 0.0
                    released += 1
        return released


def fix_mixed_batches() -> None:
    """Fix batches of mixed requests on CPU, in which those without LoRA use the adapter of the last slot once another has one.

    They have index -1, which GPU kernels skip; CPU kernels use it as an index from the end. Seen in vLLM 0.32.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    try:
        from vllm.lora.ops.torch_ops import lora_ops
        from vllm.lora.punica_wrapper import punica_cpu
    except ImportError:
        # Another release has them elsewhere; the contract suite shows whether it needs the fix.
        return
    shrink = lora_ops.bgmv_shrink

    def shrink_and_skip(inputs: Any, weights: Any, output: Any, indices: Any, scaling: float = 1.0) -> None:
        shrink(inputs, weights, output, indices, scaling)
        # The following code multiplies these rows and adds the product.
        output[: len(indices)][indices < 0] = 0

    for module in (lora_ops, punica_cpu):
        module.__dict__["bgmv_shrink"] = shrink_and_skip


FATAL = ("fatal error", "failed to start", "hit an exception")
"""What vLLM logs before a process ends."""

# Workers import this module before they load a model.
process.keep("vllm", FATAL)
fix_mixed_batches()
