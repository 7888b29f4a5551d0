"""Gradients and layers: whether the model learns, where it blows up, which layers get nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dashboards.grafana import panels, thresholds
from dashboards.grafana.layout import Section
from dashboards.grafana.panels import Query
from dashboards.grafana.queries import LAYERS, RANKS, increase, rate, worst
from dashboards.grafana.run import RUN, grad_norm
from dashboards.grafana.template import Choice, page
from torchobs import catalog
from torchobs.rules.promql import select

if TYPE_CHECKING:
    from grafana_foundation_sdk.models.dashboard import Dashboard, Panel

MOST_LAYERS = 10


def dashboard() -> Dashboard:
    """Return the dashboard."""
    sections = [
        Section("The whole gradient", whole()),
        Section("Layers", layers()),
        Section("Clipping and measuring", clipping()),
    ]
    about = "Gradients and layers of one run: of its rank 0, as ranks that share their gradients say the same; choose others."
    return page("torchobs-gradients", "gradients and layers", about, Choice.RUN | Choice.FIRST_RANK | Choice.LAYER, sections)


def whole() -> tuple[Panel, ...]:
    """Return norms and verdicts."""
    counts = increase(catalog.GRAD_NORM_DISTRIBUTION, *RANKS, suffix="_bucket")
    native = increase(catalog.GRAD_NORM_DISTRIBUTION, *RANKS)
    return (
        panels.number(
            "Stuck layers",
            "Layers that have learned nothing for a while: gradients too small to change a weight, or inputs that are "
            "all zero. Good: 0.",
            "short",
            Query(f"max({select(catalog.GRAD_UNMOVED_LAYERS, *RANKS)}) or vector(0)"),
            steps=thresholds.NONE_IS_GOOD,
        ),
        panels.number(
            "Zero gradients",
            "Share of the parameters whose gradient is exactly zero in every element. Good: 0 %, but for frozen and "
            "sparse parts.",
            "percentunit",
            Query(f"max({select(catalog.GRAD_ZERO, *RANKS)}) or vector(0)"),
        ),
        panels.number(
            "Steps with NaN",
            "Measured steps with a NaN or infinite gradient within the graphs' time. Good: 0, or some under a loss scaler.",
            "short",
            Query(f"max(increase({select(catalog.GRAD_NONFINITE_STEPS, *RANKS)}[$__range]))", instant=True),
            steps=thresholds.FEW_IS_FAIR,
        ),
        panels.number(
            "Clipped steps",
            "Share of the steps whose gradient was clipped. Good: below half; all of them means that the threshold is the "
            "learning rate.",
            "percentunit",
            Query(
                f"max({rate(catalog.GRAD_CLIPPED_STEPS, *RANKS)}) / (max({rate(catalog.STEPS, *RANKS)}) > 0) or vector(0)",
            ),
        ),
        panels.number(
            "Measured",
            "Steps from one measurement of the gradient norm to the next; torchobs measures as often as its budget allows. "
            "Good: 1 at steps of 100 ms and longer.",
            "short",
            Query(f"max({select(catalog.GRAD_INTERVAL, *RANKS)})"),
        ),
        panels.number(
            "Layers as one",
            "Layers without series of their own, shown together as 'other'. Good: few; the largest ones are shown.",
            "short",
            Query(f"max({select(catalog.GRAD_LAYERS_FOLDED, *RANKS)}) or vector(0)"),
        ),
        panels.lines(
            "Gradient norm",
            "L2 norm of all gradients before clipping by norm, put together from the ranks where parameters are sharded. "
            "Good: level within a power of ten. Finite values only.",
            "short",
            Query(grad_norm(), RUN),
            log_base=10,
            width=12,
        ),
        panels.distribution(
            "Gradient norms",
            "How many measured steps had which gradient norm. Buckets are powers of four. Good: a narrow band that falls "
            "slowly. A dot is one step: its span is a click away where exemplars are stored.",
            # Falls back to native histograms if there are no classic ones: a heatmap accepts both.
            Query(f"sum by (le) ({counts}) or (sum({native}) unless on () sum({counts}))", "{{le}}", exemplars=True),
        ),
        panels.lines(
            "Anomalies",
            "Anomalous steps by kind. Good: 0, but for single loss spikes.",
            "short",
            Query(f"max by (kind) ({increase(catalog.ANOMALIES, *RANKS)})", "{{kind}}"),
        ),
        panels.lines(
            "Non-finite gradients",
            "Measured steps with a NaN or infinite gradient, and elements that were: a few elements are one layer, all "
            "are a NaN in the loss. Good: 0, or some steps under a loss scaler. "
            "Empty: the elements, while there are none.",
            "short",
            Query(f"max({increase(catalog.GRAD_NONFINITE_STEPS, *RANKS)})", "steps"),
            Query(f"max({increase(catalog.GRAD_NONFINITE_ELEMENTS, *RANKS)})", "elements"),
        ),
    )


def layers() -> tuple[Panel, ...]:
    """Return norms by layer, which are of the chosen ranks only: a thousand ranks have a hundred thousand of them."""
    norm, weights, ratio = (
        f"max by (layer) ({select(metric, *LAYERS)})"
        for metric in (catalog.GRAD_LAYER_NORM, catalog.PARAM_LAYER_NORM, catalog.UPDATE_LAYER_RATIO)
    )
    return (
        panels.lines(
            "Greatest layer gradients",
            f"The {MOST_LAYERS} layers with the greatest gradient norm. Good: level. Empty: until a norm by layer was "
            "measured.",
            "short",
            Query(worst(norm, MOST_LAYERS), "{{layer}}"),
            log_base=10,
        ),
        panels.lines(
            "Smallest layer gradients",
            f"The {MOST_LAYERS} layers with the smallest gradient norm. Good: within four powers of ten of the greatest; "
            "below it they vanish. Empty: until a norm by layer was measured.",
            "short",
            Query(f"bottomk({MOST_LAYERS}, {norm})", "{{layer}}"),
            log_base=10,
        ),
        panels.lines(
            "Weight updates",
            f"Norm of one step's change of a layer's weights over the norm of the weights: the {MOST_LAYERS} greatest. "
            "Good: some thousandths; a hundredth is too fast, a millionth learns nothing. Empty: below level advanced.",
            "percentunit",
            Query(worst(ratio, MOST_LAYERS), "{{layer}}"),
            log_base=10,
        ),
        panels.lines(
            "Weights",
            f"L2 norm of the {MOST_LAYERS} layers with the greatest weights. Good: level or slowly growing. Empty: below "
            "level advanced.",
            "short",
            Query(worst(weights, MOST_LAYERS), "{{layer}}"),
            log_base=10,
        ),
        panels.lines(
            "Layer outputs",
            f"Standard deviation of the output of the {MOST_LAYERS} layers where it is greatest. Good: level, and within a "
            "power of ten from layer to layer. Empty: below level extreme.",
            "short",
            Query(worst(f"max by (layer) ({select(catalog.ACTIVATION_LAYER_STD, *LAYERS)})", MOST_LAYERS), "{{layer}}"),
            log_base=10,
        ),
        panels.lines(
            "Zeros in layer outputs",
            f"Share of the output that is exactly zero, of the {MOST_LAYERS} layers where it is greatest. Good: about half "
            "after a ReLU, none elsewhere. Empty: below level extreme, and where no output has a zero.",
            "percentunit",
            Query(worst(f"max by (layer) ({select(catalog.ACTIVATION_LAYER_ZERO, *LAYERS)})", MOST_LAYERS), "{{layer}}"),
        ),
        panels.lines(
            "Stuck layers and zero gradients",
            "Layers that have learned nothing for a while, and the share of parameters whose gradient is exactly zero, "
            "in percent. Good: 0. Empty: while there are none.",
            "short",
            Query(f"max({select(catalog.GRAD_UNMOVED_LAYERS, *RANKS)})", "stuck layers"),
            Query(f"100 * max({select(catalog.GRAD_ZERO, *RANKS)})", "zero gradients, %"),
        ),
    )


def clipping() -> tuple[Panel, ...]:
    """Return thresholds and effects of clipping."""
    return (
        panels.lines(
            "Clipping",
            "The gradient norm and the threshold by norm; the threshold by value. Good: the norm exceeds the threshold "
            "now and then only. Empty: without clipping and before the first norm.",
            "short",
            Query(grad_norm(), "norm"),
            Query(f"max({select(catalog.GRAD_CLIP_MAX_NORM, *RANKS)})", "threshold by norm"),
            Query(f"max({select(catalog.GRAD_CLIP_MAX_VALUE, *RANKS)})", "threshold by value"),
            log_base=10,
        ),
        panels.lines(
            "Clipped steps per second",
            "Steps whose gradient was clipped, beside all steps. Good: less than half. Empty: without a step.",
            "short",
            Query(f"max({rate(catalog.GRAD_CLIPPED_STEPS, *RANKS)})", "clipped"),
            Query(f"max({rate(catalog.STEPS, *RANKS)})", "all"),
        ),
        panels.lines(
            "Interval of measurement",
            "Steps from one measurement of the gradient norm to the next, and ranks over which the gradient is sharded. "
            "Good: small and level. Empty: the ranks, where each has the whole gradient.",
            "short",
            Query(f"max({select(catalog.GRAD_INTERVAL, *RANKS)})", "steps"),
            Query(f"max({select(catalog.GRAD_NORM_RANKS, *RANKS)})", "ranks that share a gradient"),
        ),
    )
