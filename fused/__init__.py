"""Fused CuTe DSL kernels; modules and functions are named like their twins in `moe_numerics.reference`."""
