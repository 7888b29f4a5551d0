"""What torch's operators can do to finite values, and how they are written in Python."""

from __future__ import annotations

STRONG = frozenset({
    "log", "log2", "log10", "log1p", "div", "reciprocal", "exp", "exp2", "expm1", "pow", "sqrt", "rsqrt", "acos", "asin",
    "acosh", "atanh", "tan", "sinh", "cosh", "lgamma", "digamma", "polygamma", "logit", "special_logit", "xlogy",
    "special_xlogy", "logsumexp", "softmax", "log_softmax", "std", "var", "std_mean", "var_mean", "remainder", "fmod",
    "linalg_inv_ex", "linalg_vector_norm", "norm", "linalg_solve_ex", "linalg_cholesky_ex", "linalg_eigh", "linalg_svd",
    "cumprod", "prod", "logcumsumexp", "erfinv", "binary_cross_entropy", "nll_loss", "nll_loss_nd", "nll_loss2d",
    "poisson_nll_loss", "kl_div", "addcdiv", "scaled_dot_product_attention", "hypot", "ldexp",
})  # fmt: skip
"""Operators that make infinity or NaN of ordinary finite values; all others do so by overflow only, or not at all"""

PASSING = frozenset({
    "view", "reshape", "unsafe_view", "expand", "permute", "transpose", "t", "unsqueeze", "squeeze", "slice", "select",
    "clone", "to_copy", "contiguous", "cat", "stack", "split", "split_with_sizes",
    "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "unbind", "chunk", "alias", "as_strided",
    "repeat", "flip", "roll", "gather", "index", "index_select", "neg", "abs", "relu", "leaky_relu", "gelu", "silu", "tanh",
    "sigmoid", "max_pool2d_with_indices", "adaptive_avg_pool2d", "avg_pool2d", "unfold", "narrow", "copy_slices", "flatten",
    "constant_pad_nd", "reflection_pad2d", "diagonal", "tril", "triu", "sin", "cos", "clamp", "elu", "hardtanh", "threshold",
    "native_layer_norm", "native_batch_norm", "native_group_norm", "cudnn_batch_norm", "embedding", "movedim", "detach",
    "upsample_nearest2d", "upsample_bilinear2d", "amax", "amin", "max", "min", "sort", "topk",
})  # fmt: skip
"""Operators that make nothing non-finite of finite operands: what comes out has come in"""

RESHAPING = frozenset({
    "view", "reshape", "unsafe_view", "expand", "permute", "transpose", "t", "unsqueeze", "squeeze", "clone", "to_copy",
    "contiguous", "alias", "flatten", "neg", "movedim", "detach", "flip", "roll", "repeat",
})  # fmt: skip
"""Of those, operators whose result has all elements of the operand"""

MASKABLE = frozenset({"softmax", "log_softmax", "logsumexp", "scaled_dot_product_attention"})
"""Operators to which negative infinity is a mask, and which give NaN where everything is masked"""

OPAQUE = {"compiled_function": "compiled region", "checkpoint_function": "checkpointed region"}
"""Nodes that stand for many operators, and keep nothing by name: what they are"""

ADDITIVE = frozenset({"add", "sub", "rsub"})

CHOOSING = frozenset({"cat", "stack", "where", "maximum", "minimum"})
"""Operators of several tensors whose result has only elements of these"""

RISKY_BACKWARD = {
    "sqrt": 0, "hypot": 0, "pow": 1, "log": 1, "div": 1, "acos": 1, "asin": 1, "reciprocal": 1, "xlogy": 1, "log2": 1,
    "log10": 1, "log1p": 1, "linalg_eigh": 1, "linalg_svd": 1, "acosh": 1, "atanh": 1, "logit": 1, "rsqrt": 2, "exp": 2,
    "logsumexp": 2, "prod": 2, "cumprod": 2,
}  # fmt: skip
"""Operators whose derivative is infinite or undefined at some finite value, the likeliest first: sqrt at 0.

Torch makes that of norms, deviations, distances and ``atan2`` 0, and bounds that of the binary cross entropy.
"""

_WRITTEN = {
    "add": ("+", "add"), "sub": ("-", "sub"), "rsub": ("-", "rsub"), "mul": ("*", "mul"), "div": ("/", "div", "true_divide"),
    "reciprocal": ("/", "reciprocal"), "pow": ("**", "pow", "square"), "mm": ("@", "matmul", "mm", "linear"),
    "bmm": ("@", "matmul", "bmm", "einsum", "baddbmm"), "addmm": ("linear", "addmm"), "native_layer_norm": ("layer_norm",),
    "native_batch_norm": ("batch_norm",), "native_group_norm": ("group_norm",), "linalg_vector_norm": ("norm", "vector_norm"),
    "log_softmax": ("log_softmax", "cross_entropy"), "nll_loss": ("nll_loss", "cross_entropy"),
    "nll_loss2d": ("nll_loss", "cross_entropy"), "binary_cross_entropy_with_logits": ("binary_cross_entropy_with_logits",),
    "convolution": ("conv1d", "conv2d", "conv3d", "_conv_forward"), "neg": ("-", "neg"), "matmul": ("@", "matmul"),
    "index": ("[]",), "select": ("[]", "select"), "slice": ("[]",), "masked_fill": ("masked_fill", "masked_fill_"),
    "remainder": ("%", "remainder"), "logsumexp": ("logsumexp",), "euclidean_dist": ("cdist",), "special_logit": ("logit",),
    "linalg_inv_ex": ("inv", "inverse"), "linalg_cholesky_ex": ("cholesky",), "linalg_eigh": ("eigh", "eigvalsh"),
    "std_mean": ("std_mean", "std"), "var_mean": ("var_mean", "var"), "special_xlogy": ("xlogy",),
}  # fmt: skip


def spellings(operator: str) -> tuple[str, ...]:
    """Return how Python code calls an operator: names of functions and methods, or symbols."""
    return _WRITTEN.get(operator, (operator, operator + "_"))
