"""Anomaly detection: pure functions of numbers and all thresholds. No torch, no I/O."""
