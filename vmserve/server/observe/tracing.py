"""OpenTelemetry: a span for each request that generates, sent to a collector by OTLP over HTTP.

The span begins with the request's arrival and ends with its last byte; it is a child of the one
that the client names (W3C ``traceparent``). Attributes are those of the semantic conventions for
generative AI (opentelemetry.io), and for latencies, which these lack, those of vLLM. Texts are
not sent.

Nothing of this is imported, or runs, unless it is asked for.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vmserve.errors import ConfigurationError
from vmserve.sampling import GenerationParams
from vmserve.server.access.scope import route_path
from vmserve.types import RequestMetrics, RequestOutput
from vmserve.version import __version__

__all__ = ["RequestTrace", "Traced", "Tracing", "check_tracing", "trace_of"]

_PACKAGES = (
    "opentelemetry.trace",
    "opentelemetry.sdk.resources",
    "opentelemetry.sdk.trace",
    "opentelemetry.sdk.trace.export",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.trace.propagation.tracecontext",
)
#: Time for spans that wait while the collector does not answer, when the server ends.
_FLUSH_MILLISECONDS = 2000


def check_tracing(endpoint: str | None) -> None:
    """Raises :class:`~vmserve.errors.ConfigurationError` for what is no URL, and without the
    packages."""
    if endpoint is None:
        return
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigurationError(
            f"otlp_traces_endpoint: {endpoint!r} is not the http(s) URL of a collector, "
            "such as http://localhost:4318/v1/traces (OTLP over HTTP; gRPC is not spoken)"
        )
    try:
        for name in _PACKAGES:
            importlib.import_module(name)
    except ImportError as error:
        raise ConfigurationError(
            f"otlp_traces_endpoint needs OpenTelemetry's packages ({error.name} is missing): "
            "pip install 'vmserve[otel]'"
        ) from error


class RequestTrace:
    """The data for a request's span, as far as it is known."""

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self.request_model: str | None = None
        self.response_model = ""
        self.response_id = ""
        self.params: GenerationParams | None = None
        self.outputs: list[tuple[RequestOutput, int]] = []
        self.num_choices = 0
        self.reasons: list[str] = []
        self.error_type: str | None = None

    def begin(
        self, request_model: str | None, model: str, reply_id: str, params: GenerationParams
    ) -> None:
        """Record the parsed request."""
        self.request_model, self.response_model = request_model, model
        self.response_id, self.params = reply_id, params

    def finished(self, output: RequestOutput, num_tokens: int) -> None:
        """Record the end of one prompt, after ``num_tokens`` in all choices."""
        self.outputs.append((output, num_tokens))
        self.reasons += [one.finish_reason for one in output.outputs if one.finish_reason]

    def failed(self, error: BaseException) -> None:
        self.error_type = type(error).__name__

    @property
    def metrics(self) -> RequestMetrics | None:
        """Return the metrics of the prompt that ended last."""
        return self.outputs[-1][0].metrics if self.outputs else None

    def attributes(self, began: float, ended: float) -> dict[str, Any]:
        """Return the span attributes of a request from ``began`` to ``ended`` (monotonic)."""
        found = {
            "gen_ai.operation.name": self.operation,
            "gen_ai.provider.name": "vmserve",
            "gen_ai.request.model": self.request_model or self.response_model,
            "gen_ai.response.model": self.response_model,
            "gen_ai.response.id": self.response_id,
            "gen_ai.request.id": self.response_id,
            "gen_ai.latency.e2e": ended - began,
            "error.type": self.error_type,
            **self._asked(),
        }
        if self.outputs:
            found |= self._described()
        return {name: value for name, value in found.items() if value not in (None, "", ())}

    def _asked(self) -> dict[str, Any]:
        if self.params is None:
            return {}
        params = self.params.as_sampling()
        return {
            "gen_ai.request.n": params.n,
            "gen_ai.request.choice.count": params.n if params.n != 1 else None,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
            "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
            "gen_ai.request.presence_penalty": params.presence_penalty or None,
            "gen_ai.request.seed": params.seed,
            "gen_ai.request.stop_sequences": tuple(params.stop),
        }

    def _described(self) -> dict[str, Any]:
        num_prompt = sum(len(output.prompt_token_ids) for output, _ in self.outputs)
        num_tokens = sum(num for _, num in self.outputs)
        all_metrics = [output.metrics for output, _ in self.outputs]
        return {
            "gen_ai.response.finish_reasons": tuple(self.reasons),
            "gen_ai.usage.input_tokens": num_prompt,
            "gen_ai.usage.output_tokens": num_tokens,
            "gen_ai.usage.cache_read.input_tokens": sum(m.num_cached_tokens for m in all_metrics),
            # As vLLM has them.
            "gen_ai.usage.prompt_tokens": num_prompt,
            "gen_ai.usage.completion_tokens": num_tokens,
            "gen_ai.usage.num_sequences": len(self.reasons),
            **_latencies(all_metrics),
        }

    def events(self) -> Iterator[tuple[str, float]]:
        """Names and times (monotonic) of what happened in between, of the first prompt."""
        if self.outputs:
            metrics = self.outputs[0][0].metrics
            for name, at in (
                ("scheduled", metrics.first_scheduled_time),
                ("first_token", metrics.first_token_time),
                ("last_token", metrics.last_token_time),
            ):
                if at is not None:
                    yield name, at


