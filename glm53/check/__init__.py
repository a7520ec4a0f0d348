"""Numpy references of the kernels, the cases that compare them, and the litmus loops: what the tests and `glm53 selftest` run."""
