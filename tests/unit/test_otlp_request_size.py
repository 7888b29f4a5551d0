"""Requests of the push have a size that receivers accept."""

from collections.abc import Sequence

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord

from torchobs.exporter.otlp.request_size import MOST_BYTES, MOST_ITEMS, packed


def request_of(names: Sequence[str]) -> ExportLogsServiceRequest:
    """One record for each."""
    request = ExportLogsServiceRequest()
    request.resource_logs.add().scope_logs.add(log_records=[LogRecord(event_name=name) for name in names])
    return request


def held(requests: Sequence[tuple[bytes, int]]) -> list[str]:
    """What is in them, in its order."""
    found = []
    for body, items in requests:
        (resource,) = ExportLogsServiceRequest.FromString(body).resource_logs
        records = [record.event_name for scope in resource.scope_logs for record in scope.log_records]
        assert len(records) == items
        found += records
    return found


def test_many_small_ones_are_in_few_requests() -> None:
    """As many in each as in one of the SDK's; of none there is no request."""
    names = [f"{number}" for number in range(2 * MOST_ITEMS + 1)]
    requests = packed(names, request_of)
    assert [items for _, items in requests] == [MOST_ITEMS, MOST_ITEMS, 1]
    assert held(requests) == names
    assert packed([], request_of) == []


def test_large_ones_are_in_several_and_none_is_lost() -> None:
    """One that is too large by itself is sent alone: the receiver may take more."""
    names = [letter * (MOST_BYTES // 3) for letter in "abcdefg"] + ["z" * (MOST_BYTES + 1), "small"]
    requests = packed(names, request_of)
    assert held(requests) == names
    assert all(len(body) <= MOST_BYTES for body, items in requests if items > 1)
    assert len(requests) < len(names)
