"""torchobs as the default global providers of the OpenTelemetry API, until the application sets its own.

``set_meter_provider`` and ``set_tracer_provider`` work once per process. If torchobs called them, an application that sets up
its own telemetry after ``torchobs.init()`` (under ``torchobs run``: any) would be refused. So torchobs replaces the API's
proxies instead, which mean "no provider set yet"; libraries that check by ``isinstance(…, ProxyTracerProvider)`` find none set.

When the application sets a provider, every instrument and tracer created before, by the proxies or by torchobs, delegates
to it, observable ones with their callbacks: as without torchobs, nothing of the application's is missing there.

The API has no public name for its proxies; the two private names used here have existed since 1.12.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry import metrics, trace
from opentelemetry.metrics import MeterProvider
from opentelemetry.metrics import _internal as metrics_api
from opentelemetry.trace import ProxyTracerProvider, SpanContext, TracerProvider

from torchobs.otel.metrics import FlightMeterProvider
from torchobs.otel.traces import FlightTracerProvider, nothing

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.otel.metrics import Source


class DefaultTracerProvider(FlightTracerProvider, ProxyTracerProvider):
    """Result of ``trace.get_tracer_provider()`` while the application has set none."""

    def delegate(self) -> TracerProvider | None:
        """Return the provider that the application has set meanwhile."""
        provider = trace.get_tracer_provider()
        return None if isinstance(provider, ProxyTracerProvider) else provider


class DefaultMeterProvider(FlightMeterProvider, metrics_api._ProxyMeterProvider):  # noqa: SLF001  # see the module
    """Result of ``metrics.get_meter_provider()`` while the application has set none."""

    before: metrics_api._ProxyMeterProvider | None = None

    def on_set_meter_provider(self, meter_provider: MeterProvider) -> None:
        """Delegate all instruments; called by the API when the application sets a provider."""
        if self.before is not None:
            self.before.on_set_meter_provider(meter_provider)
        self.delegate_to(meter_provider)


_meters = DefaultMeterProvider(nothing)
_tracers = DefaultTracerProvider(nothing)


def install(source: Source, parent: Callable[[], SpanContext | None] = nothing) -> None:
    """Record the application's own instruments and tracers, unless it has set providers.

    ``source`` and ``parent`` as in :class:`FlightMeterProvider` and :class:`FlightTracerProvider`. May be called
    again after :func:`uninstall`. Raises what the API raises when the environment names a provider that cannot be loaded.
    """
    _install_meters(source)
    if isinstance(trace.get_tracer_provider(), ProxyTracerProvider):
        trace._TRACER_PROVIDER = _tracers  # noqa: SLF001  # see the module
        _tracers.write_to(source, parent)


def uninstall() -> None:
    """Stop recording. Existing instruments and tracers do nothing, and still delegate to a provider set later."""
    _meters.write_to(nothing)
    _tracers.write_to(nothing)


def observe(timeout_s: float = 0.0) -> bool:
    """Call the callbacks of the application's observable instruments (:meth:`FlightMeterProvider.observe`)."""
    return _meters.observe(timeout_s)


def _install_meters(source: Source) -> None:
    current = metrics.get_meter_provider()
    if current is not _meters:
        if not isinstance(current, metrics_api._ProxyMeterProvider):  # noqa: SLF001  # see the module
            return
        _meters.before = current
        metrics_api._PROXY_METER_PROVIDER = _meters  # noqa: SLF001  # see the module
        current.on_set_meter_provider(_meters)  # instruments created before
    _meters.write_to(source)
