"""What probes share: context, step recorder, phase timeline, patches, asynchronous reads from a device."""
