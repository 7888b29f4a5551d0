"""The exporter's API: what it answers, to whom, and that it is as described."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import torchobs
from tests.exporters import Caller, Service
from tests.rank_files import live_rank, train
from tests.support import wait_until
from torchobs import debug
from torchobs.exporter import access, api_schema, daemon
from torchobs.exporter.access import SOCKET_NAME, AccessChannel, Token, refusal
from torchobs.exporter.config import ExporterConfig
from torchobs.flight import artifacts, control
from torchobs.flight.artifacts import PROFILE, STACKS, named
from torchobs.flight.directory import control_directory
from torchobs.flight.layout import PHASE_NAMES, Exit
from torchobs.flight.step_record import RecordKind, StepFlag
from torchobs.ranks import state as rank_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torchobs.flight.writer import FlightWriter

TOKEN = "a-token-of-some-length"


@pytest.fixture(autouse=True)
def _shorter_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that an exporter ends sooner when its test has; and ranks that beat once, and no more, are responsive all the time."""
    monkeypatch.setattr(daemon, "TICK_S", 0.1)
    monkeypatch.setattr(rank_state, "UNRESPONSIVE_AFTER_S", 600.0)


@pytest.fixture
def begin(flight_dir: Path) -> Iterator[Callable[..., FlightWriter]]:
    """Begin living ranks, which end with the test."""
    writers: list[FlightWriter] = []

    def rank(**resource: str | int) -> FlightWriter:
        writers.append(live_rank(flight_dir, **resource))
        return writers[-1]

    yield rank
    for writer in writers:
        writer.close()


@pytest.fixture
def writer(begin: Callable[..., FlightWriter]) -> FlightWriter:
    """A living rank that has taken three steps, and an anomaly."""
    rank = begin()
    train(rank, [1, 2, 3])
    rank.event("torchobs.anomaly", {"kind": "loss_spike", "value": float("nan"), "baseline": 2.0}, 3)
    rank.event("torchobs.run.start", {"launcher": "torchrun"})
    return rank


@pytest.fixture
def exporter(flight_dir: Path, tmp_path: Path) -> Iterator[Service]:
    """A node's exporter with a token."""
    (tmp_path / "token").write_text(TOKEN)
    config = ExporterConfig(flight_dir=str(flight_dir), mode="node", api_token_file=str(tmp_path / "token"))
    with Service(config) as running:
        yield running


@pytest.fixture
def web(exporter: Service) -> Caller:
    """Over loopback."""
    return Caller(exporter.address)


@pytest.fixture
def local(exporter: Service, flight_dir: Path) -> Caller:
    """Over the socket."""
    assert exporter.announced
    path = flight_dir / SOCKET_NAME
    wait_until(path.exists)
    assert stat.S_IMODE(path.stat().st_mode) == 0o660, "for the owner and the group"
    return Caller(path)


def seen(web: Caller, ranks: int) -> None:
    """Wait until that many ranks are served: a scan that had begun before they came knows nothing of them."""
    wait_until(lambda: len(web.get("/ranks")["ranks"]) == ranks)


def given(flight_dir: Path, writer: FlightWriter) -> control.Command:
    """What the rank reads: it was given a command."""
    command = control.ControlReader(control_directory(None, str(flight_dir)), writer.header.incarnation).poll()
    assert command is not None
    return command


