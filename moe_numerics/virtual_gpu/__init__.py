"""Runs compiled CuTe DSL kernels on the CPU by executing their PTX."""
