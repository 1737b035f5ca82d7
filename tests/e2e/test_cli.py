"""The command line as a user meets it: real processes, their output and exit status."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from vmserve.cli.main import main
from vmserve.cli.options import ENGINE_OPTIONS
from vmserve.cli.serve import SERVE_OPTIONS

Reference = Callable[[list[int], int], list[int]]
Refused = Callable[..., str]


def vmserve(*args: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from vmserve.cli.main import main; main()", *args],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_generate_json_has_the_tokens_of_transformers(
    model_dir: Path, reference: Reference
) -> None:
    prompt = "Once upon a time there was a little girl"
    done = vmserve(
        *("generate", "--prompt", prompt, "--max-tokens", "64", "--temperature", "0"),
        *("--dtype", "float32", "--ignore-eos", "--format", "json"),
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    ids = tokenizer(prompt)["input_ids"]
    [output] = document["outputs"]
    assert document["prompt"] == prompt
    assert document["prompt_token_ids"] == ids
    assert output["token_ids"] == reference(ids, 64)
    assert output["text"] == tokenizer.decode(output["token_ids"], skip_special_tokens=True)
    assert output["finish_reason"] == "length"
    assert output["cumulative_logprob"] < 0
    assert document["metrics"]["first_token_time"] is not None


def test_generate_reads_a_file_and_writes_a_line_for_each(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '"Tom had a red ball."\n{"prompt": "One day", "max_tokens": 3}\n\n'
        '{"prompt_token_ids": [5, 6, 7], "n": 2}\n'
    )
    done = vmserve("generate", "--file", str(file), "--format", "jsonl", "--ignore-eos")
    assert done.returncode == 0, done.stderr
    documents = [json.loads(line) for line in done.stdout.splitlines()]
    assert [len(d["outputs"]) for d in documents] == [1, 1, 2]
    assert [len(d["outputs"][0]["token_ids"]) for d in documents] == [16, 3, 16]


def test_generate_what_matches_a_schema(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(
        '{"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 2}'
    )
    done = vmserve(
        *("generate", "--prompt", "x", "--structured-json", f"@{file}", "--format", "json"),
        *("--max-tokens", "50"),
    )
    assert done.returncode == 0, done.stderr
    [output] = json.loads(done.stdout)["outputs"]
    assert output["finish_reason"] == "stop"
    assert set(json.loads(output["text"])) <= {"a", "b"}


def test_generate_reads_standard_input() -> None:
    done = vmserve("generate", "--max-tokens", "4", "--temperature", "0", stdin="Once upon")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Once upon")


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command in this process, which it must end with status 2 and one line; returns it."""

    def run(*args: str, stdin: str = "") -> str:
        monkeypatch.setattr(sys, "argv", ["vmserve", *args])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert (ended.value.code, out) == (2, ""), err
        [line] = [line for line in err.splitlines() if line.strip()]
        assert "Traceback" not in line
        return line

    return run


def test_missing_model(refused: Refused, tmp_path: Path) -> None:
    line = refused("generate", "-p", "x", "--model", str(tmp_path / "none"))
    assert "none" in line


def test_directory_without_config(refused: Refused, tmp_path: Path) -> None:
    line = refused("generate", "-p", "x", "--model", str(tmp_path))
    assert "config.json" in line


def test_truncated_weights(refused: Refused, tmp_path: Path, model_dir: Path) -> None:
    copy = shutil.copytree(model_dir, tmp_path / "model")
    weights = copy / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size // 2)
    line = refused("generate", "-p", "x", "--model", str(copy))
    assert "model.safetensors" in line


def test_prompt_too_long(refused: Refused) -> None:
    line = refused("generate", "--max-model-len", "32", stdin="word " * 100)
    assert "maximum context length is 32 tokens" in line


