"""Manifests and scripts of docs/scale.md: they parse, and their commands have such options."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.main import get_command_from_info
from typer.models import CommandInfo

from vmserve.cli.batch import batch_command
from vmserve.cli.engine import engine_command
from vmserve.cli.serve import serve_command

TEXT = (Path(__file__).parent.parent / "docs/scale.md").read_text()
COMMANDS = {"serve": serve_command, "engine": engine_command, "batch": batch_command}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def options_of(name: str) -> set[str]:
    command = get_command_from_info(
        CommandInfo(name, callback=COMMANDS[name]),
        pretty_exceptions_short=True,
        rich_markup_mode=None,
    )
    return {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)}


def test_all_commands_of_the_document_have_their_options() -> None:
    found = re.findall(r"vmserve (serve|engine|batch) ([^\n'`]*)", TEXT)
    assert len(found) > 8
    for name, rest in found:
        given = set(re.findall(r"(?<!\S)--[a-z][a-z-]*", rest))
        assert given <= options_of(name), (name, given - options_of(name))


def test_the_manifest_is_a_job_of_ray_and_a_service() -> None:
    [text] = blocks("yaml")
    job, service = yaml.safe_load_all(text)
    assert (job["kind"], service["kind"]) == ("RayJob", "Service")
    command = shlex.split(job["spec"]["entrypoint"])
    workers = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert int(command[command.index("--data-parallel-size") + 1]) == workers[0]["replicas"]
    assert yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    assert service["spec"]["selector"].items() <= head["metadata"]["labels"].items()


@pytest.mark.parametrize("script", blocks("bash"))
def test_scripts_are_of_bash(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
