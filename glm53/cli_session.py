"""`glm53 session save|restore|info|verify`: sessions as files. Imports the engine only when a command runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from glm53.config import EngineConfig
from glm53.errors import InputError, SessionFileError, short_bytes
from glm53.options import (
    EXIT_CODES,
    Argument,
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

if TYPE_CHECKING:
    from glm53.engine import Engine
    from glm53.session import Session

file_argument = click.argument("file", cls=Argument, type=click.Path(path_type=Path), text="A session file.")


@click.group(short_help="Save sessions to files and go on with them.", epilog=EXIT_CODES)
def session() -> None:
    """A session file holds the history of a session: what a model computed for its tokens, so that it goes on without computing it again, bit for
    bit, on one device or two."""


@session.command(
    cls=Command,
    short_help="Run a prompt and save the session.",
    epilog='Example: glm53 session save models/glm53-demo story.glm53 "In the beginning" --max-tokens 64\n\n' + EXIT_CODES,
)
@model_argument
@file_argument
@prompt_options("standard input")
@chat_options
@sampling_options(max_tokens="none: save after the prompt")
@engine_options
@text_output_options
def save(model: Path, file: Path, prompt: str | None, **options: Any) -> None:
    """Run PROMPT with MODEL, with --max-tokens continue it, and save the session to FILE, which is replaced once the new one is complete."""
    from glm53.sessionfile import check_target

    source = {name: options.pop(name) for name in ("prompt_file", "prompt_ids", "chat", "system", "reasoning_effort")}
    settings, sampling, as_json, show = _split(options)
    text = read_prompt(prompt, source)
    config = EngineConfig(**settings)
    ids = prompt_token_ids(model, config, text, source)
    check_target(file)
    with _engine(model, config, show) as engine, engine.session() as one:
        params = _seeded(replace(engine.default_params(), **sampling))
        out: dict[str, Any] = {}
        if "max_tokens" in sampling:
            out = report(engine, one.stream(ids, params), len(ids), params, as_json, show)
        else:
            one.prefill(ids)
            one.sampling = params
        out |= _save(one, file, as_json, show)
        if as_json:
            print_json(out)


@session.command(
    cls=Command,
    short_help="Go on with a saved session.",
    epilog='Example: glm53 session restore models/glm53-demo story.glm53 " And then" --save story.glm53\n\n' + EXIT_CODES,
)
@model_argument
@file_argument
@prompt_options("none, to go on from the last token drawn")
@sampling_options(max_tokens="that of the session, else 256", seed="that of the session")
@engine_options
@option(
    "--save", "save_to", group="Output", type=click.Path(path_type=Path), help="Save the session to this file afterwards; FILE itself may be given."
)
@text_output_options
@click.pass_context
def restore(context: click.Context, model: Path, file: Path, prompt: str | None, save_to: Path | None, **options: Any) -> None:
    """Restore the session of FILE, continue it with PROMPT, which is appended as it is, and stream the text.

    Sampling options that are not given are those that the session was saved with; so are --dtype, --weights and --kv-format.
    """
    from glm53.sessionfile import check_target

    source = {"prompt_file": options.pop("prompt_file"), "prompt_ids": options.pop("prompt_ids"), "chat": False, "system": None}
    settings, sampling, as_json, show = _split(options)
    take_formats(context, file, settings)
    config = EngineConfig(**settings)
    given = [prompt, *source.values()][:3] != [None, None, None]
    ids = prompt_token_ids(model, config, read_prompt(prompt, source), source) if given else []
    if save_to is not None:
        check_target(save_to)
    with _engine(model, config, show) as engine, engine.restore(file, progress_line("restoring", show)) as one:
        restored = one.rows
        params = _seeded(replace(one.sampling or engine.default_params(), **sampling))
        out = report(engine, one.stream(ids, params), len(ids), params, as_json, show)
        out |= {"restored_rows": restored, "rows": one.rows}
        if save_to is not None:
            out |= _save(one, save_to, as_json, show)
        if as_json:
            print_json(out)


@session.command(cls=Command, short_help="Show what a session file holds.", epilog="Example: glm53 session info story.glm53\n\n" + EXIT_CODES)
@file_argument
@json_option
def info(file: Path, as_json: bool) -> None:
    """Show the header of FILE: model, formats, rows, sections and sampling. Reads no more than that and needs no device."""
    from glm53.sessionfile import VERSION, SessionFile

    with SessionFile(file) as opened:
        header, size, wanted = opened.header, opened.size, opened.file_bytes
    sections = [{"name": s.name, "planes": s.planes, "row_bytes": s.row_bytes, "rows": s.rows, "bytes": s.nbytes} for s in header.sections]
    if as_json:
        print_json(
            {
                "version": VERSION,
                "bytes": size,
                "bytes_wanted": wanted,
                "rows": header.rows,
                "pending": list(header.pending),
                "dtype": header.dtype,
                "weights": header.weight_format,
                "kv_format": header.row_format,
                "weights_fingerprint": header.weights,
                "model": dict(header.model),
                "sections": sections,
                "sampling": header.sampling,
            }
        )
        return
    shape = header.model
    lines = [
        ("format", f"version {VERSION}, {short_bytes(size)}" + ("" if size == wanted else f", of {short_bytes(wanted)}: not complete")),
        ("rows", f"{header.rows} tokens" + (", and one drawn behind them" if header.pending else "")),
        ("model", f"{shape.get('n_layers')} layers of width {shape.get('hidden_size')}, weights {(header.weights or 'of no files')[:16]}"),
        ("formats", f"--dtype {header.dtype} --weights {header.weight_format} --kv-format {header.row_format}"),
        ("sampling", ", ".join(f"{key} {value}" for key, value in header.sampling.items() if value not in (None, [])) if header.sampling else "none"),
        *((s.name, f"{s.planes} x {s.row_bytes} B a row, {short_bytes(s.nbytes)}") for s in header.sections),
        *(() if header.section("mtp.hidden") else (("mtp", "none"),)),
    ]
    click.echo("\n".join([str(file), *(f"  {name:<11} {value}" for name, value in lines)]))


@session.command(cls=Command, short_help="Check every byte of a session file.", epilog="Example: glm53 session verify story.glm53\n\n" + EXIT_CODES)
@file_argument
@json_option
def verify(file: Path, as_json: bool) -> None:
    """Compare every checksum of FILE. Exits with 2 and the place of the damage if one differs. Needs no device."""
    from glm53.sessionfile import SessionFile

    started = time.perf_counter()
    with SessionFile(file) as opened:
        opened.verify(progress_line("verifying", not as_json))
        rows, size = opened.header.rows, opened.size
    seconds = time.perf_counter() - started
    if as_json:
        print_json({"file": str(file), "bytes": size, "rows": rows, "seconds": round(seconds, 3)})
    else:
        click.echo(f"{file}: {rows} rows, {short_bytes(size)}, every checksum holds ({size / seconds / 1e9:.2f} GB/s)")


def take_formats(context: click.Context, file: Path, settings: dict[str, Any]) -> None:
    """Sets the engine settings that have to be those of a file, where the command line does not give them. Refuses a bad file before the weights are
    loaded."""
    from glm53.sessionfile import SessionFile

    with SessionFile(file) as opened:
        opened.check_complete()
        header = opened.header
    limit = settings["context_rows_max"]
    if limit and header.rows > limit:
        raise SessionFileError(
            f"{file} has {header.rows} rows, wanted at most {limit} (--context-rows-max); next: --context-rows-max {header.rows + 1024}"
        )
    for name, value in (("dtype", header.dtype), ("weights", header.weight_format), ("kv_format", header.row_format)):
        if context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            settings[name] = value


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], bool, bool]:
    """Options of a command as engine settings, sampling parameters that were given, as_json, show. Refuses bad values before a device is touched."""
    settings = {f.name: options.pop(f.name) for f in fields(EngineConfig)}
    as_json, quiet = options.pop("as_json"), options.pop("quiet")
    sampling = {name: value for name, value in options.items() if value is not None and value is not False and value != ()}
    if "logprobs" in sampling and not as_json:
        raise InputError("--logprobs needs --json")
    SamplingParams(**sampling)
    return settings, sampling, as_json, not quiet and not as_json


def _seeded(params: SamplingParams) -> SamplingParams:
    from glm53.request import fresh_seed

    return params if params.seed is not None else replace(params, seed=fresh_seed())


@contextmanager
def _engine(model: Path, config: EngineConfig, show: bool) -> Iterator[Engine]:
    from glm53.engine import Engine

    with Engine.open(model, config, progress=progress_line("loading", show)) as engine:
        yield engine


def _save(one: Session, file: Path, as_json: bool, show: bool) -> dict[str, Any]:
    """Saves, says so on standard error with `show`; the figures for --json."""
    started = time.perf_counter()
    size = one.save(file, progress_line("saving", show))
    seconds = time.perf_counter() - started
    if show:
        click.echo(f"[saved {file}: {one.rows} rows, {short_bytes(size)} in {seconds:.2f} s, {size / seconds / 1e9:.2f} GB/s]", err=True)
    return {"file": str(file), "rows": one.rows, "file_bytes": size, "save_seconds": round(seconds, 3)} if as_json else {}
