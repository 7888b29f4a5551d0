"""The training process's session: sampler thread, probe manager, commands, stacks, profiler, watchdog and spans."""
