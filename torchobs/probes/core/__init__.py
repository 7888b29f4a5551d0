"""What probes share: context, step recorder, timeline of phases, patches, values on their way from a device."""
