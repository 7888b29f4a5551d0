"""Reports of a run as one self-contained file, and comparisons of two runs; from flight files, without torch."""
