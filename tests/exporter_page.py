"""The metrics page of a directory without a server, by a clock that a test moves."""

from collections.abc import Iterator
from pathlib import Path

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.samples import Sample

from tests.rank_files import Clock, File
from torchobs.catalog import Kind, Metric
from torchobs.exporter.config import ExporterConfig
from torchobs.exporter.exporter_metrics import ScrapeInput
from torchobs.exporter.exposition import Exposition
from torchobs.exporter.text_format import END, Style, pieces
from torchobs.flight.series import Scope
from torchobs.ranks.scanner import Scanner
from torchobs.ranks.snapshot import EMPTY

USER = Scope("my.package", "1.0")


def parse_openmetrics(page: str) -> Iterator[Family]:
    """Parse a page; what OpenMetrics does not admit is a `ValueError`."""
    return openmetrics_parser.text_string_to_metric_families(page)  # type: ignore[no-untyped-call,no-any-return]


class Exporter:
    """Scan and exposition of one directory, by a clock that a test moves."""

    def __init__(self, directory: Path, **given: object) -> None:
        config = ExporterConfig(flight_dir=str(directory))
        self.clock = Clock()
        self._scanner = Scanner(config, self.clock)
        self._exposition = Exposition(**given)  # type: ignore[arg-type]  # as Exposition takes them
        self._scrape = ScrapeInput(EMPTY)
        self.acknowledged = 0
        self.close = self._scanner.close

    def scan(self, seconds: float = 1.0, *files: File) -> None:
        """Take a snapshot at a moment of the clock, when these files are saved."""
        for file in files:
            file.save()
        self.clock.seconds = seconds
        self._scrape = ScrapeInput(self._scanner.scan())

    @property
    def number(self) -> int:
        """The snapshot's."""
        return self._scrape.snapshot.number

    @property
    def holding(self) -> bool:
        """Whether the last page has a counter at 0 that has counted."""
        return self._exposition.is_holding

    def openmetrics(self) -> str:
        """The page in OpenMetrics."""
        return self.written(Style(openmetrics=True)).decode()

    def text(self) -> str:
        """The page in Prometheus' own format."""
        return self.written(Style(openmetrics=False)).decode()

    def written(self, style: Style) -> bytes:
        """The page in any style."""
        foreign = END.encode() if style.openmetrics else b""
        return b"".join(pieces(style, foreign, self._exposition.families(self._scrape, style, self.acknowledged)))

    def families(self) -> dict[str, Family]:
        """The parsed page; parsing checks what OpenMetrics demands."""
        return {family.name: family for family in parse_openmetrics(self.openmetrics())}

    def samples(self, name: str) -> list[Sample]:
        """The samples of that name."""
        return [sample for family in self.families().values() for sample in family.samples if sample.name == name]


def user(name: str, kind: Kind = Kind.COUNTER, unit: str = "", brief: str = "", bounds: tuple[float, ...] = ()) -> Metric:
    """A user's instrument."""
    return Metric(name, kind, unit, brief, bounds=bounds)
