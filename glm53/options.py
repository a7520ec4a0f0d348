"""What the commands share: options in titled groups, errors as exit codes, and prompts from wherever they are given. Loads nothing heavy."""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from glm53.config import EngineConfig, check_prompt, read_config
from glm53.errors import Glm53Error, InputError

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
            click.echo(f"glm53 {_path(ctx)}: {error}", err=True)
            ctx.exit(error.exit_code)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # the reader of our output has left: click ends quietly
            click.echo(f"glm53 {_path(ctx)}: {error}", err=True)
            ctx.exit(1)
        except KeyboardInterrupt:
            ctx.exit(130)


def _path(ctx: click.Context) -> str:
    """The command as it was typed, without the program: `session save`."""
    names: list[str] = []
    while ctx.parent is not None:
        names.insert(0, str(ctx.info_name))
        ctx = ctx.parent
    return " ".join(names)


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

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """The option, and the environment variable where that has the value."""
        hint = super().get_error_hint(ctx)
        if ctx is None or self.name is None or ctx.get_parameter_source(self.name) is not click.core.ParameterSource.ENVIRONMENT:
            return hint
        return f"{hint} (from the environment variable {variable(ctx, self.name)})"


def variable(ctx: click.Context, name: str) -> str:
    """The environment variable that an option is."""
    return f"{ctx.auto_envvar_prefix}_{name.upper()}"


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


def engine_options(command: Any, hidden: Sequence[str] = ()) -> Any:
    """Adds an option for every field of EngineConfig, with the field's default and help. hidden: fields whose options the help leaves out."""
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
        command = option(
            flag, spec.name, group="Engine", default=default, show_default=True, help=spec.metadata["help"], hidden=spec.name in hidden, **extra
        )(command)
    return command


def all_of(decorators: Sequence[Any]) -> Any:
    """One decorator that adds several options, in their order."""

    def add(command: Any) -> Any:
        for decorate in reversed(decorators):
            command = decorate(command)
        return command

    return add


def prompt_options(absent: str) -> Any:
    """PROMPT and the other sources of a prompt. absent: what happens without any, for the help."""
    return all_of(
        (
            click.argument("prompt", cls=Argument, required=False, text=f"The prompt's text. Not given: --prompt-file, --prompt-ids or {absent}."),
            option(
                "--prompt-file",
                group="Prompt",
                type=click.Path(exists=True, dir_okay=False, path_type=Path),
                help="Read the prompt from a UTF-8 file.",
            ),
            option("--prompt-ids", group="Prompt", help="The prompt as token ids: 1,2,3."),
        )
    )


def reasoning_effort_option(text: str) -> Any:
    return option("--reasoning-effort", group="Prompt", type=click.Choice(["low", "high", "max"]), default="max", show_default=True, help=text)


chat_options = all_of(
    (
        option("--chat", group="Prompt", is_flag=True, help="Put the prompt into the checkpoint's chat template as one user message."),
        option("--system", group="Prompt", help="System message before it (with --chat)."),
        reasoning_effort_option("With --chat."),
    )
)


def sampling_option(flag: str, kind: Any, text: str) -> Any:
    """An option of SamplingParams. Not given: what generation_config.json or the session says, else the default of SamplingParams."""
    return option(flag, flag[2:].replace("-", "_"), group="Sampling", type=kind, default=None, help=text)


def sampling_options(max_tokens: str = "256", seed: str = "a fresh one, printed at the end", logprobs: bool = True) -> Any:
    """The options of SamplingParams; max_tokens, seed: what they are if not given, for the help. logprobs: for commands that print JSON."""
    log_probabilities = option(
        "--logprobs", group="Sampling", type=int, default=None, help="With --json: log-probability of each token and of the n best."
    )
    return all_of(
        (
            sampling_option("--temperature", float, "0 is greedy."),
            sampling_option("--top-p", float, "Mass of the most probable tokens kept, in (0, 1]."),
            sampling_option("--top-k", int, "Number of most probable tokens kept; 0: all."),
            sampling_option("--min-p", float, "Drop tokens less probable than this share of the best one, in [0, 1]."),
            sampling_option("--repetition-penalty", float, "Above 1 discourages tokens of the prompt and output."),
            sampling_option("--seed", int, f"Same seed, same text. Not given: {seed}."),
            sampling_option("--max-tokens", int, f"New tokens at most. [default: {max_tokens}]"),
            option("--stop", group="Sampling", multiple=True, help="End before this string (may be repeated)."),
            *((log_probabilities,) if logprobs else ()),
            option("--ignore-eos", group="Sampling", is_flag=True, help="Go on past end-of-sequence tokens."),
        )
    )


def prompt_token_ids(model: Path, config: EngineConfig, text: str, source: dict[str, Any]) -> list[int]:
    """Token ids of the prompt, checked against the model's vocabulary and context."""
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


json_option = option("--json", "as_json", group="Output", is_flag=True, help="Print one JSON object.")
text_output_options = all_of(
    (
        option("--json", "as_json", group="Output", is_flag=True, help="Print one JSON object instead of streaming text."),
        option("--quiet", group="Output", is_flag=True, help="No progress and no summary line on standard error."),
    )
)
