"""What every other part may use: error guard, import hooks, graph-safe wrappers, rate limit, cgroup and /proc parsers."""