def test_what_a_rank_does_and_its_steps(writer: FlightWriter, web: Caller) -> None:
    """Its numbers as on the metrics page, with units in the names; a value that a device delivered late is in its own step."""
    (rank,) = web.get("/ranks")["ranks"]
    assert rank["incarnation"] == writer.header.incarnation.hex()
    shown = {name: rank[name] for name in ("rank", "state", "up", "level", "steps", "loss")}
    assert shown == {"rank": "0", "state": "alive", "up": True, "level": "off", "steps": 3, "loss": 1 / 3}
    assert rank["last_step"] > rank["started"]
    assert web.get("/status")["ranks"]["alive"] == 1
    flags = StepFlag.LOSS | StepFlag.GRAD_NORM | StepFlag.LEARNING_RATE
    writer.append(2, time.monotonic_ns(), RecordKind.LATE, flags, 1, 0.0, 7.0, float("inf"), 0.25, (0.0,) * 9)
    answer = web.get("/ranks/0/steps?last=2")
    assert [step["step"] for step in answer["steps"]] == [2, 3]
    late = answer["steps"][0]
    assert (late["loss"], late["gradient_norm"], late["learning_rate"]) == (7.0, "Infinity", 0.25)
    assert tuple(answer["steps"][1]["phases_s"]) == PHASE_NAMES
    assert web.get(f"/ranks/{writer.header.incarnation.hex()}/steps")["steps"][0]["step"] == 1


def test_events_are_paged_and_filtered(writer: FlightWriter, web: Caller) -> None:
    """Newest first; NaN is data; the pages together are all of them, and each is there once."""
    assert writer.name
    first = web.get("/events?limit=1")
    assert (first["events"][0]["name"], first["events"][0]["severity"]) == ("torchobs.run.start", "info")
    second = web.get(f"/events?limit=1&before={first['next']}")
    (event,) = second["events"]
    assert (event["name"], event["step"], event["attributes"]["value"]) == ("torchobs.anomaly", 3, "NaN")
    assert second["next"] is None
    assert [listed["name"] for listed in web.get("/events?kind=torchobs.anomaly&rank=0")["events"]] == ["torchobs.anomaly"]
    assert web.get("/events?kind=torchobs.exception")["events"] == []


def test_the_training_summary_counts_as_the_metrics_do(begin: Callable[..., FlightWriter], web: Caller) -> None:
    """Over two ranks: steps, explosions, vanishing, anomalies of the loss, and their rates."""
    writers = [begin(rank=rank) for rank in (0, 1)]
    for writer in writers:
        train(writer, [1, 2])
    writers[0].append(3, time.monotonic_ns(), RecordKind.STEP, StepFlag.LOSS, 1, 0.1, float("nan"), 0.0, 0.0, (0.0,) * 9)
    wait_until(lambda: web.get("/debug/training/summary")["total_steps"] == 5)
    summary = web.get("/debug/training/summary")
    expected = {
        "total_steps": 5, "source": "recorded", "loss_anomalies": 1, "loss_anomaly_rate": 0.2, "anomaly_rate": 0.2,
        "anomaly_steps": 1, "anomaly_steps_most": 1, "gradient_explosions": 0, "gradient_vanishing": 0,
        "gradient_explosion_rate": 0.0, "gradient_vanishing_rate": 0.0,
    }  # fmt: skip
    assert {name: summary[name] for name in expected} == expected
    assert summary["anomalies"]["nonfinite_loss"] == 1
    assert [rank["total_steps"] for rank in summary["ranks"]] == [3, 2]
    assert web.get("/debug/summary")["anomalies_active"][0]["kind"] == "nonfinite_loss"
    assert "NaN" in {rank["loss"] for rank in web.get("/ranks")["ranks"]}  # and not the last finite one


def test_without_a_rank_there_is_nothing_and_it_says_so(web: Caller) -> None:
    """Rates of no steps are null; a command has nobody to go to."""
    assert web.get("/ranks") == {"ranks": [], "ended": []}
    summary = web.get("/debug/training/summary")
    assert (summary["gradient_explosions"], summary["gradient_explosion_rate"], summary["anomaly_rate"]) == (0, None, None)
    summary = web.get("/debug/summary")
    assert (summary["total_operations"], summary["mean_s"], summary["operations"]) == (0, None, [])
    assert web.get("/events") == {"events": [], "next": None}
    assert web.get("/evidence") == {"evidence": []}
    assert web.post("/stacks", Authorization=f"Bearer {TOKEN}").status == 409


