"""What a session touches in the process that it is in."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import dataloader


def surface() -> dict[str, Any]:
    """Everything of torch, sys and threading that a session touches."""
    from torch._dynamo import trace_rules
    from torch.amp import grad_scaler

    return {
        "pre": dict(torch_optimizer._global_optimizer_pre_hooks),
        "post": dict(torch_optimizer._global_optimizer_post_hooks),
        "parameters built": dict(torch.nn.modules.module._global_parameter_registration_hooks),
        "modules built": dict(torch.nn.modules.module._global_module_registration_hooks),
        "backward": torch.autograd.backward,
        "next": vars(dataloader._BaseDataLoaderIter)["__next__"],
        "iter": vars(dataloader.DataLoader)["__iter__"],
        "train": vars(torch.nn.Module)["train"],
        "scaler step": vars(grad_scaler.GradScaler)["step"],
        "scaler scale": vars(grad_scaler.GradScaler)["scale"],
        "clip": torch.nn.utils.clip_grad._get_total_norm,
        "skipped": list(trace_rules.SKIP_DIRS),
        "expression": trace_rules.SKIP_DIRS_RE.pattern,
        "excepthook": sys.excepthook,
        "thread excepthook": threading.excepthook,
        "meta path": list(sys.meta_path),
        "threads": {thread.name for thread in threading.enumerate() if thread.name.startswith("torchobs")},
    }


def torch_hooks() -> dict[str, Any]:
    """What of that is torch's."""
    ours_while_active = {"excepthook", "thread excepthook", "meta path", "threads", "skipped", "expression"}
    return {name: value for name, value in surface().items() if name not in ours_while_active}
