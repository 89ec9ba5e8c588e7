"""Loads, stores, atomics, shuffles, votes and barriers of the virtual GPU against plain Python loops.

Faults this catches: a lost atomic, a lane that reads another lane's neighbour, a vector stored in the wrong order.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_numerics.virtual_gpu import VirtualGPU, micro, virtual_gpu

SCHEDULES = st.sampled_from(["fast", 1, 2, 5])
WORDS = st.lists(st.integers(0, 2**32 - 1), min_size=64, max_size=64)


@pytest.fixture
def gpu() -> Iterator[VirtualGPU]:
    with virtual_gpu("sm_100a") as g:
        yield g


def lanes(statement: str, result: str, words: list[int], gpu: VirtualGPU) -> list[int]:
    """Runs a statement on two warps; `{a0}` is each thread's word."""
    (out,) = micro.run(gpu, statement, [result], [("b32", np.array(words, np.uint32))], block=64)
    return [int(v) for v in out]


SEGMENTS = st.sampled_from([1, 2, 4, 8, 16, 32])


@given(words=WORDS, mode=st.sampled_from(["up", "down", "bfly", "idx"]), width=SEGMENTS, lane=st.integers(0, 31))
def test_shuffles(gpu: VirtualGPU, words: list[int], mode: str, width: int, lane: int) -> None:
    """Fault: a wrong source lane at the edge of a segment, or a wrong predicate."""
    segment = 32 - width
    clamp = segment << 8 | (0 if mode == "up" else 31)
    statement = f"shfl.sync.{mode}.b32 {{d0}}|{{d1}}, {{a0}}, {lane}, {clamp}, -1;"
    got, inside = micro.run(gpu, statement, ["b32", "pred"], [("b32", np.array(words, np.uint32))], block=64)
    for t in range(64):
        warp, me = t // 32 * 32, t % 32
        start, end = me // width * width, me // width * width + width - 1
        source = {
            "up": me - lane, "down": me + lane, "bfly": me ^ lane, "idx": start | (lane & (width - 1))
        }[mode]  # fmt: skip
        valid = source >= start if mode == "up" else source <= end
        assert bool(inside[t]) == valid
        assert int(got[t]) == words[warp + (source if valid else me)]


@given(words=WORDS)
def test_votes_and_reductions(gpu: VirtualGPU, words: list[int]) -> None:
    """Fault: lanes of another warp are counted, or a signed reduction compares unsigned."""
    signed = [w - 2**32 if w >> 31 else w for w in words]
    halves = [words[:32], words[32:]]
    cases = {
        "redux.sync.add.u32 {d0}, {a0}, -1;": lambda h: sum(h) % 2**32,
        "redux.sync.min.u32 {d0}, {a0}, -1;": min,
        "redux.sync.max.u32 {d0}, {a0}, -1;": max,
        "redux.sync.xor.b32 {d0}, {a0}, -1;": lambda h: int(np.bitwise_xor.reduce(np.array(h, np.uint32))),
        "redux.sync.or.b32 {d0}, {a0}, -1;": lambda h: int(np.bitwise_or.reduce(np.array(h, np.uint32))),
    }
    for statement, expect in cases.items():
        got = lanes(statement, "b32", words, gpu)
        assert got == [expect(h) for h in halves for _ in range(32)], statement
    got = lanes("redux.sync.min.s32 {d0}, {a0}, -1;", "s32", words, gpu)
    assert got == [min(h) for h in (signed[:32], signed[32:]) for _ in range(32)]
    odd = [sum((w & 1) << k for k, w in enumerate(h)) for h in halves]
    predicate = "{{ .reg .pred %o; .reg .b32 %m; and.b32 %m, {a0}, 1; setp.ne.u32 %o, %m, 0; "
    statement = predicate + "vote.sync.ballot.b32 {d0}, %o, -1; }}"
    assert lanes(statement, "b32", words, gpu) == [m for m in odd for _ in range(32)]
    for mode, expect in (("all", lambda m: m == 2**32 - 1), ("any", lambda m: m != 0)):
        statement = predicate + f"vote.sync.{mode}.pred {{d0}}, %o, -1; }}}}"
        assert lanes(statement, "pred", words, gpu) == [int(expect(m)) for m in odd for _ in range(32)]


