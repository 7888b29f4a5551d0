"""Forward stamps: when the first module is called in a step, in a few steps a second.

Without a forward hook nothing shows where a forward pass begins, and a hook for every call would cost each module some
microseconds. So now and then an optimizer step sets one entry of torch's global forward pre-hooks, and the first call with
gradients in the training thread, outside of a fetch, takes it away again: 0.15 µs to set, 2 µs for the call, nothing in other
steps. The record of a plain step has the time (``flight.forward``).

There are no stamps from the first ``torch.compile`` or ``torch.export`` on: Dynamo would see the hook, warn of it, and refuse
to export. While torch traces otherwise the hook does nothing. Calls without gradients (an evaluation, a teacher), and those of
modules without a trained parameter (a metric), are passed over; after ``MOST_REFUSED`` of them the stamp is given up.
"""

from __future__ import annotations

import functools
import random
import sys
from functools import partial
from itertools import islice
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from torchobs.probes.timeline import FORWARD
from torchobs.support.graph_safe import dispatch_modes, no_hook_in_graphs
from torchobs.support.import_hooks import after_import, cancel
from torchobs.taps.patch import Patch

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from torchobs.probes.context import ProbeContext

LEAST_NS, MOST_NS = 50_000_000, 150_000_000
"""Least and most time between two stamps, at random, so that they do not run in step with the loop"""
MOST_REFUSED = 64
_MOST_PARAMETERS = 64
"""Most parameters of a module that are searched for a trained one: a metric has none, and is no forward pass"""
_COMPILERS = {"torch._dynamo.eval_frame": "__init__", "torch.export._trace": "_export"}
"""Functions that begin to compile or export: by module, of its class ``OptimizeContext`` or its own function"""


class ForwardStamps:
    """Asks for stamps in the sampler thread, makes them in the training thread; a part of ``PhaseProbe``."""

    def __init__(self, context: ProbeContext) -> None:
        from torch.nn.modules import module  # torch is optional until training begins
        from torch.utils.hooks import RemovableHandle

        self._context, self._recorder, self._training = context, context.recorder, context.training
        self._hooks: MutableMapping[int, Any] = module._global_forward_pre_hooks
        self._key = RemovableHandle(self._hooks).id
        breaker = context.breaker("phases")
        self._hook, self._modes = no_hook_in_graphs(breaker.guard(self._called)), dispatch_modes()
        self._chance, self._due_ns, self._refused = random.Random(), 0, 0  # noqa: S311  # nothing secret, and not the script's
        self._wanted, self._closed = False, False
        self._sampled_step = self._asked_at = self._due_before = 0
        context.hooks.before_step.register(breaker, self._before_step, guarded=True)  # it calls nothing that raises
        self._patches: list[Patch] = []
        self._imports = [after_import(name, breaker.guard(partial(self._watch, name))) for name in _COMPILERS]

    def sample(self) -> None:
        """Ask for a stamp in one of the next steps, if one is due."""
        if self._closed or has_compiled():
            self.close()
            return
        now_ns = monotonic_ns()
        done, self._sampled_step = self._recorder.step - self._sampled_step, self._recorder.step
        if now_ns < self._due_ns or self._key in self._hooks:
            return
        self._due_ns = now_ns + self._chance.randint(LEAST_NS, MOST_NS)
        # not the very next step, in which this thread's round still takes the GIL now and then
        hook, self._asked_at = self._context.hooks.before_step, self._sampled_step + self._chance.randint(0, max(0, done))
        if hook.due_at > self._asked_at:
            self._due_before, hook.due_at = hook.due_at, self._asked_at
        self._wanted = True

    def close(self) -> None:
        """Make no more stamps. Idempotent."""
        self._closed, self._training.to_call_ns = True, 0
        self._take_away()

    def remove(self) -> None:
        """Make no more stamps, and leave torch as it was."""
        self.close()
        for handle in self._imports:
            cancel(handle)
        while self._patches:
            self._patches.pop().undo()

    def _watch(self, name: str) -> None:
        owner, attribute = sys.modules[name], _COMPILERS[name]
        if attribute == "__init__":
            owner = getattr(owner, "OptimizeContext", None)  # type: ignore[assignment]  # a class
        if self._closed or not hasattr(owner, attribute):
            return

        def watched(original: Any) -> Any:
            @functools.wraps(original)
            def begin(*args: Any, **kwargs: Any) -> Any:
                self.close()
                return original(*args, **kwargs)

            return begin

        self._patches.append(Patch(owner, attribute, watched, nests=True))

    def _before_step(self, _optimizer: object, within_closure: bool) -> None:  # noqa: FBT001  # a listener
        if not self._wanted or self._recorder.step < self._asked_at:
            return
        self._wanted, hook = False, self._context.hooks.before_step
        if hook.due_at == self._asked_at:  # which no other listener has set meanwhile
            hook.due_at = self._due_before
        if not (within_closure or self._closed or self._training.backwards):
            self._refused = 0
            self._hooks[self._key] = self._hook

    def _called(self, module: Any, _args: object) -> None:
        """Stamp the step, if this is a module's call in training."""
        import torch  # as above

        now_ns = monotonic_ns()
        if (
            torch.is_grad_enabled()
            and get_ident() == self._training.thread
            and not (
                self._recorder.in_fetch()
                or self._modes()
                or self._training.backwards
                or torch._C._get_tracing_state() is not None
            )
            and any(parameter.requires_grad for parameter in islice(module.parameters(), _MOST_PARAMETERS))
        ):
            self._take_away()
            self._recorder.plain.called_ns = now_ns
            phase, since_ns = self._recorder.phase()
            self._training.to_call_ns = now_ns - since_ns if phase == FORWARD else 0
            return
        self._refused += 1
        if self._refused >= MOST_REFUSED:
            self._take_away()

    def _take_away(self) -> None:
        self._hooks.pop(self._key, None)


def has_compiled() -> bool:
    """Return whether ``torch.compile`` or an export was used in this process."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return any(backend is not None for backend in list(getattr(frames, "cached_backends", {}).values()))
