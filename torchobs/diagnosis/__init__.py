"""Findings on ranks and runs: what happened, computed from their files; the words are in ``catalog.findings``."""
