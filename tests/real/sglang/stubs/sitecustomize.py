"""What SGLang 0.5.23 needs on a machine without CUDA. Python imports this module at its start, in each process.

No installed file is changed: a module is mended right after it was imported.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any


def _early_send_without_cuda(module: Any) -> None:
    """A cached prefix is sent without a CUDA event: on a CPU its KV is complete when the step before has returned."""
    mixin = module.SchedulerDisaggregationPrefillMixin
    send = mixin.maybe_send_cached_prefix_chunk

    def send_now(self: Any, *args: Any, **kwargs: Any) -> None:
        overlap, self.enable_overlap = self.enable_overlap, False
        try:
            send(self, *args, **kwargs)
        finally:
            self.enable_overlap = overlap

    mixin.maybe_send_cached_prefix_chunk = send_now


def _page_indices_in_plain_memory(module: Any) -> None:
    """The other way to hand over page indices needs pinned memory and a CUDA event."""
    module.MooncakeKVSender.supports_host_tensor_indices = False


def _padding_of_torch_native(module: Any) -> None:
    """DP attention pads batches; the torch-native backend doesn't say which length a padded sequence has."""
    module.TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _self: 1


def _controller_that_waits(module: Any) -> None:
    """The DP controller looks for the next request in a busy loop, half a core a server: let it wait a little."""
    receive = module.sock_recv

    def wait_and_receive(socket: Any, *args: Any, **kwargs: Any) -> Any:
        socket.poll(_POLL_MS)
        return receive(socket, *args, **kwargs)

    module.sock_recv = wait_and_receive


class _Unpinned:
    """torch, whose tensors aren't pinned."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._torch, name)
        return _unpinned(found) if name in ("empty", "tensor", "zeros") else found


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    def make_unpinned(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return make_unpinned


def _lora_without_pinned_memory(module: Any) -> None:
    """LoRA's layers and backends pin what a GPU would read; without one torch has no pinned memory."""
    module.torch.Tensor.pin_memory = lambda self: self
    module.torch = _Unpinned(module.torch)


_POLL_MS = 50

_MENDS: dict[str, Callable[[Any], None]] = {
    "sglang.srt.disaggregation.prefill": _early_send_without_cuda,
    "sglang.srt.disaggregation.mooncake.conn": _page_indices_in_plain_memory,
    "sglang.srt.managers.data_parallel_controller": _controller_that_waits,
    "sglang.srt.layers.attention.torch_native_backend": _padding_of_torch_native,
    "sglang.srt.lora.layers": _lora_without_pinned_memory,
    "sglang.srt.lora.backend.torch_backend": _lora_without_pinned_memory,
}


class _Mending(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, mend: Callable[[Any], None]) -> None:
        self._loader = loader
        self._mend = mend

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        self._mend(module)


class _Mender(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        mend = _MENDS.get(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if mend else None
        if mend and spec and spec.loader:
            spec.loader = _Mending(spec.loader, mend)
        return spec


sys.meta_path.insert(0, _Mender())

# Its operators aren't there beside torch's CPU build; registering shapes for them fails. SGLang uses transforms only.
sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")
