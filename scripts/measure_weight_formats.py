"""Error of 4-bit weight formats, a scale for each group of columns: the table of docs/decisions/0005-weight-formats.md.

    python scripts/measure_weight_formats.py [--model models/glm53-demo] [--json]

Error: root mean square of (dequantised - weight) over that of the weights, in percent. Scales and minima are rounded to f16 before codes are chosen.
Data: Gaussian and Laplace noise, and the routed experts of a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from glm53.hip.array import f32_from_bf16, f32_from_e4m3
from glm53.model.checkpoint import Checkpoint
from glm53.model.names import SCALE_SUFFIX

ROOT = Path(__file__).resolve().parent.parent
NOISE_WEIGHTS = 1 << 20
SAMPLE_TENSORS = 24  # of a checkpoint, evenly spread over its routed experts
FACTORS = tuple(0.8 + 0.2 * i / 7 for i in range(8))  # of the scale, tried by the search
Quantise = Callable[[np.ndarray], np.ndarray]


def f16(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).astype(np.float32)


def multiples(x: np.ndarray, scale: np.ndarray, low: int, high: int) -> np.ndarray:
    """Nearest multiples of `scale` [n, 1] with codes in [low, high]; 0 where the scale is 0."""
    step = np.where(scale == 0, np.float32(1), scale)
    return np.where(scale == 0, np.float32(0), np.clip(np.rint(x / step), low, high) * scale)


def extreme(x: np.ndarray) -> np.ndarray:
    """[n, 1]: the value of largest magnitude of each group, with its sign."""
    return np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)


def symmetric(x: np.ndarray) -> np.ndarray:
    return multiples(x, f16(np.abs(x).max(axis=1, keepdims=True) / 7), -7, 7)


def signed_extreme(x: np.ndarray) -> np.ndarray:
    return multiples(x, f16(extreme(x) / -8), -8, 7)


def searched(x: np.ndarray) -> np.ndarray:
    tries = np.stack([multiples(x, f16(extreme(x) * np.float32(factor / -8)), -8, 7) for factor in FACTORS])
    best = ((tries - x) ** 2).sum(axis=2).argmin(axis=0)
    return np.take_along_axis(tries, best[None, :, None], axis=0)[0]


def zero_point(x: np.ndarray) -> np.ndarray:
    low, high = f16(x.min(axis=1, keepdims=True)), x.max(axis=1, keepdims=True)
    return low + multiples(x - low, f16((high - low) / 15), 0, 15)


def eight_bits(x: np.ndarray) -> np.ndarray:
    return multiples(x, f16(np.abs(x).max(axis=1, keepdims=True) / 127), -127, 127)


@dataclass(frozen=True)
class Format:
    name: str
    group: int  # columns that share a scale
    bits: float  # of a weight, scales included
    quantise: Quantise


FORMATS = (
    Format("(a) amax / 7, codes -7..7", 64, 4.25, symmetric),
    Format("(b) extreme / -8, codes -8..7", 64, 4.25, signed_extreme),
    Format("(c) as (b), best of 8 scales", 64, 4.25, searched),
    Format("(d) minimum and scale", 64, 4.5, zero_point),
    Format("(b) in groups of 32", 32, 4.5, signed_extreme),
    Format("(c) in groups of 32", 32, 4.5, searched),
    Format("(d) in groups of 128", 128, 4.25, zero_point),
    Format("q8g64", 64, 8.25, eight_bits),
)


def error_percent(weights: np.ndarray, form: Format) -> float:
    """weights [rows, cols], cols a multiple of 128."""
    groups = weights.reshape(-1, form.group)
    difference = (form.quantise(groups) - groups).astype(np.float64)
    return 100 * float(np.sqrt((difference**2).mean() / (groups.astype(np.float64) ** 2).mean()))


def expert_weights(model: Path) -> np.ndarray:
    """Values [n, 128] of a sample of the routed experts' matrices, each divided by its own root mean square."""
    found = []
    with Checkpoint.open(model) as checkpoint:
        names = [n for n in checkpoint.tensors if re.search(r"\.mlp\.experts\..*(weight|proj)$", n)]
        for name in names[:: -(-len(names) // SAMPLE_TENSORS)]:
            info, raw = checkpoint.tensors[name], checkpoint.view(name)
            if info.dtype == "F8_E4M3":
                scale = checkpoint.view(name + SCALE_SUFFIX)
                full = scale.repeat(128, -2).repeat(128, -1)[..., : info.shape[-2], : info.shape[-1]]
                values = f32_from_e4m3(raw) * full
            else:
                values = f32_from_bf16(raw) if info.dtype == "BF16" else raw
            found.append((values / np.sqrt((values**2).mean())).reshape(-1, 128))
    return np.concatenate(found)


def measure(model: Path, noise_weights: int = NOISE_WEIGHTS) -> dict[str, dict[str, float]]:
    """Percent error by format and data set; `bits` beside them."""
    rng = np.random.default_rng(0)
    shape = (noise_weights // 128, 128)
    data = {"Gaussian": rng.standard_normal(shape), "Laplace": rng.laplace(size=shape), model.name: expert_weights(model)}
    columns = {name: values.astype(np.float32) for name, values in data.items()}
    return {form.name: {"bits": form.bits} | {name: error_percent(values, form) for name, values in columns.items()} for form in FORMATS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "glm53-demo", help="checkpoint directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    table = measure(given.model)
    if given.json:
        print(json.dumps(table))
        return
    columns = list(next(iter(table.values())))
    print(f"| format | {' | '.join(columns)} |")
    print(f"|{' --- |' * (len(columns) + 1)}")
    for name, row in table.items():
        print(f"| {name} | {' | '.join(f'{value:.2f}' for value in row.values())} |")


if __name__ == "__main__":
    main()
