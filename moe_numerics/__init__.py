"""Reference-and-verification suite for the numerics of fused MoE training kernels."""
