"""``vmserve bench serve``: what the client sends, counts and tells, against servers on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Running
from tests.support.bench import bench, job, refusal
from vmserve.errors import ConfigurationError
from vmserve.testing import VOCAB_SIZE, ByteTokenizer, ScriptedTransport
from vmserve_bench.ab.client import Load
from vmserve_bench.ab.jobs import Decoding, Job, Prompts
from vmserve_bench.ab.metrics import Slo
from vmserve_bench.serve.client import ServedRun, Target, retry_after_s, send_load
from vmserve_bench.serve.events import Answer, EventReader
from vmserve_bench.serve.results import ServedRound, notes
from vmserve_bench.serve.server import api_url, look

Reply = tuple[int, dict[str, str], str]


def send(target: Target, jobs: list[Job], load: Load | None = None) -> ServedRun:
    prompts = Prompts(VOCAB_SIZE, 0, range(3))
    return asyncio.run(send_load(target, jobs, load or Load(), prompts, 7))


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    engine = ScriptedTransport()
    # No end of sequence among the tokens: it has no text, and the server sends no event for it.
    engine.reply = lambda prompt, index: ByteTokenizer().encode("hello", False)
    server = Running(engine)
    yield server
    server.close()


@pytest.fixture
def engine(running: Running) -> ScriptedTransport:
    """It has noted no request yet."""
    engine = running.engine
    assert isinstance(engine, ScriptedTransport)
    engine.requests.clear()
    return engine


@pytest.fixture
def target(running: Running) -> Target:
    return Target(f"{running.url}/v1", "fake")


class Scripted:
    """A server that gives prepared replies to POST, one after the other, then the last again."""

    def __init__(self, replies: list[Reply], models: Reply) -> None:
        self.bodies: list[dict[str, Any]] = []
        script = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._give(models)

            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                script.bodies.append(json.loads(self.rfile.read(length)))
                self._give(replies.pop(0) if len(replies) > 1 else replies[0])

            def _give(self, reply: Reply) -> None:
                status, headers, text = reply
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


MODELS: Reply = (200, {}, json.dumps({"data": [{"id": "m", "max_model_len": 256}]}))


Serves = Callable[..., Scripted]


@pytest.fixture
def scripted() -> Iterator[Callable[..., Scripted]]:
    with contextlib.ExitStack() as stack:

        def make(*replies: Reply, models: Reply = MODELS) -> Scripted:
            made = Scripted(list(replies) or [(500, {}, "")], models)
            stack.callback(made.close)
            return made

        yield make


def stream(*events: Any, done: bool = True) -> Reply:
    texts = [json.dumps(event) for event in events] + (["[DONE]"] if done else [])
    return 200, {"content-type": "text/event-stream"}, "".join(f"data: {t}\n\n" for t in texts)


def text_event(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


# -- events


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_however_the_network_cuts_them(size: int) -> None:
    sent = (
        b': hi\r\ndata: {"a":1}\r\n\r\nevent: x\ndata:one\ndata: two\n\n\ndata: [DONE]\n\ndata: no'
    )
    reader = EventReader()
    events = [e for at in range(0, len(sent), size) for e in reader.feed(sent[at : at + size])]
    assert events == [b'{"a":1}', b"one\ntwo", b"[DONE]"]


def test_which_events_count() -> None:
    answer = Answer()
    deltas: list[dict[str, Any]] = [
        {"index": 0, "delta": {"role": "assistant", "content": ""}},
        {"index": 0, "delta": {"content": ""}},
        {"index": 0, "delta": {"content": "a"}},
        {"index": 1, "delta": {"content": "b"}, "finish_reason": "length"},
    ]
    details = {"prompt_tokens_details": {"cached_tokens": 4}}
    usage = {"prompt_tokens": 5, "completion_tokens": 3, **details}
    events = [*({"choices": [delta]} for delta in deltas), {"choices": [], "usage": usage}]
    for at, event in enumerate(events):
        answer.take(json.dumps(event).encode(), float(at))
    assert answer.times_s == {0: [1.0, 2.0], 1: [3.0]}
    assert answer.token_times_s() == [1.0, 2.0, 3.0]
    assert answer.texts == {0: "a", 1: "b"}
    assert (answer.num_prompt_tokens, answer.num_output_tokens) == (5, 3)
    assert (answer.num_cached_tokens, answer.num_events) == (4, 3)


# -- the client against vmserve's server


def test_lengths_are_exact_and_every_token_has_a_time(
    engine: ScriptedTransport, target: Target
) -> None:
    jobs = [job(20, 9, 0), job(7, 1, 1), job(5, 4, 2, decoding=Decoding("parallel", 3))]
    run = send(target, jobs)
    assert run.failures == ()
    assert [
        (one.num_input_tokens, one.num_output_tokens, one.num_sequences)
        for one in run.record.requests
    ] == [(20, 9, 1), (7, 1, 1), (5, 4, 3)]
    first, single, parallel = run.record.requests
    assert (len(first.itls_s), single.tpot_s) == (8, None)
    assert len(parallel.token_times_s) in (4, 5)
    assert first.e2e_s >= first.ttft_s > 0
    assert first.tpot_s == pytest.approx((first.e2e_s - first.ttft_s) / 8)
    assert (run.num_counted, run.num_other_length, run.num_retries) == (0, 0, 0)
    sent = {len(ids): (ids, params) for ids, params, _ in engine.requests}
    assert sent[20][0] == Prompts(VOCAB_SIZE, 0, range(3)).of(job(20, 9, 0))
    assert (sent[20][1].ignore_eos, sent[20][1].temperature) == (True, 0.0)
    assert (sent[5][1].n, sent[5][1].temperature) == (3, 1.0)


def test_a_chat_grows_by_its_answers(engine: ScriptedTransport, target: Target) -> None:
    chat = Target(target.base_url, "fake", "chat")
    run = send(chat, [job(2, 5, 0), job(9, 5, 1, previous=0)])
    assert run.failures == ()
    first, second = (engine.facts.tokenizer.decode(ids) for ids, _, _ in engine.requests)
    begin = first.removesuffix("[assistant]")
    assert second.startswith(f"{begin}[assistant]hello|[user]")
    # The fake's tokens are bytes: the server's own count is what is kept.
    assert [one.num_input_tokens for one in run.record.requests] == [len(first), len(second)]
    assert [len(one.token_times_s) for one in run.record.requests] == [5, 5]


def test_a_conversation_of_token_ids_begins_with_what_was_said(
    engine: ScriptedTransport, target: Target
) -> None:
    run = send(target, [job(4, 3, 0), job(10, 3, 1, previous=0)], Load(concurrency=1))
    assert run.failures == ()
    first, second = (ids for ids, _, _ in engine.requests)
    assert (len(first), len(second), second[:4]) == (4, 10, first)


def test_open_loop_waits_for_arrivals(target: Target) -> None:
    run = send(target, [job(4, 2, 0, 0.15), job(4, 2, 1, 0.0)], Load(is_open=True))
    late, early = run.record.requests
    assert (late.due_s, early.due_s) == (0.15, 0.0)
    assert late.token_times_s[0] > 0.15
    assert run.record.elapsed_s == late.token_times_s[-1]
    # What the client itself was late by is in the times to the first token, and said.
    assert 0 < 2 * run.mean_send_delay_s <= late.ttft_s + early.ttft_s
    for delay_s, is_told in ((0.025, True), (0.0, False)):
        told = told_of(dataclasses.replace(run, mean_send_delay_s=delay_s))
        assert ("25 ms after they were due" in told) == is_told


def told_of(run: ServedRun) -> str:
    return " ".join(notes([ServedRound.of(0, 0, run, Slo(), None)]))


def test_concurrency_bounds_what_is_under_way(target: Target) -> None:
    run = send(target, [job(4, 4, index) for index in range(6)], Load(concurrency=1))
    spans = sorted((one.due_s, one.token_times_s[-1]) for one in run.record.requests)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert run.mean_send_delay_s == 0


def test_failures_are_counted_by_status(target: Target) -> None:
    # The fake's context is 256 tokens.
    run = send(target, [job(4, 2, 0), job(300, 2, 1), job(310, 2, 2, previous=1)])
    assert [one.index for one in run.record.requests] == [0]
    assert run.statuses == {"400": 1, "not sent": 1}
    one = ServedRound.of(0, 7, run, Slo(ttft_s=100.0), None)
    assert one.metrics["goodput_share"] == pytest.approx(1 / 3)
    assert one.metrics["cpu_s"] is None
    assert one.metrics["kv_used_peak_bytes"] is None
    assert "Failed with 400: 1 (" in told_of(run)


# -- other servers


def test_tokens_are_counted_where_no_usage_is_told(scripted: Serves) -> None:
    server = scripted(stream(text_event("a"), text_event(""), text_event("b", "length")))
    run = send(Target(server.url, "m"), [job(4, 3)])
    assert (run.num_counted, run.num_other_length) == (1, 0)
    (one,) = run.record.requests
    assert (one.num_input_tokens, one.num_output_tokens) == (4, 3)
    assert "no usage for 1 answers" in told_of(run)


def test_a_busy_server_is_asked_again_if_wanted(scripted: Serves) -> None:
    busy: Reply = (429, {"retry-after": "0"}, '{"error": {"message": "later"}}')
    good = stream(text_event("a", "length"))
    server = scripted(busy, busy, good)
    run = send(Target(server.url, "m", max_retries=2), [job(4, 1)])
    assert (run.num_retries, run.failures, len(server.bodies)) == (2, (), 3)
    server = scripted(busy, good)
    run = send(Target(server.url, "m"), [job(4, 1)])
    assert run.statuses == {"429": 1}
    assert run.failures[0].message == "later"


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        (stream(text_event("a"), done=False), "cut off"),
        (stream(), "cut off"),
        (stream(text_event("a"), {"error": {"message": "dead"}}), "error event"),
        ((200, {}, "data: {oops\n\n"), "bad event"),
        ((200, {}, "data: [1]\n\n"), "bad event"),
        ((500, {}, "<html>"), "500"),
    ],
)
def test_how_an_answer_fails(scripted: Serves, reply: Reply, status: str) -> None:
    run = send(Target(scripted(reply).url, "m"), [job(4, 2)])
    assert run.statuses == {status: 1}


def test_retry_after() -> None:
    assert [retry_after_s(text) for text in (None, "0.5", "-3", "999", "soon")] == [
        1.0, 0.5, 0.0, 60.0, 1.0,
    ]  # fmt: skip
    assert retry_after_s("Thu, 01 Jan 1970 00:00:00 GMT") == 0.0


def test_addresses() -> None:
    assert api_url("http://h:1") == api_url("h:1/") == api_url("http://h:1/v1/") == "http://h:1/v1"
    assert api_url("https://h/llm/v1") == "https://h/llm/v1"
    for wrong in ("ftp://h", "http://", "http://user:secret@h", "http://[::1", "h:99999"):
        with pytest.raises(ConfigurationError, match="--base-url"):
            api_url(wrong)


def test_what_the_server_says_of_itself(running: Running, scripted: Serves) -> None:
    info = look(f"{running.url}/v1", None, {})
    assert (info.model, info.max_len) == ("fake", 256)
    assert info.version is not None
    with pytest.raises(ConfigurationError, match="serves no 'other' but fake"):
        look(f"{running.url}/v1", "other", {})
    bare = scripted(models=(404, {}, "no"))
    assert look(bare.url, "mine", {}).model == "mine"
    with pytest.raises(ConfigurationError, match="answers 404 and names no model"):
        look(bare.url, None, {})


# -- the command


def test_the_command_writes_what_it_measured(running: Running, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.json"
    line = "serve --requests 5 --concurrency 2 --vocab-size 200 --rounds 2 --slo-ttft 10s"
    output = bench(line, "--base-url", running.url, "--json", path)
    assert "requests that meet the SLOs" in output
    assert "TTFT p50" in output
    told = json.loads(path.read_text())
    assert (told["schema"], told["schema_version"]) == ("vmserve-bench-serve", 1)
    assert told["server"]["model"] == "fake"
    assert [len(one["run"]["requests"]) for one in told["rounds"]] == [5, 5]
    assert [one["seed"] for one in told["rounds"]] == [0, 1]
    for one in told["rounds"]:
        assert one["metrics"]["goodput_share"] == 1.0
        for request in one["run"]["requests"]:
            assert len(request["itl_us"]) == request["output_tokens"] - 1
    assert "api_key" not in path.read_text()


def cells_of(output: str) -> dict[str, str]:
    """The second column of tables by the first."""
    rows = [line.split("│") for line in output.splitlines() if line.startswith("│")]
    return {row[1].strip(): row[2].strip() for row in rows}


def one_token(num_prompt: int, cached: dict[str, int] | None = None) -> Reply:
    usage = {"prompt_tokens": num_prompt, "completion_tokens": 1, "prompt_tokens_details": cached}
    return stream(text_event("a", "length"), {"choices": [], "usage": usage})


def test_a_sweep_has_a_row_and_a_file_for_each_number_at_once(
    scripted: Serves, tmp_path: Path
) -> None:
    server = scripted(one_token(128))
    line = "serve --workload vllm-cpu --requests 3 --concurrency 2,1 --rounds 2 --warmup 1"
    where = ("--base-url", server.url, "--json", tmp_path / "a.json")
    output = bench(line, *where, columns=250)
    head = [line.split("┃")[1:-1] for line in output.splitlines() if line.startswith("┃")]
    columns = [" ".join(" ".join(parts).split()) for parts in zip(*head, strict=True)]
    assert columns == [
        "Maximum request concurrency", "Request throughput (req/s)",
        "Output token throughput (tok/s)", "Median TTFT (ms)", "P99 TTFT (ms)", "Median TPOT (ms)",
        "P99 TPOT (ms)", "Median ITL (ms)", "P99 ITL (ms)",
    ]  # fmt: skip
    assert "Medians of 2 rounds" in output
    assert list(cells_of(output)) == ["1", "2"]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a-1.json", "a-2.json"]
    told = [json.loads((tmp_path / f"a-{at}.json").read_text()) for at in (1, 2)]
    assert [one["workload"]["name"] for one in told] == ["vllm-cpu at 1", "vllm-cpu at 2"]
    # No prompt was sent before: a prefix cache would answer it.
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(set(prompts)) == len(prompts) == 1 + 2 * 2 * 3
    assert {len(prompt) for prompt in prompts} == {128}


def test_a_trace_tells_its_hits_beside_those_without_a_limit(
    scripted: Serves, tmp_path: Path
) -> None:
    server = scripted(one_token(64, {"cached_tokens": 16}))
    trace = tmp_path / "t.jsonl"
    row = {"timestamp": 0, "input_length": 2048, "output_length": 32}
    chains = ([0, 1, 2, 3], [0, 1, 4, 5])
    trace.write_text("".join(json.dumps({**row, "hash_ids": ids}) + "\n" for ids in chains))
    words = ("--base-url", server.url, "--trace", trace, "--json", tmp_path / "a.json")
    cells = cells_of(bench("serve --scale 0.03125 --warmup 0", *words, columns=200))
    assert cells["prefix cache hits"] == "25.0%"
    assert cells["prefix cache hits without a limit"] == "25.0%"  # 32 of 128
    first, second = (body["prompt"] for body in server.bodies)
    assert len(first) == 64
    assert first[:32] == second[:32]
    assert first[32:] != second[32:]


def test_wrong_options(running: Running, tmp_path: Path) -> None:
    where = ("--base-url", running.url, "--vocab-size", "200", "--output", tmp_path)
    for more, told in (
        ("--workload beam", "no part of the API"),
        ("--workload nothing", "no workload is named"),
        ("--rate 1 --concurrency 2", "exclude each other"),
        ("--extra-body [1]", "JSON object"),
        ("--rate -1", "not a number above 0"),
        ("--max-len 9999", "above the 256 tokens"),
        ("--model other", "serves no 'other'"),
        ('--extra-body {"logit_bias":3}', "of the warm-up with 400"),
    ):
        assert told in refusal("serve", *more.split(), *where, kind=ConfigurationError)


def test_a_server_that_cannot_be_used(scripted: Serves, tmp_path: Path) -> None:
    closed = scripted()
    closed.close()
    locked = scripted(models=(401, {}, '{"error": {"message": "a key"}}'))
    for url, told in ((closed.url, "no server answers"), (locked.url, "--api-key")):
        where = ("--base-url", url, "--output", tmp_path)
        assert told in refusal("serve", *where, kind=ConfigurationError)
    assert list(tmp_path.iterdir()) == []
