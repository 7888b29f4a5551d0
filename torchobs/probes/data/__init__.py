"""Data loaders: fetches, epochs, starvation."""
