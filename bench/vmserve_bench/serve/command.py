"""``vmserve bench serve``: how fast does that server answer this traffic?"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vmserve.errors import ConfigurationError
from vmserve_bench import options as opt
from vmserve_bench.ab.client import RunFailedError
from vmserve_bench.ab.jobs import Prompts
from vmserve_bench.ab.plan import (
    LoadOptions,
    check_positive,
    fresh_output,
    make_workloads,
    objectives,
    sources,
    within_context,
)
from vmserve_bench.ab.traces import HASH_BLOCK_TOKENS
from vmserve_bench.ab.traffic import KINDS, get_kind
from vmserve_bench.lab.report import check_writable, dump, make_console, watch, write_text
from vmserve_bench.lab.table import print_table
from vmserve_bench.serve.client import ServedRun, Target, send_load
from vmserve_bench.serve.results import ServedRound, document, sweep_table, table
from vmserve_bench.serve.server import api_url, look
from vmserve_bench.workloads.texts import TEXTS

if TYPE_CHECKING:
    from vmserve_bench.ab.experiment import Workload
    from vmserve_bench.ab.jobs import Job

__all__ = ["HELP", "serve_load_command"]

#: Context if the server does not report its own.
_DEFAULT_MAX_LEN = 2048
#: First ids of a vocabulary are often special tokens or single bytes.
_NUM_RESERVED = 100
_WARMUP_SEED = 1_000_000
#: Requests of a round, unless the workload was published with a number of its own.
_REQUESTS = 100
#: Options that the results file has.
_KEPT = (
    "endpoint", "seed", "num_requests", "rate", "burstiness", "concurrency", "scale", "max_len",
    "vocab_size", "text_prompts", "ignore_eos", "retry",
)  # fmt: skip

HELP = f"""Send a workload to an OpenAI-compatible server, vmserve's or another, and time it.

Requests, seeds and arrivals are those of bench ab; times are taken where the answers arrive. Time
to the first token is that to the first event with choices; gaps are those between such events;
time per token is (end - first) / (tokens - 1) with the tokens of the server's usage.

\b
Workloads:
{chr(10).join(f"  {kind.name:<19}{kind.summary}" for kind in KINDS.values())}
Beam search is no part of that API: beam and mix are left to bench ab. So is real text, for which
it has the tokenizer.

\b
Examples:
  vmserve bench serve --base-url http://127.0.0.1:8000 --requests 200 --rate 8
  vmserve bench serve --base-url http://127.0.0.1:8000 --workload sessions --endpoint chat
  vmserve bench serve --base-url http://127.0.0.1:8000 --concurrency 16 --rounds 6 --json a.json
  vmserve bench serve --base-url http://127.0.0.1:8000 --workload vllm-cpu
  vmserve bench serve --base-url http://127.0.0.1:8000 --trace mooncake.jsonl --scale 0.03125
