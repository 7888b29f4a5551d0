"""Render samples that the exporter itself produces. Line prefixes are cached; only values are formatted per scrape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchobs.exporter.prometheus.float_format import numbers
from torchobs.exporter.prometheus.line_template import LineRange, weave
from torchobs.exporter.prometheus.name_registry import family_of, sample_name
from torchobs.exporter.prometheus.text_format import prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torchobs.catalog import Metric
    from torchobs.exporter.exporter_metrics import Sample
    from torchobs.exporter.prometheus.line_template import Chunk
    from torchobs.exporter.prometheus.text_format import Style


class SampleRenderer:
    """Renders samples in one style."""

    def __init__(self, style: Style, labels_of: Callable[[Mapping[str, str]], Mapping[str, str]]) -> None:
        """``labels_of`` returns the labels for a sample's attributes."""
        self._style, self._labels_of = style, labels_of
        self._metrics: list[Metric] = []
        self._attributes: list[Mapping[str, str]] = []
        self._order: list[int] = []
        self._prefixes: list[str] = []
        self._spans: list[LineRange] = []

    def chunks(self, samples: Sequence[Sample]) -> list[Chunk]:
        """Return the lines by family."""
        metrics, attributes = [one.metric for one in samples], [one.attributes for one in samples]
        if metrics != self._metrics or attributes != self._attributes:
            self._plan(samples)
            self._metrics, self._attributes = metrics, attributes
        return weave(self._prefixes, numbers([float(samples[place].value) for place in self._order]), self._spans)

    def _plan(self, samples: Sequence[Sample]) -> None:
        places: dict[str, list[int]] = {}
        for place, one in enumerate(samples):
            places.setdefault(one.metric.name, []).append(place)
        self._order = [place for group in places.values() for place in group]
        self._prefixes, self._spans = [], []
        for group in places.values():
            metric, begin = samples[group[0]].metric, len(self._prefixes)
            family = family_of(metric.name, metric.kind, metric.unit)
            starts = (prefix(self._style, sample_name(family), self._labels_of(samples[place].attributes)) for place in group)
            self._prefixes += [f"\n{start}" for start in starts]
            self._spans.append(LineRange(family, metric.brief, begin, len(self._prefixes)))
