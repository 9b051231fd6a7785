"""onehot.py that halts for ever in the middle of an exchange. PADDING has it made in more than one piece.

argv: STEPS WHERE STEP: in contribution STEP, after part of it was placed ("placing"), or of its reply
was read ("reading").
"""

import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paramserver.worker.tensors.transfer import DirectTransfer

WHERE, STEP = sys.argv[2], int(sys.argv[3])
counted = {"placing": 0, "reading": -1}  # the first weights come before the first contribution


def halt(where: str) -> None:
    if where == WHERE and counted[where] == STEP:
        print(f"halts {where}", flush=True)
        time.sleep(1000)


place, write = DirectTransfer.gather_into, DirectTransfer.write


def placing(self: DirectTransfer, *arguments: Any) -> Iterator[tuple[int, int]]:
    counted["placing"] += 1
    for start, end in place(self, *arguments):
        yield start, start + 64
        halt("placing")
        yield start + 64, end


def reading(self: DirectTransfer, offset: int, data: memoryview) -> None:
    write(self, offset, data)
    if offset == 0:
        counted["reading"] += 1
        halt("reading")


DirectTransfer.gather_into, DirectTransfer.write = placing, reading  # type: ignore[method-assign]

del sys.argv[2:]
runpy.run_path(str(Path(__file__).with_name("onehot.py")))
