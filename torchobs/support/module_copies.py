"""Copy a module so that the copy can be run while the training, in whichever thread, notices nothing of it.

Copied are the modules, their buffers and whatever Python objects they hold; parameters are the same, and other tensors too, but
cut off from their graph. Hooks of the user's are left out, and so is the compiler. What cannot be copied for certain (a random
generator, a file, a lock, an object of a class written in C) ends the copying: running it would change something.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict, defaultdict, deque
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, NoneType
from typing import TYPE_CHECKING, Any, cast

from torchobs.support.import_hooks import imported

if TYPE_CHECKING:
    import torch
    from torch import nn

MOST_OBJECTS = 20_000
"""A trainer that a module refers to has all of a program behind it"""
_PLAIN = frozenset({NoneType, bool, int, float, complex, str, bytes, range, slice, type(Ellipsis)})
_SHARED = (type, Enum, ModuleType, BuiltinFunctionType, CodeType)
_OF_TORCH = frozenset({"device", "dtype", "layout", "memory_format", "Size"})
_HOOKS = frozenset(
    {
        *("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs"),
        *("_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called", "_state_dict_hooks", "_state_dict_pre_hooks"),
        *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    }
)
_COMPILED = "OptimizedModule"


class NotCopyableError(TypeError):
    """Something is not known to be left alone by a run of its copy."""


def is_constant(value: Any) -> bool:
    """Return True for an object that cannot change: a number, a text, one of torch's types, devices and sizes."""
    kind = type(value)
    return kind in _PLAIN or (kind.__module__ == "torch" and kind.__name__ in _OF_TORCH)


