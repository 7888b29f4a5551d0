"""The metrics page for Prometheus, rendered in one direction, of which each module takes what the one before returns.

:mod:`.handler` (a request), :mod:`.page_cache` (one page for all who ask at once), :mod:`.exposition` (ranks of a snapshot),
:mod:`.rank_series` (series that each shows), :mod:`.line_renderer` (lines), :mod:`.text_format` (text), compression in
:mod:`.page_cache`.
"""
