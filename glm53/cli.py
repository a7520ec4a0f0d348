"""The command line: `glm53 generate|inspect|devices|selftest`. Imports the engine only when a command runs, so that --help needs no device."""

from __future__ import annotations

import errno
import json
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from glm53.config import EngineConfig
from glm53.errors import Glm53Error, InputError, human_bytes, short_bytes
from glm53.sampling import SamplingParams

if TYPE_CHECKING:
    from glm53.engine import Engine
    from glm53.request import TokenLogprob

EXIT_CODES = """\b
Exit codes: 0 done; 1 other error; 2 bad input (option, prompt, checkpoint); 3 no runtime or no code object
for the device; 4 not enough device memory; 5 a HIP call failed or the device was lost; 130 interrupted."""


class Command(click.Command):
    """A command whose parameters are listed in titled groups, in the order they were declared; turns errors of this package into exit codes."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                groups.setdefault(getattr(parameter, "group", "Output"), []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except Glm53Error as error:
            click.echo(f"glm53 {self.name}: {error}", err=True)
            ctx.exit(error.exit_code)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # the reader of our output has left: click ends quietly
            click.echo(f"glm53 {self.name}: {error}", err=True)
            ctx.exit(1)
        except KeyboardInterrupt:
            ctx.exit(130)


class Argument(click.Argument):
    """An argument with a line of help, listed under Arguments."""

    group = "Arguments"

    def __init__(self, *args: Any, text: str, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.text = text

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return self.make_metavar(ctx), self.text


class GroupedOption(click.Option):
    """An option that knows the title it is listed under."""

    def __init__(self, *args: Any, group: str, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.group = group


def option(*names: str, group: str, **kwargs: Any) -> Any:
    return click.option(*names, cls=GroupedOption, group=group, **kwargs)


model_argument = click.argument(
    "model", cls=Argument, type=click.Path(exists=True, file_okay=False, path_type=Path), text="Directory of a checkpoint in Hugging Face's layout."
)


class DeviceNumbers(click.ParamType):
    """Device numbers with commas between them, as a tuple."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"got {value!r}, wanted a device number, or two with a comma between them: 0,1", param, ctx)


def engine_options(command: Any) -> Any:
    """Adds an option for every field of EngineConfig, with the field's default and help."""
    for spec in reversed(fields(EngineConfig)):
        default = spec.default
        flag = "--" + spec.name.replace("_", "-")
        extra: dict[str, Any] = {"is_flag": True} if isinstance(default, bool) else {"type": type(default)}
        if isinstance(default, tuple):
            default, extra = ",".join(map(str, default)), {"type": DeviceNumbers()}
        if default is True:
            flag = f"{flag}/--no-{flag[2:]}"
        if "choices" in spec.metadata:
            extra["type"] = click.Choice(spec.metadata["choices"])
        command = option(flag, spec.name, group="Engine", default=default, show_default=True, help=spec.metadata["help"], **extra)(command)
    return command


def sampling_option(flag: str, kind: Any, text: str) -> Any:
    """An option of SamplingParams. Not given: the checkpoint's generation_config.json, else the default of SamplingParams."""
    return option(flag, flag[2:].replace("-", "_"), group="Sampling", type=kind, default=None, help=text)


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=EXIT_CODES)
@click.version_option(package_name="glm53", prog_name="glm53")
def main() -> None:
    """Run GLM-5.3 (glm_moe_dsa) checkpoints without torch, on AMD GPUs, NVIDIA GPUs or the CPU."""