"""


def serve_load_command(
    ctx: typer.Context,
    base_url: Annotated[str, typer.Option(help="http://HOST:PORT, or with a path, e.g. /v1.")],
    model: Annotated[
        str | None, typer.Option(help="Its name there. Default: the first that /models lists.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="Of the server.", envvar="VMSERVE_API_KEY", show_default=False),
    ] = None,
    endpoint: Annotated[
        Literal["completions", "chat"], typer.Option(help="Prompts as token ids, or as messages.")
    ] = "completions",
    workload: Annotated[str | None, typer.Option(help="One of the above. Default: chat.")] = None,
    trace: opt.Trace = None,
    trace_block_size: opt.TraceBlockSize = HASH_BLOCK_TOKENS,
    num_requests: Annotated[
        int | None,
        typer.Option(
            "--requests",
            min=1,
            help=f"Of each round. Default: {_REQUESTS}, or as the workload was published; of a "
            "trace all.",
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Runs that count, each with requests of its own.")
    ] = 1,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before, that do not count.")] = 2,
    rate: opt.Rate = None,
    burstiness: opt.Burstiness = None,
    concurrency: opt.Concurrency = None,
    seed: Annotated[int, typer.Option(min=0, help="Of all that is drawn.")] = 0,
    max_len: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Scale the workload to this context. Default: what the server tells, "
            f"or {_DEFAULT_MAX_LEN}.",
        ),
    ] = None,
    scale: opt.Scale = None,
    vocab_size: Annotated[
        int,
        typer.Option(
            min=_NUM_RESERVED + 1,
            help=f"Token ids of prompts are drawn from {_NUM_RESERVED} to below this.",
        ),
    ] = 1000,
    text_prompts: Annotated[
        bool,
        typer.Option(
            "--text-prompts",
            help="Words instead of token ids, about one per token; chats have them always.",
        ),
    ] = False,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos/--no-ignore-eos",
            help="Ask for answers of exactly the length; not every server knows the field.",
        ),
    ] = True,
    extra_body: Annotated[
        str | None,
        typer.Option(help="JSON object added to each request's body.", metavar="JSON"),
    ] = None,
    retry: Annotated[
        int,
        typer.Option(
            min=0,
            help="Ask again up to so often after a 429 or 503, when its Retry-After says. The "
            "wait is part of the latency.",
        ),
    ] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds without news end a request.")] = 600.0,
    slo_ttft: opt.SloTtft = None,
    slo_tpot: opt.SloTpot = None,
    price_per_hour: Annotated[
        float | None, typer.Option(help="Of the server: adds the cost of a million tokens.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Directory for results.json. Default: ./vmserve-serve-<date>."),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write everything measured to this file instead.")
    ] = None,
) -> None:
    load = LoadOptions(concurrency, rate, burstiness)
    load.check(slo_given=False)
    check_positive(scale=scale, price_per_hour=price_per_hour, timeout=timeout)
    slo = objectives(slo_ttft, slo_tpot)
    url = api_url(base_url)
    extra = _extra(extra_body)
    if trace is not None and workload:
        raise ConfigurationError("--workload and --trace exclude each other: give one")
    names = [_checked(workload or "chat")] if trace is None else []
    [found] = sources(
        names,
        trace,
        None,
        num_requests=num_requests,
        usual=_REQUESTS,
        block_tokens=trace_block_size,
    )
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    server = look(url, model, headers)
    target = Target(
        url, server.model, endpoint, headers, timeout, text_prompts, ignore_eos, retry, extra
    )
    longest, usual = (server.max_len or otherwise for otherwise in (sys.maxsize, _DEFAULT_MAX_LEN))
    length = within_context(max_len, longest, usual, "the server serves")
    made = make_workloads(found, load, max_len=length, scale=scale)
    path = json_path or (output or fresh_output("vmserve-serve")) / "results.json"
    check_writable(path)
    options = {name: ctx.params[name] for name in _KEPT} | {"extra_body": extra}
    measured: list[list[ServedRound]] = []
    with watch(1 + rounds * len(made)) as progress:

        def send(workload: Workload, jobs: list[Job], seed: int, what: str) -> ServedRun:
            progress.starting(f"{workload.name}, {what}", len(jobs))
            prompts = Prompts(vocab_size, seed, range(_NUM_RESERVED))
            sent = send_load(target, jobs, workload.load, prompts, seed, progress.finished)
            return asyncio.run(sent)

        if warmup:
            jobs = [job for job in made[0].make(_WARMUP_SEED + seed) if job.previous is None]
            run = send(made[0], jobs[:warmup], _WARMUP_SEED + seed, "warm-up")
            if run.failures:  # then all would
                raise ConfigurationError(
                    f"{url} fails a request of the warm-up with {run.failures[0].status}: "
                    f"{run.failures[0].message}"
                )
        # Prompts of its own for each run, of which no cache has anything.
        seeds = itertools.count(seed)
        for one in made:
            measured.append([])
            for index, each in zip(range(rounds), seeds, strict=False):
                run = send(one, one.make(each), each, f"round {index + 1}")
                if not run.record.requests:
                    told = ", ".join(f"{count} with {name}" for name, count in run.statuses.items())
                    raise RunFailedError(
                        f"no request was answered: {told}; the first: {run.failures[0].message}"
                    )
                measured[-1].append(ServedRound.of(index, each, run, slo, price_per_hour))
    console = make_console()
    pairs = list(zip(made, measured, strict=True))
    print_table(console, sweep_table(server, pairs) if len(made) > 1 else table(server, *pairs[0]))
    for one, served in pairs:
        at = f"{path.stem}-{one.load.concurrency}" if len(made) > 1 else path.stem
        write_text(path.with_stem(at), dump(document(options, server, one, slo, served)))
        console.print(f"written: {path.with_stem(at)}")


def _checked(name: str) -> str:
    why = ""
    if name in TEXTS:
        why = "is text for the model's tokenizer"
    elif any(job.decoding.kind == "beam" for job in get_kind(name).make(20, 0)):
        why = "has beam search, which is no part of the API"
    if why:
        raise ConfigurationError(f"--workload: {name} {why}: use bench ab for it")
    return name


def _extra(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigurationError(f"--extra-body: {error}") from None
    if not isinstance(value, dict):
        raise ConfigurationError('--extra-body: write a JSON object, e.g. {"top_p": 0.9}')
    return value