@given(words=st.lists(st.sampled_from([0, 1, 2, 3]), min_size=64, max_size=64))
def test_match_any(gpu: VirtualGPU, words: list[int]) -> None:
    """Fault: equal values of another warp are counted."""
    got = lanes("match.sync.any.b32 {d0}, {a0}, -1;", "b32", words, gpu)
    for t in range(64):
        warp = t // 32 * 32
        assert got[t] == sum(1 << k for k in range(32) if words[warp + k] == words[t])


@given(words=WORDS)
def test_float_reductions_order_zeros_and_keep_nan(gpu: VirtualGPU, words: list[int]) -> None:
    """Fault: -0 above +0, a NaN lost with .NaN or kept without it; the compiler writes .NaN before .abs."""
    values = np.array(words, np.uint32).view(np.float32)
    for name in ("max", "min"):
        for nan in ("", ".NaN", ".NaN.abs", ".abs.NaN"):
            got = lanes(f"redux.sync.{name}{nan}.f32 {{d0}}, {{a0}}, -1;", "b32", words, gpu)
            for half in (0, 32):
                part = values[half : half + 32]
                part = np.abs(part) if "abs" in nan else part
                numbers = [v for v in part if not np.isnan(v)]
                if (nan and np.isnan(part).any()) or not numbers:
                    wanted = 0x7FFFFFFF
                else:
                    chosen = (max if name == "max" else min)(numbers, key=lambda v: (v, not np.signbit(v)))
                    wanted = int(np.float32(chosen).view(np.uint32))
                assert got[half] == wanted


