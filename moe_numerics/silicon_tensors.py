"""Tensor copies in the silicon comparison: tiles of every rank, type and swizzle, their reductions, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moe_numerics.silicon_bulk import BEGIN, REGISTERS, cleared, copied, dumped, filled, tile_memory
from moe_numerics.silicon_data import BYTES, operand, operands
from moe_numerics.silicon_scenes import STOPPED, WAIT, Scene, as_bytes
from moe_numerics.virtual_gpu.tensor_map import ELEMENT_BITS, ELEMENT_TYPE, TensorMap

__all__ = ["tensors"]

_CODE = {name: code for code, name in ELEMENT_TYPE.items()}


@dataclass(frozen=True)
class Tile:
    """A tensor, a box of it and where the box begins.

    swizzle: 0 none, 1, 2, 3 for 32, 64 and 128 bytes. steps, nan: as in a tensor map.
    """

    kind: str
    sizes: tuple[int, ...]
    box: tuple[int, ...]
    at: tuple[int, ...]
    swizzle: int = 0
    steps: tuple[int, ...] = ()
    nan: bool = False

    @property
    def name(self) -> str:
        words = ("x".join(map(str, part)) for part in (self.sizes, self.box, self.at))
        steps = f".steps{'x'.join(map(str, self.steps))}" if self.steps else ""
        return f"{self.kind}.{'.'.join(words)}.swizzle{self.swizzle}{steps}{'.nan' if self.nan else ''}"

    @property
    def map(self) -> TensorMap:
        """The tensor map with rows padded to 16 bytes."""
        bits = ELEMENT_BITS[_CODE[self.kind]]
        strides = []
        span = -(-self.sizes[0] * bits // 128) * 16
        for size in self.sizes[1:]:
            strides.append(span)
            span *= size
        return TensorMap(
            0, bits, self.sizes, tuple(strides), self.box, self.swizzle, _CODE[self.kind], self.steps, self.nan
        )

    @property
    def rank(self) -> str:
        return f"{len(self.at)}d"

    @property
    def tensor_bytes(self) -> int:
        strides = self.map.strides
        return strides[-1] * self.sizes[-1] if strides else -(-self.sizes[0] * self.map.bits // 128) * 16

    @property
    def where(self) -> str:
        """The coordinates' registers."""
        return "{" + ", ".join(f"%c{k}" for k in range(len(self.at))) + "}"

    @property
    def moves(self) -> str:
        return " ".join(f"mov.b32 %c{k}, {v};" for k, v in enumerate(self.at))


