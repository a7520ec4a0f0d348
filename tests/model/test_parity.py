"""Greedy tokens and logits against transformers 5.24.0 in f32 (tests/golden; `scripts/parity` repeats it live)."""
