"""GPU hardware metrics through NVML: utilization, memory, power, temperature, clocks, throttling, errors."""