@main.command(
    cls=Command,
    short_help="Continue a prompt.",
    epilog='Example: glm53 generate models/glm53-demo "In the beginning" --temperature 0 --max-tokens 64\n\n' + EXIT_CODES,
)
@model_argument
@click.argument("prompt", cls=Argument, required=False, text="The prompt's text. Not given: --prompt-file, --prompt-ids or standard input.")
@option("--prompt-file", group="Prompt", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Read the prompt from a UTF-8 file.")
@option("--prompt-ids", group="Prompt", help="The prompt as token ids: 1,2,3.")
@option("--chat", group="Prompt", is_flag=True, help="Put the prompt into the checkpoint's chat template as one user message.")
@option("--system", group="Prompt", help="System message before it (with --chat).")
@option("--reasoning-effort", group="Prompt", type=click.Choice(["low", "high", "max"]), default="max", show_default=True, help="With --chat.")
@sampling_option("--temperature", float, "0 is greedy.")
@sampling_option("--top-p", float, "Mass of the most probable tokens kept, in (0, 1].")
@sampling_option("--top-k", int, "Number of most probable tokens kept; 0: all.")
@sampling_option("--min-p", float, "Drop tokens less probable than this share of the best one, in [0, 1].")
@sampling_option("--repetition-penalty", float, "Above 1 discourages tokens of the prompt and output.")
@sampling_option("--seed", int, "Same seed, same text. Not given: a fresh one, printed at the end.")
@sampling_option("--max-tokens", int, "New tokens at most. [default: 256]")
@option("--stop", group="Sampling", multiple=True, help="End before this string (may be repeated).")
@option("--logprobs", group="Sampling", type=int, default=None, help="With --json: log-probability of each token and of the n best.")
@option("--ignore-eos", group="Sampling", is_flag=True, help="Go on past end-of-sequence tokens.")
@engine_options
@option("--json", "as_json", group="Output", is_flag=True, help="Print one JSON object instead of streaming text.")
@option("--quiet", group="Output", is_flag=True, help="No progress and no summary line on standard error.")
def generate(model: Path, prompt: str | None, **options: Any) -> None:
    """Continue PROMPT with MODEL. The text streams to standard output, a line of figures follows on standard error."""
    from glm53.engine import Engine

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
    with Engine.open(model, config, progress=LoadProgress() if show and sys.stderr is not None and sys.stderr.isatty() else None) as engine:
        params = replace(engine.default_params(), **{k: v for k, v in options.items() if v is not None})
        report(engine, ids, params, as_json, show)


def prompt_token_ids(model: Path, config: EngineConfig, text: str, source: dict[str, Any]) -> list[int]:
    """Token ids of the prompt, checked against the model's vocabulary and context."""
    from glm53.config import check_prompt, read_config
    from glm53.tokenizer import Tokenizer

    spec = read_config(model, latent_norm_eps=config.latent_norm_eps)
    if source["prompt_ids"] is not None:
        ids = parse_ids(source["prompt_ids"])
    elif not (model / "tokenizer.json").exists():
        raise InputError(f"{model} has no tokenizer.json: give the prompt with --prompt-ids")
    else:
        tokenizer = Tokenizer.open(model)
        if source["chat"]:
            messages = [{"role": "system", "content": source["system"]}] if source["system"] else []
            messages.append({"role": "user", "content": text})
            ids = tokenizer.encode_chat(messages, reasoning_effort=source["reasoning_effort"])
        else:
            ids = tokenizer.encode(text)
    check_prompt(ids, spec, config.context_rows_max)
    return ids


def report(engine: Engine, ids: list[int], params: SamplingParams, as_json: bool, show: bool) -> None:
    """Runs one prompt, prints text (or JSON) on standard output and the summary on standard error."""
    from glm53.request import fresh_seed

    started = time.perf_counter()
    first, reason = 0.0, None
    pieces: list[str] = []
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    if params.seed is None:
        params = replace(params, seed=fresh_seed())
    for chunk in engine.stream(ids, params):
        first = first or time.perf_counter()
        pieces.append(chunk.text)
        tokens += chunk.token_ids
        logprobs += chunk.logprobs
        reason = chunk.finish_reason or reason
        if not as_json:
            click.echo(chunk.text, nl=False)
    ended = time.perf_counter()
    prefill_s, decode_s = first - started, ended - first
    cache = engine.cache_counters()
    rates = {"prompt_tokens_per_s": len(ids) / prefill_s, "decode_tokens_per_s": (len(tokens) - 1) / decode_s if len(tokens) > 1 else 0.0}
    if as_json:
        out: dict[str, Any] = {
            "text": "".join(pieces),
            "token_ids": tokens,
            "prompt_tokens": len(ids),
            "completion_tokens": len(tokens),
            "finish_reason": reason,
            "seed": params.seed,
            **{name: round(value, 3) for name, value in rates.items()},
            "runtime": engine.device.runtime.name,
            "device": engine.device.name,
            "devices": list(engine.config.devices),
            "memory_bytes": engine.memory(),
            "memory_bytes_by_place": engine.memory_by_place(),
            "kv_tier": engine.config.kv_tier,
            "kv_format": engine.tier.layout.row_format.value,
            "hot_cache": cache,
            "hot_cache_by_device": engine.cache_counters_by_device(),
        }
        if params.logprobs is not None:
            out["logprobs"] = [{"token_id": t.token_id, "logprob": t.logprob, "top": t.top} for t in logprobs]
        click.echo(json.dumps(out, ensure_ascii=False))
        return
    click.echo()
    if show:
        click.echo(
            f"[{len(ids)} prompt tokens at {rates['prompt_tokens_per_s']:.1f}/s, {len(tokens)} new at {rates['decode_tokens_per_s']:.1f}/s, "
            f"{reason}, seed {params.seed}; {engine.device.runtime.name}: {' and '.join(device.name for device in engine.devices)}]",
            err=True,
        )
        click.echo(f"[{history_line(engine, cache)}]", err=True)
        for note in engine.notes:
            click.echo(f"[{note}]", err=True)
        for place, categories in engine.memory_by_place().items():
            click.echo(f"[{place}: " + ", ".join(f"{name} {short_bytes(value)}" for name, value in categories.items() if value) + "]", err=True)


def history_line(engine: Engine, cache: dict[str, int]) -> str:
    """Where the history lies and what the hot cache did."""
    layout = engine.tier.layout
    where = f"history {engine.config.kv_tier}, {layout.row_format.value} rows of {layout.row_bytes} B"
    if not cache:
        return where
    found, fetched = cache["hits"] + cache["recent_hits"], cache["misses"] + cache["uncached"]
    if not found + fetched:
        return where + "; no row was looked up"
    return (
        f"{where}; hot cache: {100 * found / (found + fetched + cache['duplicate_misses']):.2f} % of rows found on the device "
        f"({cache['recent_hits']} recent, {cache['hits']} hits, {cache['misses']} misses, {cache['evictions']} evictions), "
        f"{short_bytes(cache['bytes_from_host'])} read from host RAM"
    )


def read_prompt(prompt: str | None, source: dict[str, Any]) -> str:
    """The prompt's text from exactly one source. Raises InputError on none, several, or invalid UTF-8."""
    given = [
        name
        for name, value in (("PROMPT", prompt), ("--prompt-file", source["prompt_file"]), ("--prompt-ids", source["prompt_ids"]))
        if value is not None
    ]
    if len(given) > 1:
        raise InputError(f"prompt: got {' and '.join(given)}, wanted one of them")
    if source["system"] and not source["chat"]:
        raise InputError("--system needs --chat")
    if source["chat"] and source["prompt_ids"] is not None:
        raise InputError("--chat takes a text, --prompt-ids are used as they are; give one of the two")
    if source["prompt_ids"] is not None:
        return ""
    if prompt is not None:
        try:
            prompt.encode("utf-8")  # undecodable bytes of an argument arrive as lone surrogates
        except UnicodeEncodeError as error:
            raise InputError("prompt argument: it is not valid UTF-8; save it as UTF-8 and use --prompt-file") from error
        text = prompt
    else:
        if not source["prompt_file"] and (sys.stdin is None or sys.stdin.isatty()):
            raise InputError("no prompt: give it as an argument, with --prompt-file, or on standard input")
        name = source["prompt_file"] or "standard input"
        raw = source["prompt_file"].read_bytes() if source["prompt_file"] else sys.stdin.buffer.read()
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{name}: byte {error.start} ({raw[error.start]:#04x}) is not valid UTF-8; convert the file to UTF-8") from error
    if not text:
        raise InputError("prompt: it is empty, wanted at least one token")
    return text


def parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(f"--prompt-ids: got {text!r}, wanted integers with commas between them: 1,2,3") from error


class LoadProgress:
    """A line on standard error that follows the loading of weights; at most ten updates a second."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._shown = 0.0

    def __call__(self, done_bytes: int, total_bytes: int, name: str) -> None:
        now = time.monotonic()
        finished = done_bytes >= total_bytes
        if now - self._shown < 0.1 and not finished:
            return
        self._shown = now
        rate = done_bytes / max(now - self._started, 1e-9) / 2**20
        line = f"loading {100 * done_bytes / max(total_bytes, 1):3.0f} %  {done_bytes / 2**20:.0f} of {total_bytes / 2**20:.0f} MiB  {rate:.0f} MiB/s"
        click.echo("\r\x1b[K" + ("" if finished else line), err=True, nl=False)


@main.command(
    cls=Command, short_help="Show a checkpoint's shape, formats and costs.", epilog="Example: glm53 inspect models/glm53-demo\n\n" + EXIT_CODES
)
@model_argument
@option("--json", "as_json", group="Output", is_flag=True, help="Print one JSON object.")
def inspect(model: Path, as_json: bool) -> None:
    """Show a checkpoint's shape, formats, bytes per kind of tensor and what a token of history costs. Needs no device."""
    from glm53.inspect import inspect_checkpoint

    inspection = inspect_checkpoint(model)
    click.echo(json.dumps(inspection.as_dict(), indent=2) if as_json else inspection.table())


@main.command(cls=Command, short_help="List devices and code objects.", epilog="Example: glm53 devices --runtime cpu\n\n" + EXIT_CODES)
@option("--runtime", group="Engine", type=click.Choice(["auto", "rocm", "cuda", "cpu"]), default="auto", show_default=True, help="HIP runtime.")
@option("--json", "as_json", group="Output", is_flag=True, help="Print one JSON object.")
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
@option("--json", "as_json", group="Output", is_flag=True, help="Print one JSON object.")
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
