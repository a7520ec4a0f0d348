"""`glm53 serve`: the OpenAI-compatible server. Imports engine and server only when it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from glm53.config import EngineConfig, read_config
from glm53.errors import InputError, short_bytes
from glm53.options import EXIT_CODES, Command, engine_options, model_argument, option, variable
from glm53.report import progress_line

if TYPE_CHECKING:
    from glm53.engine import Engine

PREFIX = "GLM53_SERVE"
DEFAULT_SESSIONS = 8  # --max-num-seqs


@click.command(
    cls=Command,
    context_settings={"auto_envvar_prefix": PREFIX},
    short_help="Serve a model over HTTP, as the OpenAI API.",
    epilog="Each option is an environment variable too: --max-num-seqs is GLM53_SERVE_MAX_NUM_SEQS.\n\n"
    "Example: glm53 serve models/glm53-demo --port 8000 --max-num-seqs 16\n\n" + EXIT_CODES,
)
@model_argument
@option("--host", group="Server", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0: every one of this machine.")
@option("--port", group="Server", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0: any free one.")
@option("--api-key", group="Server", multiple=True, help="Clients must send this key (may be repeated). Not given: everybody may ask.")
@option(
    "--api-key-file",
    group="Server",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with a key a line; --api-key shows in the list of processes.",
)
@option(
    "--served-model-name",
    group="Server",
    multiple=True,
    help="Name that clients give the model (may be repeated). [default: the name of its directory]",
)
@option("--allowed-origins", group="Server", multiple=True, help="Web origin that may ask, for CORS (may be repeated). [default: none]")
@option(
    "--max-body-mib",
    group="Server",
    type=click.IntRange(1, 1024),
    default=32,
    show_default=True,
    help="Largest body of a request that is read, in MiB.",
)
@option("--shutdown-timeout", group="Server", type=click.IntRange(1), default=30, show_default=True, help="Seconds for running requests at the end.")
@option(
    "--uvicorn-log-level",
    group="Server",
    type=click.Choice(["critical", "error", "warning", "info", "debug"]),
    default="info",
    show_default=True,
    help="What the HTTP server logs.",
)
@option("--disable-log-stats", group="Server", is_flag=True, help="No line every 10 seconds about what is being done.")
@option(
    "--session-dir",
    group="Sessions",
    type=click.Path(path_type=Path),
    help="Directory for files of sessions, in one directory a key. Not given: sessions cannot be saved.",
)
@option(
    "--session-dir-gib",
    group="Sessions",
    type=click.FloatRange(0.001),
    default=64.0,
    show_default=True,
    help="Size of all these files at most, in GiB.",
)
@option(
    "--sessions-per-key", group="Sessions", type=click.IntRange(0), default=64, show_default=True, help="Named sessions that a key may have at once."
)
@option(
    "--max-model-len",
    group="Scheduling",
    type=click.IntRange(1),
    help="Longest history, prompt and output: --context-rows-max. [default: the model's limit]",
)
@option(
    "--max-num-seqs", group="Scheduling", type=click.IntRange(1), help=f"Requests that run at once: --sessions-max. [default: {DEFAULT_SESSIONS}]"
)
@option("--max-waiting", group="Scheduling", type=click.IntRange(0), default=64, show_default=True, help="Requests that may wait; others get 429.")
@option(
    "--queue-timeout",
    group="Scheduling",
    type=click.FloatRange(0.001),
    default=60.0,
    show_default=True,
    help="Seconds that a request waits, then 429.",
)
@option(
    "--chunks-per-step",
    group="Scheduling",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Chunks of prompts between two decode steps at most, while requests decode.",
)
@option("--max-decode-rows", group="Scheduling", type=click.IntRange(0), default=0, show_default=True, help="Requests in one decode step; 0: all.")
@option(
    "--max-parked",
    group="Scheduling",
    type=click.IntRange(0),
    help="Requests that may decode in turns beside --max-num-seqs, parked in host RAM meanwhile. [default: --max-num-seqs]",
)
@option(
    "--enable-prefix-caching/--no-enable-prefix-caching",
    group="Scheduling",
    default=True,
    show_default=True,
    help="Keep the history of a prompt for later ones of the same key that begin alike.",
)
@option(
    "--gpu-memory-utilization",
    group="Scheduling",
    type=click.FloatRange(0.01, 1.0),
    default=0.9,
    show_default=True,
    help="Share of the device memory that is free behind the weights, for histories.",
)
@option(
    "--default-max-tokens",
    group="Scheduling",
    type=click.IntRange(1),
    default=4096,
    show_default=True,
    help="Tokens of a chat reply that sets no limit, at least; more where an even share of the memory holds them.",
)
@option(
    "--request-timeout", group="Scheduling", type=click.FloatRange(0.001), help="Seconds from arrival until a request ends with 504. [default: none]"
)
@partial(engine_options, hidden=("sessions_max", "context_rows_max"))  # listed under vLLM's names
@option("--quiet", group="Output", is_flag=True, help="No progress on standard error.")
@click.pass_context
def serve(context: click.Context, model: Path, **options: Any) -> None:
    """Serve MODEL: /v1/chat/completions, /v1/completions, /v1/models, /v1/sessions, /tokenize, /detokenize, /health, /ready, /version, /metrics.

    /openapi.json describes all of it.

    Many clients share the device; the text of each is the one that it would get alone.
    """
    try:
        from glm53.serve.api import ServeConfig
        from glm53.serve.server import listen
        from glm53.serve.server import serve as run
        from glm53.serve.session_files import SessionFiles
    except ImportError as error:
        raise InputError(
            f"the server needs starlette, uvicorn, prometheus-client and llguidance ({error}); next: pip install 'glm53[serve]'"
        ) from None
    settings = {f.name: options.pop(f.name) for f in fields(EngineConfig)}
    _alias(context, settings, "context_rows_max", "--max-model-len", options["max_model_len"])
    _alias(context, settings, "sessions_max", "--max-num-seqs", options["max_num_seqs"], DEFAULT_SESSIONS)
    with _naming_environment(context):
        config = EngineConfig(**settings)
        _check_context(context, model, config)
    serving = ServeConfig(
        names=options["served_model_name"] or (model.resolve().name,),
        version=version("glm53"),
        api_keys=_keys(options["api_key"], options["api_key_file"]),
        allowed_origins=options["allowed_origins"],
        waiting_max=options["max_waiting"],
        queue_timeout_s=options["queue_timeout"],
        body_bytes_max=options["max_body_mib"] << 20,
        chunks_per_step=options["chunks_per_step"],
        decode_max=options["max_decode_rows"],
        parked_max=options["max_parked"],
        keeps_prompts=options["enable_prefix_caching"],
        device_share=options["gpu_memory_utilization"],
        default_tokens=options["default_max_tokens"],
        request_timeout_s=options["request_timeout"],
        sessions_per_key=options["sessions_per_key"],
        session_files=None if options["session_dir"] is None else SessionFiles(options["session_dir"], int(options["session_dir_gib"] * 2**30)),
    )
    show = not options["quiet"]

    def open_engine(progress: Any) -> Engine:
        from glm53.engine import Engine

        return Engine.open(model, config, progress=progress)

    with listen(options["host"], options["port"]) as sock:
        host, port = sock.getsockname()[:2]

        def ready(engine: Engine) -> None:
            if show:
                device = engine.memory_by_place()
                held = ", ".join(f"{place} {short_bytes(sum(parts.values()))}" for place, parts in device.items())
                click.echo(f"[{serving.names[0]}: {engine.sessions_max} requests at once, {engine.context_rows_max} tokens each; {held}]", err=True)
                click.echo(f"[ready on http://{f'[{host}]' if ':' in host else host}:{port}/v1]", err=True)

        run(
            serving,
            sock,
            open_engine,
            progress_line("loading", show) or _silent,
            ready,
            options["shutdown_timeout"],
            options["uvicorn_log_level"],
            not options["disable_log_stats"],
        )


def _check_context(context: click.Context, model: Path, config: EngineConfig) -> None:
    """Refuses what is no model, and more context than it has, before a port is taken."""
    most = read_config(model, latent_norm_eps=config.latent_norm_eps).max_position_embeddings
    if config.context_rows_max > most:
        name = "max_model_len" if context.params["max_model_len"] is not None else "context_rows_max"
        raise InputError(f"{name} is {config.context_rows_max}, expected at most {most}, the longest history that this model is made for")


def _silent(done: int, total: int, name: str) -> None:
    pass


def _keys(given: Sequence[str], file: Path | None) -> tuple[str, ...]:
    """API keys of the command line and of a file. Raises InputError for a key that no client could send, and for a file without any."""
    try:
        of_file = [] if file is None else [line.strip() for line in file.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--api-key-file {file}: {error}; next: give a UTF-8 file with a key a line that can be read") from None
    if file is not None and not of_file:
        raise InputError(f"--api-key-file {file} has no key, wanted one a line; next: write one, or leave the option away to serve everybody")
    wrong = next((key for key in (*given, *of_file) if not key.isascii() or not key.isprintable() or " " in key or not key), None)
    if wrong is not None:
        raise InputError("an API key is empty or has spaces or other than printable ASCII characters; next: choose another one")
    return tuple(dict.fromkeys((*given, *of_file)))


@contextmanager
def _naming_environment(context: click.Context) -> Iterator[None]:
    """An error about a setting that came from the environment says from which variable."""
    try:
        yield
    except InputError as error:
        name = str(error).partition(" ")[0].rstrip(":")
        if context.get_parameter_source(name) is not ParameterSource.ENVIRONMENT:
            raise
        raise type(error)(f"{error} (it came from the environment variable {variable(context, name)})") from None


def _alias(context: click.Context, settings: dict[str, Any], field: str, flag: str, value: int | None, absent: int | None = None) -> None:
    """Puts an option of vLLM's name into the engine setting that it stands for. Raises InputError if both are given."""
    given = context.get_parameter_source(field) not in (ParameterSource.DEFAULT, None)
    if value is not None and given:
        raise InputError(f"{flag} {value} and --{field.replace('_', '-')} {settings[field]} are the same setting; give one of the two")
    if value is not None:
        settings[field] = value
    elif absent is not None and not given:
        settings[field] = absent
