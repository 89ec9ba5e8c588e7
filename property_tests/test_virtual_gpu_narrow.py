"""Narrow formats on the virtual GPU: `mma.sync` of FP8 and integers, stochastic rounding, and spread elements.

Faults this catches: a fragment's element in another place, a chain of products in another order, random bits that go to
another element, and 4- or 6-bit elements that lie elsewhere in shared memory.
"""

from __future__ import annotations

import ctypes
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_numerics.reference import tensor_core
from moe_numerics.reference.formats import E2M1, E4M3, E5M2

from moe_numerics.virtual_gpu import VirtualGPU, host_tensor_map, micro, tensor_map, virtual_gpu

FORMATS = {"e4m3": E4M3, "e5m2": E5M2, "e2m1": E2M1}
Codes = npt.NDArray[np.uint8]


def fragments(rows: Codes, halves: int) -> list[npt.NDArray[np.uint32]]:
    """Registers of a warp from a matrix of bytes [8 * halves, K], as PTX's figures for 8-bit operands draw them."""
    registers = []
    for r in range(halves * rows.shape[1] // 16):
        words = np.zeros((32, 4), np.uint8)
        for lane in range(32):
            k = 4 * (lane % 4) + 16 * (r // halves)
            words[lane] = rows[lane // 4 + 8 * (r % halves), k : k + 4]
        registers.append(words.view(np.uint32).reshape(-1))
    return registers


def multiply(gpu: VirtualGPU, name: str, a: Codes, b: Codes, c: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """One product; a [M, K], b [8, K] bytes, c [32, registers] and the result as registers."""
    given_registers = [*fragments(a, a.shape[0] // 8), *fragments(b, 1), *c.T]
    letters = [f"{{a{n}}}" for n in range(len(given_registers))]
    counts = (len(letters) - c.shape[1] - b.shape[1] // 16, b.shape[1] // 16, c.shape[1])
    groups, at = [], 0
    for count in counts:
        groups.append("{{" + ", ".join(letters[at : at + count]) + "}}")
        at += count
    results = "{{" + ", ".join(f"{{d{n}}}" for n in range(c.shape[1])) + "}}"
    statement = f"{name} {results}, {', '.join(groups)};"
    kinds = [("b32", np.ascontiguousarray(r)) for r in given_registers]
    return np.stack(micro.run(gpu, statement, ["b32"] * c.shape[1], kinds, 32), axis=1)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(("left", "right", "depth"), list(product(("e4m3", "e5m2"), ("e4m3", "e5m2"), (16, 32))))
def test_fp8_is_two_products_of_half_the_depth(arch: str, left: str, right: str, depth: int) -> None:
    rng = np.random.Generator(np.random.Philox(depth))
    a, b = (rng.integers(0, 120, (rows, depth)).astype(np.uint8) for rows in (16, 8))
    a[rng.random(a.shape) < 0.5] |= 0x80
    c = rng.standard_normal((16, 8)).astype(np.float32)
    chain = None
    for low in (0, 2):
        columns = [k for k in range(depth) if k % 4 in (low, low + 1)]
        x, y = (
            FORMATS[kind].decode(torch.from_numpy(codes[:, columns])).half() for kind, codes in ((left, a), (right, b))
        )
        chain = tensor_core.matmul(x, y.t(), chain, model=f"{arch[:-1]}.f16")
    assert chain is not None
    wanted = torch.from_numpy(c) + chain
    lanes, n = np.arange(32)[:, None], np.arange(4)[None, :]
    rows, columns_ = lanes // 4 + 8 * (n // 2), 2 * (lanes % 4) + n % 2
    with virtual_gpu(arch) as gpu:
        name = f"mma.sync.aligned.m16n8k{depth}.row.col.f32.{left}.{right}.f32"
        got = multiply(gpu, name, a, b, np.ascontiguousarray(c[rows, columns_]).view(np.uint32))
    assert np.array_equal(got, np.ascontiguousarray(wanted.numpy()[rows, columns_]).view(np.uint32))


@settings(max_examples=10)
@given(st.sampled_from([("m8n8k16", 8, 16), ("m16n8k16", 16, 16), ("m16n8k32", 16, 32)]), st.sampled_from("su"),
       st.sampled_from("su"), st.booleans(), st.integers(0, 99))  # fmt: skip
def test_integer_products_are_exact(shape: tuple[str, int, int], left: str, right: str, sat: bool, seed: int) -> None:
    name, m, depth = shape
    rng = np.random.Generator(np.random.Philox(seed))
    a, b = rng.integers(0, 256, (m, depth)).astype(np.uint8), rng.integers(0, 256, (8, depth)).astype(np.uint8)
    c = rng.integers(2**31 - 2**20, 2**31, (m, 8)) * rng.choice([-1, 1], (m, 8))
    kinds = {"s": np.int8, "u": np.uint8}
    exact = a.view(kinds[left]).astype(object) @ b.view(kinds[right]).astype(object).T + c
    wanted = np.clip(exact, -(2**31), 2**31 - 1) if sat else (exact + 2**31) % 2**32 - 2**31
    elements = m // 4
    lanes, n = np.arange(32)[:, None], np.arange(elements)[None, :]
    rows, columns = lanes // 4 + 8 * (n // 2), 2 * (lanes % 4) + n % 2
    with virtual_gpu("sm_90a") as gpu:
        text = f"mma.sync.aligned.{name}.row.col{'.satfinite' if sat else ''}.s32.{left}8.{right}8.s32"
        got = multiply(gpu, text, a, b, c[rows, columns].astype(np.int32).view(np.uint32))
    assert np.array_equal(got.view(np.int32), wanted[rows, columns].astype(np.int32))


def stochastic(statement: str, result: str, values: npt.NDArray[np.float32], random: npt.NDArray[np.uint32]) -> Codes:
    with virtual_gpu("sm_100a") as gpu:
        operands = [*(("f32", column) for column in values.T), ("b32", random)]
        (out,) = micro.run(gpu, statement, [result], operands)
    return np.ascontiguousarray(out).view(np.uint8).reshape(values.shape[0], -1)


def reverse(x: int) -> int:
    return int(f"{x:016b}"[::-1], 2)


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.integers(0, 999))
def test_stochastic_quads_use_the_bits_that_are_theirs(random: int, seed: int) -> None:
    """The first of a pair takes its half reversed; the upper half is that of the first two values."""
    rng = np.random.Generator(np.random.Philox(seed))
    values = (rng.uniform(1, 16, (8, 4)) * rng.choice([-1, 1], (8, 4))).astype(np.float32)
    words = np.full(8, random, np.uint32)
    codes = stochastic("cvt.rs.satfinite.e4m3x4.f32 {d0}, {{{a0}, {a1}, {a2}, {a3}}}, {a4};", "b32", values, words)
    high, low = random >> 16, random & 0xFFFF
    for n, own in enumerate((reverse(high), high, reverse(low), low)):
        bits = values[:, n].view(np.uint32).astype(np.int64) & 0x7FFFFFFF
        carried = (bits & 0xFFFFF) // 16 + own >= 1 << 16
        wanted = (bits >> 20) - (120 << 3) + carried
        assert np.array_equal(codes[:, 3 - n] & 0x7F, wanted)


@given(st.integers(0, 2**13 - 1), st.integers(0, 2**13 - 1))
def test_stochastic_halves_carry_as_the_sum_does(high: int, low: int) -> None:
    values = np.array([[1.000732421875, -1.0003662109375]], np.float32)
    codes = stochastic(
        "cvt.rs.f16x2.f32 {d0}, {a0}, {a1}, {a2};", "b32", values, np.array([high << 16 | low], np.uint32)
    ).view(np.uint16)
    rest = values.view(np.uint32)[0] & 0x1FFF
    assert codes[0, 1] == 0x3C00 + int(rest[0] + high >= 1 << 13)
    assert codes[0, 0] == 0xBC00 + int(rest[1] + low >= 1 << 13)


@pytest.mark.parametrize(("kind", "bits"), [(12, 4), (13, 6)])
def test_spread_elements_take_a_byte_each_in_shared_memory(kind: int, bits: int) -> None:
    """16 elements come packed at the start of 16 bytes, and a copy reports the bytes without the padding."""
    rng = np.random.Generator(np.random.Philox(bits))
    packed = rng.integers(0, 256, (4, 128 * bits // 8)).astype(np.uint8)
    source = torch.from_numpy(packed.copy()).clone()
    m = tensor_map.TensorMap(source.data_ptr(), bits, (128, 4), (packed.shape[1],), (128, 2), 0, kind)
    assert (m.box_bytes, m.copied_bytes) == (256, 256 * bits // 8)
    text = f""".version 8.8
.target sm_100a
.address_size 64
.visible .entry k(.param .align 64 .b8 map[128], .param .u64 out)
{{
    .reg .b32 %t, %tile, %bar, %x, %y, %v;
    .reg .b64 %m, %o;
    .reg .pred %p, %q;
    .shared .align 128 .b8 tile[256];
    .shared .align 8 .b8 bar[8];
    mov.b64 %m, map;
    ld.param.u64 %o, [out];
    mov.u32 %t, %tid.x;
    mov.u32 %tile, tile;
    mov.u32 %bar, bar;
    mov.b32 %x, 0;
    mov.b32 %y, 1;
    setp.ne.u32 %p, %t, 0;
    @%p bra READY;
    mbarrier.init.shared::cta.b64 [%bar], 1;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {m.copied_bytes};
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%tile], [%m, {{%x, %y}}], [%bar];
READY:
    bar.sync 0;
LOOP:
    mbarrier.try_wait.parity.shared::cta.b64 %q, [%bar], 0;
    @!%q bra LOOP;
    mad.lo.u32 %tile, %t, 4, %tile;
    ld.shared.b32 %v, [%tile];
    mad.wide.u32 %o, %t, 4, %o;
    st.global.b32 [%o], %v;
    ret;
}}
"""
    out = torch.zeros(64, dtype=torch.int32)
    with virtual_gpu("sm_100a") as gpu:
        gpu.allocate(source)
        gpu.launch(text, "k", 1, 64, [tensor_map.encode(m), out])
        assert gpu.findings == []
    groups = out.numpy().view(np.uint8).reshape(-1, 16)
    assert np.array_equal(groups[:, : 2 * bits], packed[1:3].reshape(-1, 2 * bits))
    assert not groups[:, 2 * bits :].any()


@given(st.sampled_from(sorted(tensor_map.DRIVER_TYPE)), st.integers(1, 5), st.sampled_from([0, 1, 2, 3]))
def test_the_drivers_arguments_make_the_tensor_map_they_name(kind: int, rank: int, swizzle: int) -> None:
    bits = tensor_map.ELEMENT_BITS[kind]
    row = 16 * 8 // bits if kind not in tensor_map.SPREAD else 16
    m = tensor_map.TensorMap(
        0x7000, bits, (64, 5, 4, 3, 2)[:rank], (1024, 8192, 1 << 20, 1 << 24)[: rank - 1],
        (row, 3, 2, 1, 2)[:rank], swizzle, kind,
    )  # fmt: skip
    arrays = [
        (ctypes.c_uint64 * rank)(*m.sizes), (ctypes.c_uint64 * max(rank - 1, 1))(*(m.strides or (0,))),
        (ctypes.c_uint32 * rank)(*m.box), (ctypes.c_uint32 * rank)(*[1] * rank),
    ]  # fmt: skip
    places = [ctypes.addressof(array) for array in arrays]
    raw = host_tensor_map.encode_tiled(tensor_map.DRIVER_TYPE[kind], rank, m.address, *places, 0, swizzle, 0, 0)
    assert tensor_map.decode(raw) == m
