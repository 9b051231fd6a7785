"""`--one-of-each`: which tests a seed draws."""

from __future__ import annotations

import subprocess
import sys

from paramserver.tests.sample import commit, draw

NAMES = [f"{file}.py::test_{test}[{case}]" for file in "abc" for test in range(5) for case in range(20)]


def test_a_seed_draws_the_same_tests_and_another_seed_other_tests() -> None:
    first = draw(NAMES, "test", "5f3a")
    assert first == draw(reversed(NAMES), "test", "5f3a")
    assert first != draw(NAMES, "test", "c01d")
    assert sorted(name.partition("[")[0] for name in first) == sorted({name.partition("[")[0] for name in NAMES})
    assert sorted(name[0] for name in draw(NAMES, "file", "5f3a")) == ["a", "b", "c"]


def test_a_test_of_another_group_changes_no_draw() -> None:
    assert draw(NAMES, "test", "5f3a") <= draw([*NAMES, "d.py::test"], "test", "5f3a")


def test_the_seed_is_the_commit_and_is_printed() -> None:
    argv = ["-m", "pytest", "-p", "no:cacheprovider", "--co", "-q", "--one-of-each", "file", __file__]
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, check=False)
    assert done.stdout.startswith(f"repeat this sample with --sample-seed {commit()}\n")
    assert done.stdout.count("::test_") == 1
