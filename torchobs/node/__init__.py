"""The exporter shared by all ranks of one user on a node: election, start, end. Standard library only: losers end at once."""
