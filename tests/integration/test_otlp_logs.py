"""Events as log records over OTLP: each once and at once, as OpenTelemetry names things; who refuses them gets the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.otlp import Answer, Pushing, Receiver, attributes, balanced, points, records, spans, to
from tests.rank_files import BORN_WALL_NS, File, S
from tests.support import wait_until
from torchobs import catalog
from torchobs.exporter.otlp.options import PushConfig
from torchobs.flight.format import span_ids
from torchobs.flight.format.layout import Exit

LOGS, METRICS, TRACES = "/v1/logs", "/v1/metrics", "/v1/traces"


def event(file: File, name: str, attrs: object = None, second: float = 1.0, **more: object) -> None:
    """Write an event that happened at a second of the rank's life."""
    at_ns = file.header.monotonic_ns + round(second * S)
    file.writer.events.append({"k": "event", "t": at_ns, "name": name, "attrs": attrs or {}, **more})


def everything(receiver: Receiver, **given: Any) -> PushConfig:
    """All signals to that receiver."""
    return PushConfig(to(receiver), to(receiver, path=TRACES), to(receiver, path=LOGS), **given)


def only_logs(receiver: Receiver) -> PushConfig:
    """Log records to that receiver."""
    return PushConfig(logs=to(receiver, path=LOGS))


def test_an_event_is_a_record_of_its_step(flight_dir: Path, receiver: Receiver, file: File) -> None:
    """Time, severity, sentence, name, attributes in the event's namespace, trace and the step's span, the rank's resource."""
    event(file, catalog.EVENT_ANOMALY.name, {"kind": "loss_spike", "value": 3.5, "baseline": 1.0}, step=7)
    file.save()
    with Pushing(flight_dir, only_logs(receiver)) as pushing:
        pushing.look(1.5)
        assert balanced(pushing.push.counts["logs"])
    (record,) = records(receiver.of(LOGS))
    assert record.time_unix_nano == BORN_WALL_NS + S
    assert record.observed_time_unix_nano >= BORN_WALL_NS
    assert (record.severity_number, record.severity_text) == (13, "WARN")
    assert record.body.string_value == "A step was judged anomalous: kind loss_spike, value 3.5, baseline 1.0, step 7"
    assert record.event_name == "torchobs.anomaly"
    found = attributes(record.attributes)
    assert len(found.pop("log.record.uid")) == 36
    own = {"torchobs.anomaly.kind": "loss_spike", "torchobs.anomaly.value": 3.5, "torchobs.anomaly.baseline": 1.0}
    assert found == {**own, "torchobs.step.number": 7}
    assert (record.trace_id.hex(), record.span_id.hex(), record.flags) == (*span_ids.SpanIds(file.header).step(7), 1)
    (of_resource,) = receiver.taken[0].logs.resource_logs
    resource = attributes(of_resource.resource.attributes)
    assert (resource["service.name"], resource["torchobs.rank"], resource["torchobs.restart"]) == ("gpt", 0, 0)
    assert resource["service.instance.id"] == file.header.incarnation.hex()
    assert (of_resource.scope_logs[0].scope.name, of_resource.scope_logs[0].scope.version) == ("torchobs", "0.1.0")


@pytest.mark.parametrize(
    ("name", "attrs", "severity", "expected"),
    [
        ("torchobs.anomaly", {"kind": "nonfinite_loss", "value": "NaN"}, "ERROR", {"torchobs.anomaly.kind": "nonfinite_loss"}),
        ("torchobs.exception", {"exception.type": "E", "thread": "t"}, "ERROR", {"exception.type": "E", "thread.name": "t"}),
        ("torchobs.exception", {"exception.type": "builtins.KeyboardInterrupt"}, "INFO", {}),
        ("torchobs.gpu.xid", {"hw.id": "GPU-1", "xid": 79}, "ERROR", {"hw.id": "GPU-1", "torchobs.gpu.xid.xid": 79}),
        ("torchobs.data.starved", {"share": 0.5}, "WARN", {"torchobs.data.starved.share": 0.5}),
        ("torchobs.run.start", {}, "INFO", {}),
        ("my.event", {"a": [1, "x"], "b": {"c": None}, "d": True}, "INFO", {"a": [1, "x"], "b": {"c": None}, "d": True}),
    ],
)
def test_severity_and_names_are_opentelemetry_s(
    flight_dir: Path, receiver: Receiver, file: File, name: str, attrs: dict[str, object], severity: str, expected: object
) -> None:
    """The conventions' names stay, others are the event's, an application's are its own. Without a step: the run's span."""
    event(file, name, attrs)
    file.save()
    with Pushing(flight_dir, only_logs(receiver)) as pushing:
        pushing.look(1.5)
    (record,) = records(receiver.of(LOGS))
    assert (record.event_name, record.severity_text) == (name, severity)
    assert record.severity_number == {"INFO": 9, "WARN": 13, "ERROR": 17}[severity]
    assert attributes(record.attributes).items() >= dict(expected).items()  # type: ignore[call-overload]  # a case's mapping
    assert (record.trace_id.hex(), record.span_id.hex()) == span_ids.SpanIds(file.header).run
    assert record.body.string_value


