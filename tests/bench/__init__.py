"""Benchmarks: ``python -m tests.bench.<name>``. They print tables; tests never time anything."""
