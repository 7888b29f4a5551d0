"""The compiler's words as torch 2.13 wrote them: what class they are, and that no value and no source text is left."""

from __future__ import annotations

import pytest

from torchobs import catalog
from torchobs.probes.compile.compile import (
    MAX_LENGTH,
    REMEDIES,
    read_break,
    read_failure,
    read_guard,
    stage_seconds,
)

GUARDS = [
    ("0/0: tensor 'x' size mismatch at index 0. expected 3, actual 4", "shape", "x: size at index 0"),
    ("0/2: tensor 'self._buffers['seen']' rank mismatch. expected 1, actual 2", "shape", "self._buffers['seen']: rank"),
    ("0/1: tensor 'x' dtype mismatch. expected Float, actual Double", "tensor", "x: dtype"),
    ("0/3: tensor 'x' requires_grad mismatch. expected requires_grad=0", "tensor", "x: requires_grad"),
    ("0/3: tensor 'x' dispatch key set mismatch. expected A, actual B", "tensor", "x: dispatch key set"),
    ("0/0: Duplicate tensors found: ['x', 'y']", "tensor", "Duplicate tensors found: […, …]"),
    ("0/4: GLOBAL_STATE changed: grad_mode ", "global_state", "grad_mode"),
    ("1/0_1: GLOBAL_STATE changed: autocast(cpu)_enabled ", "global_state", "autocast(cpu)_enabled"),
    (
        "0/6: ___check_type_id(n, 139854489), type=<class 'int'>  # y = x*n  # a.py:1 in f\nUser stack trace:\n  File",
        "type",
        "type(n) is int",
    ),
    (
        "0/4: expected type of 'm._parameters['bias']' to be a tensor type, ' but found <class 'NoneType'>",
        "type",
        "m._parameters['bias'] is a tensor",
    ),
    ("0/0: d is None                            # if d: y = y + d.get('k',0)  # a.py:14 in f", "value", "d is None"),
    ("0/1: len(d) == 1                          # if d: y = 1", "value", "len(d) == …"),
    ("0/0: G['SCALE'] == 3.5                    # def g(x): return x*SCALE", "value", "G['SCALE'] == …"),
    ("0/0: mode == 'my secret'                  # if mode == 'x'", "value", "mode == …"),
    ('0/0: mode == "it\'s # secret"', "value", "mode == …"),
    ("0/0: d['a b; secret'] == -1e-05", "value", "d[…] == …"),
    ("0/0: ___check_obj_id(self.act, 139854489161376), type=<class 'function'>", "value", "id(self.act)"),
    ("0/0: 2 <= x.size()[1] <= 4096", "shape", "… <= x.size()[1] <= …"),
    ("0/0: ___check_torch_function_mode_stack()", "global_state", "___check_torch_function_mode_stack()"),
    ("0/0: BACKEND_MATCH failure: torch.compile detected different backend callables. Cached: /home/me", "other", "backend"),
    ("Unable to find recompilation reasons", "other", "Unable to find recompilation reasons"),
]


@pytest.mark.parametrize(("reason", "kind", "expression"), GUARDS)
def test_a_guard_is_read(reason: str, kind: str, expression: str) -> None:
    """Its kind, and its expression without the values that it compared."""
    assert read_guard(reason) == (kind, expression)


def test_every_kind_of_guard_has_its_remedy() -> None:
    """The catalog, the reader and the words to the log go together."""
    assert tuple(REMEDIES) == catalog.COMPILE_GUARDS
    assert {kind for _, kind, _ in GUARDS} == set(catalog.COMPILE_GUARDS)


def test_an_endless_expression_is_cut() -> None:
    """A guard over a hundred symbols is not a kilobyte of an event."""
    guard = read_guard("0/0: " + " and ".join(f"s{number} < s{number + 1}" for number in range(500)))
    assert guard.kind == "shape"
    assert len(guard.expression) == MAX_LENGTH


