"""Starts an engine's OpenAI-compatible server, sends it the load and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
from environments import Environment
from launch import inherited
from subjects import Subject, command_line_options
from vmserve_bench.ab.client import Load
from vmserve_bench.ab.jobs import Job, Prompts
from vmserve_bench.lab.machine import free_port
from vmserve_bench.lab.measure import SAMPLE_INTERVAL_S, MemorySamples
from vmserve_bench.serve.client import ServedRun, Target, send_load
from vmserve_bench.workloads.shapes import RequestShape

Json = dict[str, Any]

#: Engines with a server here; OpenVINO is driven in its process, at the same arrivals.
SERVERS = ("vmserve", "llama.cpp", "vllm")
MODEL_NAME = "peers"
POLL_S = 0.02
GRACE_S = 10.0
CHECK_TIMEOUT_S = 300.0
ERROR_TAIL_CHARS = 2000
#: What ``llama-server`` decodes at once: a slot reserves its whole context.
LLAMA_SLOTS = 16
#: What ``llama-server`` calls the options of the engine in process.
LLAMA_FLAGS = {"batch": "batch_size", "ubatch": "ubatch_size", "kv_unified": "kv_unified"}


class ServerFailedError(Exception):
    """The server ended, did not answer in time, or answered with errors."""


def command(subject: Subject, environment: Environment, job: Json, port: int) -> list[str]:
    """Command of the server. Raises ServerFailedError for an unknown option."""
    threads = str(job["num_threads"])
    where = ["--host", "127.0.0.1", "--port", str(port)]
    if subject.engine == "vmserve":
        options = {
            "max_num_seqs": job["max_num_seqs"],
            "max_model_len": job["max_model_len"],
            "enable_prefix_caching": False,
        }
        start = [
            str(environment.python),
            "-c",
            "from vmserve.cli.main import main; main()",
            "serve",
        ]
        start += ["--model", job["model"], "--served-model-name", MODEL_NAME, *where]
        return start + command_line_options(options | dict(subject.options))
    if subject.engine == "llama.cpp":
        slots = int(subject.options.get("slots", min(LLAMA_SLOTS, job["max_num_seqs"])))
        start = [str(environment.tools["llama-server"]), "-m", job["files"]["gguf"], *where]
        start += ["--alias", MODEL_NAME, "--threads", threads, "--threads-batch", threads]
        start += ["--parallel", str(slots), "--ctx-size", str(slots * job["max_model_len"])]
        start += ["--no-cache-prompt", "--cache-ram", "0", "--no-webui", "--log-disable"]
        options = {name: each for name, each in subject.options.items() if name != "slots"}
        unknown = ", ".join(set(options) - set(LLAMA_FLAGS))
        if unknown:
            raise ServerFailedError(f"llama-server has no option {unknown} here")
        flags = {LLAMA_FLAGS[name]: each for name, each in options.items()}
        return start + command_line_options(flags)
    # The `vllm` command asks for the version of a package of that name, and stops without it.
    start = [str(environment.python), "-m", "vllm.entrypoints.openai.api_server"]
    start += [
        "--model",
        job["model"],
        *where,
        "--served-model-name",
        MODEL_NAME,
        "--max-model-len",
        str(job["max_model_len"]),
    ]
    start += ["--max-num-seqs", str(job["max_num_seqs"]), "--no-enable-prefix-caching"]
    dtype = {"dtype": "bfloat16" if job["has_bf16"] else "float32"}
    return start + command_line_options(dtype | dict(subject.options))


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
    began = time.monotonic()
    try:
        arguments = command(subject, environment, job, port)
        with server(arguments, added) as process:
            url = f"http://127.0.0.1:{port}/v1"
            vocab_size = job["vocab_size"]
            wait_for(process, url, job["warmup"][0], began + limit_s)
            first_token = time.monotonic() - began
            target = Target(url, MODEL_NAME, timeout_s=limit_s)
            send(target, job["warmup"], vocab_size, limit_s)
            left = limit_s - (time.monotonic() - began)
            with sampled(process.pid) as samples:
                run = send(target, requests, vocab_size, left)
            checked = [ask(url, each) for each in requests[: job["num_checked"]]]
    except (ServerFailedError, TimeoutError, OSError, httpx.HTTPError) as error:
        return {"error": str(error) or f"stopped after {limit_s:.0f} s", "workloads": {}}
    answers = run.record.requests
    served = {
        "elapsed_s": run.record.elapsed_s,
        "due_s": [each.due_s for each in answers],
        "times_s": [list(each.token_times_s) for each in answers],
        "client_cpu_s": run.record.cpu_s,
        "peak_pss_bytes": max(samples.pss_bytes, default=0),
        "token_ids": checked,
    }
    return {
        "first_token_s": first_token,
        "arguments": [Path(each).name if each.startswith("/") else each for each in arguments],
        "workloads": {"served": served},
    }


@contextlib.contextmanager
def sampled(pid: int) -> Iterator[MemorySamples]:
    """The memory of a server and all it started, as that of the other workloads is watched."""
    samples, ended = MemorySamples(), threading.Event()

    def watch() -> None:
        while not ended.wait(SAMPLE_INTERVAL_S):
            samples.take(pid)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()
        samples.take(pid)


@contextlib.contextmanager
def server(arguments: list[str], added: Mapping[str, str]) -> Iterator[Any]:
    """A server in a process group of its own, ended with all that it started."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            arguments,
            env={**inherited(), **added},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            yield process
        except ServerFailedError as error:
            output.seek(0)
            tail = output.read()[-ERROR_TAIL_CHARS:].strip()
            raise ServerFailedError(f"{error}: {tail}") from None
        finally:
            end(process)


