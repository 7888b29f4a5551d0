"""What probes share: context, step recorder, phase timeline, asynchronous reads from a device."""
