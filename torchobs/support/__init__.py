"""Utilities for all packages: error guard, import hooks, graph-safe wrappers, descriptors, rate limit, cgroup parsers."""
