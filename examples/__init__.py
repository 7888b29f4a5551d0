"""Runnable examples; ``python -m examples.demo`` (or ``make demo``) shows them live."""
