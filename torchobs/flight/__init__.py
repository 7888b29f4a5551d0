"""The flight file: a rank's last steps, cumulative metrics and events, readable whatever happened to the process.

``layout`` defines the format, ``record`` the step record and its fold, ``writer`` and ``reader`` the two sides of the file.
"""
