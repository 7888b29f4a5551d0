"""Training frameworks tell torchobs what torch does not know: epochs, steps to come, validation metrics, samples and tokens.

Everything else is seen without them. Each is a thin caller of the public functions, and optional: its framework is an extra.
"""
