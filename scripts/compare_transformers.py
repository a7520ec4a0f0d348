#!/usr/bin/env python3
"""Speed beside transformers: one checkpoint, one machine, f32, as many threads, in turn.

    python scripts/compare_transformers.py [--model models/glm53-demo] [--prompt 512] [--new 64] [--threads 2] [--rounds 3] [--reference PYTHON]

Each round starts a process of this engine on the cpu runtime and one of transformers (the environment of scripts/parity, .venv-parity). Both load the
model, run a short warm-up, then time the prompt to its first token and the greedy tokens after it, end-of-text ids ignored. Reported: medians of
the rounds in tokens/s, and their ratio. transformers gets a copy of the checkpoint without FP8 and the attention that it chooses itself.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WARM_UP_TOKENS = 40


def prompt_of(count: int, vocab: int) -> list[int]:
    """Token ids that are the same on both sides; the upper sixteenth of a vocabulary, where special tokens are, is left out."""
    draw = random.Random(0)
    return [draw.randrange(vocab - vocab // 16) for _ in range(count)]


def run_product(model: Path, prompt: int, new: int, threads: int) -> dict[str, Any]:
    """Seconds of this engine: {"prefill": to the first token, "decode": the tokens after it, "tokens": ids}."""
    from glm53 import Engine, SamplingParams
    from glm53.hip import runtime

    runtime.select("cpu")
    runtime.control().glm53_cpu_set_threads(threads)
    with Engine.open(model, dtype="f32", kv_tier="resident", context_rows_max=prompt + new + 64, sessions_max=1) as engine:
        ids = prompt_of(prompt, engine.spec.vocab_size)
        engine.generate([ids[:WARM_UP_TOKENS]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        start = time.perf_counter()
        chunks = engine.stream([ids], SamplingParams(temperature=0, max_tokens=new + 1, ignore_eos=True))
        tokens = list(next(chunks).token_ids)
        first = time.perf_counter()
        for chunk in chunks:
            tokens += chunk.token_ids
        return {"prefill": first - start, "decode": time.perf_counter() - first, "tokens": tokens}


def run_reference(model: Path, prompt: int, new: int, threads: int) -> dict[str, Any]:
    """Seconds of transformers, as run_product."""
    import torch
    import transformers

    torch.set_grad_enabled(False)
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    network = transformers.GlmMoeDsaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = prompt_of(prompt, network.config.vocab_size)

    def generate(given: list[int], count: int) -> tuple[list[int], float, float]:
        start = time.perf_counter()
        cache = transformers.DynamicCache(config=network.config)
        out = network(input_ids=torch.tensor([given]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        tokens = [int(out.logits[0, -1].argmax())]
        first = time.perf_counter()
        for _ in range(count):
            out = network(input_ids=torch.tensor([tokens[-1:]]), past_key_values=cache, use_cache=True)
            tokens.append(int(out.logits[0, -1].argmax()))
        return tokens, first - start, time.perf_counter() - first

    generate(ids[:WARM_UP_TOKENS], 8)
    tokens, prefill, decode = generate(ids, new)
    return {"prefill": prefill, "decode": decode, "tokens": tokens, "attention": network.config._attn_implementation}


def measure(python: str, side: str, model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One side in a process of its own."""
    command = [python, str(Path(__file__).resolve()), "--side", side, "--model", str(model)]
    for name in ("prompt", "new", "threads"):
        command += [f"--{name}", str(getattr(args, name))]
    threads = str(args.threads)
    environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"the {side} side failed:\n{done.stderr[-4000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the rounds; prints the table, or JSON."""
    reference = args.reference or str(ROOT / ".venv-parity" / "bin" / "python")
    if not Path(reference).exists():
        raise SystemExit(f"no interpreter at {reference}; next: run scripts/parity once, which makes .venv-parity, or give --reference")
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import make_checkpoint

    runs: dict[str, list[dict[str, Any]]] = {"product": [], "reference": []}
    with tempfile.TemporaryDirectory() as work:
        plain = Path(work) / "plain"
        make_checkpoint.write_dequantised(args.model, plain)
        for _ in range(args.rounds):
            runs["product"].append(measure(sys.executable, "product", args.model, args))
            runs["reference"].append(measure(reference, "reference", plain, args))

    def rate(side: str, part: str, tokens: int) -> float:
        return tokens / statistics.median(run[part] for run in runs[side])

    result: dict[str, Any] = {}
    for part, tokens in (("prefill", args.prompt), ("decode", args.new)):
        ours, theirs = rate("product", part, tokens), rate("reference", part, tokens)
        result |= {f"{part}_tokens_per_s": ours, f"{part}_transformers": theirs, f"{part}_ratio": ours / theirs}
    result["attention"] = runs["reference"][0]["attention"]
    pairs = zip(runs["product"][0]["tokens"], runs["reference"][0]["tokens"], strict=True)
    result["tokens_equal"] = sum(a == b for a, b in pairs)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "glm53-demo")
    parser.add_argument("--prompt", type=int, default=512, help="prompt tokens")
    parser.add_argument("--new", type=int, default=64, help="tokens timed after the first")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--reference", help="interpreter with torch and transformers; default: that of .venv-parity")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--side", choices=("product", "reference"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        run = run_product if args.side == "product" else run_reference
        print(json.dumps(run(args.model, args.prompt, args.new, args.threads)))
        return
    result = compare(args)
    if args.json:
        print(json.dumps(result))
        return
    print(f"{args.model.name}, f32, {args.prompt} prompt tokens, {args.new} decoded, {args.threads} threads, median of {args.rounds}")
    for part in ("prefill", "decode"):
        ours, theirs = result[f"{part}_tokens_per_s"], result[f"{part}_transformers"]
        print(f"{part:<8} {ours:10.1f} tokens/s   transformers ({result['attention']}) {theirs:10.1f}   ratio {result[f'{part}_ratio']:.2f}")
    print(f"greedy tokens equal: {result['tokens_equal']} of {args.new + 1}")


if __name__ == "__main__":
    main()
