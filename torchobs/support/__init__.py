"""Utilities for all packages: error guard, import hooks, graph-safe wrappers, rate limit, cgroup and /proc parsers."""
