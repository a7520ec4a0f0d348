"""One function per kernel: contract, launch shape, and what a call costs in bytes and flops."""
