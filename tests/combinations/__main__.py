"""make combinations SEED=n, or one row."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .options import DEFAULTS, Row, array, command, is_promised, refused_pairs
from .run import SCRIPT, reduced, run

MOST_REFUSAL_S = 1.0


def shown(row: Row) -> str:
    """Return the options of a row that are not defaults."""
    return " ".join(f"{name}={value}" for name, value in row.items() if value != DEFAULTS[name]) or "(defaults)"


def refuse(row: Row, folder: Path) -> str:
    """Return what is wrong with the refusal of a row; empty: nothing."""
    begun = time.monotonic()
    words = [sys.executable, "-m", "paramserver.launch", *command(row, SCRIPT, folder)]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    seconds, text = time.monotonic() - begun, (ended.stdout + ended.stderr).strip()
    if ended.returncode != 2 or "fix:" not in text or len(text.splitlines()) > 3:
        return f"exit code {ended.returncode}: {text[-300:]}"
    return "" if seconds < 2 * MOST_REFUSAL_S else f"it took {seconds:.1f} s"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m paramserver.tests.combinations")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--row", help="options of one row, as JSON")
    parser.add_argument("--most", type=int, help="run only so many rows of the array")
    parser.add_argument("--folder", type=Path, help="where rows leave their files; default: a folder that is removed")
    parser.add_argument("--no-reduce", action="store_true", help="show rows that fail as they are")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        rows = [{**DEFAULTS, **json.loads(options.row)}] if options.row else array(options.seed)
        failed = 0
        for number, row in enumerate(rows[: options.most]):
            if not is_promised(row):
                print(f"refused by the table: {shown(row)}")
                continue
            judgement = run(row, folder / "row")
            how = "ok" if judgement.is_well else "FAILED"
            print(f"{number + 1}/{len(rows)} {how} {judgement.seconds:.1f} s {shown(row)}", flush=True)
            if judgement.is_well:
                continue
            failed += 1
            print("   ", "; ".join(judgement.problems))
            if not options.no_reduce:
                print("    fewest options:", shown(reduced(row, folder / "reduced")))
            sys.stdout.flush()
        if not options.row:
            for row in refused_pairs():
                if row["optimizer"] not in ("two", "rows", "adamw", "momentum"):  # choices of the script, not of flags
                    problem = refuse(row, folder)
                    failed += bool(problem)
                    print(f"refused: {shown(row)}{': FAILED: ' + problem if problem else ''}")
        print(f"{len(rows)} rows, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
