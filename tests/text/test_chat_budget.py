"""Templates that would take for ever, or write without end, are stopped."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from vmserve.errors import InvalidRequestError
from vmserve.models import resolve_model
from vmserve.text import chat_template
from vmserve.text.tokenizer import Tokenizer, load_tokenizer

MESSAGES = [{"role": "user", "content": "x" * 1000}]
LOOP = "{% for a in range(90000) %}{% for b in range(90000) %}"
END = "{% endfor %}{% endfor %}"
SLOW = {
    "empty loops": LOOP + END,
    "computing": f"{LOOP}{{% set c = a + b %}}{END}",
    "a macro": f"{{% macro m(n) %}}{LOOP}{END}{{% endmacro %}}{{{{ m(1) }}}}",
    "loops over messages": "{% for a in range(90000) %}{% for m in messages %}{% for b in "
    "range(90000) %}{% if m.role == 'nobody' %}x{% endif %}{% endfor %}{% endfor %}{% endfor %}",
    "filters": "{% for a in range(90000) %}{% set b = range(90000) | map('string') | list %}"
    "{% endfor %}",
}
LONG = {
    "a loop": f"{LOOP}{{{{ messages[0].content }}}}{END}",
    "a macro": "{% macro m() %}{% for b in range(90) %}{{ messages[0].content }}{% endfor %}"
    f"{{% endmacro %}}{LOOP}{{{{ m() }}}}{END}",
}


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    return load_tokenizer(resolve_model(None))


@pytest.mark.parametrize("name", SLOW)
def test_time_is_bounded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDER_SECONDS", 0.2)
    with pytest.raises(InvalidRequestError, match=r"did not finish within 0\.2 seconds"):
        tokenizer.apply_chat_template(MESSAGES, chat_template=SLOW[name])
    assert sys.gettrace() is None


@pytest.mark.parametrize("name", LONG)
def test_output_is_bounded(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 100_000)
    with pytest.raises(InvalidRequestError, match="writes more than 200000 characters"):
        tokenizer.apply_chat_template(MESSAGES, chat_template=LONG[name])


def test_what_ends_is_not_touched(tokenizer: Tokenizer) -> None:
    template = (
        "{% for m in messages %}{% for i in range(3) %}{{ m.content }}{% endfor %}{% endfor %}"
    )
    messages: list[Any] = [{"role": "user", "content": "ab"}] * 500
    text, _ = tokenizer.apply_chat_template(messages, chat_template=template)
    assert text == "ab" * 1500


def test_the_sandbox_holds(tokenizer: Tokenizer) -> None:
    for template in (
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
    ):
        with pytest.raises(InvalidRequestError, match="refuses these messages"):
            tokenizer.apply_chat_template(MESSAGES, chat_template=template)
