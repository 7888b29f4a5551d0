"""What every layer puts out, at level extreme: statistics by layer, and their history around an anomaly."""

from torchobs.probes.activations.probe import ActivationProbe

__all__ = ["ActivationProbe"]
