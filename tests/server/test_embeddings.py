"""Embeddings over an engine whose states are known, raw and through the official client."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from tests.server.conftest import EMBEDDINGS, Running

#: The fake's states: the number of tokens, and 0, 1, 2, ...
HI = np.array([3, 0, 1, 2], np.float32)  # "Hi" and a start token


def unit(state: np.ndarray[Any, Any]) -> list[float]:
    return [float(x) for x in state / np.linalg.norm(state)]


def test_the_official_client_gets_vectors_of_length_one(shared: Running) -> None:
    with shared.openai() as client:
        reply = client.embeddings.create(model="fake", input=["Hi", "Hello"])
        assert [item.index for item in reply.data] == [0, 1]
        assert reply.data[0].embedding == pytest.approx(unit(HI))
        assert reply.usage.prompt_tokens == 3 + 6
        cut = client.embeddings.create(
            model="fake", input="Hi", dimensions=2, encoding_format="float"
        )
    assert cut.data[0].embedding == pytest.approx(unit(HI[:2]))


def test_forms_of_input(shared: Running) -> None:
    ids = [1, 75, 108]
    for given in ("Hi", ["Hi"], ids, [ids]):
        reply = shared.ok(EMBEDDINGS, {"input": given})
        assert reply["object"] == "list"
        [item] = reply["data"]
        assert item["embedding"] == pytest.approx(unit(HI))
    packed = shared.ok(EMBEDDINGS, {"input": "Hi", "encoding_format": "base64"})["data"][0][
        "embedding"
    ]
    floats = np.frombuffer(base64.b64decode(packed), "<f4")
    assert floats.tolist() == pytest.approx(unit(HI))


def test_what_the_engine_is_asked(shared: Running) -> None:
    shared.ok(EMBEDDINGS, {"input": "Hello", "pooling": "mean", "truncate_prompt_tokens": 2})
    ids, params, _ = shared.last
    assert (len(ids), params.max_tokens, params.pooling) == (2, 0, "mean")
