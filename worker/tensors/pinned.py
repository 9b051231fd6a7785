"""Memory that exists already, locked so that copies between it and a GPU need not wait."""

from __future__ import annotations

from typing import Any

import torch

from ...common.reporting.log import get_logger

log = get_logger()


class PinnedMemory:
    """`payload` locked until `release`. Where the driver refuses, copies are slower and a line of the log says why.

    `runtime` is CUDA's, as `torch.cuda.cudart()` gives it.
    """

    def __init__(self, payload: torch.Tensor, runtime: Any) -> None:
        self._runtime = runtime
        self._address = payload.data_ptr()
        self.is_pinned = self._succeeded("register", runtime.cudaHostRegister(self._address, payload.numel(), 0))

    def release(self) -> None:
        """Before the memory is given back to the system, or the driver keeps its pages. Once."""
        if self.is_pinned:
            self.is_pinned = False
            self._succeeded("unregister", self._runtime.cudaHostUnregister(self._address))

    @staticmethod
    def _succeeded(what: str, error: Any) -> bool:
        """`error` is CUDA's: 0 is none."""
        if int(error) == 0:
            return True
        log.warning("not_pinned", call=what, cuda_error=int(error), meaning="copies to and from the GPU wait")
        return False
