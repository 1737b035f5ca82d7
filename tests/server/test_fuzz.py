"""Whatever JSON comes in: an answer or an error in the one shape, never a fault of ours."""

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.conftest import CHAT, COMPLETIONS, Running, error_of
from vmserve.server.words.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    RequestModel,
    TokenizeRequest,
)

NUM_EXAMPLES = int(os.environ.get("VMSERVE_FUZZ_EXAMPLES", "100"))
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
INTEGERS = st.integers(-3, 300) | st.integers()
ANYTHING = st.recursive(
    st.none() | st.booleans() | INTEGERS | FLOATS | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)
IDS = st.lists(st.integers(0, 258), max_size=6)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"])},
        optional={"content": st.text(max_size=9) | ANYTHING, "tool_calls": ANYTHING},
    ),
    max_size=3,
)
#: Values that reach further than random ones.
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.text(min_size=1, max_size=9) | IDS | st.lists(IDS, max_size=3),
    "messages": MESSAGES,
    "model": st.sampled_from(["fake", None]),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries(
        {}, optional={"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()}
    ),
    "stop": st.text(min_size=1, max_size=2) | st.lists(st.text(min_size=1, max_size=2), max_size=3),
    "logit_bias": st.dictionaries(st.integers(0, 258).map(str), st.floats(-100, 100), max_size=3),
    "logprobs": st.booleans() | st.integers(0, 20),
    "tokens": IDS,
}


@st.composite
def bodies(draw: st.DrawFn, model: type[RequestModel]) -> dict[str, Any]:
    """A likely body, with a few fields of which up to two hold anything at all."""
    mains = [name for name in ("prompt", "messages", "tokens") if name in model.model_fields]
    main = draw(st.sampled_from(mains))
    names = draw(st.lists(st.sampled_from(sorted(model.model_fields)), max_size=4, unique=True))
    wild = draw(st.lists(st.sampled_from([main, *names]), max_size=2))
    simple = st.none() | st.booleans() | st.integers(0, 3)
    return {
        name: draw(ANYTHING if name in wild else LIKELY.get(name, simple))
        for name in [main, *names]
    }


@pytest.mark.parametrize(
    ("path", "model"),
    [
        (COMPLETIONS, CompletionRequest),
        (CHAT, ChatCompletionRequest),
        ("/tokenize", TokenizeRequest),
        ("/detokenize", DetokenizeRequest),
    ],
)
def test_any_body(shared: Running, path: str, model: type[RequestModel]) -> None:
    statuses = set()

    @settings(
        max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    @given(body=bodies(model))
    def check(body: dict[str, Any]) -> None:
        response = shared.post(path, body)
        statuses.add(response.status_code)
        if response.status_code != 200:
            assert response.status_code in (400, 404), response.text
            error_of(response)
        elif response.headers["content-type"].startswith("text/event-stream"):
            assert response.text.endswith("data: [DONE]\n\n")
            assert '"error"' not in response.text

    check()
    assert {200, 400} <= statuses
    assert shared.engine.running == {}  # type: ignore[attr-defined]
