"""The flight file: a rank's last steps, cumulative metrics and events, readable whatever happened to the process.

``format`` defines its contents, ``metrics`` aggregates step records, ``writer`` and ``reader`` access it, ``files`` manages it.
"""
