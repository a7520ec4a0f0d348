#!/usr/bin/env python3
"""The transformers half of scripts/parity: greedy tokens, logits and margins of one checkpoint, in float32 on the CPU.

Runs in an environment with torch and transformers, never in the product's:

    parity_reference.py JOB.json OUT.npz

JOB.json: {"model": directory, "prompts": {name: [token ids]}, "new_tokens": n, "uncached": bool}. The directory must
hold no FP8 (see make_checkpoint.write_dequantised). OUT.npz holds `versions`, "torch==... transformers==...", and for
each prompt name:

    NAME/tokens    [n] int64        greedy tokens, cached, eager attention, end-of-text ids ignored
    NAME/logits    [n, V] float32   row i chose tokens[i]; row 0 belongs to the last prompt token
    NAME/margins   [5] float64      index_gap, index_gap_relative, router_gap, logit_gap, uncached_diff (MARGINS)
"""

import json
import sys
import time
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import transformers
from transformers import DynamicCache, GlmMoeDsaForCausalLM
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as modeling

MARGINS = ("index_gap", "index_gap_relative", "router_gap", "logit_gap", "uncached_diff")


class Margins:
    """Smallest distances to a discontinuity seen while active, over all layers and rows.

    index_gap: k-th minus (k+1)-th largest index score of a row with more than index_topk keys;
    index_gap_relative: that over the row's largest absolute score; router_gap: the same for the biased expert scores.
    The indexer keeps its scores local, so Tensor.topk is watched while an indexer runs; routers get a forward hook.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.index_gap = self.index_gap_relative = self.router_gap = float("inf")
        self.inside = False
        self.original = torch.Tensor.topk
        self.hooks: list[Any] = []
        self.model = model

    def __enter__(self) -> Self:
        for module in self.model.modules():
            if isinstance(module, modeling.GlmMoeDsaIndexer):
                self.hooks.append(module.register_forward_pre_hook(lambda *_: self.enter_indexer(True)))
                self.hooks.append(module.register_forward_hook(lambda *_: self.enter_indexer(False)))
            if isinstance(module, modeling.GlmMoeDsaTopkRouter):
                self.hooks.append(module.register_forward_hook(self.see_router))
        watch = self

        def topk(scores: torch.Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
            if watch.inside:
                watch.see_scores(scores, k)
            return watch.original(scores, k, *args, **kwargs)

        torch.Tensor.topk = topk
        return self

    def __exit__(self, *_: object) -> None:
        torch.Tensor.topk = self.original
        for hook in self.hooks:
            hook.remove()

    def enter_indexer(self, inside: bool) -> None:
        self.inside = inside

    def see_scores(self, scores: torch.Tensor, k: int) -> None:
        """scores [B, S, N]; masked entries hold the type's minimum."""
        if scores.shape[-1] <= k:
            return
        top = self.original(scores, k + 1, dim=-1).values
        real = top[..., k] > -1e30  # otherwise the row has no more than k keys
        if not real.any():
            return
        gap = (top[..., k - 1] - top[..., k])[real]
        masked = scores.masked_fill(scores < -1e30, 0.0)
        largest = masked.abs().amax(-1)[real]
        self.index_gap = min(self.index_gap, gap.min().item())
        self.index_gap_relative = min(self.index_gap_relative, (gap / largest).min().item())

    def see_router(self, router: Any, _: Any, output: Any) -> None:
        scores = output[0].sigmoid() + router.e_score_correction_bias
        top = self.original(scores, router.top_k + 1, dim=-1).values
        self.router_gap = min(self.router_gap, (top[:, -2] - top[:, -1]).min().item())


def greedy(model: Any, ids: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """`count` greedy tokens after the prompt, cached; returns them and the [count, V] logits that chose them."""
    cache, step = DynamicCache(config=model.config), torch.tensor([ids])
    tokens: list[int] = []
    rows = []
    for _ in range(count):
        output = model(input_ids=step, cache=cache, use_cache=True, logits_to_keep=1)
        rows.append(output.logits[0, -1])
        tokens.append(int(rows[-1].argmax()))
        step = torch.tensor([tokens[-1:]])
    return tokens, torch.stack(rows)


def uncached(model: Any, ids: list[int], tokens: list[int]) -> torch.Tensor:
    """[len(tokens), V] logits of the same rows from one pass over prompt and tokens without a cache."""
    whole = torch.tensor([ids + tokens[:-1]])
    return model(input_ids=whole, use_cache=False, logits_to_keep=len(tokens)).logits[0]


def run_prompt(model: Any, ids: list[int], job: dict[str, Any]) -> dict[str, Any]:
    """tokens, logits and margins of one prompt."""
    with Margins(model) as margins:
        tokens, logits = greedy(model, ids, job["new_tokens"])
    top = logits.topk(2, dim=-1).values
    difference = float("nan")
    if job.get("uncached", True):
        other = uncached(model, ids, tokens)
        same = bool((other.argmax(-1) == logits.argmax(-1)).all())
        difference = (other - logits).abs().max().item() if same else float("inf")
    gaps = [margins.index_gap, margins.index_gap_relative, margins.router_gap]
    values = [*gaps, (top[:, 0] - top[:, 1]).min().item(), difference]
    return {"tokens": np.array(tokens), "logits": logits.numpy(), "margins": np.array(values)}


def load(path: str) -> Any:
    """The model in float32. Of the file's tensors only those of an MTP layer, which transformers lacks, may go unused."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, info = GlmMoeDsaForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    mtp = f"model.layers.{model.config.num_hidden_layers}."
    bad = {key: names for key in info if (names := [n for n in info[key] if not str(n).startswith(mtp)])}
    if bad:
        raise ValueError(f"{path}: transformers could not use the checkpoint as it is: {bad}")
    return model.eval()


def main(job_path: str, out_path: str) -> None:
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)  # one order of summation, and these machines are shared
    job = json.loads(Path(job_path).read_text())
    model = load(job["model"])
    arrays: dict[str, Any] = {}
    for name, ids in job["prompts"].items():
        start = time.monotonic()
        result = run_prompt(model, ids, job)
        arrays |= {f"{name}/{key}": value for key, value in result.items()}
        text = "  ".join(f"{key} {value:.2e}" for key, value in zip(MARGINS, result["margins"], strict=True))
        print(f"  {name}: {len(ids)} tokens, {text}, {time.monotonic() - start:.1f} s", flush=True)
    arrays["versions"] = f"torch=={torch.__version__.partition('+')[0]} transformers=={transformers.__version__}"
    np.savez(out_path, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
