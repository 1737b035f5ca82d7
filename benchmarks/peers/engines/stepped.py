"""The loop that serves requests by an engine's steps: what a server does between two events."""

from __future__ import annotations

import time
from typing import Any

Json = dict[str, Any]


class Stepped:
    """An engine that computes in steps. ``facts``: for the results, all but ``more`` shown."""

    facts: Json
    _num_added = 0

    def prepare(self, requests: list[Json]) -> None:
        """Set up what this number and length of requests need; not part of the workload's time."""

    def add(self, number: int, request: Json) -> None:
        """Queue a request under a number."""
        raise NotImplementedError

    def step(self) -> list[tuple[int, list[int]]]:
        """Compute once; new tokens by number."""
        raise NotImplementedError

    def close(self) -> None:
        """Free what the process's end does not."""

    def run(self, requests: list[Json]) -> list[Json]:
        """All requests, each from its ``arrival_s`` on; those marked ``is_sequential`` one after
        the other. Instants are seconds from the call.
        """
        start = time.monotonic()
        if not requests[0].get("is_sequential"):
            return self._together(requests, start, 0.0)
        answers: list[Json] = []
        for request in requests:
            answers += self._together([request], start, time.monotonic() - start)
        return answers

    def _together(self, requests: list[Json], start: float, offset: float) -> list[Json]:
        """A token's time is the end of the step that made it. ``due_s`` is when a request was to
        arrive, not when the engine was told: a long step must not hide the wait.
        """
        first, self._num_added = self._num_added, self._num_added + len(requests)
        answers: list[Json] = [
            {"due_s": offset + each["arrival_s"], "times_s": [], "token_ids": []}
            for each in requests
        ]
        waiting = sorted(range(len(requests)), key=lambda index: requests[index]["arrival_s"])
        waiting.reverse()
        num_unfinished = 0
        while waiting or num_unfinished:
            now = time.monotonic() - start
            while waiting and answers[waiting[-1]]["due_s"] <= now:
                index = waiting.pop()
                self.add(first + index, requests[index])
                num_unfinished += 1
            if not num_unfinished:
                time.sleep(max(0.0, answers[waiting[-1]]["due_s"] - now))
                continue
            found = self.step()
            now = time.monotonic() - start
            for number, tokens in found:
                answer, request = answers[number - first], requests[number - first]
                answer["token_ids"] += tokens
                answer["times_s"] += [now] * len(tokens)
                is_whole = len(answer["token_ids"]) >= request["num_output_tokens"]
                num_unfinished -= bool(tokens) and is_whole
        return answers
