"""The learning rate: of the first parameter group in every step's record, of up to eight groups by the sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torchobs import catalog
from torchobs.flight.record import Flag

if TYPE_CHECKING:
    import torch

    from torchobs.probes.host import Host

MAX_GROUPS = 8


class LearningRateProbe:
    """Reads ``param_groups``."""

    name = "learning_rate"

    def install(self, host: Host) -> None:
        """See :class:`~torchobs.probes.host.Probe`."""
        self._host = host
        self._optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._order: list[int] = []
        self._shown: dict[int, float] = {}
        host.reads_rate = True
        host.before_step.append((self.name, host.fuse(self.name).guard(self._take)))

    def remove(self) -> None:
        """See :class:`~torchobs.probes.host.Probe`."""
        self._host.reads_rate = False

    def _take(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:  # noqa: FBT001  # a listener
        del closure
        if id(optimizer) not in self._order:
            self._order.append(id(optimizer))
            self._optimizers.add(optimizer)
        values = self._host.cycle.values
        rate = _number(optimizer.param_groups[0].get("lr"))
        if rate is not None and not values.flags & Flag.LEARNING_RATE:
            values.learning_rate = rate
            values.flags |= Flag.LEARNING_RATE

    def sample(self) -> None:
        """Show the other groups' rates; groups count on over several optimizers, in the order of their first step."""
        known = {id(optimizer): optimizer for optimizer in list(self._optimizers)}
        groups = [group for key in self._order if key in known for group in known[key].param_groups]
        for index, group in enumerate(groups[1:MAX_GROUPS], start=1):
            rate = _number(group.get("lr"))
            if rate is None or self._shown.get(index) == rate:
                continue
            self._shown[index] = rate
            cell = self._host.writer.table.cell(catalog.LEARNING_RATE, {"group": str(index)})
            if cell is not None:
                cell.set(rate)


def _number(rate: Any) -> float | None:
    """Return it as a float; ``None`` for a rate that a device holds (capturable optimizers), where reading would wait."""
    if isinstance(rate, (int, float)):
        return float(rate)
    device = getattr(rate, "device", None)
    return float(rate.item()) if device is not None and device.type == "cpu" else None