class ModuleCopier:
    """Copies modules and their arguments; what several refer to is copied once."""

    def __init__(self) -> None:
        import torch  # torch is optional until training begins

        self._torch = torch
        self._copies: dict[int, Any] = {}
        self._originals: list[Any] = []
        """So that no id is used again meanwhile"""
        self.buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Each buffer's copy and the buffer"""

    def copy(self, module: nn.Module) -> nn.Module:
        """Return a copy. Raises :class:`NotCopyableError`."""
        for each in module.modules():  # first, since lists and attributes may hold them, too
            for buffer in each._buffers.values():  # noqa: SLF001  # there is no other way to those that are no attribute
                if buffer is not None and id(buffer) not in self._copies:
                    made = buffer.detach().clone()
                    self._keep(buffer, made)
                    self.buffers.append((made, buffer))
        return cast("nn.Module", self._copy(module))

    def copy_arguments(self, arguments: Any) -> Any:
        """Return a copy of what the module is called with. Raises :class:`NotCopyableError`."""
        return self._copy(arguments)

    def _keep(self, original: Any, made: Any) -> Any:
        self._copies[id(original)] = made
        self._originals.append(original)
        if len(self._originals) > MOST_OBJECTS:
            raise NotCopyableError(MOST_OBJECTS)
        return made

    def _copy(self, value: Any) -> Any:
        if self._is_shared(value):
            return value
        if id(value) in self._copies:
            return self._copies[id(value)]
        if isinstance(value, self._torch.Tensor):
            return value.detach().requires_grad_() if value.grad_fn is not None else value
        if isinstance(value, self._torch.nn.Module):
            inner = dict(value.named_children()).get("_orig_mod") if type(value).__name__ == _COMPILED else None
            return self._copy(inner) if inner is not None else self._module(value)
        return self._function(value) if callable(value) else self._container(value)

    def _is_shared(self, value: Any) -> bool:
        """Return True for what does not change, or of which every change is seen: a scripted module's attributes are in C++."""
        torch = self._torch
        if is_constant(value) or isinstance(value, _SHARED):
            return True
        is_of_parameter = isinstance(value, weakref.ref) and isinstance(value(), (NoneType, torch.Tensor))
        return is_of_parameter or isinstance(value, (torch.jit.ScriptModule, torch.jit.ScriptFunction))

    def _function(self, value: Any) -> Any:
        if isinstance(value, FunctionType):
            for cell in value.__closure__ or ():
                self._require_harmless(cell.cell_contents)
            return value
        if isinstance(value, MethodType):
            return MethodType(value.__func__, self._copy(value.__self__))
        if type(value) is functools.partial:
            return functools.partial(self._copy(value.func), *self._copy(value.args), **self._copy(value.keywords))
        return self._object(value)

    def _require_harmless(self, value: Any) -> None:
        """Raise for what a function that is not copied could change, or could run besides its copy."""
        if self._copy(value) is not value:
            raise NotCopyableError(type(value))

    def _container(self, value: Any) -> Any:
        kind, numpy = type(value), imported("numpy")
        if kind in {list, set, deque}:
            made = self._keep(value, kind(*([[], value.maxlen] if kind is deque else [])))
            (made.update if kind is set else made.extend)(self._copy(each) for each in list(value))
            return made
        if kind is defaultdict or (isinstance(value, dict) and not isinstance(value, defaultdict)):
            return self._mapping(value)
        if kind in {tuple, frozenset}:
            return kind(self._copy(each) for each in value)
        if isinstance(value, tuple) and hasattr(kind, "_make"):
            return kind._make(self._copy(each) for each in value)
        if numpy is not None and isinstance(value, (numpy.generic, numpy.ndarray)) and not value.dtype.hasobject:
            return self._keep(value, value.copy())
        return self._object(value)

    def _mapping(self, value: dict[Any, Any]) -> Any:
        """Return a copy of a dictionary, also of a class of its own, whose methods are not called: it may be frozen."""
        kind: Any = type(value)
        if kind.__new__ not in {dict.__new__, OrderedDict.__new__} or any(vars(each).get("__slots__") for each in kind.__mro__):
            raise NotCopyableError(kind)
        made = self._keep(value, kind.__new__(kind))
        base: Any = OrderedDict if isinstance(value, OrderedDict) else dict
        for key, each in list(base.items(value)):
            base.__setitem__(made, self._copy(key), self._copy(each))
        for name, each in list(getattr(value, "__dict__", {}).items()):
            vars(made)[name] = self._copy(each)
        if isinstance(value, defaultdict):
            made.default_factory = self._copy(value.default_factory)
        return made

    def _object(self, value: Any) -> Any:
        """Return a copy of an object whose class is plain Python: all that it has is in its ``__dict__``."""
        kind = type(value)
        slots = any(vars(each).get("__slots__") for each in kind.__mro__)
        if not _is_plain_python(kind) or slots or not hasattr(value, "__dict__"):
            raise NotCopyableError(kind)
        made = self._keep(value, object.__new__(kind))
        vars(made).update((name, self._copy(each)) for name, each in list(vars(value).items()))
        return made

    def _module(self, module: nn.Module) -> Any:
        kind: Any = type(module)
        if not _is_plain_python(kind):
            raise NotCopyableError(kind)
        made = self._keep(module, object.__new__(kind))
        attributes = vars(made)
        for name, value in list(vars(module).items()):
            if name in _HOOKS:
                hooks = {} if value is None else value
                attributes[name] = type(hooks)((key, hook) for key, hook in hooks.items() if _is_torchs(hook))
            elif name == "_parameters":
                attributes[name] = type(value)(value)
            elif name in {"_buffers", "_modules"}:
                attributes[name] = type(value)((key, self._copy(each)) for key, each in value.items())
            else:
                attributes[name] = None if name == "_compiled_call_impl" else self._copy(value)
        return made


def _is_plain_python(kind: Any) -> bool:
    """Return True for a class of which an object can be made without a call of its code, and can end without one."""
    return bool(kind.__new__ == object.__new__) and not hasattr(kind, "__del__")


def _is_torchs(hook: Any) -> bool:
    """Return True for a hook without which the module is not what it is: ``weight_norm`` computes a weight by one."""
    return isinstance(hook, bool) or str(getattr(hook, "__module__", "")).startswith("torch.")
