"""The parts of `make demo`: the job, its Prometheus, what a page of metrics says, and how it is shown."""
