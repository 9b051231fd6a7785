"""Our exchange as a contestant: one worker of the real server, by transport and by where its gradients lie.

    begun ---- encode ---- sent ---- gate wait, reply ---- replied ---- down ---- done
      `------------------ up ----------------'

`encode` is the gathering of the gradients, and what a codec or the shared memory makes of them.

`gate_wait` is the server's metric (Reply.gate_wait_s): from the last byte of the contribution until the
reply is decided, so it holds the check for NaN, the fold and the optimizer. `down` is measured
directly: from the reply's header until the last byte has been written into the parameters. What is
left between begun and replied is the upload and the making of the reply, which only a second run
tells apart, in turns with the first: async with `policy.pull_every` so large that no reply carries
weights, hence no reply is made, and

    up = replied - begun - gate_wait

is the time from `optimizer.step()`, encoding included, until the server has all of it (and has decoded it),
plus one small message back (about 0.1 ms). `reply` is what the first run needs beyond that, turn by
turn: small beside the other two, so on a noisy machine trust it least.

In the shared-memory transport gradients are either renewed before every step, as by a backward that made
new tensors (the cost of that is included: "shared"), or left where the transport has put them, as by a
backward that accumulates into what is there ("shared, in place").

With TLS the server has a certificate, and the worker the authority's: made for the measurement.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from .certificates import server_certificate
from .server_process import running_server, watching
from .turns import Measured, Samples
from .worker_run import JoinedWorker, joined_worker

_NEVER = 1_000_000_000


@dataclass(frozen=True)
class Variant:
    """A variant of our exchange: transport, new gradients for each step or not, TLS or not."""

    name: str
    transport: str
    renews: bool
    is_tls: bool = False
    watched: str = ""  # `store` or `page`: what its servers have beside


VARIANTS = {
    "grpc": (Variant("grpc", "grpc", renews=False),),
    "direct": (Variant("direct", "direct", renews=False),),
    "shared": (Variant("shared", "shared", renews=True), Variant("shared, in place", "shared", renews=False)),
}
TRANSPORTS = (*VARIANTS, "all")


def variants_of(transport: str, tls: bool = False, watched: Sequence[str] = ()) -> tuple[Variant, ...]:
    """Those of a transport, or of all; `tls`: those over the network encrypted too; and all by servers with a store, a
    page, as far as they are `watched`."""
    found = sum(VARIANTS.values(), ()) if transport == "all" else VARIANTS[transport]
    over = [variant for variant in found if variant.transport != "shared"] if tls else []
    found += tuple(replace(variant, name=f"{variant.name}, TLS", is_tls=True) for variant in over)
    return found + tuple(
        replace(variant, name=f"{variant.name}, {how}", watched=how) for how in watched for variant in found
    )


def transports_of(transport: str) -> tuple[str, ...]:
    """Returns one transport, or all of them."""
    return tuple(VARIANTS) if transport == "all" else (transport,)


@dataclass
class Facts:
    """Facts of an exchange that are not times: sizes in bytes, and the transport."""

    payload_bytes: int = 0
    sent_bytes: int = 0
    transport: str = ""


@dataclass(frozen=True)
class OurExchange:
    """What is run; `facts` are filled in when it has been."""

    variant: Variant
    mode: str
    optimizer: str
    codec: str
    num_floats: int
    num_steps: int
    device: str = "cpu"  # of the model
    facts: Facts = field(default_factory=Facts)

    @contextmanager
    def opened(self) -> Iterator[Measured]:
        """Parts exchange, encode, up, gate_wait, down, and up_reply: both of them in the first run."""
        steps = str(self.num_steps + 1)
        size = (self.num_floats, self.optimizer, self.codec, self.variant.transport)
        first_flags = ("--mode", self.mode, "--workers", "1", "--steps", steps, "--set", "policy.local_steps=1")
        second_flags = ("--mode", "async", "--workers", "1", "--steps", steps, "--set", f"policy.pull_every={_NEVER}")
        with (
            server_certificate(self.variant.is_tls) as (flags, ca),
            watching(self.variant.watched) as more,
            running_server(*first_flags, *flags, *more) as both_ways,
            running_server(*second_flags, *flags, *more) as one_way,
            joined_worker(both_ways.address, 0, *size, ca=ca, device=self.device) as first,
            joined_worker(one_way.address, 0, *size, ca=ca, device=self.device) as second,
        ):
            self.facts.payload_bytes, self.facts.sent_bytes = first.payload_bytes, first.sent_bytes
            self.facts.transport = first.transport

            def measured(count: int) -> Samples:
                found: Samples = {}
                for _ in range(count):
                    whole, upload = self._exchange(first), self._exchange(second)
                    time.sleep(upload["exchange"])  # its server steps after the reply: not in somebody else's turn
                    for part, seconds in (whole | {"up": upload["up"], "up_reply": whole["up"]}).items():
                        found.setdefault(part, []).append(seconds)
                return found

            yield measured

    def _exchange(self, worker: JoinedWorker) -> dict[str, float]:
        began = time.perf_counter()
        if self.variant.renews:
            worker.renew_gradients()
        worker.optimizer.step()
        worker.wait()
        total_s = time.perf_counter() - began
        at = worker.watch.last
        assert at is not None
        return {
            "exchange": total_s,
            "encode": at.sent - at.begun,
            "up": at.replied - at.begun - at.gate_wait_s,
            "gate_wait": at.gate_wait_s,
            "down": at.done - at.replied,
        }
