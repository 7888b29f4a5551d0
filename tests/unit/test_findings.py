"""The words of all findings."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.catalog.findings import KINDS, RECOMPILE_REMEDIES, Finding, Kind, as_subject, fields, origin_of, sentence

if TYPE_CHECKING:
    import pytest

GOLDEN = Path(__file__).parent / "golden" / "findings.txt"
SAMPLE: dict[str, object] = {
    "who": "Rank 1", "count": 1, "rank": "1", "step": 812, "where": "after step 812", "quiet": 69.0, "usual": 0.1,
    "phase": "data", "phase_s": 69.0, "moment": "2026-01-02 03:04:05", "lifetime": "2 h since init()",
    "signal": "SIGTERM", "code": 3,
    "raised": 'ValueError "no such file" at train.py:33', "cause": 'OSError "disk" at data.py:7',
    "exception": "ValueError at train.py:33", "waited": "it timed out after 30 s waiting for rank 0, which did not come",
    "unused": ["head.weight", "head.bias"], "unused_of": "Net", "handled": "RuntimeError at train.py:5",
    "place": "torch/nn/functional.py:10, called at train.py:33 in load", "meaning": "a segmentation fault", "kill_age": 1.0,
    "cgroup": 0.99, "machine": 0.98, "limit": 8 * 2**30, "thread": "loader", "others": 2, "at": "fc2", "unmoved": 3,
    "others_s": 0.1, "ago": 3.0, "hw.id": "GPU-1234", "reason": "lost", "xid": 79, "gpus": 2, "names": ["GPU-1", "GPU-2"],
    "pid": 4711, "how": "SIGKILL", "workers": 3, "probes": "gpu, amp", "items": ["12 events", "3 series"],
    "badge": "All well", "headline": "Training: 2 of 2 ranks alive.", "stacks": ["r0.stacks.txt"],
    "worker": "worker 1 (pid 20), then sleeping in futex", "command": "`torchobs stacks`", "took": 40.0, "more": 2,
    "now": 0.4, "steps": 640, "share": 0.46, "wait": 30.0, "age": 300.0, "lost": 40, "saves": 2,
    "why": "OSError", "needed": 4 * 2**30, "saved_step": 800, "format": "torch",
    "exception.type": "OSError", "device": "cuda:0", "requested": 2 * 2**30, "free": 2**30, "allocated": 70 * 2**30,
    "reserved": 74 * 2**30, "model": "parameters 20 GiB, gradients 20 GiB, optimizer state 40 GiB",
    "largest": "train.py:40, 30 GiB", "used": 60 * 2**20, "size": 64 * 2**20, "memory": "Host", "per_step": 3 * 2**20,
    "time_to_limit": 7200.0, "left": 7200.0, "tensor": "244 tensors float32[200000] on cpu, 186 MiB", "grown": 195 * 2**20,
    "line": "train.py:23 2,000 more, 95 MiB", "objects": ["100 Marked"], "location": "model.py:12", "guard": "shape",
    "expression": "x.size(0) == 32", "recompiles": 9, "remedy": "pad to a few sizes", "message": "call to print",
    "missing": 2, "here": 6, "expected": 8, "next": "0", "later": 3.0, "within": 2.0, "what": "A collective",
    "timeout": 30.0, "gave_up": "ranks 0 and 2",
    "waiting": "Rank 1 evaluates, and the other 2 ranks wait in backward of step 40.", "number": 41, "group": "default",
    "operations": "all_reduce on rank 0 and barrier on rank 1", "odd": "ranks 1 and 3", "norms": "rank 1: 2.5, 3: 2.7",
    "alike": 512, "factor": 1.7, "own": 0.2, "name": "NaN", "loss": 2.3, "rise": 40.0, "rise_usual": 1.2,
    "rise_value": 48.0, "rise_ago": 3, "rate": 10.0, "rate_usual": 1e-3, "rate_value": 1e-2, "rate_step": 790,
    "learning_rate": 1e-3, "wasted": 100, "losses": 4, "recovered": True, "healthy": 300, "kinds": "NaN",
    "layers": ["fc1", "fc2", "fc3", "fc4"], "layers_affected": 5, "layers_total": 9, "scaled": True, "value": 48.0,
    "baseline": 1.2, "again": 3, "layer": "fc1", "layer_norm": 40.0, "layer_usual": 1.1, "vanished": 12, "measured": 640,
    "zero": 0.25, "first": 2.3, "warm_up": 50, "word": "Past:", "parameter": "fc.weight", "operator": "log",
    "module": "net.head", "note": "it was given 0", "infinite": "at 0", "sample": 3, "region": "compiled region",
    "since": 400, "highest": 1e-3, "streak": 40, "skipped": 40, "scale": 0.5, "device_type": "xla", "changes": 3,
    "optimizer": "AdamW", "backward_passes": 64, "parameters": ["head.weight", "head.bias"], "parameters_affected": 2,
    "scheduler": "StepLR", "units_dead": 60, "units": 64, "kind": "loss_spike", "compiled": 3, "evidence": "r0-12.layers",
    "activity": "Training", "alive": 7, "world": 64, "speed": "1.90 steps/s", "ranks": 8, "ran": 3600.0,
    "amount": "2,000 more, 95 MiB", "first_step": 812,
    "room": " 1 GiB were left on the file system, and a checkpoint takes 4 GiB.", "first_value": 48.0, "first_usual": 1.2,
    "start": 2.3, "last_step": 900, "last_value": 48.0, "modules": ["decoder, 30 GiB"], "function": "get_batch",
    "holder": "The parameter fc.weight", "calm": 300, "other": "0", "elsewhere": "backward", "matched": 0, "keys": 148,
    "unexpected": "module.fc.weight",
}  # fmt: skip
SAMPLE_OF: dict[str, dict[str, object]] = {
    "past_anomalies": {"what": "2 loss spikes"},
    "gradient_vanishing": {"value": 1e-12},
    "nonfinite_origin_overflow": {"note": "and 5 more"},
    "recompile_storm": {"remedy": RECOMPILE_REMEDIES["shape"]},
    "tiny_learning_rate": {"rate": 1e-9},
    "checkpoint_keys_unused": {"model": "Net", "missing": "fc.weight"},
    "checkpoint_optimizer_unused": {"parameters": 148},
    "memory_leak": {"line": None, "native": False},
    "progress": {"activity": "No step", "step": 812, "hanging": None},
    "over": {"activity": "Interrupted by Ctrl-C", "unknown": None, "unwritten": None},
}
"""What the sample would say oddly"""


def words(kind: Kind) -> list[str]:
    """The sentences of a kind with every value, and with those alone that it cannot do without."""
    full = SAMPLE | ({"where": "rank 1"} if "on {where}" in kind.short else {}) | SAMPLE_OF.get(kind.name, {})
    bare = {name: value for name, value in full.items() if name in fields(kind.short) | fields(kind.long)}
    templates = dict.fromkeys(filter(None, (kind.short, kind.long)))
    return list(dict.fromkeys(sentence(template, values) for template in templates for values in (full, bare)))


def test_the_words_of_all_findings(pytestconfig: pytest.Config) -> None:
    """Every sentence, with likely numbers; `pytest --update-golden` writes them again, to be read aloud."""
    text = "".join(f"{kind.name}\n" + "".join(f"    {line}\n" for line in words(kind)) for kind in KINDS.values())
    if pytestconfig.getoption("--update-golden"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_no_sentence_of_a_finding_stands_elsewhere(checkout: Path) -> None:
    """Four words of one in a row are in no string of another file, but in descriptions of events and settings."""
    texts = "\n".join(f"{kind.short} {kind.long}" for kind in KINDS.values())
    parts = {" ".join(part.split()) for part in re.split(r"\{[^}]*\}|[\[\].:;,()\n]", texts)}
    phrases = {part for part in parts if len(part.split()) >= 4} - {"beside the flight file"}
    assert len(phrases) > 200
    for path in (checkout / "torchobs").rglob("*.py"):
        source = path.read_text()
        joined = re.sub(r"""["'][\s\\]*[rbfu]*["']""", "", source.replace("\\n", " "))
        text = " ".join(joined.split())  # a first look, for to parse all takes long
        if path.parent.name != "catalog" and any(phrase in text for phrase in phrases):
            nodes = list(ast.walk(ast.parse(source)))
            docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
            strings = (node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings)
            said = "\n".join(" ".join(value.split()) for value in strings if isinstance(value, str))
            assert [phrase for phrase in phrases if phrase in said] == [], path


def test_a_sentence_is_a_sentence_of_a_kind_of_the_catalog(checkout: Path) -> None:
    """It ends with a full stop, without byte counts, doubled punctuation, unset values; its kind's key and alert are there."""
    templates = [template for kind in KINDS.values() for template in (kind.short, kind.long)]
    used = {name for template in templates for _, name, _, _ in Formatter().parse(re.sub(r"\w+[?!]", "", template)) if name}
    assert used - SAMPLE.keys() == set()
    for kind in KINDS.values():
        for line in words(kind):
            assert line.endswith((".", "?")), (kind.name, line)
            assert not re.search(r"\d{7,}|  |(?<!\.)\.\.(?!\.)|,,|\( | \)|\{|\}|\[ ", line), (kind.name, line)
            assert "no longer" not in line, (kind.name, line)
    alerts = (checkout / "deploy/prometheus/rules/torchobs-alerts.yml").read_text()
    for kind in KINDS.values():
        assert not kind.alert or f"alert: {kind.alert}\n" in alerts, kind.name
        if isinstance(kind.source, catalog.Event) and kind.key and kind.key not in {"cpu", "device"}:
            assert any(kind.key in attribute.values for attribute in kind.source.attributes), kind.name


def test_values_from_a_file_cannot_break_a_sentence_and_a_nameless_parameter_is_a_noun() -> None:
    """Control characters, braces, numbers without end; a parameter without a name is a noun, alone and with others."""
    odd = {"scheduler": "\x1b[31m{x}[y]", "parameters_affected": 10**400, "parameters": ["a\n"], "step": float("inf")}
    said = Finding("scheduler_never_stepped", "", None, odd).short
    assert said.startswith("A learning-rate scheduler (?[31m{x}[y]) is never")
    assert Finding("left_out", "", None, odd).long
    several = {"origin": "unknown", "parameter": "unnamed", "note": "and 1 more"}
    assert origin_of(several).short == "A parameter of no module and 1 more hold NaN or infinity."
    assert as_subject("unnamed") == "A parameter of no module"


def test_a_part_is_left_out_where_a_value_is_absent() -> None:
    """And shown or not by a condition; words agree with the number, and what a value says stays as it is."""
    assert sentence("It rose[ to {value:n}][ in step {step:,}].", {"value": 2.0}) == "It rose to 2."
    assert sentence("[up?waits][up!waited]", {"up": True}) + sentence("[up?waits][up!waited]", {}) == "waitswaited"
    assert [sentence("{n:layer} {n:learns|learn}", {"n": n}) for n in (1, 2000)] == ["1 layer learns", "2,000 layers learn"]
    # it goes on after "To avoid it,"
    assert {remedy.split()[0] for remedy in RECOMPILE_REMEDIES.values()} == {"mark", "give", "call", "pass", "see"}
