"""Formats of what a flight file holds."""
