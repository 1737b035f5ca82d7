"""Starts an engine's OpenAI-compatible server, sends it the load and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
from environments import SERVER, Environment
from launch import NO_BYTECODE
from memory import MemorySamples, watch
from subjects import Subject

from vmserve_bench.ab.client import Load
from vmserve_bench.ab.jobs import Job, Prompts
from vmserve_bench.lab.machine import free_port
from vmserve_bench.lab.server import Process, inherited, started
from vmserve_bench.serve.client import ServedRun, Target, send_load
from vmserve_bench.workloads.shapes import RequestShape

Json = dict[str, Any]

#: Engines with a server here; OpenVINO is driven in its process, at the same arrivals.
SERVERS = ("vmserve", "llama.cpp", "vllm")
MODEL_NAME = "peers"
POLL_S = 0.02
TIMEOUT_S = 300.0
ERROR_TAIL_CHARS = 2000
#: What ``llama-server`` decodes at once: a slot reserves its whole context.
LLAMA_SLOTS = 16
#: What ``llama-server`` calls the options of the engine in process.
LLAMA_FLAGS = {"batch": "batch_size", "ubatch": "ubatch_size", "kv_unified": "kv_unified"}


class ServerFailedError(Exception):
    """The server ended, did not answer in time, or answered with errors."""


def command(subject: Subject, environment: Environment, job: Json, port: int) -> list[str]:
    """Command of the server. Raises ServerFailedError for an unknown option."""
    options, python = dict(subject.options), str(environment.python)
    where = {"host": "127.0.0.1", "port": port}
    if subject.engine == "llama.cpp":
        slots = int(options.pop("slots", min(LLAMA_SLOTS, job["max_num_seqs"])))
        if unknown := ", ".join(set(options) - set(LLAMA_FLAGS)):
            raise ServerFailedError(f"llama-server has no option {unknown} here")
        settings = where | {
            "model": job["files"]["gguf"],
            "alias": MODEL_NAME,
            "threads": job["num_threads"],
            "threads_batch": job["num_threads"],
            "parallel": slots,
            "ctx_size": slots * job["max_model_len"],
            "cache_prompt": False,
            "cache_ram": 0,
            "webui": False,
            "log_disable": True,
        }
        settings |= {LLAMA_FLAGS[name]: value for name, value in options.items()}
        return [str(environment.tools[SERVER]), *command_line_options(settings)]
    settings = {"model": job["model"], "served_model_name": MODEL_NAME, **where}
    settings |= {name: job[name] for name in ("max_num_seqs", "max_model_len")}
    settings |= {"enable_prefix_caching": False}
    if subject.engine == "vmserve":
        return [python, "-m", "vmserve", "serve", *command_line_options(settings | options)]
    settings |= {"dtype": "bfloat16" if job["has_bf16"] else "float32"}
    # The `vllm` command asks for the version of a package of that name, and stops without it.
    program = [python, "-m", "vllm.entrypoints.openai.api_server"]
    return [*program, *command_line_options(settings | options)]


def command_line_options(options: Mapping[str, Any]) -> list[str]:
    """Spell engine options as these servers do."""
    found: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            found.append(flag if value else "--no-" + flag[2:])
        elif value is not None:
            found += [flag, str(value)]
    return found


def run_server(
    subject: Subject,
    environment: Environment,
    job: Json,
    added: Mapping[str, str],
    requests: list[Json],
    limit_s: float,
) -> Json:
    """Measure one server from its start to the last answer; ``error`` if it failed."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1"
    target = Target(url, MODEL_NAME, timeout_s=limit_s)
    samples, at_end = MemorySamples(), MemorySamples()
    began = time.monotonic()
    try:
        arguments = command(subject, environment, job, port)
        with (
            server(arguments, added) as process,
            httpx.Client(base_url=url, timeout=TIMEOUT_S) as client,
        ):
            watcher = threading.Thread(target=watch, args=(process, samples, limit_s))
            watcher.start()  # ends with the server
            ask(process, client, job["warmup"][0], 1, began + limit_s)
            first_token = time.monotonic() - began
            send(target, job["warmup"], limit_s)
            start = time.monotonic()
            run = send(target, requests, limit_s - (start - began))
            end = time.monotonic()
            at_end.take(process.pid)
            checked = []
            for each in requests[: job["num_checked"]]:
                length, until = each["num_output_tokens"], time.monotonic() + TIMEOUT_S
                checked.append(token_ids_of(ask(process, client, each, length, until)))
        watcher.join()
    except (ServerFailedError, TimeoutError, OSError, httpx.HTTPError) as error:
        return {"error": str(error) or f"stopped after {limit_s:.0f} s", "workloads": {}}
    answers = run.record.requests
    served = {
        "elapsed_s": run.record.elapsed_s,
        "due_s": [each.due_s for each in answers],
        "times_s": [list(each.token_times_s) for each in answers],
        "client_cpu_s": run.record.cpu_s,
        "peak_pss_bytes": max([samples.peak(start, end), *at_end.pss_bytes]),
        "token_ids": checked,
    }
    # Without this machine's directories.
    told = [Path(each).name if each.startswith("/") else each for each in arguments]
    return {"first_token_s": first_token, "arguments": told, "workloads": {"served": served}}


@contextlib.contextmanager
def server(arguments: list[str], added: Mapping[str, str]) -> Iterator[Process]:
    """A server; what it has said last is in the errors about it."""
    with started(arguments, {**inherited(NO_BYTECODE), **added}) as (process, said):
        try:
            yield process
        except ServerFailedError as error:
            raise ServerFailedError(f"{error}: {said()[-ERROR_TAIL_CHARS:]}") from None


def ask(
    process: Process,
    client: httpx.Client,
    request: Json,
    num_tokens: int,
    deadline: float,
) -> str:
    """The answer to a request outside the load: greedy, not streamed, asked for again and again
    while the server starts. Raises ServerFailedError.
    """
    body = {
        "model": MODEL_NAME,
        "prompt": request["prompt_token_ids"],
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerFailedError(f"the server ended with {process.returncode}")
        with contextlib.suppress(httpx.TransportError):
            answer = client.post("/completions", json=body)
            if answer.is_success:
                return str(answer.json()["choices"][0]["text"])
            if answer.status_code not in (404, 503):  # 503: it is loading the model
                raise ServerFailedError(f"{answer.status_code}: {answer.text[:300]}")
        time.sleep(POLL_S)
    raise ServerFailedError("no token came in time")


def token_ids_of(text: str) -> list[int]:
    """The checkpoint's words are named by their ids; special ones have no text."""
    return [int(number) for number in re.findall(r"w(\d+)", text)]


def send(target: Target, requests: list[Json], limit_s: float) -> ServedRun:
    """Send all requests at their arrivals. Raises ServerFailedError or TimeoutError."""

    def job_of(index: int, request: Json) -> Job:
        ids = tuple(request["prompt_token_ids"])
        shape = RequestShape(len(ids), request["num_output_tokens"], request["arrival_s"], index)
        return Job(shape, token_ids=ids)

    jobs = [job_of(index, each) for index, each in enumerate(requests)]
    # Every job has its prompt: nothing is drawn.
    load = send_load(target, jobs, Load(is_open=True), Prompts(1, 0), 0)
    run = asyncio.run(asyncio.wait_for(load, max(1.0, limit_s)))
    if run.failures:
        raise ServerFailedError(f"{len(run.failures)} requests failed: {run.failures[0].message}")
    if run.num_other_length:
        raise ServerFailedError(f"{run.num_other_length} answers are not as long as was asked")
    return run
