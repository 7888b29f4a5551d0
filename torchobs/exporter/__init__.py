"""The exporter: reads flight files, judges what only an outside process can see, serves all of it. It never imports torch."""
