"""`ps-launch doctor`: what it concludes from what it has measured, and that it measures."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramserver.common.errors import UsageError
from paramserver.common.reporting.report import report_console
from paramserver.drills.doctor import advice, run
from paramserver.drills.doctor.main import doctor
from paramserver.drills.doctor.measure import Link, Measured, Measurements, Plan, measure
from paramserver.tests.cluster import Cluster
from paramserver.tests.hosts import why_not

ROOT = Path(__file__).parents[2]

HEALTHY = {
    "host": "a", "program": "1", "torch": "2", "python": "3.11", "free_memory": 8 << 30, "free_disk": 1 << 40,
    "fsync_s": 0.01, "files": 65536, "load": 0.1, "cores": 4, "folder": "/work", "cuda": 0, "free_shm": 1 << 30,
}  # fmt: skip


@given(st.floats(1e-4, 100), st.floats(1e-4, 10))
def test_local_steps_keep_exchanges_at_a_fifth_of_the_time(exchange_s: float, compute_s: float) -> None:
    steps = advice.local_steps_for(exchange_s, compute_s)
    assert exchange_s / (exchange_s + steps * compute_s) <= 0.2 + 1e-9
    if steps > 1:
        assert exchange_s / (exchange_s + (steps - 1) * compute_s) > 0.2 - 1e-9


def test_what_is_wrong_with_machines() -> None:
    measured = Measured(1000.0, {0: HEALTHY, 1: {**HEALTHY, "program": "2", "free_memory": 1 << 30, "fsync_s": 0.5}})
    measured.clocks = {1: 60.0}
    found = [(finding.level, finding.text) for finding in advice.checks(measured)]
    assert found == [
        ("fail", "versions of program differ: worker 0 1, worker 1 2"),
        ("fail", "worker 1 (a): 1.1 GB of memory are free, but 4.0 GB are needed"),
        ("warn", "worker 1 (a): writing a MiB to the disk takes 0.50 s"),
        ("warn", "worker 1 (a): its clock differs by +60.0 s"),
    ]
    assert [finding.level for finding in advice.checks(Measured(1.0, {0: HEALTHY}))] == ["ok"]


def test_the_machine_of_the_server_is_looked_at_where_no_worker_is(tmp_path: Path) -> None:
    slow = {**HEALTHY, "host": "b", "fsync_s": 0.5, "free_memory": 1 << 30, "arrived": 5.0, "time": 5.0}
    found = [(finding.level, finding.text) for finding in advice.checks(Measured(1000.0, {0: HEALTHY}, server=slow))]
    assert found[:2] == [
        ("fail", "server (b): 1.1 GB of memory are free, but 4.0 GB are needed"),
        ("warn", "server (b): writing a MiB to the disk takes 0.50 s"),
    ]
    path = tmp_path / "hosts.yaml"
    path.write_text("hosts: [{host: a, slots: 2, server: true}, b]")
    assert run.server_of(str(path), 2, 1.0, []) == {}, "a worker is there, and says it"


def test_what_is_as_it_should_be_is_shown_too() -> None:
    out = io.StringIO()
    measured = Measured(1.0, {0: HEALTHY}, clocks={0: 0.012}, security="TLS, token")
    report_console(out).print(run.machines_table(measured))
    for text in ("worker 0 (a)", "+0.01 s", "8.6 GB", "10.0 ms", "65,536", "TLS, token"):
        assert text in out.getvalue()


def test_how_machines_are_joined_is_said() -> None:
    apart = Measured(1.0, {0: HEALTHY, 1: {**HEALTHY, "host": "b"}}, refused=[(1, "shared", "another host")])
    found = [(finding.level, finding.text) for finding in advice.checks(apart)]
    assert found == [
        ("warn", "the connections have no TLS: others can read and change the data"),
        ("ok", "worker 1 (b) has no transport shared: another host"),
    ]
    apart.security, apart.refused = "mutual TLS, token", []
    assert [finding.level for finding in advice.checks(apart)] == ["ok"]


@pytest.mark.parametrize(
    ("megabit", "says", "first"),
    [
        (10_000, "Raw gradients of every step fit this link", "--mode sync:"),
        (1000, "Raw, transfer takes more than a fifth of the time; q4 makes it fit", "--mode sync --set"),
        (20, "No codec makes gradients of every step fit", "--mode diloco --local-steps 42 --set worker.codec=q4"),
    ],
)
def test_advice_by_link(megabit: float, says: str, first: str) -> None:
    """10 MB of model, 100 ms of computing: there and back raw on 10 Gbit/s 16 ms, on 1 Gbit/s 160, q4 21; on
    20 Mbit/s q4 one second."""
    link, trip_s = Link(-1, "direct", megabit * 1e6 / 8, megabit * 1e6 / 8, 0.0), 0.001
    foreseen = advice.foresee(None, 2, 10.0, 0.1, link, trip_s)
    sync = {item.codec: item for item in foreseen if item.mode == "sync"}
    exact = 2 / (0.1 + trip_s + 2 * 10e6 / link.up)
    assert sync["raw"].steps_per_s == pytest.approx(exact, rel=0.02)
    assert sync["raw"].steps_per_s <= sync["int8"].steps_per_s <= sync["q4"].steps_per_s
    diloco = {item.codec: item for item in foreseen if item.mode == "diloco"}
    assert all(text.of_ideal >= 0.77 for text in diloco.values())
    advised = "\n".join(advice.sentences(foreseen, link, trip_s, 0.1, 10.0))
    assert says in advised and first in advised.partition("First try")[2]
    best = advice.first_try(foreseen, uneven=True)
    assert best.mode not in ("sync", "buffered") or best.local_steps > 1


@st.composite
def foreseen_of_all(draw: st.DrawFn) -> list[advice.Foreseen]:
    """Every mode with every codec, of any speed; some modes take local steps, some refuse a codec on the way back."""
    ways = st.sampled_from([("worker.codec", "worker.reply_codec"), ("worker.codec",)])
    found = []
    for mode in advice.MODES:
        takes = mode in ("localsgd", "diloco", "async_diloco")
        for codec in advice.CODECS:
            sets = tuple(f"{way}={codec}" for way in draw(ways))
            local = draw(st.integers(1, 50)) if takes else 1
            part = draw(st.floats(0.01, 1.0) | st.floats(0.75, 0.82))
            found.append(advice.Foreseen(mode, codec, 100 * part, part, local, sets))
    return found


def contradiction(foreseen: list[advice.Foreseen], link: Link, machines: dict, *, uneven: bool) -> str:
    """Returns how two sentences of the advice, or a sentence and a metric, contradict each other; empty if none do."""
    _, reason, *_, first = advice.sentences(foreseen, link, 0.001, 0.1, 10.0, uneven=uneven)
    best = advice.first_try(foreseen, uneven=uneven)
    flags = dict(item.split("=") for item in first.replace(":", " ").split() if "=" in item)
    fixes = " ".join(finding.fix for finding in advice.checks(Measured(1.0, machines)))
    good = [item for item in foreseen if round(item.of_ideal, 2) >= 0.77]
    single = {item.codec for item in good if item.local_steps == 1}
    return next((why for is_wrong, why in (
        ("raw" in single and not reason.startswith("Raw gradients of every step fit"), "raw fits, and is not advised"),
        (reason.startswith("Raw gradients") and (flags or "--local-steps" in first), "raw fits, yet more is advised"),
        ("makes it fit" in reason and f"worker.codec={best.codec}" not in first, "another codec is advised"),
        ("makes it fit" in reason and "--local-steps" in first, "a codec is enough, yet local steps are advised"),
        ("No codec makes" in reason and (single or "--local-steps" not in first), "local steps, or none?"),
        ("No codec makes" in reason and f"{best.local_steps} with {best.codec}" not in reason, "other local steps"),
        (bool(good) == ("less than" in reason), "whether anything fits"),
        (flags and not {f"{key}={value}" for key, value in flags.items()} <= {*best.sets}, "a refused setting"),
        (", so" in reason and ": ." in reason, "no numbers"),
        (f"--mode {best.mode}" not in first, "another mode is tried first"),
        (any(mode in fixes.split() for mode in advice.MODES), "a check names a mode"),
    ) if is_wrong), "")  # fmt: skip


@given(foreseen_of_all(), st.booleans())
def test_no_two_sentences_contradict_each_other(foreseen: list[advice.Foreseen], uneven: bool) -> None:
    loaded = {0: HEALTHY, 1: {**HEALTHY, "load": 99.0}}
    assert advice.are_uneven(Measured(1.0, loaded)) and not advice.are_uneven(Measured(1.0, {0: loaded[1]}))
    assert contradiction(foreseen, Link(-1, "direct", 1e7, 1e7, 0.0), loaded, uneven=uneven) == ""


def test_workers_that_share_a_link() -> None:
    """What is foreseen is for all at once: of two, each has half of what it had alone."""
    alone = [Link(rank, "direct", 10e6, 20e6, 0.3) for rank in range(2)]
    shared = [Link(rank, "direct", 10e6, 20e6, 0.3, together=2.0) for rank in range(2)]
    assert advice.typical(shared) == Link(-1, "direct", 5e6, 10e6, 0.6)
    rates = [
        next(foreseen.steps_per_s for foreseen in advice.foresee(None, 2, 10.0, 0.01, advice.typical(links), 0.0))
        for links in (alone, shared)
    ]
    assert rates[0] == pytest.approx(2 * rates[1], rel=0.05)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"megabytes": 4}, "the model's size and the time of a step are unknown"),
        ({"megabytes": 4, "compute": "0ms"}, "the time of a step must be positive"),
        ({"megabytes": -4, "compute": "10ms"}, "the model has -4 MB"),
        ({"megabytes": 4, "compute": "10ms", "verify": True}, "needs a task to run"),
        ({"megabytes": 4, "compute": "10ms", "transports": "tin"}, "there is no transport 'tin'"),
        ({"config": "nowhere.yaml"}, "cannot read the configuration nowhere.yaml"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        doctor(**flags)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def said_of(rank: int, number: int, both_s: float, transport: str = "direct", given: str = "direct") -> dict:
    return {
        "rank": rank, "kind": "transport", "round": number, "transport": transport, "given": given, "reason": "why not",
        "up_s": both_s / 2, "both_s": both_s, "trip_s": 0.001, "trip_p99_s": 0.002,
    }  # fmt: skip


def add_round(found: Measurements, *of_workers: dict[str, float]) -> None:
    """A round of all workers: the seconds of an exchange of each, by transport."""
    for rank, of_worker in enumerate(of_workers):
        for transport, both_s in of_worker.items():
            found.add(said_of(rank, len(found.rounds), both_s, transport, transport))
        found.add({"rank": rank, "kind": "together", "transport": "direct", "pair_s": 1.0})


def test_it_stops_when_three_rounds_agree() -> None:
    found = Measurements(2, 100.0, 40.0)
    assert found.why_stop(1000.0) == "", "the first round is measured whole, however long it takes"
    for value in (2.0, 1.0, 1.02):
        assert found.why_stop(101.0) == ""
        add_round(found, {"grpc": value}, {"grpc": 5.0})
    assert found.why_stop(101.0) == "", "the first of the three is twice the others"
    assert found.differ_by() == pytest.approx((2.0 - 1.02) / 1.5), "of the medians so far: 2, 1.5, 1.02"
    add_round(found, {"grpc": 1.04}, {"grpc": 5.1})
    assert found.why_stop(101.0) == "4 rounds; the metrics of the last 3 agree within 5%"


def test_only_the_best_transports_must_agree() -> None:
    found = Measurements(1, 0.0, 40.0)
    for shared_s, grpc_s in ((0.1, 1.0), (0.1, 2.0)):
        add_round(found, {"shared": shared_s, "grpc": grpc_s})
    assert found.best() == {(0, "shared")} and found.why_stop(1.0) == ""
    add_round(found, {"shared": 0.1, "grpc": 4.0})
    assert found.why_stop(1.0) == "3 rounds; the metrics of the last 3 agree within 5%"
    found.add(said_of(0, 3, 0.01))
    assert found.best() == {(0, "direct")} and found.why_stop(1.0) == "", "it has come in no round"


def test_it_stops_when_its_time_is_over() -> None:
    found = Measurements(1, 100.0, 40.0)
    for value in (1.0, 2.0):
        add_round(found, {"grpc": value})
    assert found.why_stop(139.9) == "" and found.part_done(139.9) == pytest.approx(39.9 / 40)
    assert found.why_stop(140.0) == "2 rounds: the 40 s of --budget were used up"
    add_round(found, {"grpc": 1.5})
    assert found.why_stop(140.0) == "3 rounds, which differ by up to 33%: the 40 s of --budget were used up"


def test_it_stops_when_medians_agree_although_rounds_do_not() -> None:
    """A busy machine: single rounds never agree."""
    found, stopped = Measurements(1, 0.0, 40.0), []
    for value in (1.0, 1.5, 0.7, 1.02, 1.6, 0.8, 1.01):
        add_round(found, {"grpc": value})
        stopped.append(bool(found.why_stop(1.0)))
    # Medians so far: 1, 1.25, 1, 1.01, 1.02, 1.01, 1.01.
    assert stopped == [False, False, False, False, True, True, True]


def test_metrics_are_medians_of_what_was_said_so_far() -> None:
    """Also in the middle of a round, and of a transport that a worker was not given."""
    found = Measurements(2, 0.0, 40.0)
    for rank in range(2):
        found.add(
            {"rank": rank, "kind": "machine", "bytes": 4000, "compute_s": 0.1, "arrived": 2.0, "time": 1.5, **HEALTHY}
        )
    assert found.measured.links == [] and found.rounds == []
    for number, both_s in enumerate((0.2, 0.4, 0.3)):
        found.add(said_of(0, number, both_s))
        found.add(said_of(0, number, 0.1, "shared", "direct"))
        found.add({"rank": 0, "kind": "together", "transport": "direct", "pair_s": 3 * both_s})
    assert found.rounds == [], "one worker has said nothing"
    (link,) = found.measured.links
    assert (link.rank, link.transport, link.exchange_s, link.together) == (0, "direct", 0.3, 2.0)
    assert link.up == pytest.approx(4000 / (0.15 - 0.001)) and link.down == pytest.approx(4000 / 0.15)
    assert found.measured.refused == [(0, "shared", "why not")] and found.measured.clocks == {0: 0.5, 1: 0.5}
    found.add(said_of(1, 0, 1.0))
    found.add({"rank": 1, "kind": "together", "transport": "direct", "pair_s": 1.5})
    assert found.rounds == [{(0, "direct"): 0.2, (1, "direct"): 1.0}]


def made(clock: Clock, values: list[float], interrupted_after: int | None) -> Iterator[dict]:
    """Messages of made-up metrics, a second apart."""
    yield {"kind": "security", "security": "none"}
    yield {"rank": 0, "kind": "machine", "bytes": 4000, "compute_s": 0.1, "arrived": 1.0, **HEALTHY, "time": 1.0}
    for number, value in enumerate(values):
        clock.now += 1.0
        yield said_of(0, number, value)
        if number == interrupted_after:
            raise KeyboardInterrupt
        yield {"rank": 0, "kind": "together", "transport": "direct", "pair_s": value}


@pytest.mark.parametrize(
    ("values", "after", "ended"),
    [
        ([1.0] * 100, None, "3 rounds; the metrics of the last 3 agree within 5%"),
        ([1.0, 2.0] * 50, None, "9 rounds, which differ by up to 50%: the 10 s of --budget were used up"),
        ([1.0, 2.0] * 50, 2, "2 whole rounds, then Ctrl-C"),
    ],
)
def test_the_run_is_ended_when_enough_is_known(values: list[float], after: int | None, ended: str) -> None:
    clock = Clock()
    messages, parts = made(clock, values, after), list[float]()
    plan = Plan(0.3, 0.004, ("direct",))
    found = measure(messages, 1, plan, 10.0, lambda part, text: parts.append(part), clock)
    assert found.ended == ended and next(messages, None) is None
    assert found.is_partial == (after is not None) and len(found.links) == 1
    assert parts == sorted(parts) and 0 <= parts[0] <= parts[-1] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("message", ["measuring", "starting"])
def test_ctrl_c_shows_what_is_measured_so_far(cluster: Cluster, message: str) -> None:
    flags = (
        "--mb", "0.5", "--compute", "20ms", "--seconds", "0.1", "-n", "1", "--transports", "direct", "--budget", "600",
    )  # fmt: skip
    doctor = cluster.start("doctor", "-m", "paramserver.launch", "doctor", *flags, "--set=log.level=debug")
    wanted = "round 2" if message == "measuring" else "starting"
    doctor.until(lambda: wanted in doctor.output, wanted)
    doctor.signal(signal.SIGINT)
    assert doctor.wait() == 130, doctor.output
    assert "Traceback" not in doctor.output
    if message == "measuring":
        assert "then Ctrl-C" in doctor.output and "First try: --mode" in doctor.output
    else:
        assert "ended before anything was measured" in doctor.output


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared", "direct", "grpc"])
def test_it_measures_a_transport(cluster: Cluster, transport: str) -> None:
    flags = ("--mb", "0.5", "--compute", "20ms", "--seconds", "0.2", "--transports", transport, "--json", "--set",
             "policy.local_steps=4")  # fmt: skip
    result = cluster.command("launch", "doctor", *flags)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert {(link["rank"], link["transport"]) for link in found["links"]} == {(0, transport), (1, transport)}
    assert all(link["up"] > 1e6 and link["down"] > 1e6 and link["together"] >= 1 for link in found["links"])
    assert found["security"] == "none"
    assert set(found["round_trips"]) == set(found["machines"]) == {"0", "1"}
    assert {item["mode"] for item in found["foreseen"]} == set(advice.MODES)
    assert "First try" in found["advice"][-1]
    assert not (cluster.folder / "runs").exists()


@pytest.mark.slow
def test_why_a_transport_is_not_there_is_said(cluster: Cluster) -> None:
    flags = ("--mb", "0.5", "--compute", "20ms", "--seconds", "0.2", "-n", "1", "--set", "server.shared_memory=false")
    result = cluster.command("launch", "doctor", *flags, "--transports", "shared,direct", "--json")
    assert result.returncode == 0, result.stderr
    output = [check["text"] for check in json.loads(result.stdout)["checks"]]
    assert any("has no transport shared: " in text and "server" in text for text in output), output
    result = cluster.command("launch", "doctor", *flags, "--transports", "shared")
    assert (result.returncode, "no worker has a transport of shared: " in result.stderr) == (2, True), result.stderr


@pytest.mark.campaign  # other tests beside it would take its link's time
@pytest.mark.timeout(1200)
def test_what_is_foreseen_is_what_comes_of_it_on_a_link_of_100_megabit(cluster: Cluster) -> None:
    """In a network namespace of its own, whose loopback has the rate both ways; the machine otherwise quiet. Errors of
    at most a quarter of what is measured; but for diloco, of which docs/doctor.md says so."""
    if (why := why_not()) is not None:
        pytest.skip(why)
    name = f"doctor{os.getpid()}"
    inside = ("ip", "netns", "exec", name)
    try:
        for command in (
            ("ip", "netns", "add", name), ("ip", "-n", name, "link", "set", "lo", "up"),
            ("tc", "-n", name, "qdisc", "add", "dev", "lo", "root",
             "tbf", "rate", "100mbit", "burst", "256kb", "latency", "50ms"),
        ):  # fmt: skip
            made = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
            if made.returncode:
                pytest.skip(f"{' '.join(command)}: {made.stderr.strip()}")
        doctor = (sys.executable, "-m", "paramserver.launch", "doctor", str(ROOT / "configs/digits.yaml"))
        flags = ("--transports", "direct", "--seconds", "2", "--verify", "--json")
        result = subprocess.run(
            [*inside, *doctor, *flags], cwd=cluster.folder, capture_output=True, text=True, check=False
        )
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=30, check=False)
    assert result.returncode == 0, result.stderr
    verified = json.loads(result.stdout)["verified"]
    errors = {(item["mode"], item["codec"]): item["foreseen"] / item["measured"] - 1 for item in verified}
    print("\n".join(f"{mode:>12} {codec:>5} {error:+.0%}" for (mode, codec), error in errors.items()))
    wanted = {*errors} - {("diloco", "raw")}
    assert {("sync", "q4"), ("localsgd", "raw"), ("async_diloco", "raw")} <= wanted
    assert {error: errors[error] for error in wanted if abs(errors[error]) > 0.25} == {}
