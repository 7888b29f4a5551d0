"""Verdicts: pure functions of numbers. No torch, no I/O, nothing of ours is imported here."""
