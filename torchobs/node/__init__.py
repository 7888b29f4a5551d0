"""The exporter shared by all ranks of one user on a node: its election, start and end.

A trainer calls :mod:`.launch`; :mod:`.election` chooses the exporter process and publishes its address, :mod:`.lifetime` runs
it. Standard library only: a process that loses the election ends before importing anything heavy.
"""
