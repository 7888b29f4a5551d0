"""``@checked``: a function whose tensors are checked by its annotations."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from torchobs.guard.contracts import Contract, refuse
from torchobs.guard.tensor_values import Violation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

P = ParamSpec("P")
R = TypeVar("R")
_RETURN = "return"


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Check the arguments and the result of a function by their annotations.

    An annotation is one of jaxtyping's, ``Float[Tensor, "batch 3 height width"]``, which says dtype and shape (jaxtyping has to
    be installed, as by ``pip install torchobs[guard]``), or ``Annotated[Tensor, Contract(...)]``, which says more. Named
    dimensions have one size in one call, in arguments and result: those of contracts among themselves, and those of
    jaxtyping's annotations among themselves. Of ``Optional`` and of other unions one alternative has to match; ``None`` is
    allowed by them, or as a default. What is within lists, tuples and dictionaries is not checked. On a device, only a contract
    that asks for values makes a transfer.

    Raises:
        ContractError: at a call, for what does not match.
        TypeError: at decoration, if no annotation can be checked, or for a coroutine function.
    """
    if not callable(function):
        raise TypeError(f"checked() takes a function, not {type(function).__name__}")
    if inspect.iscoroutinefunction(function):
        raise TypeError(f"{_name_of(function)} is a coroutine function: check inside of it, with `await contract.acheck(x)`")
    signature = inspect.signature(function)
    expected = _expected(function, signature)
    if not expected:
        raise TypeError(f"{_name_of(function)} has no annotation to check: Annotated[Tensor, Contract(...)], or jaxtyping's")
    has_types = any(one.kind is not None and one.is_jaxtyping for each in expected.values() for one in each.alternatives)

    @functools.wraps(function)
    def check(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)  # raises what the call itself would
        checks = _Checks(expected, has_types=has_types)
        with checks:
            checks.check(_by_name(signature, bound.arguments))
            result = function(*args, **kwargs)
            checks.check([(_RETURN, result)])
        return result

    return check


@dataclass(frozen=True)
class _Alternative:
    """One member of a union, or all of an annotation that is none."""

    kind: Any
    """a class, or a type of jaxtyping's; None for any"""
    contracts: tuple[Contract, ...]
    is_jaxtyping: bool

    def violations(self, value: Any, name: str, sizes: dict[str, object]) -> list[Violation]:
        if self.kind is not None and not isinstance(value, self.kind):
            return [_mismatch(name, value, self.kind)]
        return [found for contract in self.contracts for found in contract.violations(value, name, sizes)]


@dataclass(frozen=True)
class _Expected:
    """What an annotation says."""

    alternatives: tuple[_Alternative, ...]
    optional: bool

    def violations(self, value: Any, name: str, sizes: dict[str, object]) -> list[Violation]:
        if value is None and self.optional:
            return []
        if len(self.alternatives) == 1:
            return self.alternatives[0].violations(value, name, sizes)
        found: list[Violation] = []
        for each in self.alternatives:
            tried = dict(sizes)  # what an alternative that does not match has named counts for nothing
            wrong = each.violations(value, name, tried)
            if not wrong:
                sizes.update(tried)
                return []
            found += wrong
        what = "shape" if any(one.what == "shape" for one in found) else found[0].what
        wanted = " or ".join(dict.fromkeys(one.expected for one in found))
        return [Violation(name, what, wanted, " and ".join(dict.fromkeys(one.found for one in found)))]


class _Checks:
    """The sizes of the named dimensions of one call: ours, and jaxtyping's in its own context."""

    def __init__(self, expected: dict[str, _Expected], *, has_types: bool) -> None:
        self._expected = expected
        self._sizes: dict[str, object] = {}
        self._context: Any = None
        if has_types:
            import jaxtyping

            self._context = jaxtyping.jaxtyped("context")

    def __enter__(self) -> None:
        if self._context is not None:
            self._context.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._context is not None:
            self._context.__exit__(*error)

    def check(self, values: Iterable[tuple[str, Any]]) -> None:
        found: list[Violation] = []
        for name, value in values:
            if name in self._expected:
                found += self._expected[name].violations(value, name, self._sizes)
        if found:
            refuse(tuple(found))


def _expected(function: Callable[..., Any], signature: inspect.Signature) -> dict[str, _Expected]:
    """Return what is to be checked, by argument; the result is ``return``."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        advice = "import it at run time, not for type checkers alone"
        raise TypeError(f"an annotation of {_name_of(function)} cannot be read, since {error}: {advice}") from error
    found = {}
    for name, hint in hints.items():
        members = list(_members(hint))
        alternatives = tuple(_alternative(member) for member in members if member is not type(None))
        if any(each.contracts or each.is_jaxtyping for each in alternatives):
            missing = name in signature.parameters and signature.parameters[name].default is None
            found[name] = _Expected(alternatives, optional=missing or type(None) in members)
    return found


def _members(hint: Any) -> Iterator[Any]:
    """Yield the alternatives of an annotation, each with the contracts that hold for all of them."""
    if get_origin(hint) in {Union, UnionType}:
        for part in get_args(hint):
            yield from _members(part)
    elif get_origin(hint) is Annotated and get_origin(get_args(hint)[0]) in {Union, UnionType}:
        for part in _members(get_args(hint)[0]):
            parameters = (part, *get_args(hint)[1:])
            yield part if part is type(None) else Annotated[parameters]
    else:
        yield hint


def _alternative(hint: Any) -> _Alternative:
    contracts: tuple[Contract, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *more = get_args(hint)
        contracts = tuple(each for each in more if isinstance(each, Contract))
    is_jaxtyping = any(base.__module__.startswith("jaxtyping.") for base in type(hint).__mro__)
    kind = hint if is_jaxtyping else get_origin(hint) or hint
    if contracts and not is_jaxtyping:
        kind = None  # the contract itself wants a tensor
    return _Alternative(kind if isinstance(kind, type) else None, contracts, is_jaxtyping)


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _by_name(signature: inspect.Signature, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the arguments by their parameter's name, those of ``*args`` and ``**kwargs`` one by one."""
    for name, value in arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            yield from ((name, each) for each in value)
        elif kind is inspect.Parameter.VAR_KEYWORD:
            yield from ((name, each) for each in value.values())
        else:
            yield name, value


def _mismatch(name: str, value: Any, expected: Any) -> Violation:
    if not isinstance(value, torch.Tensor) or not hasattr(expected, "dtypes"):
        return Violation(name, "type", expected.__name__, type(value).__name__)
    dtype = str(value.dtype).removeprefix("torch.")
    # jaxtyping's names for dtypes are those of NumPy, "bool" aside
    allowed = getattr(expected, "dtypes", ())
    what = "shape" if not isinstance(allowed, (list, tuple)) or dtype in allowed or dtype == "bool" else "dtype"
    return Violation(name, what, expected.__name__, f"{dtype} {tuple(value.shape)}")
