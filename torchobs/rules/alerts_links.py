"""Alerts about the links between GPUs and between nodes. They look a day back, and are evaluated once a minute for that."""

from __future__ import annotations

from torchobs import catalog
from torchobs.rules.alert_texts import THIS_RUN, Culprits, amount
from torchobs.rules.promql import BY_RUN, by_run, select
from torchobs.rules.rule_file import Alert, Group

INFINIBAND, UNAME = "node_infiniband_state_id", "node_uname_info"
"""Of node_exporter, whose collectors `infiniband` and `uname` are on by default; the exporter has no such collector."""
ACTIVE = 4
"""State of a port that carries data (`/sys/class/infiniband/*/ports/*/state`); below it there are down, init and armed."""
DOWN = "2m"
"""A port whose link is trained anew is back within seconds."""
PAST = "1d"
_PORT = "cluster, instance, device, port"


def links() -> Group:
    """Return the rules."""
    return Group("torchobs.links", (_nvlink(), _infiniband()), interval="1m")


def _nvlink() -> Alert:
    def lost(*matchers: str) -> str:
        there = select(catalog.GPU_NVLINK_LINKS, *matchers)
        return f"max_over_time({there}[{PAST}]) - {there}"

    return Alert(
        alert="TorchobsNvlinkDown",
        expr=by_run(f"{lost()} > 0"),
        summary="has lost NVLinks.",
        description=f"A GPU has {amount('link', 'links')} fewer than it had within a day: collectives take another way.",
        culprits=Culprits(f"{lost(THIS_RUN)} > 0", f"GPU {{{{ $l.hw_id }}}}, {amount('link', 'links', '$v')}", "Observed by"),
    )


def _infiniband() -> Alert:
    """Return the alert on node_exporter's ports, by the name of the node that it and the ranks give.

    A target that two jobs scrape, or that has just changed its name, must not make the rule fail.
    """
    nodes = f"topk by (cluster, instance) (1, max by (cluster, instance, nodename) ({UNAME}))"
    down = f"max by ({_PORT}) (max_over_time({INFINIBAND}[{DOWN}]))"
    before = f"max by ({_PORT}) (max_over_time({INFINIBAND}[{PAST}]))"
    lost = f"(({down} < {ACTIVE} and {before} >= {ACTIVE}) * on (cluster, instance) group_left (nodename) {nodes})"
    return Alert(
        alert="TorchobsInfinibandDown",
        expr=f"""
            max {BY_RUN} (
                {_located()}
                * on (cluster, nodename) group_left ()
                count by (cluster, nodename) ({lost})
            )
        """,
        summary="has lost InfiniBand ports.",
        description=(
            f"One of its nodes has {amount('port', 'ports')} down that carried data within a day: collectives are slower, or "
            "fail."
        ),
        culprits=Culprits(
            f"{lost} and on (cluster, nodename) {_located(THIS_RUN)}",
            "port {{ $l.port }} of {{ $l.device }} on {{ $l.nodename }}",
            "Down are",
            named=False,
        ),
    )


def _located(*matchers: str) -> str:
    """Return the ranks with their node's name: Kubernetes' where it is known, for a pod's host name is its own."""
    by_host = f'label_replace({select(catalog.RANK_INFO, *matchers)}, "nodename", "$1", "host", "(.+)")'
    return f'label_replace({by_host}, "nodename", "$1", "k8s_node_name", "(.+)")'
