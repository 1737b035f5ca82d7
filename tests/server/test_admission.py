"""How much may wait before requests are turned away."""

import asyncio
import random

import httpx
import openai
import pytest

from tests.client.test_fleet import Engine, fleet_of
from tests.engine.interrupting import count_instructions
from tests.helpers import until
from tests.server.conftest import CHAT, COMPLETIONS, HI, Start, error_of
from vmserve.errors import InvalidRequestError
from vmserve.server.access.admission import Admission, Ticket
from vmserve.server.app import create_app
from vmserve.server.config import ServerConfig
from vmserve.server.errors import ApiError
from vmserve.testing import ScriptedTransport


def make(max_requests: int = 4, max_tokens: int = 100, running: int = 0) -> Admission:
    return Admission(max_requests, max_tokens, lambda: running, lambda: 8)


def test_requests_and_tokens_are_bounded() -> None:
    admission = make()
    tickets = [admission.admit("a", 1, 10) for _ in range(4)]
    with pytest.raises(ApiError, match="overloaded: 4 requests of 40 tokens") as refused:
        admission.admit("a", 1, 10)
    assert (refused.value.status, refused.value.headers) == (429, {"retry-after": "1"})
    assert admission.num_rejected == 1
    admission.release(tickets[0])
    with pytest.raises(ApiError, match=r"at most 4 of 100 may \(--max-queued-requests, --max"):
        admission.admit("a", 1, 71)
    admission.admit("a", 1, 70)
    assert admission.waiting() == (4, 100)


def test_what_runs_does_not_wait() -> None:
    admission = make(max_requests=2, running=3)
    for tokens in (90, 80, 70):
        admission.admit("a", 1, tokens)
    assert admission.waiting() == (0, 0)
    admission.admit("a", 1, 20)
    admission.admit("a", 1, 30)
    # The youngest are those that wait.
    assert admission.waiting() == (2, 50)
    with pytest.raises(ApiError, match="overloaded"):
        admission.admit("a", 1, 1)
    # A ticket of several prompts can run in part.
    admission = make(running=1)
    admission.admit("a", 4, 80)
    assert admission.waiting() == (3, 60)


def test_what_waits_is_known_after_any_history_and_costs_the_same_to_know() -> None:
    """The youngest requests that the engines do not run, counted as if one looked at all."""
    running = 0
    admission = Admission(10**9, 10**9, lambda: running, lambda: 0)
    chance = random.Random(3)
    tickets: list[Ticket] = []
    for _ in range(3000):
        if tickets and chance.random() < 0.45:
            admission.release(tickets.pop(chance.randrange(len(tickets))))
        else:
            tickets.append(admission.admit("a", chance.randrange(1, 5), chance.randrange(1, 99)))
        running = chance.randrange(1 + sum(ticket.num_requests for ticket in tickets))
        left = waiting = sum(ticket.num_requests for ticket in tickets) - running
        tokens = 0
        for ticket in reversed(tickets):
            share = min(left, ticket.num_requests)
            tokens += ticket.num_tokens * share // ticket.num_requests
            left -= share
        assert admission.waiting() == (waiting, tokens)

    def cost(num_waiting: int) -> int:
        queue = Admission(10**9, 10**9, lambda: 0, lambda: 0)
        for _ in range(num_waiting):
            queue.admit("a", 1, 10)
        return count_instructions(lambda: queue.admit("a", 1, 10))

    assert cost(5000) == cost(5)


def test_what_may_wait_follows_what_engines_can_run_where_options_do_not_say() -> None:
    def limits(requests: int | None, tokens: int | None, max_running: int) -> tuple[int, ...]:
        made = Admission(requests, tokens, lambda: 0, lambda: max_running)
        return made.max_requests, made.max_tokens, made.most_held

    assert limits(None, None, 0) == (1024, 8_000_000, 1024)
    assert limits(None, None, 128) == (1024, 8_000_000, 1152)
    assert limits(None, None, 16 * 256) == (8192, 64_000_000, 12_288)
    assert limits(5, 6, 16 * 256) == (5, 6, 4101)


def test_a_burst_that_idle_engines_can_run_is_served() -> None:
    """All of one client, and all at once."""
    fleet = fleet_of(*(Engine() for _ in range(5)))
    app = create_app(fleet, ServerConfig(served_model_names=("m",)))

    async def chat(http: httpx.AsyncClient) -> int:
        return (await http.post(CHAT, json={"messages": HI, "max_tokens": 2})).status_code

    async def burst() -> list[int]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            return await asyncio.gather(*(chat(http) for _ in range(5 * 128)))

    assert set(asyncio.run(burst())) == {200}
    app.state.context.close()


def test_a_full_queue_is_full_for_who_filled_it() -> None:
    admission = make(max_requests=8, max_tokens=100)
    flood = admission.admit("a", 8, 60)
    with pytest.raises(ApiError, match="overloaded"):
        admission.admit("a", 1, 1)
    # Another has an equal part of it, of requests and of tokens, and no more.
    with pytest.raises(ApiError, match="overloaded"):
        admission.admit("b", 1, 51)
    small = [admission.admit("b", 1, 10) for _ in range(4)]
    with pytest.raises(ApiError, match="overloaded"):
        admission.admit("b", 1, 1)
    third = admission.admit("c", 2, 33)
    with pytest.raises(ApiError, match="overloaded"):
        admission.admit("c", 1, 1)
    for ticket in (flood, *small, third):
        admission.release(ticket)
    admission.admit("b", 8, 100)


def test_what_never_fits_is_a_client_error() -> None:
    with pytest.raises(InvalidRequestError, match="5 prompts"):
        make().admit("a", 5, 10)
    with pytest.raises(InvalidRequestError, match="101 tokens"):
        make().admit("a", 1, 101)


def test_429_with_retry_after(start: Start) -> None:
    engine = ScriptedTransport()
    server = start(engine, max_queued_requests=2)
    engine.pause = server.on_loop(asyncio.Event)
    body = {"prompt": "x", "stream": True}
    with (
        server.http.stream("POST", COMPLETIONS, json=body) as one,
        server.http.stream("POST", COMPLETIONS, json=body) as other,
    ):
        # Both run: a third would be taken. Both wait: it is not.
        engine.num_waiting = 2
        response = server.post(COMPLETIONS, {"prompt": "x"})
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert error_of(response)["type"] == "RateLimitError"
        with pytest.raises(openai.RateLimitError):
            server.openai().completions.create(model="fake", prompt="x")
        # Operators still see what is going on.
        metrics = server.http.get("/metrics").text
        assert 'vmserve:admission_rejections_total{engine="0",model_name="fake"} 2.0' in metrics
        assert server.http.get("/load").json() == {"server_load": 2}
        engine.num_waiting = 0
        server.on_loop(engine.pause.set)
        for stream in (one, other):
            stream.read()
        until(lambda: server.http.get("/load").json() == {"server_load": 0})
        assert server.complete()["choices"][0]["text"] == "hello"
    until(lambda: server.http.get("/load").json() == {"server_load": 0})


def test_a_request_larger_than_the_queue(start: Start) -> None:
    server = start(max_queued_requests=2, max_queued_tokens=100)
    assert "3 prompts" in server.error(COMPLETIONS, {"prompt": ["a", "b", "c"]})["message"]
    message = server.error(COMPLETIONS, {"prompt": "a", "max_tokens": 50, "n": 2})["message"]
    assert "104 tokens" in message
