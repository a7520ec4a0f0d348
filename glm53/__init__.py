"""Torch-free runtime for GLM-5.3 on AMD GPUs: `from glm53 import Engine, SamplingParams`."""
