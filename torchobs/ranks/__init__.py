"""Ranks as read from their flight files: scanner, state, incarnations, comparison. Shared by exporter, top and inspect."""
