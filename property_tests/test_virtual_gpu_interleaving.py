"""Schedules run warps together where nobody can notice, and in every order where somebody can.

Faults this catches: an order of stores that no seed reaches, a load that runs ahead of another warp's store or of its
own, stores that change their order, and a table of narrow floats that differs from the rounding it stands for.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_numerics.virtual_gpu import virtual_gpu
from moe_numerics.virtual_gpu.narrow import FORMATS, encode, encoder

SEEDS = range(40)
HEAD = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 out, .param .u64 in)
{
    .reg .b32 %r<8>, %t, %w, %a;
    .reg .b64 %out, %in, %rd<8>;
    .reg .pred %p<4>;
    .shared .align 16 .b8 buffer[1024];
    ld.param.u64 %out, [out];
    ld.param.u64 %in, [in];
    mov.u32 %t, %tid.x;
    shr.u32 %w, %t, 5;
"""


def run(seed: int | str, body: str, threads: int = 64, blocks: int = 1, checkers: bool = False) -> list[int]:
    """What the kernel leaves in `out`, 64 words that begin as zeros; `in` holds 100, 101, ..."""
    out, given_words = torch.zeros(64, dtype=torch.int32), torch.arange(100, 164, dtype=torch.int32)
    with virtual_gpu("sm_90a", seed, checkers) as gpu:
        gpu.launch(f"{HEAD}{body}\n    ret;\n}}\n", "k", blocks, threads, [out, given_words])
        assert not gpu.findings
    return out.tolist()


def test_every_order_of_two_warps_stores_occurs() -> None:
    # Each warp reads, computes, and stores its number to two places.
    body = """
    mul.wide.u32 %rd1, %w, 4; add.u64 %rd1, %rd1, %in; ld.global.u32 %r1, [%rd1];
    st.global.u32 [%out], %r1;
    add.u32 %r1, %r1, 10; sub.u32 %r1, %r1, 10;
    st.global.u32 [%out+4], %r1;
    """
    found = {tuple(run(seed, body)[:2]) for seed in SEEDS}
    assert found == set(product((100, 101), repeat=2))


def test_every_order_of_two_blocks_stores_occurs() -> None:
    body = "mov.u32 %r1, %ctaid.x; add.u32 %r1, %r1, 1; st.global.u32 [%out], %r1;"
    assert {run(seed, body, 32, 2)[0] for seed in SEEDS} == {1, 2}


@pytest.mark.parametrize("place", ["global", "shared"])
def test_a_load_sees_a_store_or_does_not(place: str) -> None:
    # Warp 1 reads what warp 0 stores; the load comes first in its program.
    address = "mov.u64 %rd2, %out;" if place == "global" else "mov.u32 %a, buffer; cvt.u64.u32 %rd2, %a;"
    body = f"""
    {address}
    setp.eq.u32 %p1, %w, 0;
    ld.global.u32 %r1, [%in];
    @%p1 st.{place}.u32 [%rd2], %r1;
    @%p1 bra done;
    ld.{place}.u32 %r2, [%rd2];
    st.global.u32 [%out+4], %r2;
    done:
    """
    body = body if place == "global" else body.replace("%rd2]", "%a]")
    assert {run(seed, body)[1] for seed in SEEDS} == {0, 100}


@given(seed=st.integers(0, 2**32))
def test_a_thread_reads_what_it_stored(seed: int) -> None:
    # The distance from `out` to `in` comes from memory, so that no parameter says where the store goes.
    body = """
    ld.global.u64 %rd1, [%in];
    mul.wide.u32 %rd2, %t, 4; add.u64 %rd3, %rd1, %out; add.u64 %rd3, %rd3, %rd2;
    add.u64 %rd4, %in, %rd2; add.u64 %rd5, %out, %rd2;
    st.global.u32 [%rd3+256], %t;
    ld.global.u32 %r1, [%rd4+256];
    st.global.u32 [%rd5], %r1;
    """
    out, given_words = torch.zeros(64, dtype=torch.int32), torch.full((64,), -1, dtype=torch.int64)
    given_words[0] = given_words.data_ptr() - out.data_ptr()
    with virtual_gpu("sm_90a", seed) as gpu:
        gpu.launch(f"{HEAD}{body}\n    ret;\n}}\n", "k", 1, 64, [out, given_words])
    assert out.tolist() == list(range(64))


def test_two_increments_may_be_lost_or_not() -> None:
    # Both warps stand at the load together, but no schedule has to run them so.
    body = "ld.global.u32 %r1, [%out]; add.u32 %r1, %r1, 1; st.global.u32 [%out], %r1;"
    assert {run(seed, body)[0] for seed in SEEDS} == {1, 2}


STEPS = {
    "store": "st.global.u32 [%rd2], %r1;",
    "exchange": "shfl.sync.idx.b32 %r2, %r1, {n}, 31, -1; add.u32 %r1, %r1, %r2;",
    "part": "and.b32 %r3, %t, {bit}; setp.eq.u32 %p1, %r3, 0; @%p1 bra on{n}; mad.lo.u32 %r1, %r1, 3, {n}; on{n}:",
}


@given(
    seed=st.integers(0, 2**32), blocks=st.integers(1, 2), steps=st.lists(st.sampled_from(sorted(STEPS)), max_size=12)
)
def test_every_schedule_gives_the_fast_ones_result(seed: int, blocks: int, steps: list[str]) -> None:
    """Threads that store several values to their own word and exchange values, with lanes that part in between."""
    middle = "\n    ".join(STEPS[step].format(n=n, bit=1 << n % 5) for n, step in enumerate(steps))
    body = f"""
    mov.u32 %r4, %ctaid.x; mov.u32 %r5, %ntid.x; mad.lo.u32 %r4, %r4, %r5, %t;
    mul.wide.u32 %rd1, %r4, 4; add.u64 %rd2, %rd1, %out; add.u64 %rd1, %rd1, %in;
    ld.global.u32 %r1, [%rd1];
    {middle}
    st.global.u32 [%rd2], %r1; add.u32 %r1, %r1, 1;
    st.global.u32 [%rd2], %r1; add.u32 %r1, %r1, 1;
    st.global.u32 [%rd2], %r1;
    """
    threads = 64 // blocks
    assert run(seed, body, threads, blocks, checkers=True) == run("fast", body, threads, blocks)


@given(
    name=st.sampled_from(["e4m3", "e5m2", "e2m1", "e2m3", "e3m2", "bf16"]),
    mode=st.sampled_from(["rn", "rna", "rz", "rm", "rp"]),
    satfinite=st.booleans(),
    seed=st.integers(0, 2**32),
    cleared=st.integers(0, 22),
)
def test_looked_up_codes_are_the_rounded_ones(name: str, mode: str, satfinite: bool, seed: int, cleared: int) -> None:
    """Random bits whose lowest are cleared, so that ties and exact values occur; exponents near the format's too."""
    bits = np.random.Generator(np.random.Philox(seed)).integers(0, 2**32, 512, np.uint32)
    bits[::2] = bits[::2] & np.uint32(0x87FFFFFF) | np.uint32(0x38000000)
    x = (bits & np.uint32(2**32 - (1 << cleared))).view(np.float32)
    assert np.array_equal(encoder(FORMATS[name], mode, satfinite)(x), encode(x, FORMATS[name], mode, satfinite))