def end(process: subprocess.Popen[Any]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
            if number == signal.SIGTERM:
                continue  # its children may outlive it
            return


def wait_for(process: subprocess.Popen[Any], url: str, request: Json, deadline: float) -> None:
    """Wait until one token comes. Raises ServerFailedError."""
    body = body_of(request, 1)
    with httpx.Client(timeout=120.0) as client:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise ServerFailedError(f"the server ended with {process.returncode}")
            try:
                answer = client.post(f"{url}/completions", json=body)
            except httpx.HTTPError:
                time.sleep(POLL_S)
                continue
            if answer.is_success:
                return
            if answer.status_code not in (404, 503):  # 503: it is loading the model
                raise ServerFailedError(f"{answer.status_code}: {answer.text[:300]}")
            time.sleep(POLL_S)
    raise ServerFailedError("no token came in time")


def body_of(request: Json, num_tokens: int) -> Json:
    """Send a request outside the load: greedy, not streamed."""
    return {
        "model": MODEL_NAME,
        "prompt": request["prompt_token_ids"],
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def ask(url: str, request: Json) -> list[int]:
    """Tokens of an answer outside the load. Raises ServerFailedError."""
    body = body_of(request, request["num_output_tokens"])
    answer = httpx.post(f"{url}/completions", json=body, timeout=CHECK_TIMEOUT_S)
    if not answer.is_success:
        raise ServerFailedError(f"{answer.status_code}: {answer.text[:300]}")
    return token_ids_of(answer.json()["choices"][0]["text"])


def token_ids_of(text: str) -> list[int]:
    """The checkpoint's words are named by their ids; special ones have no text."""
    return [int(number) for number in re.findall(r"w(\d+)", text)]


def send(target: Target, requests: list[Json], vocab_size: int, limit_s: float) -> ServedRun:
    """Send all requests at their arrivals. Raises ServerFailedError or TimeoutError."""
    jobs = [
        Job(
            RequestShape(
                len(request["prompt_token_ids"]),
                request["num_output_tokens"],
                request["arrival_s"],
                index,
            ),
            token_ids=tuple(request["prompt_token_ids"]),
        )
        for index, request in enumerate(requests)
    ]

    async def limited() -> ServedRun:
        load = send_load(target, jobs, Load(is_open=True), Prompts(vocab_size, 0), 0)
        return await asyncio.wait_for(load, max(1.0, limit_s))

    run = asyncio.run(limited())
    if run.failures:
        first = run.failures[0]
        raise ServerFailedError(f"{len(run.failures)} requests failed: {first.message}")
    if run.num_other_length:
        raise ServerFailedError(f"{run.num_other_length} answers are not as long as was asked")
    return run
