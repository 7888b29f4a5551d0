"""The HTTP server: listeners, limits, negotiation."""