def test_a_level_goes_to_all_ranks_or_to_one(flight_dir: Path, begin: Callable[..., FlightWriter], local: Caller) -> None:
    """Over the socket nothing else is needed; the answer has the command's number."""
    writers = [begin(rank=rank) for rank in (0, 1)]
    seen(local, 2)
    reply = local.post("/debug/level/advanced")
    assert reply.status == 202
    assert [answer["rank"] for answer in reply.json["ranks"]] == ["0", "1"]
    for writer, answer in zip(writers, reply.json["ranks"], strict=True):
        command = given(flight_dir, writer)
        assert (command.level, command.seq) == (2, answer["command"])
    assert [answer["rank"] for answer in local.post("/debug/level/off?rank=1").json["ranks"]] == ["1"]
    assert [given(flight_dir, writer).level for writer in writers] == [2, 0]


def test_what_a_slow_rank_has_yet_to_read_is_not_replaced(flight_dir: Path, writer: FlightWriter, local: Caller) -> None:
    """However long it takes until it says that it has; another profile is refused until then."""
    writer.level(1)
    wait_until(lambda: local.get("/ranks")["ranks"][0]["level"] == "basic")
    stacks = local.post("/stacks").json["ranks"][0]["command"]
    profile = local.post("/profile", {"steps": 3}).json
    refused = local.post("/profile", {"steps": 5})
    assert (refused.status, refused.json["type"]) == (409, "urn:torchobs:problem:profile-asked")
    assert profile["evidence"]["id"] in refused.json["detail"]
    assert local.post("/stacks").json["ranks"][0]["command"] == stacks
    command = given(flight_dir, writer)
    assert (command.profile_seq, command.profile_steps, command.stacks_seq) == (profile["command"], 3, stacks)
    writer.heartbeat()
    assert local.post("/stacks").json["ranks"][0]["command"] == stacks
    writer.command(command.seq)
    wait_until(lambda: local.post("/stacks").json["ranks"][0]["command"] > stacks)
    wait_until(lambda: local.post("/profile", {"steps": 5}).status == 202)


def test_a_command_over_tcp_needs_the_token(writer: FlightWriter, web: Caller, caplog: pytest.LogCaptureFixture) -> None:
    """Refused and done commands are in the log, one line each."""
    assert writer.name
    caplog.set_level(logging.INFO, "torchobs")
    refused = web.post("/debug/level/basic")
    assert (refused.status, refused.headers["content-type"]) == (401, "application/problem+json")
    assert refused.headers["www-authenticate"] == "Bearer"
    assert "--api.token-file" in refused.json["detail"]
    assert web.post("/debug/level/basic", Authorization=f"Bearer {TOKEN}").status == 202
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("command")]
    assert len(lines) == 2
    assert "/api/v1/debug/level/basic" in lines[0]
    assert "over loopback: 401" in lines[0]
    assert "over loopback: 202" in lines[1]


def test_two_runs_have_a_rank_0_each(begin: Callable[..., FlightWriter], local: Caller) -> None:
    """Then it takes the incarnation to name one."""
    writers = [begin(run_id=run_id) for run_id in ("a", "b")]
    seen(local, 2)
    reply = local.ask("GET", "/ranks/0/steps")
    assert (reply.status, reply.json["type"]) == (409, "urn:torchobs:problem:ambiguous-rank")
    assert local.get(f"/ranks/{writers[1].header.incarnation.hex()}/layers")["run_id"] == "b"


