"""The table of tensor-core models: architectures and types are rows.

Sources: MMA-Sim (microsoft/MMA-Sim; PyPI `mmasim` 2.1.1) for the scheme and its constants, which agree with
Khattak and Mikaitis, "Accurate Models of NVIDIA Tensor Cores" (arXiv 2512.07004) on Hopper and Blackwell
without block scales; the rows with evidence `silicon` were compared with an H200, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from .formats import E2M1, E4M3, E5M2, FloatFormat

__all__ = ["MODELS", "OPERANDS", "Model", "find_model"]


@dataclass(frozen=True)
class Model:
    """How one kind of tensor-core instruction accumulates.

    `group` (L) values of K are added at once, each truncated to `fraction_bits` (F) below the largest
    exponent; `rounding` of the sum is "rz_f32", "rz_e8m13" (then the low 10 bits cleared) or "rne_f16"; a
    zero term counts with `zero_exponent`. Block-scaled rows have one scale for `scale_block` values of K;
    `exact_run` values are summed exactly before they are scaled and aligned. `evidence` is "silicon"
    (compared with an H200) or "third party" (MMA-Sim only).
    """

    name: str
    operands: tuple[str, ...]
    group: int
    fraction_bits: int
    rounding: str
    zero_exponent: int
    evidence: str
    scale_format: str = ""
    scale_block: int = 0
    exact_run: int = 1


OPERANDS: dict[str, FloatFormat] = {
    "bf16": FloatFormat("BF16", 8, 7, 127, "ieee"),
    "f16": FloatFormat("F16", 5, 10, 15, "ieee"),
    "tf32": FloatFormat("TF32", 8, 10, 127, "ieee"),
    "e4m3": E4M3,
    "e5m2": E5M2,
    "e2m3": FloatFormat("E2M3", 2, 3, 1, "none"),
    "e3m2": FloatFormat("E3M2", 3, 2, 3, "none"),
    "e2m1": E2M1,
}

_F8 = ("e4m3", "e5m2")
_F8F6F4 = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")
_SILICON, _THIRD = "silicon", "third party"

MODELS: dict[str, Model] = {
    row.name: row
    for row in (
        Model("sm_70.f16", ("f16",), 4, 23, "rz_f32", -131, _THIRD),
        Model("sm_70.f16_f16acc", ("f16",), 4, 23, "rne_f16", -19, _THIRD),
        Model("sm_80.f16", ("f16",), 8, 24, "rz_f32", -132, _THIRD),
        Model("sm_80.bf16", ("bf16",), 8, 24, "rz_f32", -132, _THIRD),
        Model("sm_80.tf32", ("tf32",), 4, 24, "rz_f32", -132, _THIRD),
        Model("sm_80.f16_f16acc", ("f16",), 8, 24, "rne_f16", -20, _THIRD),
        Model("sm_89.e4m3", _F8, 16, 13, "rz_e8m13", -132, _THIRD),
        Model("sm_89.e4m3_f16acc", _F8, 16, 13, "rne_f16", -20, _THIRD),
        Model("sm_90.bf16", ("bf16",), 16, 25, "rz_f32", -133, _SILICON),
        Model("sm_90.f16", ("f16",), 16, 25, "rz_f32", -133, _SILICON),
        Model("sm_90.tf32", ("tf32",), 8, 25, "rz_f32", -133, _SILICON),
        Model("sm_90.f16_f16acc", ("f16",), 16, 25, "rne_f16", -21, _SILICON),
        Model("sm_90.e4m3", _F8, 32, 13, "rz_e8m13", -133, _SILICON),
        Model("sm_90.e5m2", _F8[::-1], 32, 13, "rz_e8m13", -133, _SILICON),
        Model("sm_90.e4m3_f16acc", _F8, 32, 13, "rne_f16", -21, _SILICON),
        Model("sm_100.bf16", ("bf16",), 16, 25, "rz_f32", -133, _THIRD),
        Model("sm_100.f16", ("f16",), 16, 25, "rz_f32", -133, _THIRD),
        Model("sm_100.tf32", ("tf32",), 8, 25, "rz_f32", -133, _THIRD),
        Model("sm_100.f16_f16acc", ("f16",), 16, 25, "rne_f16", -21, _THIRD),
        Model("sm_100.f8f6f4", _F8F6F4, 32, 25, "rz_f32", -133, _THIRD),
        Model("sm_100.f8f6f4_f16acc", _F8F6F4, 32, 25, "rne_f16", -21, _THIRD),
        Model("sm_100.mxf8f6f4", _F8F6F4, 32, 25, "rz_f32", -133, _THIRD, "e8m0", 32),
        Model("sm_100.mxf4", ("e2m1",), 64, 35, "rz_f32", -139, _THIRD, "e8m0", 32, 16),
        Model("sm_100.mxf4nvf4", ("e2m1",), 64, 35, "rz_f32", -139, _THIRD, "e4m3", 16, 16),
        Model("sm_100.mxf4nvf4_e8m0", ("e2m1",), 64, 35, "rz_f32", -139, _THIRD, "e8m0", 16, 16),
    )
}


def find_model(name: str) -> Model:
    """Gives the row of `MODELS` called `name`. ValueError for an unknown name, with the known ones."""
    if name not in MODELS:
        raise ValueError(f"unknown tensor-core model {name!r}: known models are {', '.join(MODELS)}")
    return MODELS[name]
