"""Tests claims of papers about learning: a command for each number of docs/claims.md.

    python -m paramserver.benchmarks.claims [N4 N18 ...] [--seeds N] [--short]        or: make claims [N="N4 N18"]

Each prints the command that it runs, which can be run by itself with other settings. `--short`: a tenth of the steps,
which says that it works and nothing about learning.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import NamedTuple


class Claim(NamedTuple):
    statement: str
    module: str
    steps: int
    arguments: tuple[str, ...] = ()
    ways: tuple[str, ...] = ()


_LONG = 3_000  # rounds of local steps are few in less: what 600 steps rank first is not first then
_FEEDBACK = ("", ", no feedback")
CLAIMS: dict[str, Claim] = {
    "N3": Claim("int8 both ways loses nothing", "codecs", 400, ("--down", "--codec", "raw", "--codec", "int8")),
    "N3-adam": Claim(
        "the same with Adam", "codecs", 400, ("--down", "--optimizer", "adam", "--codec", "raw", "--codec", "int8")
    ),
    "N4": Claim("q4 both ways loses nothing", "codecs", 400, ("--down", "--codec", "raw", "--codec", "q4")),
    "N4-adam": Claim(
        "the same with Adam", "codecs", 400, ("--down", "--optimizer", "adam", "--codec", "raw", "--codec", "q4")
    ),
    "N5": Claim(
        "q4 on DiLoCo costs nothing, at 190 times less and more", "outer", _LONG, (),
        ("H 25", "H 25, q4 both", "H 25, int8 both", "H 100, q4 both"),
    ),
    "N6": Claim(
        "the outer optimizer is no worse than the mean", "outer", _LONG, (),
        ("H 25, mean", "H 25", "H 25, 0.7/0.9", "H 10, mean", "H 10"),
    ),
    "N7": Claim("many local steps cost little", "outer", _LONG, (), ("sync", "H 10", "H 25", "H 100", "H 100, mean")),
    "N8": Claim(
        "sparse needs error feedback", "outer", _LONG, (),
        ("H 25, mean", *(f"H 25, sparse up{options}" for options in _FEEDBACK)),
    ),
    "N9": Claim(
        "2 bits lose next to nothing, with feedback", "outer", _LONG, (),
        ("H 25", *(f"H 25, q2 both{options}" for options in _FEEDBACK)),
    ),
    "N10": Claim(
        "fragments cost nothing, nor does going on during their exchange", "outer", _LONG, (),
        ("H 25", "H 25, 5 fragments", *(
            f"H 25, 5 fragments, tau 2{codecs}" for codecs in ("", ", q4 both")
        )),
    ),
    "N11": Claim("lost deltas cost little", "outer", _LONG, (), ("H 25", "H 25, 30 % dropped")),
    "N12": Claim(
        "1-bit Adam loses nothing after a warm-up", "codecs", 400,
        ("--only-feedback", "--optimizer", "onebit", "--codec", "raw", "--codec", "onebit_adam"),
    ),
    "N12-adam": Claim("Adam itself", "codecs", 400, ("--optimizer", "adam", "--codec", "raw")),
    "N15": Claim(
        "PowerSGD of rank 1 needs its memory, and loses nothing with it", "codecs", 400,
        ("--codec", "raw", "--codec", "powersgd"),
    ),
    "N15-down": Claim("the same with int8 down", "codecs", 400, ("--down", "int8", "--codec", "powersgd")),
    "N16": Claim("top-k needs its memory", "codecs", 400, ("--codec", "topk")),
    "N17": Claim(
        "a worker that loses what it kept back costs little", "codecs", 400,
        ("--only-feedback", "--lose-every", "10", "--codec", "raw", "--codec", "topk", "--codec", "powersgd"),
    ),
    "N18": Claim(
        "late gradients and the rules against it", "late", 8_000, ("--workers", "30"),
        ("nothing", "no momentum, inverse", "buffered, no momentum"),
    ),
    "N18-all": Claim("the same, all rules, by number of workers", "late", 3_000),
    "N19": Claim("local steps learn as much when nobody waits, in less time", "async_diloco", 3_200),
    "N24": Claim("a region loses less by `shift` than by HALoS's rule", "regions", 160),
}  # fmt: skip


def command(number: str, seeds: int, part: float) -> list[str]:
    claim = CLAIMS[number]
    ways = [words for way in claim.ways for words in ("--way", way)]
    sizes = ["--steps", str(max(1, round(claim.steps * part))), "--seeds", str(seeds)]
    return ["-m", f"{__package__}.{claim.module}", *sizes, *claim.arguments, *ways]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", metavar="N", help="of " + ", ".join(CLAIMS) + "; none: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--short", action="store_true", help="a tenth of the steps, one seed")
    options = parser.parse_args()
    if unknown := [number for number in options.numbers if number not in CLAIMS]:
        parser.error(f"no claim {', '.join(unknown)}; there are {', '.join(CLAIMS)}")
    for number in options.numbers or CLAIMS:
        argv = command(number, 1 if options.short else options.seeds, 0.1 if options.short else 1.0)
        words = " ".join(f'"{word}"' if " " in word else word for word in argv)
        print(f"\n{number}: {CLAIMS[number].statement}\n$ python {words}", flush=True)
        if (code := subprocess.run([sys.executable, *argv], check=False).returncode) != 0:
            raise SystemExit(code)


if __name__ == "__main__":
    main()