BREAKS = [
    ("generic_jump TensorVariable()", "data_dependent"),
    ("Unsupported Tensor.item() call with capture_scalar_outputs=False\n  Explanation: secret", "data_dependent"),
    ("Dynamic shape operator\n  Explanation: ...", "data_dependent"),
    ("Failed to trace builtin operator\n  Explanation: print('secret')", "call"),
    ("Attempted to call function marked as skipped", "call"),
    ("Call to `torch._dynamo.graph_break()`", "call"),
    ("call_function BuiltinVariable(print) [ConstantVariable(str: 'secret')] {}", "call"),
    ("Skip calling `torch.compiler.disable()`d function", "call"),
    ("Reconstruction failure", "other"),
    ("step_unsupported", "other"),
]


@pytest.mark.parametrize(("reason", "kind"), BREAKS)
def test_a_graph_break_is_read(reason: str, kind: str) -> None:
    """Its class, and the first line of its reason without values."""
    found, message = read_break(reason)
    assert found == kind
    assert message.partition("(")[0] == reason.partition("\n")[0].partition("(")[0]
    assert "secret" not in message


@pytest.mark.parametrize(
    ("fail_type", "fail_reason", "expected"),
    [
        ("Unsupported", "Dynamo recompile limit exceeded\n  Explanation: ...", "recompile_limit"),
        ("FailOnRecompileLimitHit", "Hard failure due to fullgraph=True", "recompile_limit"),
        ("Unsupported", "Failed to trace builtin operator\n limit exceeded", "unsupported"),
        ("UserError", "", "unsupported"),
        ("BackendCompilerFailed", "backend='inductor' raised", "error"),
        ("InternalTorchDynamoError", "AttributeError", "error"),
    ],
)
def test_a_failure_is_read(fail_type: str, fail_reason: str, expected: str) -> None:
    """Given up because it cannot be compiled, because it was too often, or because the compiler broke."""
    assert read_failure(fail_type, fail_reason) == expected


DYNAMO, AOT, BACKWARD = (f"{name}_cumulative_compile_time_us" for name in ("dynamo", "aot_autograd", "backward"))
INDUCTOR, KERNELS = "inductor_cumulative_compile_time_us", "triton_compile_time_us"


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        # an inductor build, its backward, and a load from the cache, as measured
        (
            {DYNAMO: 29_997_248, AOT: 29_506_447, INDUCTOR: 28_057_412, KERNELS: 1_699_157},
            (0.490801, 1.449035, 26.358255, 1.699157),
        ),
        ({BACKWARD: 2_289_413, INDUCTOR: 2_278_998, KERNELS: 1_738_810}, (0.0, 0.010415, 0.540188, 1.738810)),
        ({DYNAMO: 150_414, AOT: 36_817, INDUCTOR: None, KERNELS: 495}, (0.113597, 0.036322, 0.0, 0.000495)),
        ({DYNAMO: 72_991, AOT: 762}, (0.072229, 0.000762, 0.0, 0.0)),
        ({DYNAMO: 3008}, (0.003008, 0.0, 0.0, 0.0)),
        ({DYNAMO: 10, AOT: 20}, (0.0, 2e-5, 0.0, 0.0)),
        ({}, (0.0, 0.0, 0.0, 0.0)),
    ],
)
def test_stages_add_up(record: dict[str, int | None], expected: tuple[float, ...]) -> None:
    """Torch's times hold one another; ours are what each stage took by itself."""
    spent = stage_seconds(record)
    assert [spent[stage] for stage in catalog.COMPILE_STAGES] == pytest.approx(expected)
    assert sum(spent.values()) == pytest.approx(max([*filter(None, record.values()), 0]) / 1e6)


def test_kernels_tuned_while_the_model_runs_are_kernels() -> None:
    """Autotuning and the recording of CUDA graphs belong to no compilation."""
    assert stage_seconds({"is_runtime": True, "duration_us": 250_000}) == {"kernels": 0.25}
