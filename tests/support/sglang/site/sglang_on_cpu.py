"""Makes SGLang's published package run on a CPU. Imported at the start of every Python of the tests' environment.

PyPI has SGLang with its CUDA kernels only. On a CPU its models compute in PyTorch and need none of them, but its modules
use five things that do not work there (torchvision is another: see `tests/support/torchvision`):

* `sgl_kernel`, the package of kernels: any name can be imported, and raises when it is called, and those that models look up in
  PyTorch when they are imported are declared there;
* `pin_memory`, which needs an accelerator: host memory is the device's here;
* NIXL's kind of memory: SGLang says "VRAM" of all KV, and UCX refuses that of host memory;
* the kernels of its diffusion runtime: each of its layers has a form in PyTorch, which takes their place;
* the memory that a tier of its cache leaves to others, 10 GiB, and the registration of host memory with CUDA and the kernel that copies blocks between the tiers of its cache: nothing has
  to be registered, and PyTorch copies.

The production adapter does none of this: without it, SGLang on a CPU ends with an error that says what is missing.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

KERNELS = "sgl_kernel"
LORA = "sglang.srt.lora.layers"
TRANSFER = "sglang.srt.disaggregation.nixl.conn"
HOST_POOLS = ("sglang.srt.mem_cache.pool_host.common", "sglang.srt.mem_cache.pool_host.mha")
DIFFUSION_LAYERS = "sglang.multimodal_gen.runtime.layers.custom_op"
HOST_SIZES = "sglang.srt.mem_cache.pool_host.base"
RESERVE_BYTES = 256 << 20
"""Of host memory that a tier leaves to others: with SGLang's 10 GiB the tests would need a large machine for their few blocks."""
LOOKED_UP = (
    "fused_input_proj_cpu",
    "fused_linear_sigmoid_mul",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qk_norm_rope_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_qkvzba_split_reshape_cat_cpu",
    "fused_sigmoid_mul_cpu",
)
"""Kernels of Qwen's newer models, all of which are imported with the processor of its images."""
PROCESSORS = "sglang.srt.multimodal"
MISSING = frozenset({"sgl_kernel.scalar_type"})
"""Parts of the kernels that must fail to import: SGLang then uses its own."""


def _raises(name: str) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} does not exist on a CPU")

    call.__name__ = name
    return call


def _attribute(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _raises(name)


class _Loader(importlib.abc.Loader):
    """Makes a module that has every name."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        made = types.ModuleType(spec.name)
        made.__dict__.update(__getattr__=_attribute, __path__=[], __version__="0.4.10")
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the kernels, and changes what needs CUDA as it is imported."""

    def __init__(self) -> None:
        self._unpinned = False
        self._in_host_memory = False
        self._declared: Any = None
        self._loading: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in self._loading:
            return None
        if name == TRANSFER and not self._in_host_memory:
            self._in_host_memory = True
            _name_host_memory()
        if name == PROCESSORS and self._declared is None:
            self._declared = _declare_kernels()
        if name == LORA and not self._unpinned:
            self._unpinned = True
            _ignore_pinning()
        if name in HOST_POOLS or name in (HOST_SIZES, DIFFUSION_LAYERS):
            return self._completed(name)
        if name == KERNELS or (name.startswith(f"{KERNELS}.") and name not in MISSING):
            return importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)
        return None

    def _completed(self, name: str) -> importlib.machinery.ModuleSpec | None:
        self._loading.add(name)
        spec = importlib.util.find_spec(name)
        self._loading.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _CompletingLoader(spec.loader)
        return spec


class _CompletingLoader(importlib.abc.Loader):
    """Loads a module of host memory's tier or of the diffusion runtime, and gives it what it has only with kernels."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        if module.__name__ == HOST_SIZES:
            module.__dict__.update(HICACHE_HOST_MEMORY_RESERVE_BYTES=RESERVE_BYTES)
            return
        if module.__name__ == DIFFUSION_LAYERS:
            module.__dict__["CustomOp"].dispatch_forward = lambda layer: layer.forward_native
            _define_modulation()
            return
        module.__dict__.update(_cuda_host_register=_register_nothing, transfer_kv_direct=_copy_blocks)


def _declare_kernels() -> Any:
    """Kernels without an implementation. They are declared as long as the result is kept."""
    import torch

    library = torch.library.Library(KERNELS, "DEF")
    for kernel in LOOKED_UP:
        library.define(f"{kernel}() -> ()")
    return library


def _define_modulation() -> None:
    """The one kernel that its layers in PyTorch call."""
    import torch

    def scaled(x: Any, scale: Any, shift: Any, constant: float) -> Any:
        return x * (constant + scale) + shift

    library = torch.library.Library(KERNELS, "FRAGMENT")
    library.define("fused_scale_shift_cpu(Tensor x, Tensor scale, Tensor shift, float constant) -> Tensor")
    library.impl("fused_scale_shift_cpu", scaled, "CompositeExplicitAutograd")
    _kept.append(library)


_kept: list[Any] = []
"""Libraries: their kernels exist as long as these do."""


def _register_nothing(*_: Any, **__: Any) -> None:
    """Host memory is the device's here."""


def _copy_blocks(
    *, src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """Copy the tokens at these places, layer by layer."""
    for source, destination in zip(src_layers, dst_layers, strict=True):
        destination[dst_indices] = source[src_indices]


def _ignore_pinning() -> None:
    """Let host memory be asked for as pinned, and stay as it is."""
    import torch

    def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, pin_memory: bool = False, **named: Any) -> Any:
            return make(*arguments, **named)

        return made

    for name in ("empty", "zeros", "tensor"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self


def _name_host_memory() -> None:
    """Call KV in host memory what it is."""
    from nixl._api import nixl_agent

    def named(call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **others: Any) -> Any:
            given = [_host(one) for one in arguments]
            return call(*given, **{name: _host(one) for name, one in others.items()})

        return made

    for name in ("register_memory", "get_reg_descs", "get_xfer_descs", "prep_xfer_dlist"):
        setattr(nixl_agent, name, named(getattr(nixl_agent, name)))
    _let_progress_wait()


def _let_progress_wait() -> None:
    """NIXL's progress thread waits for events for a millisecond at a time: without a pause it would fill a core."""
    import nixl._api

    binding = nixl._api.__dict__["nixlBind"]
    config: Any = binding.nixlAgentConfig

    class Waiting(config):  # type: ignore[misc]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, 1_000 if name == "pthrDelay" else value)

    binding.nixlAgentConfig = Waiting


def _host(argument: Any) -> Any:
    return "DRAM" if isinstance(argument, str) and argument == "VRAM" else argument


os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
sys.meta_path.insert(0, _Finder())