ATOMIC = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 cells, .param .u64 index, .param .u64 values, .param .u64 old)
{{
    .reg .b32 %r<8>, %x;
    .reg .b64 %c, %i, %v, %o, %a;
    .shared .align 4 .b8 local[64];
    ld.param.u64 %c, [cells];
    ld.param.u64 %i, [index];
    ld.param.u64 %v, [values];
    ld.param.u64 %o, [old];
    mov.u32 %x, %tid.x;
    mad.wide.u32 %i, %x, 4, %i;
    mad.wide.u32 %v, %x, 4, %v;
    mad.wide.u32 %o, %x, 4, %o;
    ld.global.u32 %r1, [%i];
    ld.global.u32 %r2, [%v];
    mad.wide.u32 %a, %r1, 4, %c;
    {statement}
    ret;
}}
"""
INTEGER = {
    "add.u32": lambda o, v: (o + v) % 2**32,
    "min.u32": min,
    "max.u32": max,
    "and.b32": lambda o, v: o & v,
    "or.b32": lambda o, v: o | v,
    "xor.b32": lambda o, v: o ^ v,
    "exch.b32": lambda o, v: v,
    "inc.u32": lambda o, v: 0 if o >= v else o + 1,
    "dec.u32": lambda o, v: v if o == 0 or o > v else o - 1,
}


@given(
    op=st.sampled_from(sorted(INTEGER)),
    index=st.lists(st.integers(0, 3), min_size=64, max_size=64),
    values=WORDS,
    schedule=SCHEDULES,
)
def test_atomics_are_some_order_of_all_threads(
    op: str, index: list[int], values: list[int], schedule: str | int
) -> None:
    """Fault: an update is lost, or a thread gets a value that no order of the threads gives it."""
    cells = torch.full((4,), 7, dtype=torch.int32)
    old = torch.zeros(64, dtype=torch.int32)
    as_words = torch.from_numpy(np.array(values, np.uint32).view(np.int32))
    with virtual_gpu("sm_90a", schedule=schedule) as g:
        text = ATOMIC.format(statement=f"atom.global.{op} %r3, [%a], %r2; st.global.u32 [%o], %r3;")
        g.launch(text, "k", 1, 64, [cells, torch.tensor(index, dtype=torch.int32), as_words, old])
    apply = INTEGER[op]
    seen = [int(v) & 0xFFFFFFFF for v in old]
    for cell in range(4):
        threads = [t for t in range(64) if index[t] == cell]
        # Follow the chain: each thread found what another one left.
        now, left = 7, {t: (seen[t], apply(seen[t], values[t])) for t in threads}
        state = [now]
        if op in ("add.u32", "exch.b32", "inc.u32", "dec.u32", "xor.b32"):
            found = sorted(v[0] for v in left.values())
            produced = sorted([7, *(v[1] for v in left.values())])
            final = int(cells[cell]) & 0xFFFFFFFF
            produced.remove(final)
            assert found == produced
        else:
            for t in threads:
                state.append(apply(state[-1], values[t]))
            assert int(cells[cell]) & 0xFFFFFFFF == state[-1]


@given(
    values=st.lists(st.integers(-512, 512).map(lambda n: n / 128), min_size=64, max_size=64),
    kind=st.sampled_from(["f32", "bf16x2", "f16x2"]),
)
def test_float_atomics_round_every_addition(values: list[float], kind: str) -> None:
    """Fault: additions are not rounded one by one, or one half of a pair reaches the other.

    The values are multiples of 2^-7, so that float32 holds every sum before it is rounded to 16 bits.
    """
    if kind == "f32":
        words = np.array(values, np.float32).view(np.int32)
        suffix = "add.f32"
    else:
        dtype = torch.bfloat16 if kind == "bf16x2" else torch.float16
        pairs = torch.tensor(values, dtype=torch.float32).to(dtype)
        words = torch.stack((pairs, pairs.flip(0)), -1).view(torch.int32).reshape(-1).numpy()
        suffix = f"add.noftz.{kind}"
    cells = torch.zeros(1, dtype=torch.int32)
    with virtual_gpu("sm_90a") as g:
        text = ATOMIC.format(statement=f"red.global.{suffix} [%a], %r2;")
        g.launch(text, "k", 1, 64, [cells, torch.zeros(64, dtype=torch.int32), torch.from_numpy(words.copy()), cells])
    if kind == "f32":
        total = np.float32(0)
        for v in values:
            total = np.float32(total + np.float32(v))
        assert int(cells) == int(total.view(np.int32))
    else:
        halves = cells.view(dtype)
        for n, order in enumerate((pairs, pairs.flip(0))):
            total = torch.zeros((), dtype=dtype)
            for v in order:
                total = (total.float() + v.float()).to(dtype)
            assert halves[n] == total


@given(schedule=SCHEDULES)
def test_compare_and_swap_loop_counts_every_thread(schedule: str | int) -> None:
    """Fault: a spin on a compare-and-swap loses updates or never ends."""
    text = ATOMIC.format(
        statement="""
