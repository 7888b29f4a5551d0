"""Checkpoints, distributed training, exceptions and exits."""
