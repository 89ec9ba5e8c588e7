"""Kernels for an architecture that nothing here can execute are compiled all the same, and read by ptxas.

Faults these tests catch: a function that is launched while it is only to be compiled, a target that does not reach the
compiler, a spill or an allocation of tensor memory that is read from the wrong kernel.
"""

from __future__ import annotations

import shutil

import pytest
import torch
from moe_numerics.fused import compilation, grouped_gemm

from moe_numerics.assembly import _tensor_columns, assemble

PTXAS = shutil.which("ptxas")


def compiled(target: str) -> tuple[str, torch.Tensor]:
    """PTX of a product, and its result's buffer, which nothing has written."""
    x, weights = torch.ones((40, 32), dtype=torch.bfloat16), torch.ones((1, 32, 32), dtype=torch.bfloat16)
    out = torch.full((40, 32), 7.0)
    with compilation.compiling_for(target) as used:
        grouped_gemm.grouped_matmul(x, weights, torch.tensor([0, 40], dtype=torch.int32), out=out)
    (module,) = used
    return module.ptx, out


def test_compiling_launches_nothing() -> None:
    before = compilation.current_target()
    text, out = compiled("sm_103a")
    assert compilation.current_target() == before
    assert ".target sm_103a" in text
    assert bool((out == 7.0).all())
    (name,) = compilation.kernels_in(text)
    assert _tensor_columns(text, name) == 512
    if PTXAS is not None:
        registers, spilled, _ = assemble(text, "sm_103a", PTXAS)[name]
        assert 0 < registers <= 168
        assert spilled == 0


def test_columns_are_those_of_the_kernel_asked_for() -> None:
    allocation = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], {};\n"
    text = ".entry first() {\nmov.b32 %r2, 64;\n" + allocation.format("%r2") + "}\n"
    text += ".entry second() {\n" + allocation.format("32") + "}\n.entry third() {\nret;\n}\n"
    assert [_tensor_columns(text, name) for name in ("first", "second", "third")] == [64, 32, None]


@pytest.mark.skipif(PTXAS is None, reason="needs ptxas")
def test_what_ptxas_refuses_is_an_error() -> None:
    assert PTXAS is not None
    with pytest.raises(ValueError, match="refuses the PTX for sm_100a"):
        assemble(".version 8.8\n.target sm_100a\n.address_size 64\n.entry k() { nonsense; }\n", "sm_100a", PTXAS)
