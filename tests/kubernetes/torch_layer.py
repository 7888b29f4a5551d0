"""`python -m tests.kubernetes.torch_layer DIR`: copy this environment's torch, and what it requires, into DIR.

An image gets torch so without fetching it a second time. Left out is what only a compiler or torch's own tests read.
"""

import re
import shutil
import sys
from importlib.metadata import Distribution, distribution
from importlib.util import cache_from_source
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement

LEFT_OUT = re.compile(r"torch/(include|test|share)/|torch/bin/(?!torch_shm_manager)|.*\.(a|h|cuh|hpp)$|\.\./")


def required(name: str, distributions: dict[str, Distribution]) -> dict[str, Distribution]:
    """`seen` and the distribution of that name, and those that it requires, by name."""
    if name not in distributions:
        distributions[name] = distribution(name)
        for requirement in map(Requirement, distributions[name].requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                required(requirement.name, distributions)
    return distributions


def copy(distribution: Distribution, to: Path) -> None:
    """Copy what was installed of a distribution, with its times: compiled modules are believed by them.

    Not every installer lists those. Without them each rank of a pod compiles torch anew, since it may not write into its image.
    """
    listed = [Path(path) for path in distribution.files or () if not LEFT_OUT.match(path.as_posix())]
    compiled = (Path(cache_from_source(path)) for path in listed if path.suffix == ".py")
    for path in chain(listed, compiled):
        source, target = Path(str(distribution.locate_file(path))), to / path
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


for package in required("torch", {}).values():
    copy(package, Path(sys.argv[1]))
