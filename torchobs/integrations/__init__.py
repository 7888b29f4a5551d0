"""Integrations with training frameworks: epochs, planned steps, validation metrics, samples and tokens.

Everything else works without them. Each is a thin, optional caller of the public functions; its framework is an extra.
"""
