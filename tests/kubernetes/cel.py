"""The injection policy without a cluster: its CEL compiled and evaluated by Google's own library, its JSON Patch applied.

What only an API server knows is not here: the cost of an expression, the defaults and the validation of the pod that comes of
it. `tests/e2e/test_injection.py` asks one.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cel_expr_python import cel
from cel_expr_python.ext import ext_strings

_QUANTITY = re.compile(r"([+-]?[0-9]+(?:\.[0-9]*)?|[+-]?\.[0-9]+)(m|u|n|k|[MGTPE]|[KMGTPE]i|[eE][+-]?[0-9]+)?")
_FACTORS = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3} | {
    f"{letter}{suffix}": float(base**power)
    for power, letter in enumerate("KMGTPE", 1)
    for suffix, base in (("i", 1024), ("", 1000))
    if (letter, suffix) != ("K", "")
}
_VARIABLE = re.compile(r"\bvariables\.")
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


def admitted(policy: Mapping[str, Any], pod: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pod as the policy changes it. Label selectors and namespaces are not looked at."""
    scope = _Scope(pod)
    for variable in policy["spec"]["variables"]:
        scope.define(variable["name"], variable["expression"])
    changed = copy.deepcopy(dict(pod))
    for mutation in policy["spec"]["mutations"]:
        for patch in scope.evaluated(_as_maps(mutation["jsonPatch"]["expression"])):
            _add(changed, patch)
    return changed


class _Scope:
    """What expressions see: `object`, of any type, and each `variables.NAME` of the type that its expression has."""

    def __init__(self, pod: Mapping[str, Any]) -> None:
        self._types, self._data = {"object": cel.Type.DYN}, {"object": pod}

    def define(self, name: str, expression: str) -> None:
        """Make a variable."""
        compiled = self._compiled(expression)
        self._data[f"variables_{name}"] = self._value(compiled, expression)
        self._types[f"variables_{name}"] = compiled.return_type()

    def evaluated(self, expression: str) -> Any:
        """Return the value of an expression; the test fails where it has none."""
        return self._value(self._compiled(expression), expression)

    def _compiled(self, expression: str) -> cel.Expression:
        environment = cel.NewEnv(variables=self._types, extensions=[ext_strings.ExtStrings()], functions=_FUNCTIONS)
        return environment.compile(_VARIABLE.sub("variables_", expression))

    def _value(self, compiled: cel.Expression, expression: str) -> Any:
        result = compiled.eval(data=self._data)
        assert result.type() != cel.Type.ERROR, f"{result.value()} in {expression}"
        return result.plain_value()


def _quantity(text: str) -> float:
    """Return the value of a Kubernetes quantity such as `300m` or `1Gi`."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no quantity")
    number, suffix = match[1], match[2] or ""
    return float(number + suffix) if suffix[:1] in "eE" and suffix[1:] else float(number) * _FACTORS[suffix]


def _function(
    name: str, result: cel.Type, *parameters: cel.Type, impl: Callable[..., Any], member: bool = False
) -> cel.FunctionDecl:
    return cel.FunctionDecl(name, [cel.Overload(f"test_{name}", result, list(parameters), is_member=member, impl=impl)])


# Of Kubernetes alone; a quantity is a number here.
_FUNCTIONS = [
    _function("quantity", cel.Type.DOUBLE, cel.Type.STRING, impl=_quantity),
    _function("isQuantity", cel.Type.BOOL, cel.Type.STRING, impl=lambda text: _QUANTITY.fullmatch(text) is not None),
    _function("compareTo", cel.Type.INT, cel.Type.DOUBLE, cel.Type.DOUBLE, impl=lambda a, b: (a > b) - (a < b), member=True),
]


def _as_maps(expression: str) -> str:
    """Return an expression with each `JSONPatch{op: a, path: b, value: c}`, a type of Kubernetes alone, as a map of CEL."""
    head, opening, rest = expression.partition("JSONPatch{")
    if not opening:
        return expression
    fields = list(_fields(rest))
    pairs = [(name.strip(), text) for name, _, text in (field.partition(":") for field in fields)]
    inside = ", ".join(f"{name!r}: dyn({_as_maps(text)})" for name, text in pairs)
    return f"{head}{{{inside}}}{_as_maps(rest[sum(map(len, fields)) + len(fields) :])}"


def _fields(text: str) -> Iterator[str]:
    """Yield what is between the commas until the brace that closes."""
    depth, start, quote = 0, 0, ""
    for position, letter in enumerate(text):
        if quote or letter in "'\"":
            quote = "" if letter == quote else quote or letter
            continue
        if (ends := depth == 0 and letter == "}") or (depth == 0 and letter == ","):
            yield text[start:position]
            start = position + 1
        if ends:
            return
        depth += _BRACKETS.get(letter, 0)


def _add(target: Any, patch: Mapping[str, Any]) -> None:
    """Apply an operation `add` of RFC 6902."""
    assert patch["op"] == "add"
    *parents, last = (part.replace("~1", "/").replace("~0", "~") for part in patch["path"].split("/")[1:])
    for part in parents:
        target = target[int(part)] if isinstance(target, list) else target[part]
    if not isinstance(target, list):
        target[last] = patch["value"]
    elif last == "-":
        target.append(patch["value"])
    else:
        target.insert(int(last), patch["value"])
