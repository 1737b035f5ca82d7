"""What a stream's reader gets, early or late."""

from __future__ import annotations

import asyncio
import itertools
from functools import partial

import pytest

from vmserve import EngineDeadError, SamplingParams
from vmserve.client.callers import Callers
from vmserve.client.inbox import Inbox, OpenRequest
from vmserve.client.messages import Add, StartOver, StepUpdate
from vmserve.models import resolve_model
from vmserve.text.assembly import RequestAssembly
from vmserve.text.tokenizer import Tokenizer, load_tokenizer
from vmserve.text.update import ChoiceUpdate, RequestUpdate
from vmserve.types import FinishReason, RequestMetrics, RequestOutput, RequestTerms

MOST_AT_ONCE = 64
WORDS = [300, 301, 302, 303]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model(None))


def request(
    tokenizer: Tokenizer, *, stream: bool = True, n: int = 1, logprobs: int | None = None
) -> OpenRequest:
    params = SamplingParams(n=n, max_tokens=1000, logprobs=logprobs)
    add = Add(1, "r", [5], params, RequestTerms(), stream)
    assembly = partial(
        RequestAssembly, tokenizer, "r", None, [5], params, arrival_time=0.0, stream=stream
    )
    return OpenRequest(add, assembly, Callers(), MOST_AT_ONCE)


def update(token_id: int, end: FinishReason | None = None, index: int = 0) -> RequestUpdate:
    choice = ChoiceUpdate(index, [token_id], -1.0, None, end, None)
    return RequestUpdate("", [choice], end is not None, RequestMetrics(0.0) if end else None)


async def test_a_prompt_reader_gets_every_token(tokenizer: Tokenizer) -> None:
    opened = request(tokenizer)
    opened.accept()
    assert (await opened.next()).outputs == []
    for place, token_id in enumerate(WORDS):
        waiting = asyncio.ensure_future(opened.next())
        await asyncio.sleep(0)
        opened.update(update(token_id), 1.0 + place)
        [choice] = (await waiting).outputs
        assert choice.token_ids == [token_id]
        assert choice.text == tokenizer.decode([token_id])


async def test_a_slow_reader_gets_all_at_once(tokenizer: Tokenizer) -> None:
    opened = request(tokenizer, n=2)
    opened.accept()
    for token_id in WORDS:
        opened.update(update(token_id), 1.0)
    opened.update(update(WORDS[0], index=1), 2.0)
    opened.update(update(WORDS[1], "length"), 3.0)
    opened.fail(EngineDeadError("gone"))
    assert (await opened.next()).outputs == []  # that it was accepted comes first
    output = await opened.next()
    assert output.finished
    first, second = output.outputs
    assert first.token_ids == [*WORDS, WORDS[1]]
    assert first.text == tokenizer.decode([*WORDS, WORDS[1]])
    assert (first.finish_reason, second.finish_reason) == ("length", None)
    assert second.token_ids == WORDS[:1]
    with pytest.raises(EngineDeadError, match="gone"):  # only after what came before it
        await opened.next()


async def test_a_very_slow_reader_takes_turns(tokenizer: Tokenizer) -> None:
    """So much text is not made in one go: others are served in between."""
    opened = request(tokenizer)
    for _ in range(2 * MOST_AT_ONCE + 1):
        opened.update(update(WORDS[0]), 1.0)
    sizes = [len((await opened.next()).outputs[0].token_ids) for _ in range(3)]
    assert sizes == [MOST_AT_ONCE, MOST_AT_ONCE, 1]


async def turns_of_others(opened: OpenRequest) -> tuple[RequestOutput, int]:
    """An answer, and how often others had their turn meanwhile."""
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    waiting = asyncio.ensure_future(others())
    output = await opened.next()
    waiting.cancel()
    return output, turns


async def test_while_a_long_answer_is_made_others_have_their_turn(tokenizer: Tokenizer) -> None:
    """All of it may come at once: of a beam search, or after a time in which nobody read."""
    opened = request(tokenizer, stream=False, n=8, logprobs=20)
    top = {token_id: (-1.0, rank) for rank, token_id in enumerate(range(100, 121), start=1)}
    choices = [ChoiceUpdate(index, [100] * 100, -1.0, [top] * 100, "length") for index in range(8)]
    opened.update(RequestUpdate("", choices, True, RequestMetrics(0.0)), 1.0)
    output, turns = await turns_of_others(opened)
    assert [len(choice.logprobs or ()) for choice in output.outputs] == [100] * 8
    assert turns >= 8
    slow = request(tokenizer, stream=False)
    for end in [None] * (10 * MOST_AT_ONCE - 1) + ["length"]:
        slow.update(update(WORDS[0], end), 1.0)  # type: ignore[arg-type]
    output, turns = await turns_of_others(slow)
    assert len(output.outputs[0].token_ids) == 10 * MOST_AT_ONCE
    assert turns >= 9


async def test_a_whole_answer_is_told_once(tokenizer: Tokenizer) -> None:
    opened = request(tokenizer, stream=False)
    waiting = asyncio.ensure_future(opened.next())
    tokens = WORDS * MOST_AT_ONCE
    for token_id in tokens:
        opened.update(update(token_id), 1.0)
        await asyncio.sleep(0)
        assert not waiting.done()
    opened.update(update(WORDS[0], "length"), 2.0)
    [choice] = (await waiting).outputs
    assert choice.token_ids == [*tokens, WORDS[0]]
    assert choice.text == tokenizer.decode([*tokens, WORDS[0]])


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_text_that_cannot_be_made_fails_its_own_reader(
    tokenizer: Tokenizer, stream: bool
) -> None:
    """And not those whose updates are in the same message."""
    inbox = Inbox(Callers(), itertools.count())
    broken, fine = request(tokenizer, stream=stream), request(tokenizer, stream=stream)
    inbox.requests.update({1: broken, 2: fine})
    updates = [(handle, update(token, "length")) for handle, token in ((1, -1), (2, WORDS[0]))]
    waiting = [asyncio.ensure_future(each.next()) for each in (broken, fine)]
    await asyncio.sleep(0)
    inbox.take(StepUpdate(0, 0, [], updates, []))
    error, output = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(error, OverflowError)
    assert isinstance(output, RequestOutput)
    assert output.outputs[0].token_ids == [WORDS[0]]
    assert not inbox


@pytest.mark.parametrize("num_before", [3, MOST_AT_ONCE], ids=["not taken", "taken"])
async def test_a_request_that_starts_over_is_told_once(
    tokenizer: Tokenizer, num_before: int
) -> None:
    """Whatever its reader had taken of the updates before."""
    inbox = Inbox(Callers(), itertools.count())
    begun = inbox.requests[1] = request(tokenizer, stream=False)
    reading = asyncio.ensure_future(begun.next())
    await asyncio.sleep(0)
    for _ in range(num_before):
        inbox.take(StepUpdate(0, 0, [], [(1, update(WORDS[0]))], []))
    await asyncio.sleep(0)
    inbox.take(StartOver(1))
    inbox.take(StartOver(2))  # of no one
    inbox.take(StepUpdate(0, 0, [], [(1, update(WORDS[1], "length"))], []))
    output = await reading
    assert output.outputs[0].token_ids == WORDS[1:2]
    assert output.finished
