"""The loop that serves requests by an engine's steps: what a server does between two events."""

from __future__ import annotations

import time
from typing import Any, Protocol

Json = dict[str, Any]


class Stepped(Protocol):
    """``add`` queues a request under a number; ``step`` computes once and gives new tokens."""

    def add(self, number: int, request: Json) -> None: ...

    def step(self) -> list[tuple[int, list[int]]]: ...


def run_stepped(engine: Stepped, requests: list[Json], *, first_number: int = 0) -> list[Json]:
    """All requests, each from its ``arrival_s`` on; instants are seconds from the call.

    A token's time is the end of the step that made it. ``due_s`` is when a request was to
    arrive, not when the engine was told: a long step must not hide the wait.
    """
    start = time.monotonic()
    answers = [{"due_s": each["arrival_s"], "times_s": [], "token_ids": []} for each in requests]
    waiting = sorted(range(len(requests)), key=lambda index: requests[index]["arrival_s"])
    waiting.reverse()
    unfinished = 0
    while waiting or unfinished:
        now = time.monotonic() - start
        while waiting and answers[waiting[-1]]["due_s"] <= now:
            index = waiting.pop()
            engine.add(first_number + index, requests[index])
            unfinished += 1
        if not unfinished:
            time.sleep(max(0.0, answers[waiting[-1]]["due_s"] - now))
            continue
        found = engine.step()
        now = time.monotonic() - start
        for number, tokens in found:
            answer, request = answers[number - first_number], requests[number - first_number]
            answer["token_ids"] += tokens
            answer["times_s"] += [now] * len(tokens)
            unfinished -= bool(tokens) and len(answer["token_ids"]) >= request["num_output_tokens"]
    return answers


def run_all(engine: Stepped, requests: list[Json], first_number: int) -> list[Json]:
    """Like :func:`run_stepped`; requests marked ``is_sequential`` one after the other."""
    if not requests[0].get("is_sequential"):
        return run_stepped(engine, requests, first_number=first_number)
    answers: list[Json] = []
    start = time.monotonic()
    for index, request in enumerate(requests):
        began = time.monotonic() - start
        [answer] = run_stepped(engine, [request], first_number=first_number + index)
        answer["due_s"] = began
        answer["times_s"] = [began + each for each in answer["times_s"]]
        answers.append(answer)
    return answers
