"""The results of ps-launch doctor, as tables and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from rich.table import Table

from ...common.reporting.report import report_console, share, size
from . import advice
from .measure import Measured


@dataclass(frozen=True)
class Report:
    """All results of the doctor."""

    measured: Measured
    checks: list[advice.Finding]
    foreseen: list[advice.Foreseen]
    sentences: list[str]
    verified: list[tuple[advice.Foreseen, float]]  # with the measured steps a second

    def as_json(self) -> str:
        """Returns everything as JSON."""
        found = {name: value for name, value in vars(self.measured).items() if name not in ("clocks", "refused")}
        trips = {rank: {"median_s": trip, "p99_s": worst} for rank, (trip, worst) in self.measured.round_trips.items()}
        found |= {
            "clocks_s": self.measured.clocks, "round_trips": trips,
            "links": [
                {**vars(link), "up_mb_s": round(link.up / 1e6, 2), "down_mb_s": round(link.down / 1e6, 2)}
                for link in self.measured.links
            ],
            "checks": [asdict(item) for item in self.checks],
            "foreseen": [asdict(item) for item in self.foreseen], "advice": self.sentences,
            "verified": [
                {"mode": item.mode, "codec": item.codec, "foreseen": item.steps_per_s, "measured": rate}
                for item, rate in self.verified
            ],
        }  # fmt: skip
        return json.dumps(found, indent=2)

    def show(self) -> None:
        """Print tables and sentences."""
        found = self.measured
        console = report_console()
        columns = ("up MB/s", "down MB/s", "exchange", "while all exchange", "round trip", "slowest 1 %")
        links = Table("worker", "host", "transport", *columns, box=None)
        for link in sorted(found.links, key=lambda link: (link.rank, link.exchange_s)):
            trip, worst = found.round_trips[link.rank]
            links.add_row(
                str(link.rank), str(found.machines[link.rank]["host"]), link.transport, f"{link.up / 1e6:,.1f}",
                f"{link.down / 1e6:,.1f}", f"{link.exchange_s * 1e3:,.1f} ms",
                f"{link.together:.1f} times as long" if link.together > 1 else "",
                f"{trip * 1e3:.2f} ms", f"{worst * 1e3:.2f} ms",
            )  # fmt: skip
        console.print(links)
        console.print(machines_table(found))
        for check in self.checks:
            style = {"ok": "green", "warn": "yellow", "fail": "red"}[check.level]
            console.print(f"{check.level}: {check.text}" + (f"; {check.fix}" if check.fix else ""), style=style)
        console.print(f"Measured {found.ended}.", style="dim", highlight=False)
        console.print("Steps per second of all workers, by codec, and the share of time in which workers compute:")
        modes = Table("mode", "local steps", *advice.CODECS, box=None)
        for mode in dict.fromkeys(item.mode for item in self.foreseen):
            row = {item.codec: item for item in self.foreseen if item.mode == mode}
            local = "/".join(dict.fromkeys(str(item.local_steps) for item in row.values()))
            cells = [
                f"{row[codec].steps_per_s:,.1f} ({share(row[codec].of_ideal)})" if codec in row else "-"
                for codec in advice.CODECS
            ]
            modes.add_row(mode, local, *cells)
        console.print(modes)
        if self.verified:
            real = Table("mode", "codec", "foreseen", "measured", "error", box=None)
            for entry, rate in self.verified:
                error = f"{entry.steps_per_s / rate - 1:+.0%}" if rate else "-"
                real.add_row(entry.mode, entry.codec, f"{entry.steps_per_s:,.1f}", f"{rate:,.1f}", error)
            console.print(real)
        for sentence in self.sentences:
            console.print(sentence, highlight=False)


def machines_table(found: Measured) -> Table:
    """Returns the table of all machines, including machines without problems."""
    free = ("memory free", "disk free", "shared memory free")
    names = ("clock differs by", "cores", "load", *free, "to write 1 MiB", "open files", "GPUs", "security")
    table = Table("machine", *names, box=None)
    for name, entry, behind_s in found.named_machines():
        written = f"{entry['fsync_s'] * 1e3:.1f} ms" if entry["fsync_s"] >= 0 else "no"
        table.add_row(
            name, "-" if behind_s is None else f"{behind_s:+.2f} s", str(entry["cores"]),
            f"{entry['load']:.1f}", *(size(entry[f"free_{name}"]) for name in ("memory", "disk", "shm")), written,
            f"{entry['files']:,}", str(entry["cuda"]), found.security,
        )  # fmt: skip
    return table
