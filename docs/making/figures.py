"""The figures of the modes' pages: what a few workers do in their first seconds, by `ps-sim`'s own simulation.

    make docs-figures          all of docs/figures/*.svg again

One picture for each mode. A row is a worker: its computing, transfers and waits. The number in a box is how many
versions late that gradient was when it was applied. A line down the rows is a new version.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from paramserver.common.config.schema import Config
from paramserver.common.reporting.pictures import svg
from paramserver.common.wire.records import Outcome
from paramserver.ps.core import effects
from paramserver.simulate.plan import Flags, alone, resolve, worlds
from paramserver.simulate.run.agenda import Worker
from paramserver.simulate.run.simulation import Simulation

FOLDER = Path(__file__).parents[1] / "figures"
SETS = ["policy.delayed_update=false"]
LINK = Flags(megabytes=0.6, compute="100ms", jitter=0.15, speeds="1,0.9,1.1,0.55", bandwidth="200mbit", latency="6ms")
SHOWN_S = 1.9
# Of each mode: what it is told besides, and what stands above the picture.
MODES = {
    "sync": ([], "sync: the round ends with the slowest"),
    "async": ([], "async: nobody waits; numbers are versions of staleness"),
    "ssp": (["policy.staleness=2"], "ssp, staleness 2: fast workers wait once they are too far ahead"),
    "dssp": (["policy.staleness=1", "policy.staleness_most=6"], "dssp, 1 to 6: the fastest goes on where it pays"),
    "buffered": (["policy.buffer=3"], "buffered, 3: a version is made of any three gradients"),
    "localsgd": (["policy.local_steps=4"], "localsgd, 4 local steps: one exchange in four steps"),
    "diloco": (["policy.local_steps=6"], "diloco, 6 local steps: one outer step along the mean"),
    "async_diloco": (
        ["policy.local_steps=6", "policy.quorum=2"],
        "async_diloco, 6 local steps: a slow worker takes fewer, and nobody waits for it long",
    ),
}
_LEFT, _WIDTH, _ROW = 70, 760, 34
_STYLE = (
    "<style>text{font:12px sans-serif;fill:#333}.c{fill:#4c9f70}.t{fill:#4878a8}.w{fill:#d9a441}"
    ".v{stroke:#999;stroke-dasharray:2 3}.b{fill:#fff}.n{fill:#fff;text-anchor:middle}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.b{fill:#1e2129}.n{fill:#fff}}</style>"
)


class Watched(Simulation):
    """A simulation that remembers who did what when: (class, rank, from, to, label), and when versions were made."""

    def __init__(self, *args: Any, **more: Any) -> None:
        self.spans: list[tuple[str, int, float, float, str]] = []
        self.versions: list[float] = []
        super().__init__(*args, **more)

    def _computed(self, worker: Worker, told: object) -> None:
        self.spans.append(("c", worker.rank, self.now - worker.computed_s, self.now, ""))
        super()._computed(worker, told)

    def _account(self, worker: Worker, reply: effects.SendReply) -> None:
        result = reply.reply.result
        transfer_s = (self.now - worker.sent_at - result.gate_wait_s) / 2  # one way
        arrived_at = worker.sent_at + transfer_s
        replied_at = arrived_at + result.gate_wait_s
        self.spans += [
            ("t", worker.rank, worker.sent_at, arrived_at, ""),
            ("w", worker.rank, arrived_at, replied_at, ""),
            ("t", worker.rank, replied_at, self.now, ""),
        ]
        if result.outcome is Outcome.APPLIED:
            computed = max(i for i, (kind, rank, *_) in enumerate(self.spans) if (kind, rank) == ("c", worker.rank))
            kind, rank, begun, ended, _ = self.spans[computed]
            self.spans[computed] = (kind, rank, begun, ended, str(result.staleness))
        super()._account(worker, reply)

    def _commit(self, commit: effects.Commit) -> None:
        self.versions.append(self.now)
        super()._commit(commit)


def timeline(title: str, runs: list[Watched], names: list[str]) -> str:
    """An SVG file of what the workers did until SHOWN_S."""
    rows = [(run, rank) for run in runs for rank in range(run.world.num_workers)]
    height = 40 + len(rows) * _ROW + 44
    scale = (_WIDTH - _LEFT - 10) / SHOWN_S
    found = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}">',
        f"<title>{escape(title)}</title>{_STYLE}",
        f'<rect class="b" width="{_WIDTH}" height="{height}" rx="6"/><text x="10" y="20">{escape(title)}</text>',
    ]
    for index, ((run, rank), name) in enumerate(zip(rows, names, strict=True)):
        top = 36 + index * _ROW
        found.append(f'<text x="10" y="{top + 18}">{escape(name)}</text>')
        for kind, of, begun, ended, label in run.spans:
            if of != rank or begun > SHOWN_S or ended - begun < 1e-4:
                continue
            ended = min(ended, SHOWN_S)
            x, wide = _LEFT + begun * scale, (ended - begun) * scale
            found.append(f'<rect class="{kind}" x="{x:.1f}" y="{top}" width="{wide:.1f}" height="26"/>')
            if label and wide > 8:
                found.append(f'<text class="n" x="{x + wide / 2:.1f}" y="{top + 17}">{label}</text>')
    for run in runs[:1]:
        for at in (at for at in run.versions if at <= SHOWN_S):
            x = _LEFT + at * scale
            found.append(f'<line class="v" x1="{x:.1f}" x2="{x:.1f}" y1="30" y2="{36 + len(rows) * _ROW}"/>')
    found.append(_legend(height - 24))
    return "".join(found) + "</svg>\n"


def _legend(top: int) -> str:
    shown, x = "", _LEFT
    for kind, name in (("c", "computing"), ("t", "transfer"), ("w", "waiting")):
        shown += f'<rect class="{kind}" x="{x}" y="{top}" width="14" height="14"/><text x="{x + 20}" y="{top + 12}">'
        shown, x = f"{shown}{name}</text>", x + 130
    return f'{shown}<text x="{x}" y="{top + 12}">dashed: a new version; 0 to {SHOWN_S:g} s</text>'


def simulated(config: Config, told: Flags = LINK) -> Watched:
    """A run of this mode, to its end."""
    ((config, world),) = worlds([config], told)
    simulation = Watched(config, world)
    simulation.go()
    return simulation


def of_mode(mode: str, sets: list[str]) -> Config:
    (config,) = resolve(None, mode, 4, {"run.steps": 40, "run.seed": 1}, [*SETS, *sets], {})
    return config


def drawn() -> dict[str, str]:
    """Every figure by its file's name."""
    found = {}
    for mode, (sets, title) in MODES.items():
        found[f"{mode}.svg"] = timeline(title, [simulated(of_mode(mode, sets))], [f"rank {rank}" for rank in range(4)])
    found["single.svg"] = _single()
    found["allreduce.svg"] = _ring_and_server()
    return found


