"""Benchmarks, run by hand: ``python -m bench.<name>``. They print the tables of the documentation."""