def trace_of(request: Request) -> RequestTrace | None:
    """Return the request's trace; None if requests are not traced."""
    trace: RequestTrace | None = getattr(request.state, "trace", None)
    return trace


def _latencies(all_metrics: list[RequestMetrics]) -> dict[str, float | None]:
    """Seconds; of several prompts the longest."""

    def longest(begin: str, end: str) -> float | None:
        spans = [
            getattr(metrics, end) - getattr(metrics, begin)
            for metrics in all_metrics
            if None not in (getattr(metrics, begin), getattr(metrics, end))
        ]
        return max(spans, default=None)

    return {
        "gen_ai.latency.time_in_queue": longest("arrival_time", "first_scheduled_time"),
        "gen_ai.latency.time_to_first_token": longest("arrival_time", "first_token_time"),
        "gen_ai.latency.time_in_model_prefill": longest("first_scheduled_time", "first_token_time"),
        "gen_ai.latency.time_in_model_decode": longest("first_token_time", "last_token_time"),
        "gen_ai.latency.time_in_model_inference": longest(
            "first_scheduled_time", "last_token_time"
        ),
    }


class Tracing:
    """Exports spans to ``endpoint``, a URL; ``/v1/traces`` is added where it has no path.

    Batches are sent by a thread of the SDK, which :meth:`close` ends. The SDK heeds its own
    variables (``OTEL_SERVICE_NAME``, ``OTEL_TRACES_SAMPLER``, ``OTEL_EXPORTER_OTLP_HEADERS`` …).

    Raises :class:`~vmserve.errors.ConfigurationError` without the packages, or for what is no
    URL.
    """

    def __init__(self, endpoint: str) -> None:
        check_tracing(endpoint)
        url = urlsplit(endpoint)
        if url.path in ("", "/"):
            endpoint = url._replace(path="/v1/traces").geturl()
        api, resources, sdk, export, otlp, context = map(importlib.import_module, _PACKAGES)
        default = resources.Resource.create({"service.version": __version__})
        if str(default.attributes.get("service.name", "")).startswith("unknown_service"):
            default = default.merge(resources.Resource({"service.name": "vmserve"}))
        self._api = api
        self._provider = sdk.TracerProvider(resource=default, shutdown_on_exit=False)
        exporter = otlp.OTLPSpanExporter(endpoint=endpoint)
        self._provider.add_span_processor(export.BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("vmserve", __version__)
        self._context = context.TraceContextTextMapPropagator()

    def export(self, trace: RequestTrace, scope: Scope, began: float) -> None:
        """The span of a request that has ended now and had arrived at ``began``."""
        ended = time.monotonic()
        to_unix_ns = time.time_ns() - int(ended * 1e9)

        def unix_ns(seconds: float) -> int:
            return to_unix_ns + int(seconds * 1e9)

        headers = {name.decode("latin-1"): v.decode("latin-1") for name, v in scope["headers"]}
        model = trace.request_model or trace.response_model
        span = self._tracer.start_span(
            f"{trace.operation} {model}".strip(),
            context=self._context.extract(headers),
            kind=self._api.SpanKind.SERVER,
            attributes=trace.attributes(began, ended),
            start_time=unix_ns(began),
        )
        for name, at in trace.events():
            span.add_event(name, timestamp=unix_ns(at))
        if trace.error_type is not None:
            span.set_status(self._api.StatusCode.ERROR, trace.error_type)
        span.end(end_time=unix_ns(ended))

    def close(self) -> None:
        """Send what waits, for two seconds; blocks."""
        self._provider.force_flush(_FLUSH_MILLISECONDS)
        self._provider.shutdown()


class Traced:
    """ASGI: makes a :class:`RequestTrace` of each generation request, and exports it."""

    def __init__(self, app: ASGIApp, *, tracing: Tracing, paths: frozenset[str]) -> None:
        self._app = app
        self._tracing = tracing
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route_path(scope) not in self._paths:
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        is_text = route_path(scope) == "/v1/completions"
        trace = RequestTrace("text_completion" if is_text else "chat")
        scope["state"]["trace"] = trace

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                trace.error_type = trace.error_type or str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except BaseException as error:
            trace.failed(error)
            raise
        finally:
            if trace.params is not None and not trace.outputs and trace.error_type is None:
                trace.error_type = "ClientDisconnectedError"
            self._tracing.export(trace, scope, began)
