"""``/metrics``: families, names and what they count."""

from __future__ import annotations

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import Running
from tests.support.serving import Start
from vmserve.server.observe.telemetry import Histogram
from vmserve.testing import ScriptedTransport

LABELS = {"model_name": "fake", "engine": "0"}

#: Each is there before anything was served.
FAMILIES = {
    *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason"),
    *("kv_cache_usage_perc", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions"),
    *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
    *("prompt_tokens", "generation_tokens", "request_success", "cache_config_info"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_inference_time_seconds", "admission_rejections"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens"),
    *("request_generation_tokens", "request_params_n", "request_params_max_tokens"),
    "request_num_preemptions",
}


def scrape(server: Running) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Values by sample name and labels other than the model's."""
    response = server.http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    values: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            assert {name: sample.labels.pop(name) for name in LABELS} == LABELS
            values.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return values


def test_families_are_there_from_the_start_under_both_names(start: Start) -> None:
    server = start()
    plain = server.http.get("/metrics")
    names = {family.name for family in text_string_to_metric_families(plain.text)}
    for prefix in ("vmserve", "vllm"):
        assert {f"{prefix}:{name}" for name in FAMILIES} <= names
    assert "vmserve:server_load" in names
    assert "vllm:server_load" not in names
    values = scrape(server)
    for reason in ("stop", "length", "abort"):
        assert values["vmserve:request_success_total"][(("finished_reason", reason),)] == 0
    assert values["vmserve:time_to_first_token_seconds_count"][()] == 0
    accept = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
    asked = server.http.get("/metrics", headers=accept)
    assert asked.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert asked.text.endswith("# EOF\n")
    assert {family.name for family in openmetrics_families(asked.text)} == names


def test_vllm_names_can_be_left_out(start: Start) -> None:
    values = scrape(start(vllm_metrics=False))
    assert not any(name.startswith("vllm:") for name in values)
    assert "vmserve:num_requests_running" in values


def test_what_a_request_adds(start: Start) -> None:
    server = start()
    server.complete()
    server.stream("/v1/completions", {"prompt": "Hi", "max_tokens": 2, "n": 3})
    values = scrape(server)
    finished = values["vmserve:request_success_total"]
    assert finished[(("finished_reason", "stop"),)] == 1
    assert finished[(("finished_reason", "length"),)] == 1
    for name, count, total in (
        ("request_prompt_tokens", 2, 6),
        ("request_generation_tokens", 2, 6 + 3 * 2),
        ("request_params_n", 2, 4),
        ("request_params_max_tokens", 2, 18),
        # The fake's times: arrival 10, scheduled 10.5, first token 11, last 13.
        ("request_queue_time_seconds", 2, 1.0),
        ("time_to_first_token_seconds", 2, 2.0),
        ("request_prefill_time_seconds", 2, 1.0),
        ("request_decode_time_seconds", 2, 4.0),
        ("request_inference_time_seconds", 2, 5.0),
        ("e2e_request_latency_seconds", 2, 6.0),
        # Five gaps of 0.4 s, and one of 2 s (two tokens a choice).
        ("inter_token_latency_seconds", 6, pytest.approx(4.0)),
    ):
        assert values[f"vllm:{name}_count"][()] == count, name
        assert values[f"vllm:{name}_sum"][()] == total, name
    # From the engine.
    assert values["vmserve:prompt_tokens_total"][()] == 7
    assert values["vmserve:generation_tokens_total"][()] == 9


def test_histogram_buckets_are_cumulative() -> None:
    histogram = Histogram((1, 2, 5))
    for value, times in ((0.5, 1), (1, 1), (1.5, 3), (100, 2)):
        histogram.observe(value, times)
    assert histogram.buckets() == [("1.0", 2), ("2.0", 5), ("5.0", 5), ("+Inf", 7)]
    assert (histogram.count, histogram.total) == (7, 206.0)


def test_the_cache_in_labels_and_by_kind_of_layers_where_there_are_several(start: Start) -> None:
    engine = ScriptedTransport()
    assert "vmserve:kv_kind_pages" not in scrape(start(engine))
    figures = {"page_bytes": 4096, "used_pages": 3, "cached_pages": 2, "free_pages": 1}
    names = ("all", "window 32")
    kinds = {f"kv_kind:{kind}:{name}": n for kind in names for name, n in figures.items()}
    told = {**engine.stats(), "limit_pages": 100, "page_tokens": 64, **kinds}
    engine.stats = lambda: told  # type: ignore[method-assign]
    values = scrape(start(engine))
    for kind in names:
        for use, pages in (("used", 3), ("cached", 2), ("free", 1)):
            labels = (("kind", kind), ("use", use))
            assert values["vmserve:kv_kind_pages"][labels] == pages
            assert values["vmserve:kv_kind_bytes"][labels] == pages * 4096
    assert not any("kv_kind:" in name for name in values)
    key = (
        ("cache_dtype", "auto"),
        ("kv_cache_max_concurrency", "25.00"),
        ("kv_cache_size_tokens", "6400"),
    )
    assert values["vmserve:cache_config_info"] == {key: 1.0}
    assert values["vmserve:limit_pages"] == {(): 100.0}
