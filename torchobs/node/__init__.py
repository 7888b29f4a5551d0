"""The one exporter of a node and user: who becomes it, how it is started beside a training, and when it leaves.

``start`` is called by a trainer, ``election`` decides, ``detach`` makes the new process one of its own, ``daemon`` runs it,
``announcement`` says where it listens. Only the standard library: a process that loses the election ends before it has
imported anything heavy.
"""
