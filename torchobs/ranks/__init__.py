"""Ranks as seen from outside: scanner, state, incarnations and comparison. Shared by exporter, top and inspect."""
