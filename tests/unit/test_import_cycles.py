"""Modules can be read one after the other."""

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


def test_no_module_imports_itself_by_a_detour() -> None:
    """Neither at run time, in a function or at its head, nor for the type checker."""
    graph = grimp.build_graph("torchobs", exclude_type_checking_imports=False, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 200
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as problem:
        pytest.fail(" -> ".join(problem.args[1]))