def test_sizes_in_a_record_s_sentence_have_their_unit(flight_dir: Path, receiver: Receiver, file: File) -> None:
    """For people; the attribute is the number."""
    event(file, catalog.EVENT_OUT_OF_MEMORY.name, {"requested": 2 << 30})
    file.save()
    with Pushing(flight_dir, only_logs(receiver)) as pushing:
        pushing.look(1.5)
    (record,) = records(receiver.of(LOGS))
    assert record.body.string_value.endswith("requested 2 GiB")
    assert attributes(record.attributes)["torchobs.memory.out_of_memory.requested"] == 2 << 30


def test_an_event_without_a_step_is_of_the_segment_under_way(flight_dir: Path, receiver: Receiver, file: File) -> None:
    """Of the run before there is one; sampled as that is."""
    ids = span_ids.SpanIds(file.header)
    event(file, "my.event")
    for number, part in enumerate((ids.segment(1, 0), ids.segment(1, 1)), start=2):
        own = {"trace_id": part.trace, "span_id": part.span, "flags": number % 2, "scope": ["torchobs", None, None, {}]}
        file.writer.events.append({"k": "span_start", "name": catalog.SPAN_SEGMENT.name, "t0": BORN_WALL_NS, **own})
        event(file, "my.event", second=number)
    file.save()
    with Pushing(flight_dir, only_logs(receiver)) as pushing:
        pushing.look(3.5)
    found = [(record.trace_id.hex(), record.span_id.hex(), record.flags) for record in records(receiver.of(LOGS))]
    assert found == [(*ids.run, 1), (*ids.segment(1, 0), 0), (*ids.segment(1, 1), 1)]


def test_a_checkpoint_is_a_record_when_it_is_saved(flight_dir: Path, receiver: Receiver, file: File) -> None:
    """Of its span; one that failed has an event, and curves and other spans are no records."""
    identity = {"k": "span", "trace_id": "a" * 32, "flags": 1, "t0": BORN_WALL_NS, "t1": BORN_WALL_NS + 2 * S}
    saved: dict[str, object] = {
        "name": "torchobs.checkpoint",
        "span_id": "b" * 16,
        "status": "unset",
        "scope": ["torchobs", None, None, {}],
    }
    file.writer.events.append({**identity, **saved, "attrs": {"format": "torch", "size": 5}})
    file.writer.events.append({**identity, **saved, "status": "error", "attrs": {}})
    file.writer.events.append({**identity, **saved, "scope": ["my.package"], "attrs": {}})
    file.writer.events.append({**identity, **saved, "name": "torchobs.epoch", "attrs": {"event": 1}})
    event(file, catalog.EVENT_SCALARS.name, {"names": ["x"]})
    file.save()
    with Pushing(flight_dir, only_logs(receiver)) as pushing:
        pushing.look(2.5)
    (record,) = records(receiver.of(LOGS))
    assert (record.event_name, record.severity_text) == ("torchobs.checkpoint", "INFO")
    assert (record.trace_id.hex(), record.span_id.hex()) == ("a" * 32, "b" * 16)
    assert record.time_unix_nano == BORN_WALL_NS + 2 * S
    found = {name.removeprefix("torchobs.checkpoint."): value for name, value in attributes(record.attributes).items()}
    assert found.items() >= {"format": "torch", "size": 5, "duration_s": 2.0}.items()


def test_each_event_comes_once_and_with_the_next_look(flight_dir: Path, receiver: Receiver, file: File) -> None:
    """Also many; not when the spans' or metrics' time has come."""
    config = everything(receiver, span_delay_s=3600.0, interval_s=3600.0)
    with Pushing(flight_dir, config) as pushing:
        for look in range(1, 4):
            for number in range(700):
                event(file, "my.event", {"number": number, "look": look})
            file.beat(look)
            file.save()
            pushing.look(look, final=False, wait=False)
            wait_until(lambda look=look: len(records(receiver.of(LOGS))) == 700 * look)  # type: ignore[misc]  # binds the loop's
        assert not receiver.of(TRACES)
    found = [attributes(record.attributes) for record in records(receiver.of(LOGS))]
    assert [(one["look"], one["number"]) for one in found] == [(look, number) for look in range(1, 4) for number in range(700)]
    assert len({one["log.record.uid"] for one in found}) == len(found)
    assert len(receiver.of(LOGS)) > 3


def test_a_restarted_exporter_sends_the_same_identifiers(flight_dir: Path, receiver: Receiver, file: File) -> None:
    """What is still in the ring comes twice, as what it is."""
    for number in range(5):
        event(file, "my.event", {"number": number})
    file.save()
    for _ in range(2):
        with Pushing(flight_dir, only_logs(receiver)) as pushing:
            pushing.look(1.0)
    first, second = (
        [attributes(record.attributes)["log.record.uid"] for record in records([request])] for request in receiver.of(LOGS)
    )
    assert first == second


