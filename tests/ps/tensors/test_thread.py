"""Tensor work in order: whose error it is, and what runs after one."""

from __future__ import annotations

import asyncio

import pytest

from paramserver.common.errors import DivergedError, Reason
from paramserver.ps.tensors.thread import INLINE_BYTES, TensorsBroken, TensorThread

SIZES = [pytest.param(1, id="inline"), pytest.param(INLINE_BYTES + 1, id="thread")]


def fail() -> None:
    raise RuntimeError("no such tensor")


@pytest.mark.parametrize("num_bytes", SIZES)
async def test_an_error_reaches_who_awaits_the_work_and_nobody_else(num_bytes):
    ends: list[BaseException] = []
    tensors = TensorThread(ends.append)
    tensors.size_for(num_bytes)
    with pytest.raises(RuntimeError, match="no such tensor"):
        await tensors.run(fail)
    errors: list[Exception] = []
    tensors.submit(fail, failed=errors.append)
    assert await tensors.run(lambda: 7) == 7
    assert len(errors) == 1 and ends == [] and not tensors.is_broken
    tensors.close()


@pytest.mark.parametrize(
    "error", [ValueError("no such tensor"), DivergedError("no such tensor", reason=Reason.DIVERGED)]
)
@pytest.mark.parametrize("num_bytes", SIZES)
async def test_after_work_on_the_weights_has_failed_nothing_is_done_with_them(num_bytes, error):
    def fail() -> None:
        raise error

    ends: list[BaseException] = []
    found: list[object] = []
    tensors = TensorThread(ends.append)
    tensors.size_for(num_bytes)
    tensors.submit(fail)
    tensors.submit(lambda: found.append("a later commit"))
    tensors.submit(lambda: found.append("a capture"), failed=lambda error: found.append(type(error)))
    tensors.then(lambda: found.append("then"))
    with pytest.raises(TensorsBroken) as broken:
        await tensors.run(lambda: found.append("a look"))
    assert broken.value.reason is getattr(error, "reason", None)
    assert found == [TensorsBroken, "then"] and tensors.is_broken
    assert [str(error) for error in ends] == ["no such tensor"]
    tensors.close()


@pytest.mark.parametrize("num_bytes", SIZES)
async def test_work_and_callbacks_keep_their_order(num_bytes):
    found: list[int] = []
    tensors = TensorThread(lambda error: None)
    tensors.size_for(num_bytes)
    tensors.submit(lambda: 1, found.append)
    tensors.then(lambda: found.append(2))
    tensors.submit(lambda: 3, found.append)
    assert await tensors.run(lambda: 4) == 4
    assert found == [1, 2, 3]
    tensors.close()


@pytest.mark.parametrize("num_bytes", SIZES)
async def test_work_that_holds_is_gone_on_with_before_all_that_came_after_it(num_bytes):
    found: list[object] = []
    tensors = TensorThread(lambda error: found.append(str(error)))
    tensors.size_for(num_bytes)

    def measured(name: str) -> None:
        found.append(f"{name} is measured")
        asyncio.get_running_loop().call_later(0.01, tensors.go_on, lambda: found.append(f"step {name}"), found.append)

    for name in ("a", "b"):
        tensors.submit(lambda name=name: name, measured, pauses=True)
        tensors.then(lambda name=name: found.append(f"at once after {name}"))
        tensors.submit(lambda name=name: found.append(f"after {name}"))
        tensors.then(lambda name=name: found.append(f"then {name}"))
    await tensors.run(lambda: None)
    found = [item for item in found if item is not None]
    work = [item for item in found if item.startswith(("step", "after"))]
    assert work == ["step a", "after a", "step b", "after b"]
    expected = ["a is measured", "at once after a", "then a", "b is measured", "at once after b", "then b"]
    assert [item for item in found if item not in work] == expected
    assert all(found.index(f"step {name}") < found.index(f"at once after {name}") for name in ("a", "b"))
    tensors.submit(fail, pauses=True)
    with pytest.raises(TensorsBroken):
        await tensors.run(lambda: 7)
    tensors.close()
