"""``/api/v1``: what the ranks do, as JSON, and what they are to do. Described by ``openapi``, which is served with it."""
