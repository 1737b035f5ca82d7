"""Spans, as a collector gets them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.server.conftest import Body, Running
from tests.support.serving import COMPLETIONS, Patch, Start, http_server
from vmserve import ConfigurationError
from vmserve.errors import OutOfMemoryError
from vmserve.server.observe.tracing import Tracing, check_tracing
from vmserve.testing import ScriptedTransport

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector:
    """Keeps what is posted to it."""

    url = ""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.resources: list[Body] = []
        self.spans: list[Any] = []

    def answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        self.paths.append(path)
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(attributes(of_resource.resource))
            for of_scope in of_resource.scope_spans:
                self.spans += of_scope.spans
        return 200, b""

    def of(self, running: Running) -> list[Any]:
        """All spans: the end of the server sends what has not been sent."""
        running.close()
        return self.spans


def attributes(holder: Any) -> Body:
    return {one.key: plain(one.value) for one in holder.attributes}


def plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(item) for item in value.array_value.values]
    return getattr(value, kind)


@pytest.fixture
def collector() -> Iterator[Collector]:
    running = Collector()
    with http_server(running.answer) as running.url:
        yield running


def test_a_stream(start: Start, collector: Collector) -> None:
    engine = ScriptedTransport()
    engine.num_cached = 2
    running = start(engine, otlp_traces_endpoint=collector.url)
    body = {"prompt": "Hi", "request_id": "r", "max_tokens": 4, "seed": 7, "stop": ["zz"]}
    body |= {"temperature": 0.5, "model": "fake", "stream": True}
    assert running.post(COMPLETIONS, body, headers={"traceparent": PARENT}).status_code == 200
    [span] = collector.of(running)
    assert collector.paths == ["/v1/traces"]
    assert collector.resources[0]["service.name"] == "vmserve"
    assert span.trace_id.hex() == PARENT.split("-")[1]
    assert span.parent_span_id.hex() == PARENT.split("-")[2]
    assert (span.name, span.kind, span.status.code) == ("text_completion fake", 2, 0)
    told = attributes(span)
    seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    assert told.pop("gen_ai.latency.e2e") == pytest.approx(seconds, abs=1e-4)
    assert told == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "vmserve",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "gen_ai.response.id": "cmpl-r",
        "gen_ai.request.id": "cmpl-r",
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.seed": 7,
        "gen_ai.request.stop_sequences": ["zz"],
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 4,
        "gen_ai.usage.num_sequences": 1,
        "gen_ai.latency.time_in_queue": 0.5,
        "gen_ai.latency.time_to_first_token": 1.0,
        "gen_ai.latency.time_in_model_prefill": 0.5,
        "gen_ai.latency.time_in_model_decode": 2.0,
        "gen_ai.latency.time_in_model_inference": 2.5,
    }
    at = {event.name: event.time_unix_nano for event in span.events}
    assert list(at) == ["scheduled", "first_token", "last_token"]
    assert at["first_token"] - at["scheduled"] == pytest.approx(0.5e9, abs=1e3)


def test_chats_without_a_parent_and_failures(start: Start, collector: Collector) -> None:
    engine = ScriptedTransport()
    running = start(engine, otlp_traces_endpoint=f"{collector.url}/v1/traces")
    running.chat(n=2, max_tokens=3)
    running.http.get("/v1/models")
    running.error(COMPLETIONS, {"prompt": "Hi", "max_tokens": -1})
    engine.fail = OutOfMemoryError("no pages")
    assert "no pages" in list(running.events(COMPLETIONS, {"prompt": "Hi"}))[-1]
    chat, refused, failed = collector.of(running)
    told = attributes(chat)
    assert (chat.name, chat.parent_span_id) == ("chat fake", b"")
    assert told["gen_ai.request.choice.count"] == 2
    assert told["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert told["gen_ai.usage.output_tokens"] == 6
    assert (refused.name, refused.status.code) == ("text_completion", 2)
    assert attributes(refused)["error.type"] == "ValidationError"
    assert failed.status.code == 2
    assert attributes(failed)["error.type"] == "OutOfMemoryError"


def test_a_collector_that_is_not_there_holds_nobody_up(start: Start) -> None:
    with http_server(lambda path, body: (200, b"")) as url:
        pass
    running = start(otlp_traces_endpoint=url)
    assert running.complete()["choices"][0]["text"] == "hello"
    running.close()


def test_what_cannot_be_exported(monkeypatch: Patch) -> None:
    for url in ("localhost:4317", "grpc://host:4317", "http://", ""):
        with pytest.raises(ConfigurationError, match="is not the http"):
            Tracing(url)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'vmserve\[otel\]'"):
        check_tracing("http://localhost:4318")
    check_tracing(None)
