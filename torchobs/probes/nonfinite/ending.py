"""Find what was not finite when an exception, or ``sys.exit(n)``, ends the training.

A script that checks its loss and raises has no backward pass in which it would be traced, and one whose weights became NaN may
end in its next forward pass (``torch.distributions`` refuses them) before a measurement has seen them. The values are still
there: in variables of the functions that are left, and in what the optimizers hold.
"""

from __future__ import annotations

import sys
import time
import traceback
from types import FrameType
from typing import TYPE_CHECKING, Any

from torchobs.probes.nonfinite.backward import bad_gradients
from torchobs.probes.nonfinite.locate import is_users, locals_of
from torchobs.probes.nonfinite.values import Condition, condition

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LONGEST_WAIT_S = 1.0
"""For a device that still computes: one that hangs must not keep the process from ending"""


def frames_of(error: BaseException | None) -> list[FrameType]:
    """Return the frames of the user's code that an exception leaves, or those that run now; innermost first."""
    if error is not None:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]
    else:
        frames = [frame for frame, _ in traceback.walk_stack(sys._getframe().f_back)]
    return [frame for frame in frames if is_users(frame.f_code)]


def bad_losses(frames: Iterable[FrameType]) -> list[Any]:
    """Return the scalars with a graph that are not finite, of the innermost function that has any."""
    for frame in frames:
        scalars = [value for value in _with_graph(frame) if value.numel() == 1]
        bad = [value for value in scalars if is_idle(value.device) and condition(value) is Condition.BAD]
        if bad:
            return bad
    return []


def refused_by_torch(error: BaseException | None) -> list[Any]:
    """Return what is not finite, and has a graph, of the innermost function of torch's that has refused such values.

    Empty if the exception was not raised by torch: values that are not finite are ordinary where nobody refuses them.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)] if error is not None else []
    if not frames or not isinstance(error, (ValueError, RuntimeError)) or is_users(frames[-1].f_code):
        return []
    for frame in reversed(frames):
        bad = [value for value in _with_graph(frame) if is_idle(value.device) and condition(value) is Condition.BAD]
        if bad or is_users(frame.f_code):
            return bad
    return []


def _with_graph(frame: FrameType) -> list[Any]:
    """Return the tensors with a graph that variables hold. Objects of the user's are not asked whether they are tensors."""
    import torch  # torch is optional until training begins

    with torch._C.DisableTorchFunctionSubclass():
        tensors = [value for value in locals_of(frame).values() if issubclass(type(value), torch.Tensor)]
        return [value for value in tensors if value.grad_fn is not None]


def bad_parameters(parameters: Sequence[Any]) -> list[Any]:
    """Return the parameters that are not finite."""
    idle = _idle_devices(each.device for each in parameters)
    return [each for each in parameters if each.device in idle and condition(each) is Condition.BAD]


def bad_gradients_left(parameters: Sequence[Any]) -> list[Any]:
    """Return the parameters whose gradients, which no optimizer has used yet, are not finite."""
    with_gradient = [each for each in parameters if each.grad is not None]
    idle = _idle_devices(each.grad.device for each in with_gradient)
    return bad_gradients(each for each in with_gradient if each.grad.device in idle)


def _idle_devices(devices: Iterable[Any]) -> set[Any]:
    """Return those that are idle, each of which is waited for once."""
    return {device for device in set(devices) if is_idle(device)}


def is_idle(device: Any) -> bool:
    """Return True if values can be read without waiting for longer than a second."""
    import torch  # torch is optional until training begins

    if device.type == "cpu":
        return True
    if device.type != "cuda":
        return False
    stream, until_s = torch.cuda.current_stream(device), time.monotonic() + LONGEST_WAIT_S
    try:
        while not stream.query():
            if time.monotonic() >= until_s:
                return False
            time.sleep(0.01)
    except RuntimeError:  # the device failed: that is what ends the training
        return False
    return True
