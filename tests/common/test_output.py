"""Files are whole or as they were, whatever is at their path, and whoever was killed while it wrote."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from paramserver.common.reporting.output import write_whole


def test_what_a_killed_process_left_goes_with_the_next_file_and_one_that_is_being_written_stays(tmp_path: Path) -> None:
    left, others, in_use = (tmp_path / name for name in (".w[1].7.tmp", ".w2.7.tmp", ".w[1].8.tmp"))
    for path in (left, others, in_use):
        path.write_bytes(b"half")
    with in_use.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        write_whole(tmp_path / "w[1]", b"whole")
    assert (tmp_path / "w[1]").read_bytes() == b"whole"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([in_use.name, others.name, "w[1]"])


def test_a_link_stays_and_a_pipe_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "w")
    write_whole(tmp_path / "link", b"whole")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "disk" / "w").read_bytes() == b"whole"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_whole(tmp_path / "pipe", b"whole")
    assert os.read(reader, 9) == b"whole" and stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    os.close(reader)
