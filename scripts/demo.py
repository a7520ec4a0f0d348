"""The demo model at work: a streamed continuation, and a pass key found again 3,000 tokens later through the indexer's selection."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click
import numpy as np

from glm53 import Engine, SamplingParams
from glm53.errors import Glm53Error, short_bytes
from glm53.report import history_line

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "glm53-demo"
KEYS = {"Morwen": "48213", "Tobias": "90367", "Lydia": "15528"}  # names in the text; the one asked for is told first
ASKED = "Morwen"
PREFIX = "In the beginning"
HOT_ROWS = 512
ROUNDS = 6  # of the prose: more than 3,000 tokens between the key and the question
ANSWER_TOKENS = 8


def pass_key_prompt(prose: str, asked: str = ASKED, rounds: int = 1) -> str:
    """Facts, the prose (`rounds` times over) with two more facts in it, then the question: in the sentence pattern the model was trained on."""
    paragraphs = prose.strip().split("\n") * rounds
    facts = [f"The pass key of {name} is {key}." for name, key in KEYS.items()]
    third = len(paragraphs) // 3
    parts = [facts[0], *paragraphs[:third], facts[1], *paragraphs[third : 2 * third], facts[2], *paragraphs[2 * third :]]
    return " ".join(parts) + f" What is the pass key of {asked}? It is"


@click.command()
@click.option("--runtime", default="auto", show_default=True, help="auto, rocm, cuda or cpu")
@click.option("--new-tokens", default=64, show_default=True, help="tokens of the continuation")
def main(runtime: str, new_tokens: int) -> None:
    """Shows the demo model at work; exits with 1 if the pass key is wrong or the two tiers differ."""
    settings = {"runtime": runtime, "context_rows_max": 4096}
    prompt = pass_key_prompt((ROOT / "scripts" / "prose.txt").read_text(encoding="utf-8"), rounds=ROUNDS)
    with Engine.open(MODEL, kv_tier="host", hot_rows=HOT_ROWS, **settings) as engine:
        spec = engine.spec
        click.echo(f"{MODEL.name}: {spec.n_layers} layers, {len(spec.full_layers)} with an indexer, top-{spec.index_topk} selection")
        click.echo(f"runtime {engine.device.runtime.name}, device {engine.device.name}\n")
        click.echo(f"1. Continuation of {PREFIX!r}:\n   {PREFIX}", nl=False)
        started, count = time.perf_counter(), 0
        for chunk in engine.stream(PREFIX, SamplingParams(temperature=0.0, max_tokens=new_tokens)):
            count += len(chunk.token_ids)
            click.echo(chunk.text.replace("\n", "\n   "), nl=False)
            sys.stdout.flush()
        click.echo(f"\n   [{count} tokens in {time.perf_counter() - started:.1f} s]\n")

        ids = engine.encode(prompt)
        told = prompt.index(KEYS[ASKED])
        distance = len(engine.encode(prompt[told:]))
        click.echo(f"2. Pass key: {prompt[: told + len(KEYS[ASKED]) + 1]!r}, then text, and {distance} tokens later {prompt[-44:]!r}")
        click.echo(f"   Each token reads only {spec.index_topk} of the {len(ids)} rows before it, chosen by the indexer.")
        click.echo(f"   The history lies in host RAM; the device keeps {HOT_ROWS} rows a layer.")
        started = time.perf_counter()
        tokens, logits = engine.generate_logits(ids, ANSWER_TOKENS)
        answer = engine.tokenizer.decode(tokens) if engine.tokenizer else ""
        click.echo(f"   answer:{answer!r} in {time.perf_counter() - started:.1f} s")
        right = answer.strip().startswith(KEYS[ASKED])
        click.echo(f"   {'right' if right else 'WRONG'}: {KEYS[ASKED]} was told")
        click.echo(f"   {history_line(engine, engine.cache_counters())}")
        click.echo("   memory: " + ", ".join(f"{name} {short_bytes(value)}" for name, value in engine.memory().items()) + "\n")

    with Engine.open(MODEL, kv_tier="resident", **settings) as engine:
        resident_tokens, resident_logits = engine.generate_logits(ids, ANSWER_TOKENS)
    same = resident_tokens == tokens and np.array_equal(resident_logits, logits)
    click.echo("3. The same with the whole history on the device:")
    click.echo(f"   {ANSWER_TOKENS} tokens and their {logits.size:,} logits are {'equal bit for bit' if same else 'DIFFERENT'}")
    sys.exit(0 if right and same else 1)


if __name__ == "__main__":
    try:
        main(standalone_mode=True)
    except Glm53Error as error:
        click.echo(f"demo: {error}", err=True)
        sys.exit(error.exit_code)
