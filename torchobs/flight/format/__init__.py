"""The flight file on disk: layout, live words, series, event ring and span ids."""