def test_evidence_is_listed_downloaded_and_removed(flight_dir: Path, writer: FlightWriter, local: Caller) -> None:
    """By an id, as an attachment that no browser runs; a link, a FIFO or an empty file in its place is not there.

    What removes it leaves metrics, events and summaries as they were.
    """
    stacks, profile = named(writer.name, STACKS, 1), named(writer.name, PROFILE, 2)
    (flight_dir / stacks.name).write_text("Thread 0x1\n" * 200_000)
    os.truncate(flight_dir / stacks.name, artifacts.LIMITS[STACKS])
    (flight_dir / profile.name).symlink_to("/etc/passwd")
    (flight_dir / named(writer.name, STACKS, 3).name).touch()
    os.mkfifo(flight_dir / named(writer.name, STACKS, 4).name)
    (listed,) = local.get("/evidence")["evidence"]
    shown = {"id": stacks.id, "kind": "stacks", "rank": "0", "job_name": "gpt", "run_id": "run-1"}
    assert {name: listed[name] for name in shown} == shown
    reply = local.ask("GET", listed["href"], prefix="")
    assert (reply.status, len(reply.body)) == (200, listed["size_bytes"])
    assert reply.body == (flight_dir / stacks.name).read_bytes()
    assert reply.headers["content-disposition"] == f'attachment; filename="{stacks.name}"'
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert local.ask("HEAD", f"/evidence/{stacks.id}").body == b""
    for missing in (profile, named(writer.name, STACKS, 3), named(writer.name, STACKS, 4)):
        assert local.ask("GET", f"/evidence/{missing.id}").status == 404
    events, ranks = local.get("/events"), local.get("/ranks")["ranks"]
    assert local.get("/debug/training/summary")["total_steps"] == 3
    assert local.post("/debug/clear").json["removed"] == 1
    assert local.get("/evidence") == {"evidence": []}
    assert local.get("/debug/training/summary")["total_steps"] == 3
    assert (local.get("/events"), local.get("/ranks")["ranks"][0]["steps"]) == (events, ranks[0]["steps"])
    assert local.post("/debug/clear").json["removed"] == 0


def test_the_summaries_say_what_debug_s_own_say(flight_dir: Path, local: Caller) -> None:
    """Operations and checked steps of a session in this process, by the same names."""
    import torch  # most tests of this file do without it

    debug.clear()
    torchobs.init(flight_dir=flight_dir)
    try:
        model = torch.nn.Linear(2, 1)
        for loss in (1.0, float("nan"), 1.0):
            model.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            with debug.context("step"):
                debug.monitor_step(model, loss)
        wait_until(lambda: local.get("/debug/summary")["total_operations"] == 3)
        direct, served = debug.training_summary().to_dict(), local.get("/debug/training/summary")
        assert direct == {name: served[name] for name in direct}
        assert (served["total_steps"], served["loss_anomalies"], served["source"]) == (3, 1, "monitored")
        direct, served = debug.summary().to_dict(), local.get("/debug/summary")
        for name in ("mean_s", "maximum_s", "memory_peak_bytes", "total_operations", "with_problems"):
            assert served[name] == pytest.approx(direct[name])
        (row,) = served["operations"]
        assert (row["operation"], row["count"]) == ("step", 3)
    finally:
        torchobs.shutdown()
        debug.clear()


def test_a_rank_that_has_ended_is_told_nothing(flight_dir: Path, writer: FlightWriter, local: Caller) -> None:
    """A command is refused with the reason; one that it got while it lived is removed."""
    assert local.post("/debug/level/basic").status == 202
    record = flight_dir / "control" / control.file_name(writer.header.incarnation)
    assert record.exists()
    writer.exit(Exit.FINISHED, 0)
    writer.close()
    wait_until(lambda: local.get("/ranks")["ranks"][0]["state"] == "finished")
    assert local.post("/debug/level/basic").json["type"] == "urn:torchobs:problem:rank-ended"
    wait_until(lambda: not record.exists())


def test_a_rank_that_hangs_is_asked_for_its_stacks_once(flight_dir: Path, begin: Callable[..., FlightWriter]) -> None:
    """By the exporter itself, when it calls it hung."""
    writer = begin()
    with Service(ExporterConfig(flight_dir=str(flight_dir), mode="node", hang_timeout_s=0.3)) as exporter:

        def state() -> str:
            writer.heartbeat()
            return exporter.state()

        wait_until(lambda: state() == "hung")
        wait_until((flight_dir / "control" / control.file_name(writer.header.incarnation)).exists)
        command = given(flight_dir, writer)
        assert command.stacks
        time.sleep(0.5)
        state()
        assert given(flight_dir, writer).stacks_seq == command.stacks_seq