def _single() -> str:
    config = of_mode("sync", [])
    ((config, world),) = worlds([config], LINK)
    one = Watched(*alone(config, world))
    one.go()
    title = "single: the same four batches on one machine, one step after another"
    return timeline(title, [one], ["alone"])


def _ring_and_server() -> str:
    """Seconds of one exchange of 100 MB by number of workers, 1 Gbit/s for each machine: a server's link is shared."""
    curves = []
    numbers = (2, 4, 6, 8, 12, 16)
    for shards in (1, 4):
        points = []
        for num in numbers:
            told = Flags(
                megabytes=100, compute="1ms", jitter=0, bandwidth="1gbit", fold="0ms", step="0ms",
                server_bandwidth=f"{shards}gbit",
            )  # fmt: skip
            (config,) = resolve(None, "sync", num, {"run.steps": 4}, SETS, {})
            run = simulated(config, told)
            points.append((float(num), (run.versions[-1] - run.versions[0]) / (len(run.versions) - 1)))
        curves.append((f"sync, {shards} shard{'s' * (shards > 1)}", points))
    curves.append(("ring all-reduce", [(float(num), 2 * (num - 1) / num * 0.8) for num in numbers]))
    style = _STYLE.replace("text{font:12px sans-serif;fill:#333}", "text{font:12px sans-serif}")
    told = "seconds of one exchange of 100 MB, 1 Gbit/s for each machine"
    above = f'<rect class="b" width="880" height="350" rx="6"/><text x="90" y="26">{told}</text>'
    shown = svg(curves, "workers").replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return shown.replace(">", f"><title>{told}</title>{style}{above}", 1) + "\n"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in drawn().items():
        (FOLDER / name).write_text(text)
        print(f"docs/figures/{name}: {len(text):,} B")


if __name__ == "__main__":
    main()
