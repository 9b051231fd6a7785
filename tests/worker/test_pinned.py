"""Memory locked for a GPU is unlocked again, and a driver that refuses costs speed only."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from paramserver.common.tensors.layout import new_payload
from paramserver.worker.tensors.staged import PinnedMemory


class Driver:
    """CUDA's runtime as far as it locks memory: which addresses are locked, and with which error it replies."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if not self.error:
            self.locked[address] = num_bytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return self.error


def test_what_is_locked_is_unlocked_once() -> None:
    driver, payload = Driver(), new_payload(4096)
    pinned = PinnedMemory(payload, driver)
    assert driver.locked == {payload.data_ptr(): 4096} and pinned.is_pinned
    pinned.release()
    assert driver.locked == {}
    pinned.release()


@pytest.mark.parametrize("error", [1, 2, 712])
def test_a_driver_that_refuses_is_said_once_and_nothing_is_unlocked(error: int) -> None:
    driver = Driver(error)
    with capture_logs() as lines:
        pinned = PinnedMemory(new_payload(64), driver)
        pinned.release()
    assert [(line["event"], line["cuda_error"]) for line in lines] == [("not_pinned", error)]
    assert not pinned.is_pinned
