"""Whether a forward pass takes derivatives of its own (physics-informed networks, forces of an energy), by how it fails."""

from __future__ import annotations

import re

_AUTOGRAD_REFUSES = re.compile(r"requires?[ _]grad")
"""In what autograd says of a tensor that has no graph: "element 0 of tensors does not require grad", "requires_grad=False" """


def wants_gradients(message: str) -> bool:
    """Return True if an error's message is autograd's of a tensor without gradients: the pass works where they are on."""
    return _AUTOGRAD_REFUSES.search(message) is not None