AGAIN:
    ld.relaxed.gpu.global.u32 %r3, [%c];
    add.u32 %r4, %r3, 1;
    atom.global.cas.b32 %r5, [%c], %r3, %r4;
    .reg .pred %again;
    setp.ne.u32 %again, %r5, %r3;
    @%again bra AGAIN;"""
    )
    cells = torch.zeros(4, dtype=torch.int32)
    zeros = torch.zeros(64, dtype=torch.int32)
    with virtual_gpu("sm_90a", schedule=schedule) as g:
        g.launch(text, "k", 3, 64, [cells, zeros, zeros, zeros])
        assert g.findings == []
    assert int(cells[0]) == 192


@pytest.mark.parametrize("schedule", ["fast", 1, 2, 3])
def test_block_reduction_barriers(schedule: str | int) -> None:
    """Fault: bar.red counts threads of another block, or lets threads pass early."""
    text = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 out)
{
    .reg .b32 %x, %c, %n, %r<4>;
    .reg .b64 %o;
    .reg .pred %p, %all, %any;
    ld.param.u64 %o, [out];
    mov.u32 %x, %tid.x;
    mov.u32 %c, %ctaid.x;
    mul.lo.u32 %r1, %c, 30;
    setp.lt.u32 %p, %x, %r1;
    barrier.cta.red.popc.aligned.u32 %n, 0, %p;
    barrier.cta.red.and.aligned.pred %all, 1, 96, %p;
    bar.red.or.pred %any, 2, %p;
    selp.u32 %r2, 1000, 0, %all;
    selp.u32 %r3, 2000, 0, %any;
    add.u32 %n, %n, %r2;
    add.u32 %n, %n, %r3;
    mad.lo.u32 %r1, %c, 96, %x;
    mad.wide.u32 %o, %r1, 4, %o;
    st.global.u32 [%o], %n;
    ret;
}
"""
    out = torch.zeros(5, 96, dtype=torch.int32)
    with virtual_gpu("sm_90a", schedule=schedule) as g:
        g.launch(text, "k", 5, 96, [out])
    for block in range(5):
        true = min(96, 30 * block)
        wanted = true + (1000 if true == 96 else 0) + (2000 if true else 0)
        assert out[block].tolist() == [wanted] * 96


