"""The command line: `glm53 generate|chat|serve|session|inspect|devices|selftest`. Commands import the engine as they run: --help needs no device."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from glm53.cli_chat import chat
from glm53.cli_serve import serve
from glm53.cli_session import session
from glm53.config import EngineConfig
from glm53.errors import Glm53Error, InputError, human_bytes
from glm53.options import (
    EXIT_CODES,
    Command,
    chat_options,
    engine_options,
    json_option,
    model_argument,
    option,
    prompt_options,
    prompt_token_ids,
    read_prompt,
    sampling_options,
    text_output_options,
)
from glm53.report import print_json, progress_line, report
from glm53.sampling import SamplingParams


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=EXIT_CODES)
@click.version_option(package_name="glm53", prog_name="glm53")
def main() -> None:
    """Run GLM-5.3 (glm_moe_dsa) checkpoints without torch, on AMD GPUs, NVIDIA GPUs or the CPU."""


main.add_command(chat)
main.add_command(session)
main.add_command(serve)


@main.command(
    cls=Command,
    short_help="Continue a prompt.",
    epilog='Example: glm53 generate models/glm53-demo "In the beginning" --temperature 0 --max-tokens 64\n\n' + EXIT_CODES,
)
@model_argument
@prompt_options("standard input")
@chat_options
@sampling_options()
@engine_options
@text_output_options
def generate(model: Path, prompt: str | None, **options: Any) -> None:
    """Continue PROMPT with MODEL. The text streams to standard output, a line of figures follows on standard error."""
    from glm53.engine import Engine
    from glm53.request import fresh_seed

    settings = {f.name: options.pop(f.name) for f in fields(EngineConfig)}
    as_json, quiet = options.pop("as_json"), options.pop("quiet")
    source = {name: options.pop(name) for name in ("prompt_file", "prompt_ids", "chat", "system", "reasoning_effort")}
    if options["logprobs"] is not None and not as_json:
        raise InputError("--logprobs needs --json")
    text = read_prompt(prompt, source)
    config = EngineConfig(**settings)
    SamplingParams(**{k: v for k, v in options.items() if v is not None})  # refuses bad values before a device is touched
    show = not quiet and not as_json
    ids = prompt_token_ids(model, config, text, source)  # refuses a bad prompt before the weights are loaded
    with Engine.open(model, config, progress=progress_line("loading", show)) as engine:
        params = replace(engine.default_params(), **{k: v for k, v in options.items() if v is not None})
        if params.seed is None:
            params = replace(params, seed=fresh_seed())
        out = report(engine, engine.stream(ids, params), len(ids), params, as_json, show)
        if as_json:
            print_json(out)


@main.command(
    cls=Command, short_help="Show a checkpoint's shape, formats and costs.", epilog="Example: glm53 inspect models/glm53-demo\n\n" + EXIT_CODES
)
@model_argument
@json_option
def inspect(model: Path, as_json: bool) -> None:
    """Show a checkpoint's shape, formats, bytes per kind of tensor and what a token of history costs. Needs no device."""
    from glm53.inspect import inspect_checkpoint

    inspection = inspect_checkpoint(model)
    click.echo(json.dumps(inspection.as_dict(), indent=2) if as_json else inspection.table())


@main.command(cls=Command, short_help="List devices and code objects.", epilog="Example: glm53 devices --runtime cpu\n\n" + EXIT_CODES)
@option("--runtime", group="Engine", type=click.Choice(["auto", "rocm", "cuda", "cpu"]), default="auto", show_default=True, help="HIP runtime.")
@json_option
def devices(runtime: str, as_json: bool) -> None:
    """List the devices of a runtime, why it was chosen, which code objects exist, and the links between its devices, checked and measured."""
    from glm53.check.links import link_matrix
    from glm53.hip import code_objects, list_devices
    from glm53.hip import runtime as hip_runtime

    info = hip_runtime.select(None if runtime == "auto" else runtime)
    rows = list_devices()
    objects = code_objects()
    links = link_matrix()
    if as_json:
        chosen = {"runtime": info.name, "library": str(info.library), "reason": info.reason}
        click.echo(json.dumps(chosen | {"devices": rows, "links": links, "objects": objects}))
        return
    click.echo(f"runtime {info.name} ({info.reason})\nlibrary {info.library}")
    for row in rows:
        click.echo(
            f"  {row['index']}: {row['name']}, {row['arch']}, {human_bytes(row['total_bytes'])}, {human_bytes(row['free_bytes'])} free, "
            f"code object {'present' if row['arch'] in objects else 'MISSING'}"
        )
    for link in links:
        click.echo(f"  {link['source']} -> {link['target']}: {link_line(link)}")
    click.echo("code objects: " + ", ".join(sorted(objects)))


def link_line(link: dict[str, Any]) -> str:
    """A row of the link matrix in words."""
    access = "peer access" if link["peer_access"] else f"no peer access ({link['reason']})"
    if not link["checked"]:
        return access + ", not checked"
    staged = "" if link["peer_access"] else ", staged through host memory"
    return f"{access}{staged}, checked, {link['bytes_per_s'] / 1e9:.1f} GB/s, {link['latency_us']:.1f} us"


@main.command(cls=Command, short_help="Check every kernel on a device.", epilog="Example: glm53 selftest --device 0\n\n" + EXIT_CODES)
@option("--runtime", group="Engine", type=click.Choice(["auto", "rocm", "cuda", "cpu"]), default="auto", show_default=True, help="HIP runtime.")
@option("--device", "device_index", group="Engine", type=int, default=0, show_default=True, help="Device index.")
@option("--thorough", group="Output", is_flag=True, help="Also the large cases.")
@json_option
def selftest(runtime: str, device_index: int, thorough: bool, as_json: bool) -> None:
    """Check every kernel family, graphs, registered memory, peer access and streams on a device, and print what holds.

    Send the table to the project when something fails: it names versions and code objects.
    """
    from glm53.check.selftest import run_selftest

    result = run_selftest(None if runtime == "auto" else runtime, device_index, thorough, echo=None if as_json else click.echo)
    if as_json:
        click.echo(json.dumps(result.as_dict()))
    if result.failed:
        raise Glm53Error(f"{result.failed} of {result.total} checks failed; the lines marked FAIL say which")
