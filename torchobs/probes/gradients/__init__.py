"""Gradient norms, clipping, layers and weight updates."""