def test_a_sidecar_takes_no_commands_unless_told_to(flight_dir: Path, tmp_path: Path, writer: FlightWriter) -> None:
    """Loopback is for reading, and a socket is made where it is asked for."""
    assert writer.name
    with Service(ExporterConfig(flight_dir=str(flight_dir), api_socket=str(tmp_path / "s"))) as exporter:
        assert Caller(exporter.address).get("/status")["mode"] == "sidecar"
        refused = Caller(exporter.address).post("/stacks", Authorization=f"Bearer {TOKEN}")
        assert (refused.status, refused.json["type"]) == (403, "urn:torchobs:problem:control-off")
        assert not (flight_dir / SOCKET_NAME).exists()
        wait_until((tmp_path / "s").exists)
        assert Caller(tmp_path / "s").post("/debug/level/basic").status == 202


def test_on_another_address_it_takes_authentication(web: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token, for reading too; without one there is nothing but a word on where to ask."""
    monkeypatch.setattr(access, "is_local", lambda _: False)
    assert web.ask("GET", "/status").status == 401
    assert web.get("/status", Authorization=f"Bearer {TOKEN}")["token"] is True
    refused = refusal("GET", {"host": "node-1"}, "open", Token(None))
    assert refused
    assert (refused.status, refused.kind) == (403, "not-here")


# As a program: as a plug-in it costs every run of pytest five seconds, whichever tests that is for (see `addopts`).
SCHEMATHESIS = (sys.executable, "-m", "schemathesis.cli", "run", "--header", f"Authorization: Bearer {TOKEN}")
HOW = ("--phases", "examples,coverage,fuzzing", "--max-examples", "25", "--generation-deterministic")


def test_every_answer_is_as_described(flight_dir: Path, tmp_path: Path, begin: Callable[..., FlightWriter]) -> None:
    """No server error, no status, content type or content that the description does not have; what it forbids is refused.

    Asked is a node's exporter with two ranks, steps, events and evidence, which serves the description as well.
    """
    (tmp_path / "token").write_text(TOKEN)
    writers = [begin(rank=rank) for rank in (0, 1)]
    for writer in writers:
        train(writer, [1, 2, 3])
        writer.level(1)
        writer.event("torchobs.anomaly", {"kind": "loss_spike", "value": float("nan")}, 3)
    (flight_dir / named(writers[0].name, STACKS, 1).name).write_text("Thread 0x1\n")
    config = ExporterConfig(flight_dir=str(flight_dir), mode="node", api_token_file=str(tmp_path / "token"))
    with Service(config) as exporter:
        wait_until(lambda: len(Caller(exporter.address).get("/ranks")["ranks"]) == 2)
        description = Caller(exporter.address).ask("GET", "/openapi.json").body
        assert description.decode() == api_schema.text()
        (tmp_path / "openapi.json").write_bytes(description)
        argv = [*SCHEMATHESIS, *HOW, "--url", f"http://{exporter.address}/api/v1", "openapi.json"]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    operations = sum(map(len, json.loads(description)["paths"].values()))
    assert f"Tested: {operations}\n" in done.stdout


SECRET = "0123456789abcdef-token"
JSON = {"content-type": "application/json; charset=utf-8"}
BEARER = {"authorization": f"Bearer {SECRET}"}
LOCAL = {"host": "localhost:10960"}


@pytest.fixture
def token(tmp_path: Path) -> Token:
    """A token file with a newline at its end, as an editor leaves it."""
    path = tmp_path / "token"
    path.write_text(f"{SECRET}\n")
    return Token(str(path))


def status(method: str, headers: dict[str, str], door: AccessChannel, token: Token) -> int:
    """What the refusal answers with; 0 for none."""
    refused = refusal(method, headers, door, token)
    return refused.status if refused else 0


GATE: tuple[tuple[AccessChannel, str, dict[str, str], int], ...] = (
    ("socket", "GET", {}, 0),
    ("socket", "POST", JSON, 0),
    ("socket", "POST", {}, 415),
    ("loopback", "GET", LOCAL, 0),
    ("loopback", "HEAD", {"host": "127.0.0.1"}, 0),
    ("loopback", "GET", {"host": "[::1]:10960"}, 0),
    ("loopback", "GET", {"host": "evil.example:10960"}, 421),
    ("loopback", "GET", {}, 421),
    ("loopback", "GET", LOCAL | {"origin": "http://localhost:10960"}, 0),
    ("loopback", "GET", LOCAL | {"origin": "http://evil.example"}, 403),
    ("loopback", "GET", LOCAL | {"origin": "null"}, 403),
    ("loopback", "POST", LOCAL | JSON, 401),
    ("loopback", "POST", LOCAL | JSON | BEARER, 0),
    ("loopback", "POST", LOCAL | JSON | BEARER | {"origin": "http://evil.example"}, 403),
    ("loopback", "POST", LOCAL | BEARER | {"content-type": "text/plain"}, 415),
    ("loopback", "POST", LOCAL | JSON | {"authorization": "Bearer wrong"}, 401),
    ("loopback", "GET", LOCAL | {"authorization": "Bearer wrong"}, 401),
    ("loopback", "POST", LOCAL | JSON | {"authorization": f"Basic {SECRET}"}, 401),
    ("open", "GET", {"host": "node-1"}, 401),
    ("open", "GET", {"host": "node-1"} | BEARER, 0),
    ("open", "POST", {"host": "node-1"} | JSON | BEARER, 0),
    ("open", "POST", {"host": "node-1"} | JSON, 401),
    ("open", "POST", JSON | {"authorization": "Basic dTpw", "torchobs-token": SECRET}, 0),
    ("open", "POST", JSON | {"authorization": "Basic dTpw", "torchobs-token": "wrong"}, 401),
    ("open", "POST", JSON | {"authorization": "Bearer wrong", "torchobs-token": SECRET}, 401),
)


def test_the_gate(token: Token) -> None:
    """With a token file."""
    answers = [(door, method, headers, status(method, headers, door, token)) for door, method, headers, _ in GATE]
    assert answers == [*GATE]


def test_without_a_token_file_commands_are_off_but_for_the_socket() -> None:
    """And the refusal says how to switch them on; a password or a certificate of the web configuration is for reading."""
    refused = refusal("POST", LOCAL | JSON, "loopback", Token(None))
    assert refused
    assert (refused.status, refused.kind) == (403, "control-off")
    assert "--api.token-file" in refused.detail
    assert refusal("POST", LOCAL | JSON | BEARER, "loopback", Token(None))
    assert refusal("GET", LOCAL, "loopback", Token(None)) is None
    node = {"host": "node-1"}
    refusals = [
        refusal(method, node | more, "open", Token(None), authenticated=True)
        for method, more in (("GET", {}), ("POST", JSON), ("GET", {"origin": "https://evil.example"}))
    ]
    assert [refused and refused.kind for refused in refusals] == [None, "control-off", "foreign-origin"]


@pytest.mark.parametrize("content", [None, b"", b"short", b"\n\n", b"\xff" * 32])
def test_a_token_file_that_is_none_admits_nobody(tmp_path: Path, content: bytes | None) -> None:
    """It fails closed: missing, empty, too short, no text."""
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    for text in ("", "short", "\udcff" * 32):
        assert not Token(str(path)).admits(text)
    assert status("POST", LOCAL | JSON | {"authorization": "Bearer short"}, "loopback", Token(str(path))) == 401


def test_a_token_is_rotated_by_its_file(token: Token, tmp_path: Path) -> None:
    """As a mounted secret is; and a directory or a FIFO in its place admits nobody, and holds nobody up."""
    path = tmp_path / "token"
    assert token.admits(SECRET)
    path.write_text(SECRET[::-1])
    assert (token.admits(SECRET), token.admits(SECRET[::-1])) == (False, True)
    path.unlink()
    path.mkdir()
    assert not token.admits(SECRET)
