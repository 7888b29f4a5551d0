"""Operations of operators that torch's counter does not know or counts otherwise, and which of the others multiply.

A product and a sum are two operations, of complex numbers eight. Formulas are those of the matrix products that an operator is
made of; a backward pass has one for each gradient.
"""

# mypy: disable-error-code="no-untyped-call, unreachable"
# torch has no types for its dispatch modes

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchobs.support.storages import stored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_PRODUCTS = re.compile(
    r"(?:^|_)[a-z]*mm(?:_|$)|conv(?!ert)|matmul|attention|rnn_layer|_rnn$|_rnn_backward|lstm$|gru$|mkldnn_linear|^_trilinear$|_fft_"
    r"|[cp]dist|linalg_(?!vector_norm|check_errors)|cholesky|_solve$|matrix_exp|ormqr|householder"
)
"""Names of torch's operators that compute products: of matrices, convolutions, transforms, decompositions"""
_NO_PRODUCTS = {
    "aten",
    "prim",
    "prims",
    "rngprims",
    "profiler",
    "c10d",
    "_c10d_functional",
    "_c10d_functional_autograd",
    "fsdp",
    "torchobs",
}
"""Namespaces whose operators multiply only if :data:`_PRODUCTS` says so; of another library's operator nothing is known"""


class UnknownProducts(TorchDispatchMode):
    """Collects the names of operators without a formula that may multiply. Enter it before the counter, which decomposes."""

    def __init__(self, known: Iterable[Any]) -> None:
        super().__init__()
        self._known = set(known)
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and look at its name."""
        packet = getattr(func, "_overloadpacket", None)
        if packet is not None and packet not in self._known:
            name = packet.__name__
            if func.namespace not in _NO_PRODUCTS or (func.namespace == "aten" and _PRODUCTS.search(name)):
                self.names.add(str(packet))
        return func(*args, **(kwargs or {}))


def formulas() -> dict[Any, Callable[..., int]]:
    """Return formulas by operator, as ``FlopCounterMode(custom_mapping=...)`` takes them."""
    found = {}
    for formula, names in _FORMULAS.items():
        formula._get_raw = True  # type: ignore[attr-defined]  # called with tensors, not with their shapes
        found.update({getattr(torch.ops.aten, name): formula for name in names if hasattr(torch.ops.aten, name)})
    return found


def _each(x: Any) -> int:
    """Return the operations of one product and sum."""
    return 8 if x.is_complex() else 2


def _product(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Of the last two dimensions; of a sparse matrix only the stored elements are multiplied."""
    if a.layout is torch.strided:
        times = prod(a.shape) * b.shape[-1] if b.layout is torch.strided else stored(b)[-1].numel() * a.shape[-2]
    else:
        times = stored(a)[-1].numel() * b.shape[-1]
    return _each(a) * int(times)


def _added_product(_: Any, a: Any, b: Any, *__: Any, **___: Any) -> int:
    return _product(a, b)


def _vector_product(a: Any, *_: Any, **__: Any) -> int:
    return _each(a) * int(stored(a)[-1].numel())


def _added_vector_product(_: Any, a: Any, *__: Any, **___: Any) -> int:
    return _vector_product(a)


def _grouped_product(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Of the experts of a mixture: each row of ``a``, or column of ``b``, is multiplied by one of the matrices."""
    return _each(a) * int(prod(a.shape[-2:] if b.dim() == 2 else a.shape) * b.shape[-1])  # noqa: PLR2004  # one matrix, in groups


def _convolution_backward(gradient: Any, x: Any, weight: Any, *rest: Any, **_: Any) -> int:
    """As many as forward for the gradient of the input, and for that of the weight, in whatever number of groups."""
    is_transposed, mask = rest[4], rest[7]
    places = (x if is_transposed else gradient).shape[2:]
    return _each(x) * int(x.shape[0] * prod(places) * prod(weight.shape)) * (bool(mask[0]) + bool(mask[1]))


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Scores, and values weighted by them; the half that a causal mask hides counts, as in torch's own formula."""
    return _each(query) * int(prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1]))


def _attention_backward(_: Any, query: Any, key: Any, value: Any, *__: Any, **___: Any) -> int:
    """Scores again, gradients of query, key and scores, and of values: five products."""
    return _each(query) * int(prod(query.shape[:-1]) * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1]))


def _recurrent(x: Any, *weights: Any, **_: Any) -> int:
    """Each matrix of weights multiplies each step of each sequence once: those of the input, the state and a projection."""
    matrices = weights[0] if isinstance(weights[0], (list, tuple)) else weights[:2]
    return int(_each(x) * prod(x.shape[:-1]) * sum(each.numel() for each in matrices if each.dim() > 1))


def _recurrent_backward(x: Any, *weights: Any, **_: Any) -> int:
    return 2 * _recurrent(x, *weights)


def _encoder_layer(x: Any, width: int, _: int, *rest: Any, **__: Any) -> int:
    """The fused layer of ``nn.TransformerEncoderLayer``: four matrices of weights, and attention within each sequence."""
    feed_forward = int(rest[11].numel() + rest[13].numel())
    return _multi_head(x, x, x, width) + 2 * sum(_lengths(x)) * feed_forward


def _multi_head(query: Any, key: Any, _: Any, width: int, *__: Any, **___: Any) -> int:
    queries, keys = _lengths(query), _lengths(key)
    projections = 2 * width * width * (2 * sum(queries) + 2 * sum(keys))
    return projections + 4 * width * sum(one * other for one, other in zip(queries, keys, strict=True))


def _lengths(x: Any) -> Sequence[int]:
    """Return the length of each sequence of a batch, which may be a nested tensor."""
    return [int(each.shape[0]) for each in x.unbind()]


_FORMULAS: dict[Callable[..., int], tuple[str, ...]] = {
    _product: ("mm", "bmm"),
    _added_product: ("addmm", "addmm_", "baddbmm", "baddbmm_", "addbmm", "addbmm_", "_addmm_activation", "_sparse_addmm"),
    _grouped_product: ("_grouped_mm",),
    _vector_product: ("mv", "dot", "vdot"),
    _added_vector_product: ("addmv", "addmv_"),
    _convolution_backward: ("convolution_backward",),
    _attention: ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_fused_attention_overrideable"),
    _attention_backward: (
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "_scaled_dot_product_fused_attention_overrideable_backward",
    ),
    _recurrent: ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"),
    _recurrent_backward: ("mkldnn_rnn_layer_backward", "_cudnn_rnn_backward", "miopen_rnn_backward"),
    _encoder_layer: ("_transformer_encoder_layer_fwd",),
    _multi_head: ("_native_multi_head_attention",),
}
