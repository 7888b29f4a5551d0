"""Lists of living objects, which are made beside other threads."""

from __future__ import annotations

import gc
import time
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import pytest
import torch

from torchobs import debug
from torchobs.debug.switches import model_of
from torchobs.probes.leak import count_objects
from torchobs.tensors.references import living, living_optimizers, types_of_objects

if TYPE_CHECKING:
    from collections.abc import Callable


class Layer(torch.nn.Linear):
    """A class of the user's."""


def test_objects_of_a_class_and_of_those_that_inherit_from_it_are_found() -> None:
    """Each once, and no longer than it lives."""
    layer, model = Layer(2, 2), torch.nn.Sequential(Layer(2, 2))
    found = living(Layer)
    assert sum(each is layer for each in found) == 1
    assert sum(each is model[0] for each in found) == 1
    assert not any(each is model for each in found)
    del layer, found
    assert len(living(Layer)) == 1
    assert not any(kind is None for kind in types_of_objects())


OPTIMIZER = torch.optim.SGD(Layer(2, 2).parameters(), lr=0.1)


@pytest.mark.parametrize(
    "look",
    [
        pytest.param(lambda: living(torch.nn.Module), id="modules"),
        pytest.param(living_optimizers, id="optimizers"),
        pytest.param(lambda: count_objects(torch), id="objects that grow"),
        pytest.param(lambda: model_of(OPTIMIZER), id="model of an optimizer"),
        pytest.param(lambda: debug.profile_memory("here"), id="memory at a point"),
    ],
)
def test_a_look_at_all_objects_breaks_nothing_that_other_threads_are_building(look: Callable[[], Any]) -> None:
    """``tuple(...)`` raises ``SystemError`` in CPython where anything else refers to the tuple: the training would fail."""
    errors, built, looked = list[SystemError](), 0, Event()

    def build() -> None:
        nonlocal built
        while not looked.is_set():
            try:
                built += len(tuple(number for number in range(30)))
            except SystemError as error:
                errors.append(error)

    def called(*_: object) -> None:
        time.sleep(1e-4)  # as code of Python's does that a collection runs: finalizers, callbacks of a library

    thread, before = Thread(target=build), gc.get_threshold()
    gc.callbacks.append(called)
    gc.set_threshold(20)  # so that one begins in each look, if it may
    thread.start()
    try:
        for _ in range(8):  # three of four did harm when they held the list
            look()
    finally:
        looked.set()
        thread.join()
        gc.callbacks.remove(called)
        gc.set_threshold(*before)
    assert built
    assert not errors
