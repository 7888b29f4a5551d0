"""Kernels of ``scaled_dot_product_attention``: one preferred to the others, and which really ran."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from torch.nn.attention import SDPBackend, sdpa_kernel

from torchobs.probes.core.torch_profiler import recorded
from torchobs.tune.techniques import Reclassed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
_OPERATORS = {
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_scaled_dot_product_efficient_attention": "memory_efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_attention_math": "math",
    "aten::_scaled_dot_product_attention_math_for_mps": "math",
    "aten::_scaled_dot_product_fused_attention_overrideable": "overrideable",
    "aten::_native_multi_head_attention": "native_multi_head",
}
"""Operator as the profiler names it to the kernel's name; the last is what nn.MultiheadAttention does in evaluation mode"""


class PreferredAttention(Reclassed):
    """Runs a model's forward pass with one kernel of attention, and with ``math`` where that one cannot."""

    def __init__(self, modules: Sequence[nn.Module], kernel: str) -> None:
        super().__init__(modules)
        self._kernels = list(dict.fromkeys((KERNELS[kernel], SDPBackend.MATH)))

    def forward_of(self, kind: type[nn.Module]) -> Callable[..., Any]:
        """Return the forward pass within torch's own context manager."""
        kernels = self._kernels

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with sdpa_kernel(kernels):
                return kind.forward(self, *args, **kwargs)

        return forward


def kernels_of(function: Callable[[], object]) -> dict[str, int]:
    """Return how often each kernel of attention ran during a call, as torch's profiler saw it.

    Raises:
        RuntimeError: another profiler runs, or the function starts one.
    """
    profiler = recorded("torchobs.tune, kernels of attention", function)
    events = profiler.events() or ()
    return dict(Counter(_OPERATORS[event.name] for event in events if event.name in _OPERATORS))
