"""OpenTelemetry traces (the extra `otel`), shared by the spans of server and workers.

One exchange is one trace. A stream lasts as long as its worker, so the metadata of a call cannot carry a context for
each contribution. Instead both sides compute the same ids from (run, rank, incarnation, sequence number). The server's
spans are children of the worker's span without any bytes on the wire. A sampler by trace id chooses the same traces on
both sides.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from ..errors import UsageError
from ..reporting.log import get_logger

try:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
except ModuleNotFoundError as error:
    raise UsageError(f"output.traces: {error.name} is not installed", fix="pip install 'paramserver[otel]'") from None

log = get_logger()

_TIMEOUT_S = 2.0  # of one export request, and of the last export when the process ends


class Ids(RandomIdGenerator):
    """Makes random ids, except while `fixed` holds the ids for the span of an exchange."""

    def __init__(self) -> None:
        self.fixed: tuple[int, int] | None = None

    def generate_trace_id(self) -> int:
        return self.fixed[0] if self.fixed else int(super().generate_trace_id())

    def generate_span_id(self) -> int:
        return self.fixed[1] if self.fixed else int(super().generate_span_id())


class _Exporter(OTLPSpanExporter):
    """Exports spans, and warns once if the collector does not accept them."""

    def __init__(self, url: str) -> None:
        super().__init__(endpoint=f"{url.rstrip('/')}/v1/traces", timeout=_TIMEOUT_S)
        self._to, self._has_warned = url, False
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # no tracebacks beside the warning below

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        if result is not SpanExportResult.SUCCESS and not self._has_warned:
            self._has_warned = True
            log.warning("traces_lost", to=self._to, meaning="no collector accepts traces there; the run continues")
        return result


class Traces:
    """Makes the spans of one process. Times are Unix nanoseconds. Raises UsageError without the extra."""

    def __init__(self, url: str, service: str, **about: Any) -> None:
        self._ids, self._is_closed = Ids(), False
        named = {"service.name": service, **about}
        self._provider = TracerProvider(
            resource=Resource.create(named), id_generator=self._ids, shutdown_on_exit=False
        )  # its sampler: OTEL_TRACES_SAMPLER
        self._provider.add_span_processor(BatchSpanProcessor(_Exporter(url)))
        self._tracer = self._provider.get_tracer("paramserver")

    def exchange(self, ids: tuple[int, int], begun: int, ended: int, attributes: dict[str, Any]) -> Context:
        """Record the span of a whole exchange, and return the context for its child spans."""
        self._ids.fixed = ids
        try:
            return self.below(Context(), "exchange", begun, ended, attributes, kind="CLIENT")
        finally:
            self._ids.fixed = None

    def of_others(self, ids: tuple[int, int]) -> Context:
        """Return the context of an exchange whose span another process records."""
        is_sampled = self._provider.sampler.should_sample(None, ids[0], "exchange").decision.is_sampled()
        flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if is_sampled else trace.TraceFlags.DEFAULT)
        remote = trace.SpanContext(*ids, is_remote=True, trace_flags=flags)
        return trace.set_span_in_context(trace.NonRecordingSpan(remote), Context())

    def below(
        self,
        parent: Context,
        name: str,
        begun: int,
        ended: int,
        attributes: dict[str, Any] | None = None,
        *,
        kind: str = "INTERNAL",
    ) -> Context:
        """Record a child span of the context `parent`, and return the context for its own children.

        `kind`: the name of one of OpenTelemetry's kinds of spans.
        """
        span = self._tracer.start_span(name, parent, trace.SpanKind[kind], attributes=attributes, start_time=begun)
        span.end(max(begun, ended))
        return trace.set_span_in_context(span, parent)

    def close(self) -> None:
        """Export the remaining spans, which takes at most a few seconds. Further calls do nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._provider.force_flush(int(_TIMEOUT_S * 1000))
        self._provider.shutdown()


def ids_of(run: str, rank: int, incarnation: int, number: int) -> tuple[int, int]:
    """Return the trace id and span id of a contribution's exchange. They are never 0, which means no id."""
    digest = blake2b(f"{run}/{rank}/{incarnation}/{number}".encode(), digest_size=24).digest()
    return int.from_bytes(digest[:16]) or 1, int.from_bytes(digest[16:]) or 1