_TILES = (
    Tile("u32", (100,), (64,), (-8,)),
    Tile("u8", (200,), (256,), (16,)),
    Tile("f64", (40,), (16,), (34,)),
    Tile("bf16", (72, 20), (64, 16), (-8, 7), 3),
    Tile("f16", (72, 20), (32, 24), (40, -3), 2),
    Tile("u8", (90, 9), (32, 8), (64, 2), 1),
    Tile("f32", (21, 6), (12, 5), (12, 3)),
    Tile("s32", (33, 40), (32, 32), (4, 8), 3),
    Tile("u16", (48, 5, 7), (64, 3, 4), (0, 3, 5), 3),
    Tile("u64", (10, 5, 7), (8, 2, 4), (4, -1, 0), 2),
    Tile("s64", (10, 4, 3), (4, 4, 2), (6, 0, 1), 1),
    Tile("bf16", (40, 6, 3, 4), (16, 4, 2, 3), (24, 4, -1, 2), 1),
    Tile("u8", (64, 5, 4, 3), (64, 3, 2, 2), (-16, 1, 3, 0), 2),
    Tile("u16", (24, 4, 3, 3, 4), (16, 2, 2, 2, 3), (8, 3, -1, 0, 2), 0),
    Tile("f32", (40, 3, 3, 2, 2), (32, 2, 2, 2, 1), (4, 0, 2, -1, 1), 3),
    Tile("bf16", (64, 8), (64, 8), (200, 0), 3),
    # Rows narrower than the swizzle.
    Tile("u8", (90, 9), (16, 8), (64, 2), 1),
    Tile("u16", (72, 20), (16, 16), (40, -3), 2),
    Tile("f32", (24, 20), (4, 16), (12, 3), 3),
    # Each second, third, ... row alone, of which some lie outside.
    Tile("u32", (64, 32), (16, 9), (4, -3), 2, (1, 2)),
    Tile("u16", (64, 32), (32, 12), (40, 25), 0, (2, 3)),
    Tile("f32", (24, 8, 8, 9), (8, 5, 4, 8), (4, 1, -1, 1), 1, (1, 2, 3, 8)),
    # Bits that conversions change: tf32 is rounded on the way in, subnormals of `.ftz` types stay.
    *(Tile(kind, (32, 40), (32, 32), (0, 4), 3) for kind in ("f32.ftz", "tf32", "tf32.ftz")),
    *(
        Tile(kind, (256 // width, 5), (64 // width, 4), (at, 3), 2, nan=True)
        for kind, width, at in (
            ("f16", 2, -8), ("bf16", 2, 120), ("f32", 4, -4), ("f32.ftz", 4, 60), ("f64", 8, -4), ("tf32", 4, 56),
            ("tf32.ftz", 4, -8),
        )
    ),
)  # fmt: skip


def _load(tile: Tile, space: str, ahead: str = "prefetch.tensormap [%p2]") -> Scene:
    """A tile from global memory to a block's own; `ahead` prefetches its tensor map."""
    size = tile.map.box_bytes
    copy = f"cp.async.bulk.tensor.{tile.rank}.{space}.global.tile.mbarrier::complete_tx::bytes"
    prefetch = f"cp.async.bulk.prefetch.tensor.{tile.rank}.L2.global.tile"
    body = f"""{BEGIN}{tile.moves}
    {cleared(size)}
    @%other bra READY;
    mbarrier.init.shared::cta.b64 [%bar], 1;
    fence.mbarrier_init.release.cluster;
    {ahead};
    {prefetch} [%p2, {tile.where}];
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {tile.map.copied_bytes};
    {copy} [%s], [%p2, {tile.where}], [%bar];
    READY:
    bar.sync 0;
    {WAIT.format(label="WAIT", parity=0)}
    {dumped(size, 1)}"""
    data = as_bytes(operand("f32" if tile.kind.endswith(("f32", "ftz")) else "u32", 0, tile.tensor_bytes // 4, 3))
    return Scene(
        f"{copy}.{tile.name}", body, (copy, prefetch, ahead.split()[0], "bra"), (data,), (size,), registers=REGISTERS,
        module=tile_memory(size), maps=((tile.map, 0),),
    )  # fmt: skip


def _multicast(tile: Tile) -> Scene:
    """Each of two blocks copies a tile of its own to both: the second one after the first in memory."""
    size = tile.map.box_bytes
    copy = (
        f"cp.async.bulk.tensor.{tile.rank}.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint"
    )
    body = f"""{BEGIN}{tile.moves}
    mov.u32 %rank, %cluster_ctarank; mov.b16 %mask, 3; createpolicy.fractional.L2::evict_last.b64 %policy, 1.0;
    @%other bra READY;
    mbarrier.init.shared::cta.b64 [%bar], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {2 * size};
    READY:
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    @%other bra SENT;
    mad.lo.u32 %k, %rank, {size}, %s; mad.lo.u32 %c1, %rank, {tile.box[1]}, %c1;
    {copy} [%k], [%p2, {tile.where}], [%bar], %mask, %policy;
    SENT:
    {WAIT.format(label="WAIT", parity=0)}
    {dumped(2 * size, 1)}
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    """
    data = as_bytes(operand("u32", 0, tile.tensor_bytes // 4, 4))
    return Scene(
        f"{copy}.{tile.name}", body, (copy,), (data,), (4 * size,), 128, 2, 2, REGISTERS, tile_memory(2 * size),
        maps=((tile.map, 0),),
    )  # fmt: skip


def _store(tile: Tile) -> Scene:
    """A tile to global memory, of which what lies outside the tensor is dropped."""
    size = tile.map.box_bytes
    name = f"cp.async.bulk.tensor.{tile.rank}.global.shared::cta.tile.bulk_group"
    body = f"""{BEGIN}{tile.moves}
    {filled(size)}
    @%other bra LEAVE;
    {name} [%p2, {tile.where}], [%s];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    LEAVE:
    """
    return Scene(
        f"{name}.{tile.name}", body, (name,), (as_bytes(operand("u32", 0, size // 4, 5)),), (tile.tensor_bytes,),
        registers=REGISTERS, module=tile_memory(size), maps=((tile.map, 1),),
    )  # fmt: skip


def _reduce(tile: Tile, op: str) -> Scene:
    """A tile combined with what lies inside the tensor."""
    size = tile.map.box_bytes
    name = f"cp.reduce.async.bulk.tensor.{tile.rank}.global.shared::cta.{op}.tile.bulk_group"
    body = f"""{BEGIN}{tile.moves}
    {copied(tile.tensor_bytes, 1, 2)}
    fence.proxy.async;
    {filled(size)}
    @%other bra LEAVE;
    {name} [%p3, {tile.where}], [%s];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    LEAVE:
    """
    kind = tile.kind.replace("tf32", "f32").removesuffix(".ftz")
    count = max(size, tile.tensor_bytes) // BYTES[kind]
    new, old = (as_bytes(v) for v in operands((kind, kind), count, seed=21))
    return Scene(
        f"{name}.{tile.name}", body, (name,), (new[:size], old[: tile.tensor_bytes]), (tile.tensor_bytes,),
        registers=REGISTERS, module=tile_memory(size), maps=((tile.map, 2),),
    )  # fmt: skip


_REDUCED = {
    "u32": ("add", "min", "max", "inc", "dec", "and", "or", "xor"),
    "s32": ("add", "min", "max", "and", "or", "xor"),
    "u64": ("add", "min", "max", "and", "or", "xor"),
    "s64": ("min", "max"),
    "f16": ("add", "min", "max"),
    "bf16": ("add", "min", "max"),
    **dict.fromkeys(("f32", "f32.ftz", "tf32", "tf32.ftz", "f64"), ("add",)),
}
"""The reductions that a type of elements has."""
_SHAPES = (
    ((24,), (16,), (8,)),
    ((24, 6), (8, 4), (16, 3)),
    ((16, 3, 5), (16, 2, 3), (8, 1, 3)),
    ((16, 3, 2, 3), (8, 2, 2, 2), (0, 2, 1, 1)),
    ((8, 3, 2, 3, 2), (8, 2, 2, 2, 2), (0, 1, 0, 2, 0)),
)


def _reductions() -> Iterator[Scene]:
    for n, (kind, op) in enumerate((kind, op) for kind, ops in _REDUCED.items() for op in ops):
        sizes, box, at = _SHAPES[n % 5]
        bits = ELEMENT_BITS[_CODE[kind]]
        yield _reduce(Tile(kind, sizes, box, at, (0, 1)[box[0] * bits <= 256]), op)
    # The last elements of a row are part of 16 bytes.
    yield _reduce(Tile("f32", (21, 6), (12, 5), (12, 3)), "add")
    yield _reduce(Tile("bf16", (41, 6), (24, 4), (24, 1)), "max")


def _stopped(tile: Tile, op: str = "") -> Scene:
    """A store, or a reduction, that the hardware does not do."""
    done = _reduce(tile, op) if op else _store(tile)
    return replace(done, name=f"{done.name}.stops", outputs=(max(len(STOPPED), *done.outputs),), stops=True)


def tensors() -> Iterator[Scene]:
    """Tiles from and to global memory, reductions, and copies that stop the device."""
    for n, tile in enumerate(_TILES):
        yield _load(tile, ("shared::cluster", "shared::cta")[n % 2])
        # A store begins inside the tensor, or past it.
        yield _store(replace(tile, at=tuple(max(0, c) for c in tile.at), nan=False))
    tile = Tile("u16", (64, 8), (64, 8), (8, 0), 3)
    yield _load(tile, "shared::cta", "prefetch.param.tensormap [p2]")
    constant = _load(replace(tile, at=(16, 0)), "shared::cta", "prefetch.const.tensormap [other]")
    yield replace(constant, module=f"{constant.module} .const .align 128 .b8 other[128];")
    yield _multicast(Tile("bf16", (72, 40), (64, 16), (-8, 7), 3))
    yield from _reductions()
    for at in ((0, -1), (4, 0)):
        yield _stopped(Tile("u16", (64, 16), (64, 8), at, 3))
    yield _stopped(Tile("u16", (16, 4), (16, 4), (0, 0)), "add")