@pytest.mark.parametrize("command", ["generate", "serve", "plan", "chat", "top", "bench"])
def test_unknown_argument(refused: Refused, command: str) -> None:
    line = refused(command, "--no-such-option")
    assert "--no-such-option" in line
    assert f"see vmserve {command} --help" in line


@pytest.mark.parametrize(
    ("args", "told"),
    [(["brew"], "'brew'"), (["serve", "--port", "x"], "--port"), (["serve", "a", "b"], "(b)")],
)
def test_wrong_command_lines_are_one_line(refused: Refused, args: list[str], told: str) -> None:
    assert told in refused(*args)


def test_a_directory_without_tokenizer(refused: Refused, tmp_path: Path, model_dir: Path) -> None:
    copy = shutil.copytree(model_dir, tmp_path / "model")
    (copy / "tokenizer.json").unlink()
    line = refused("generate", "-p", "x", "--model", str(copy))
    assert "tokenizer.json" in line
    assert "--tokenizer" in line


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"prompt": "x", "speed": 1}', "there is no sampling field speed"),
        ('{"prompt": "x", "max_tokens": -1}', "max_tokens must be at least 0"),
        ('{"prompt": null}', "is a string, not NoneType"),
    ],
)
def test_a_wrong_line_of_a_file_is_named(
    refused: Refused, line: str, text: str, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'"fine"\n{line}\n')
    told = refused("generate", "--file", str(file))
    assert text in told
    assert f"{file}:2: " in told


def test_beams_do_not_take_fields_of_a_line(refused: Refused, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "x", "max_tokens": 3}\n')
    line = refused("generate", "--file", str(file), "--beam-width", "2")
    assert "max_tokens" in line


def test_not_enough_memory_names_both_numbers(refused: Refused) -> None:
    line = refused("generate", "-p", "x", "--kv-cache-memory", "64KiB")
    assert "--kv-cache-memory" in line
    assert "64 KiB" in line


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        (["--attention-backend", "flash"], "sdpa"),
        (["--preemption", "swap"], "give --swap-space"),
        (["--beam-width", "4", "--top-p", "0.5"], "not sampled"),
        (["--beam-width", "65"], "--max-num-seqs"),
        (["--length-penalty", "2"], "give --beam-width"),
        (["--max-model-len", "9000"], "8192"),
        (["--kv-cache-memory", "many"], "512MiB"),
    ],
)
def test_what_is_not_there_is_refused_with_the_remedy(
    refused: Refused, option: list[str], remedy: str
) -> None:
    assert remedy in refused("generate", "-p", "x", *option)


def test_plan_prints_a_table_and_json() -> None:
    done = vmserve("plan", "--model", "llama-3-8b", "--granularity", "64KiB")
    assert done.returncode == 0, done.stderr
    assert "64" in done.stdout
    done = vmserve("plan", "--format", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


def test_a_piped_plan_cuts_no_column_short() -> None:
    done = vmserve("plan", "--kv-cache-memory", "1GiB", "--model", "vmserve-embedded")
    assert done.returncode == 0, done.stderr
    assert "requests" in done.stdout
    assert "…" not in done.stdout


def test_version_and_help_name_every_command() -> None:
    assert vmserve("--version").stdout.strip()
    done = vmserve("--help")
    for command in ("generate", "serve", "chat", "top", "plan", "bench"):
        assert command in done.stdout


def test_help_of_serve_spells_every_option_out() -> None:
    """In as few columns as a pipe has."""
    told = vmserve("serve", "--help").stdout
    for option in [*SERVE_OPTIONS, *ENGINE_OPTIONS.values()]:
        for flag in "/".join(option.flags).split("/"):
            assert re.search(rf"(?<![\w-]){flag}(?![\w-])", told), flag


@pytest.mark.parametrize(
    "args", [["--help"], ["plan", "--paper"], ["generate", "-p", "x", "--max-tokens", "2"]]
)
def test_a_full_disk_is_one_line(args: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", "from vmserve.cli.main import main; main()", *args],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=100,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "vmserve: No space left on device\n")
