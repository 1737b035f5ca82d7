"""In a real Ray cluster on this machine; skipped where Ray is not installed."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.chaos.harness import free_port
from tests.ray.nodes import ray

ENGINE = {"kv_cache_memory": "16MiB", "max_model_len": 128, "max_num_seqs": 4}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(
        num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1",
        object_store_memory=80 << 20, log_to_driver=False,
    )  # fmt: skip
    yield
    ray.shutdown()


def test_a_dataset_is_answered_by_two_actors(cluster: None) -> None:
    pytest.importorskip("ray.data")
    from vmserve.ray import Predictor

    rows = [{"id": index, "prompt": f"Number {index} is"} for index in range(12)]
    rows[5]["prompt"] = "word " * 500
    answered = (
        ray.data.from_items(rows)
        .map_batches(
            Predictor,
            fn_constructor_kwargs={"sampling_params": {"max_tokens": 4}, **ENGINE},
            concurrency=2,
            num_cpus=1,
            batch_size=3,
        )
        .take_all()
    )
    answered.sort(key=lambda row: row["id"])
    assert [row["id"] for row in answered] == list(range(12))
    assert [bool(row["error"]) for row in answered] == [index == 5 for index in range(12)]
    assert all(row["generated_text"] for row in answered if row["id"] != 5)


def test_a_deployment_serves_the_http_api(cluster: None) -> None:
    serve = pytest.importorskip("ray.serve")
    from vmserve.ray import deployment

    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    app = deployment(**ENGINE, options={"ray_actor_options": {"num_cpus": 1}})
    serve.run(app, route_prefix="/")
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        [model] = client.get("/v1/models").json()["data"]
        asked = {"model": model["id"], "prompt": "Once", "max_tokens": 5, "temperature": 0}
        whole = client.post("/v1/completions", json=asked)
        assert whole.status_code == 200, whole.text
        assert whole.json()["usage"]["completion_tokens"] == 5
        with client.stream("POST", "/v1/completions", json={**asked, "stream": True}) as reply:
            events = [line for line in reply.iter_lines() if line]
        assert events[-1] == "data: [DONE]"
        assert client.post("/v1/completions", json={**asked, "max_tokens": 9999}).status_code == 400
    serve.shutdown()
