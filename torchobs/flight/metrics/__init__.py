"""Step records aggregated into cumulative metrics, by the same pure function in rank and reader."""