def test_special_registers_and_shapes() -> None:
    """Fault: an index along the wrong axis."""
    names = ["%tid.x", "%tid.y", "%tid.z", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%laneid", "%lanemask_lt", "%ntid.y",
             "%nctaid.z", "%cluster_ctarank", "%clusterid.y"]  # fmt: skip
    stores = "\n".join(f"mov.u32 %r1, {n}; st.global.u32 [%o+{4 * k}], %r1;" for k, n in enumerate(names))
    text = f""".version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 out, .param .u64 counter)
{{
    .reg .b32 %r<4>, %slot;
    .reg .b64 %o, %c;
    ld.param.u64 %o, [out];
    ld.param.u64 %c, [counter];
    atom.global.add.u32 %slot, [%c], 1;
    mad.wide.u32 %o, %slot, {4 * len(names)}, %o;
    {stores}
    ret;
}}
"""
    grid, block, cluster = (4, 2, 3), (5, 2, 4), (2, 2, 1)
    count = 4 * 2 * 3 * 40
    out = torch.zeros(count, len(names), dtype=torch.int32)
    with virtual_gpu("sm_90a", schedule=4) as g:
        g.launch(text, "k", grid, block, [out, torch.zeros(1, dtype=torch.int32)], cluster=cluster)
    wanted = set()
    for c in np.ndindex(*grid):
        for t in np.ndindex(*block):
            lane = (t[0] + 5 * (t[1] + 2 * t[2])) % 32
            rank = c[0] % 2 + 2 * (c[1] % 2)
            wanted.add((*t, *c, lane, (1 << lane) - 1, 2, 3, rank, c[1] // 2))
    assert {tuple(int(v) & 0xFFFFFFFF for v in row) for row in out} == wanted


def test_symbols_vectors_generic_and_local_memory() -> None:
    """Fault: a generic address reaches another space, or a constant array is read at another place."""
    text = """.version 8.7
.target sm_90a
.address_size 64
.const .align 4 .b32 table[4] = {10, 20, 30, 0x28};
.global .align 4 .b32 counter;
.visible .entry k(.param .u64 out)
{
    .reg .b32 %r<12>, %x;
    .reg .b64 %o, %g, %h;
    .reg .b16 %h16<2>;
    .local .align 8 .b8 depot[32];
    .shared .align 8 .b8 space[512];
    ld.param.u64 %o, [out];
    mov.u32 %x, %tid.x;
    mad.wide.u32 %o, %x, 16, %o;
    and.b32 %r1, %x, 3;
    mov.u64 %g, table;
    mad.wide.u32 %g, %r1, 4, %g;
    ld.const.u32 %r2, [%g];
    mov.u64 %h, depot;
    cvta.local.u64 %h, %h;
    st.u32 [%h+4], %x;
    ld.local.u32 %r3, [depot+4];
    mov.u64 %g, space;
    cvta.shared.u64 %g, %g;
    mad.wide.u32 %g, %x, 8, %g;
    st.v2.u32 [%g], {%r2, %r3};
    cvta.to.shared.u64 %g, %g;
    ld.shared.v2.u32 {%r4, %r5}, [%g];
    atom.global.add.u32 %r6, [counter], 1;
    mov.b32 {%h16_0, %h16_1}, %r4;
    st.global.v4.u32 [%o], {%r4, %r5, %r6, %r2};
    ret;
}
""".replace("%h16_0", "%h160").replace("%h16_1", "%h161")
    out = torch.zeros(64, 4, dtype=torch.int32)
    with virtual_gpu("sm_90a") as g:
        g.launch(text, "k", 1, 64, [out])
        g.launch(text, "k", 1, 64, [out])
        assert g.findings == []
    for t in range(64):
        assert out[t].tolist()[:2] == [(10, 20, 30, 40)[t % 4], t]
    assert sorted(out[:, 2].tolist()) == list(range(64, 128))


def test_global_float_atomics_flush_and_shared_ones_do_not() -> None:
    """Fault: subnormal sums of atomics differ from an H200's, which flushes them in global memory only."""
    tiny = torch.tensor([3], dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int32)
    text = ATOMIC.format(
        statement="""mov.u32 %r4, local; st.shared.u32 [%r4], 5; atom.shared.add.f32 %r5, [%r4], %r2;
    ld.shared.u32 %r6, [%r4]; st.global.u32 [%o], %r6; red.global.add.f32 [%a], %r2;"""
    )
    cells, old = torch.tensor([5], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with virtual_gpu("sm_90a") as g:
        g.launch(text, "k", 1, 1, [cells, zero, tiny, old])
    assert cells.item() == 0
    assert old.item() == 8


@pytest.mark.parametrize(
    ("rest", "hint", "kept"),
    [
        ("", "", 4),
        ("", ", %policy", 4),
        (", 1", "", 1),
        (", %size", ", %policy", 3),
        (", %all", "", 0),
        (", !%all", ", %policy", 4),
    ],
)
def test_a_copy_keeps_what_it_is_told_to(rest: str, hint: str, kept: int) -> None:
    """Fault: a cache policy is taken for the size of the source, or the predicate that drops the source is not seen."""
    text = f""".version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 out, .param .u64 in)
{{
    .reg .b32 %r1, %r2, %size;
    .reg .b64 %out, %in, %policy;
    .reg .pred %all;
    .shared .align 16 .b8 cell[16];
    ld.param.u64 %out, [out];
    ld.param.u64 %in, [in];
    mov.u32 %r1, cell;
    mov.u32 %size, 3;
    setp.eq.u32 %all, %size, 3;
    createpolicy.fractional.L2::evict_first.b64 %policy, 1.0;
    cp.async.ca.shared.global{".L2::cache_hint" if hint else ""} [%r1], [%in], 4{rest}{hint};
    cp.async.wait_all;
    ld.shared.b32 %r2, [%r1];
    st.global.b32 [%out], %r2;
    ret;
}}
"""
    out, given = torch.zeros(4, dtype=torch.uint8), torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    with virtual_gpu("sm_90a") as gpu:
        gpu.launch(text, "k", 1, 1, [out, given])
        assert gpu.findings == []
    assert out.tolist() == [*range(1, kept + 1), *[0] * (4 - kept)]
