"""Reading a checkpoint and running it: `checkpoint` (files), `names` (tensors wanted), `weights` (device arrays), `forward` (the pass)."""