@pytest.mark.parametrize("span_events", [True, False])
def test_the_run_s_span_has_them_too_unless_switched_off(
    flight_dir: Path,
    receiver: Receiver,
    file: File,
    span_events: bool,  # noqa: FBT001  # a case
) -> None:
    """And what happened last is pushed when the rank has ended."""
    event(file, "my.event")
    file.save()
    with Pushing(flight_dir, everything(receiver, span_events=span_events)) as pushing:
        pushing.look(1.0)
        event(file, "my.last")
        file.writer.exit(Exit.FINISHED, 0)
        file.save().release()
        pushing.look(4.0)
        pushing.look(5.0)
    (run,) = spans(receiver.of(TRACES))
    assert [one.name for one in run.events] == (["my.event", "my.last"] if span_events else [])
    assert [record.event_name for record in records(receiver.of(LOGS))] == ["my.event", "my.last"]


def test_who_takes_no_logs_gets_the_rest_and_it_is_told_once(
    flight_dir: Path, receiver: Receiver, file: File, caplog: pytest.LogCaptureFixture
) -> None:
    """404 for each of several requests: one line on the log, the books balance, and metrics and spans arrive."""
    receiver.answer = lambda request: Answer(404 if request.path == LOGS else 200)
    file.span(1, 0.5, k="span", status="unset")
    with Pushing(flight_dir, everything(receiver)) as pushing:
        for look in range(1, 5):
            event(file, "my.event", second=look)
            file.beat(look)
            file.save()
            pushing.look(look)
        counts = pushing.push.counts
    assert (counts["logs"].recorded, counts["logs"].dropped["refused"], counts["logs"].sent) == (4, 4, 0)
    for signal in ("metrics", "traces"):
        assert balanced(counts[signal])
        assert counts[signal].sent == counts[signal].recorded > 0
    assert [*points(receiver.of(METRICS))]
    assert [span.name for span in spans(receiver.of(TRACES))] == ["torchobs.step"]
    assert len([request for request in receiver.requests if request.path == LOGS]) == 4
    assert caplog.text.count("OTLP logs: the receiver refuses them: 404") == 1


def test_a_refusal_is_told_again_once_something_was_accepted(
    flight_dir: Path, receiver: Receiver, file: File, caplog: pytest.LogCaptureFixture
) -> None:
    """Twice refused, accepted, refused: two lines."""
    statuses = iter((404, 404, 200, 404, 200))
    receiver.answer = lambda _: Answer(next(statuses))
    with Pushing(flight_dir, only_logs(receiver)) as pushing:
        for look in range(1, 6):
            event(file, "my.event", second=look)
            file.beat(look)
            file.save()
            pushing.look(look)
        counts = pushing.push.counts["logs"]
    assert (counts.recorded, counts.sent, counts.dropped["refused"]) == (5, 2, 3)
    assert caplog.text.count("OTLP logs: the receiver refuses them: 404") == 2


HOSTILE: tuple[dict[str, object], ...] = (
    {"name": None}, {"name": ["x"]}, {"attrs": [1]}, {"step": "x"}, {"step": -(1 << 70)}, {"t": "x"}, {"t": 1 << 80},
    {"attrs": {"kind": {"a": 1}}, "name": "torchobs.anomaly"}, {"attrs": {"": "", "huge": 1 << 100}},
    {"k": "span", "name": "torchobs.checkpoint", "scope": "x"},
    {"k": "span", "name": "torchobs.checkpoint", "scope": ["torchobs"], "trace_id": "zz", "span_id": 5, "t0": "x"},
)  # fmt: skip


def test_no_frame_stops_the_others(flight_dir: Path, receiver: Receiver, file: File) -> None:
    """Whatever a file says: what can be sent is."""
    for wrong in HOSTILE:
        file.writer.events.append({"k": "event", "t": BORN_WALL_NS, "name": "my.event", "attrs": {}, **wrong})
    event(file, "my.last")
    file.save()
    with Pushing(flight_dir, only_logs(receiver)) as pushing:
        pushing.look(1.0)
        assert balanced(pushing.push.counts["logs"])
    assert records(receiver.of(LOGS))[-1].event_name == "my.last"


def test_what_a_ring_loses_is_counted(flight_dir: Path, receiver: Receiver, file: File) -> None:
    """In bytes, also where no spans are pushed."""
    with Pushing(flight_dir, only_logs(receiver)) as pushing:
        for _ in range(4000):
            event(file, "my.event", {"text": "x" * 50})
        file.save()
        pushing.look(1.0)
        size = pushing.scanner.scan().ranks[0].view.live.event_head / 4000
        lost = 4000 - len(records(receiver.of(LOGS)))
        assert lost > 1000
        assert abs(pushing.push.counts["logs"].unread_bytes - lost * size) < 16 * 1024
