"""What a process imports before its first token, and what the processes of a server never do."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.timeout(400)

OFFLINE = """
import json, sys
from vmserve import LLM, SamplingParams
with LLM(kv_cache_memory="64MiB", max_model_len=256) as llm:
    [result] = llm.generate("Once", SamplingParams(max_tokens=1, temperature=0))
    assert len(result.outputs[0].token_ids) == 1
print(json.dumps(sorted(sys.modules)))
"""
#: What else our own decoder and sampler are asked for, in both regimes, with too little memory.
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # to import it is an error
from vmserve import LLM, BeamSearchParams, SamplingParams
prompts = ["Once upon a time", "Once upon a day", "The cat"] * 4
for regime, preemption in (("auto", "recompute"), ("virtual", "swap"), ("paged", "swap")):
    with LLM(kv_cache_memory="1MiB", max_model_len=256, kv_regime=regime, preemption=preemption,
             swap_space="8MiB", dtype="bfloat16" if regime == "paged" else "auto") as llm:
        greedy = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, logprobs=3,
                                prompt_logprobs=2)
        drawn = SamplingParams(max_tokens=60, n=3, seed=1, top_p=0.9, top_k=50, min_p=0.01,
                               repetition_penalty=1.1, logit_bias={7: 1.0}, stop=["xyz"])
        assert len(llm.generate(prompts, greedy)) == 12
        assert all(len(each.outputs) == 3 for each in llm.generate(prompts, drawn))
        assert llm.engine.scheduler.totals.preemptions > 0 or regime == "virtual"
        beams = BeamSearchParams(beam_width=3, max_tokens=8)
        assert len(llm.generate(prompts[:1], beams)[0].outputs) == 3
print("done")
"""
#: Each of them would add more than a tenth of a second, or drags such modules in.
HEAVY = {
    "fastapi",
    "httpx",
    "huggingface_hub.file_download",
    "huggingface_hub.hf_api",
    "jinja2",
    "llguidance",
    "matplotlib",
    "numpy.ma",
    "pydantic",
    "rich",
    "importlib.metadata",
    "tempfile",
    "torch",
    "transformers",
    "typer",
    "uvicorn",
    "vmserve.attention.cuda",
    "vmserve.models.foreign",
    "zmq",
}


def test_the_first_token_without_heavy_modules() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    imported = set(json.loads(done.stdout.splitlines()[-1]))
    assert "vmserve.models.native" in imported
    assert sorted(imported & HEAVY) == []


def test_requests_of_every_kind_without_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout == "done\n", done.stderr


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def maps(pid: int, name: str) -> bool:
    return name in Path(f"/proc/{pid}/maps").read_text()


def wait_url(process: subprocess.Popen[str]) -> str:
    """Where it serves, from the line of its log that says that it is ready."""
    assert process.stderr is not None
    end = time.monotonic() + 300
    lines: list[str] = []
    while time.monotonic() < end:
        readable, _, _ = select.select([process.stderr], [], [], 1.0)
        if readable:
            line = process.stderr.readline()
            assert line, "".join(lines)
            lines.append(line)
            if match := re.search(r"ready: serving .* at (http://\S+)", line):
                return match[1]
    raise AssertionError("".join(lines))


def test_the_processes_of_a_server_have_no_torch() -> None:
    environment = {name: v for name, v in os.environ.items() if name != "VMSERVE_API_KEY"}
    command = [sys.executable, "-m", "vmserve", "serve", "--port", "0",
               "--kv-cache-memory", "64MiB", "--max-model-len", "256"]  # fmt: skip
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environment, bufsize=1
    ) as process:
        try:
            url = wait_url(process)
            [engine] = children(process.pid)
            with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
                chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2,
                        "model": "vmserve-embedded"}  # fmt: skip
                reply = client.post("/v1/chat/completions", json=chat)
                assert reply.status_code == 200, reply.text
                prompt = {"prompt": "Once", "max_tokens": 2, "model": "vmserve-embedded"}
                assert client.post("/v1/completions", json=prompt).status_code == 200
            assert maps(engine, "vmserve/_core")
            assert not maps(engine, "libtorch")
            assert not maps(process.pid, "libtorch")
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
