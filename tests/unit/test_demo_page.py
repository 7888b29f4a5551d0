"""The demo's reading of a page of metrics, and how it is shown."""

import io
import math

import pytest

from examples._demo.page import Row, parse, rows
from examples._demo.prometheus import Alert
from examples._demo.table import Screen, summary, table, total_anomalies
from torchobs import catalog

RANK = 'job_name="gpt",run_id="r1",rank="{rank}"'
PAGE = """\
# TYPE torchobs_exporter_scans counter
torchobs_exporter_scans_total 7.0
# TYPE torchobs_steps counter
torchobs_steps_total{{{rank}}} {steps}
# TYPE torchobs_step_duration_seconds histogram
torchobs_step_duration_seconds_bucket{{{rank},le="+Inf"}} {steps}
torchobs_step_duration_seconds_sum{{{rank}}} {seconds}
torchobs_step_duration_seconds_count{{{rank}}} {steps}
# TYPE torchobs_step_phase_time_seconds counter
torchobs_step_phase_time_seconds_total{{{rank},phase="forward"}} {forward}
torchobs_step_phase_time_seconds_total{{{rank},phase="backward"}} {backward}
# TYPE torchobs_tokens counter
torchobs_tokens_total{{{rank}}} {tokens}
# TYPE torchobs_loss gauge
torchobs_loss{{{rank}}} 2.5
# TYPE torchobs_rank_state gauge
torchobs_rank_state{{{rank},state="alive"}} 0.0
torchobs_rank_state{{{rank},state="lost"}} 1.0
# TYPE torchobs_anomalies counter
torchobs_anomalies_total{{{rank},kind="loss_spike"}} 3.0
torchobs_anomalies_total{{{rank},kind="nonfinite_loss"}} 0.0
# EOF
"""


def page(rank: int, **values: float) -> str:
    """The text of a page with one rank."""
    return PAGE.format(rank=RANK.format(rank=rank), **values)


def test_a_row_holds_what_a_rank_has_and_its_rates_since_the_earlier_page() -> None:
    """Rates, mean step time and shares are of the time between two pages; what no page has is NaN."""
    earlier = parse(page(3, steps=10, seconds=5.0, forward=2.0, backward=3.0, tokens=1000), at=100.0)
    now = parse(page(3, steps=30, seconds=7.0, forward=2.5, backward=4.5, tokens=5000), at=102.0)

    (row,) = rows(now, earlier)
    assert (row.rank, row.state, row.steps, row.loss) == (3, "lost", 30, 2.5)
    assert row.step_time == pytest.approx(0.1)
    assert row.tokens_rate == pytest.approx(2000.0)
    assert row.phases == {"data": 0.0, "forward": 0.25, "backward": 0.75, "optimizer": 0.0, "other": 0.0, "between": 0.0}
    assert row.anomalies == {"loss_spike": 3}
    assert math.isnan(row.grad_norm)


def make_row(rank: int, **changes: object) -> Row:
    """A healthy rank, but for `changes`."""
    phases = dict.fromkeys(catalog.PHASES, 0.2)
    given = {"state": "alive", "steps": 7, "loss": 2.0, "grad_norm": 0.5, "step_time": 0.08, "tokens_rate": 9000.0}
    return Row(rank=rank, **{"phases": phases, "anomalies": {}, **given, **changes})  # type: ignore[arg-type]


def test_columns_stand_under_their_headings() -> None:
    """As many words in a line as in the header; an unknown number is a dash."""
    header, first, second = table([make_row(0), make_row(1, loss=math.nan)])

    assert " ".join(header.split()) == "rank state step loss norm ms/step data fwd bwd opt other betw tokens/s anomalies"
    assert first.split() == ["0", "alive", "7", "2.000", "0.500", "80.0", *["20%"] * 6, "9,000", "none"]
    assert second.split()[3] == "-"


def test_a_log_gets_one_line_for_all_ranks() -> None:
    """States are counted, steps a range, losses a mean, speeds and anomalies a sum; two updates at once are one line."""
    ranks = [make_row(0, anomalies={"loss_spike": 1}), make_row(1, steps=8, loss=4.0, anomalies={"loss_spike": 2})]
    assert total_anomalies(ranks) == {"loss_spike": 3}
    expected = "2 alive  step 7-8  loss 3.000  norm 0.500  80.0 ms/step  18,000 tokens/s  anomalies loss_spike 3"
    assert summary(ranks) == expected

    log = io.StringIO()
    screen = Screen(log)
    for _ in range(2):
        screen.show(ranks, [Alert("Diverging", "firing", "")], ["printed by a rank"])
    assert log.getvalue() == f"{expected}  alerts: Diverging firing\n"


def test_a_terminal_gets_a_table_that_is_erased_before_the_next_one() -> None:
    """Nothing scrolls: as many lines go up as were drawn, and no line is wider than the terminal."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    screen = Screen(terminal)
    screen.show([make_row(0)], [], ["x" * 500])
    drawn = terminal.getvalue()
    screen.print("done")

    assert max(map(len, drawn.splitlines())) < 500
    assert terminal.getvalue() == f"{drawn}\x1b[{drawn.count(chr(10))}F\x1b[Jdone\n"
