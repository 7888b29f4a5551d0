"""The JSON API ``/api/v1``: state of the ranks, and commands to them. Described by ``openapi``, which is served with it."""
