"""Kernels of the silicon comparison that are more than one instruction: memory, atomics, barriers, matrix tiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import numpy.typing as npt

from moe_numerics.silicon_data import operand
from moe_numerics.virtual_gpu.tensor_map import TensorMap

__all__ = ["STOPPED", "Scene", "header", "scenes"]

STOPPED = b"stopped\0"
"""Stands for the outputs of a kernel that stopped its device; a scene that must do so has one output of this size."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Scene:
    """A kernel with its buffers.

    body: PTX after the registers' declaration; parameters p0, p1, ... point to the inputs, then to the outputs, then
    to the tensor maps (each with the number of the buffer it describes), which are parameters themselves.
    inputs: bytes. outputs: sizes in bytes; they begin as zeros. shows: the instructions that the results depend on.
    module: declarations before the kernel. cluster: blocks of a cluster along x. stops: whether a fault of the kernel
    is what is compared.
    """

    name: str
    body: str
    shows: tuple[str, ...]
    inputs: tuple[Bytes, ...]
    outputs: tuple[int, ...]
    threads: int = 128
    blocks: int = 1
    cluster: int = 1
    registers: str = ""
    module: str = ""
    targets: tuple[str, ...] = field(default=("sm_90a",))
    maps: tuple[tuple[TensorMap, int], ...] = ()
    stops: bool = False

    def ptx(self, target: str) -> str:
        """The module of the kernel `scene`."""
        pointers = len(self.inputs) + len(self.outputs)
        count = pointers + len(self.maps)
        parameters = [f".param .u64 p{n}" for n in range(pointers)]
        parameters += [f".param .align 64 .b8 p{n}[128]" for n in range(pointers, count)]
        loads = "\n    ".join(
            f"ld.param.u64 %p{n}, [p{n}];" if n < pointers else f"mov.b64 %p{n}, p{n}; cvta.param.u64 %p{n}, %p{n};"
            for n in range(count)
        )
        cluster = f".explicitcluster .reqnctapercluster {self.cluster}, 1, 1\n" if self.cluster > 1 else ""
        return f"""{header(target)}{self.module}
.visible .entry scene({", ".join(parameters)})
.reqntid {self.threads}, 1, 1
{cluster}{{
    .reg .b64 %p<{count}>;
    .reg .b32 %t, %c, %i, %s;
    {self.registers}
    {loads}
    mov.u32 %t, %tid.x;
    mov.u32 %c, %ctaid.x;
    mad.lo.u32 %i, %c, {self.threads}, %t;
    {self.body.strip()}
    ret;
}}
"""


def header(target: str) -> str:
    """The first lines of a module."""
    return f".version 8.7\n.target {target}\n.address_size 64\n"


def as_bytes(array: npt.NDArray[np.generic]) -> Bytes:
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1)


def _tiles() -> Iterator[Scene]:
    """`ldmatrix` and `stmatrix`: each lane names a row of a permutation of the rows in shared memory."""
    warp_rows = np.concatenate([np.argsort(operand("u64", 3, 32, seed), kind="stable") for seed in range(4)])
    rows = (warp_rows * 16 + np.repeat(np.arange(4), 32) * 512).astype(np.uint32)
    words = operand("u32", 0, 128 * 4, 9)
    for count, transposed in product((1, 2, 4), (False, True)):
        trans = ".trans" if transposed else ""
        registers = "{" + ", ".join(f"%r{k}" for k in range(count)) + "}"
        common = """
        mov.u32 %s, tile;
        mad.wide.u32 %at0, %t, 16, %p0; ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%at0];
        mad.wide.u32 %at1, %t, 4, %p1; ld.global.b32 %row, [%at1];
        add.u32 %row, %row, %s;
        mad.lo.u32 %k, %t, 16, %s;
        """
        load = f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16"
        body = f"""{common}
        st.shared.v4.b32 [%k], {{%r0, %r1, %r2, %r3}};
        bar.warp.sync 0xffffffff;
        mov.b32 %r0, 0; mov.b32 %r1, 0; mov.b32 %r2, 0; mov.b32 %r3, 0;
        {load} {registers}, [%row];
        mad.wide.u32 %at0, %t, 16, %p2; st.global.v4.b32 [%at0], {{%r0, %r1, %r2, %r3}};
        """
        declared = ".reg .b32 %r<4>, %row, %k; .reg .b64 %at<2>;"
        tile = ".shared .align 128 .b8 tile[2048];"
        inputs = (as_bytes(words), as_bytes(rows))
        shown = (load, "st.shared.v4.b32", "ld.global.v4.b32", "st.global.v4.b32", "bar.warp.sync")
        yield Scene(load, body, shown, inputs, (2048,), registers=declared, module=tile)
        store = f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16"
        body = f"""{common}
        st.shared.v4.b32 [%k], {{0, 0, 0, 0}};
        bar.warp.sync 0xffffffff;
        {store} [%row], {registers};
        bar.warp.sync 0xffffffff;
        ld.shared.v4.b32 {{%r0, %r1, %r2, %r3}}, [%k];
        mad.wide.u32 %at0, %t, 16, %p2; st.global.v4.b32 [%at0], {{%r0, %r1, %r2, %r3}};
        """
        yield Scene(store, body, (store, "ld.shared.v4.b32"), inputs, (2048,), registers=declared, module=tile)


def _barriers() -> Iterator[Scene]:
    body = """
    mad.wide.u32 %at, %i, 4, %p0; ld.global.b32 %v, [%at];
    and.b32 %n, %v, 3; setp.ne.u32 %q, %n, 0;
    bar.red.popc.u32 %r0, 0, %q;
    bar.red.and.pred %a, 0, %q; selp.b32 %r1, 1, 0, %a;
    bar.red.or.pred %a, 0, %q; selp.b32 %r2, 1, 0, %a;
    setp.lt.u32 %half, %t, 64;
    mov.b32 %r3, 7;
    @%half bra FIRST;
    barrier.cta.red.popc.u32 %r3, 2, 64, %q;
    bra MEET;
    FIRST:
    barrier.cta.red.popc.u32 %r3, 1, 64, %q;
    MEET:
    barrier.cta.sync 3; barrier.sync.aligned 4; bar.cta.sync 5; barrier.cta.sync.aligned 6, 128;
    mad.wide.u32 %at, %i, 16, %p1; st.global.v4.b32 [%at], {%r0, %r1, %r2, %r3};
    """
    yield Scene(
        "barrier.reductions", body,
        ("bar.red.popc.u32", "bar.red.and.pred", "bar.red.or.pred", "barrier.cta.red.popc.u32", "barrier.cta.sync",
         "barrier.sync.aligned", "bar.cta.sync", "barrier.cta.sync.aligned"),
        (as_bytes(operand("u32", 0, 512)),), (512 * 16,), 128, 4,
        registers=".reg .b32 %r<4>, %v, %n; .reg .pred %q, %a, %half; .reg .b64 %at;",
    )  # fmt: skip
    body = """
    mad.wide.u32 %at, %i, 4, %p0; ld.global.b32 %v, [%at];
    mov.u32 %s, cells; mad.lo.u32 %k, %t, 4, %s;
    setp.lt.u32 %q, %t, 64;
    @%q bra CONSUMER;
    st.shared.b32 [%k], %v;
    bar.arrive 1, 128;
    bra DONE;
    CONSUMER:
    bar.sync 1, 128;
    ld.shared.b32 %v, [%k+256];
    DONE:
    mad.wide.u32 %at, %i, 4, %p1; st.global.b32 [%at], %v;
    """
    yield Scene(
        "barrier.producer_consumer", body, ("bar.arrive", "bar.sync"),
        (as_bytes(operand("u32", 0, 256)),), (1024,), 128, 2,
        registers=".reg .b32 %v, %k; .reg .pred %q; .reg .b64 %at;", module=".shared .align 8 .b8 cells[512];",
    )  # fmt: skip


WAIT = """
    {label}:
    mbarrier.try_wait.parity.shared::cta.b64 %q, [%bar], {parity};
    @!%q bra {label};
"""


def _copies() -> Iterator[Scene]:
    """Asynchronous copies into shared memory and out of it."""
    data = as_bytes(operand("u32", 0, 1024))
    for op, size in (("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)):
        name = f"cp.async.{op}.shared.global"
        body = f"""
        mov.u32 %s, tile; mad.lo.u32 %k, %t, {size}, %s;
        mad.wide.u32 %at, %t, {size}, %p0;
        st.shared.b32 [%k], 0;
        and.b32 %n, %t, 1; mad.lo.u32 %n, %n, -4, {size};
        {name} [%k], [%at], {size}, %n;
        cp.async.commit_group;
        cp.async.wait_group 0;
        bar.sync 0;
        mov.u32 %n, %t;
        LOOP:
        mad.lo.u32 %k, %n, 4, %s; ld.shared.b32 %v, [%k];
        mad.wide.u32 %at, %n, 4, %p1; st.global.b32 [%at], %v;
        add.u32 %n, %n, 128;
        setp.lt.u32 %q, %n, {32 * size};
        @%q bra LOOP;
        """
        yield Scene(
            f"{name}.{size}", body, (name, "cp.async.commit_group", "cp.async.wait_group"), (data[: 128 * size],),
            (128 * size,), registers=".reg .b32 %k, %n, %v; .reg .pred %q; .reg .b64 %at;",
            module=".shared .align 128 .b8 tile[2048];",
        )  # fmt: skip
    body = (
        """
    mov.u32 %s, tile; mov.u32 %bar, barrier;
    setp.ne.u32 %other, %t, 0;
    @%other bra READY;
    mbarrier.init.shared::cta.b64 [%bar], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 2048;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%p0], 2048, [%bar];
    READY:
    bar.sync 0;
    """
        + WAIT.format(label="WAIT", parity=0)
        + """
    mad.lo.u32 %k, %t, 16, %s;
    ld.shared.v4.b32 {%r0, %r1, %r2, %r3}, [%k];
    add.u32 %r0, %r0, 1;
    st.shared.b32 [%k], %r0;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @%other bra LEAVE;
    cp.async.bulk.global.shared::cta.bulk_group [%p1], [%s], 2048;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    mbarrier.inval.shared::cta.b64 [%bar];
    LEAVE:
    """
    )
    yield Scene(
        "cp.async.bulk", body,
        ("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",
         "cp.async.bulk.global.shared::cta.bulk_group",
         "cp.async.bulk.commit_group", "cp.async.bulk.wait_group", "mbarrier.init.shared::cta.b64",
         "mbarrier.arrive.expect_tx.shared::cta.b64", "mbarrier.try_wait.parity.shared::cta.b64",
         "mbarrier.inval.shared::cta.b64", "fence.mbarrier_init.release.cluster", "fence.proxy.async.shared::cta"),
        (data[:2048],), (2048,), registers=".reg .b32 %k, %bar, %r<4>; .reg .pred %q, %other;",
        module=".shared .align 128 .b8 tile[2048]; .shared .align 8 .b8 barrier[8];",
    )  # fmt: skip


def _mbarriers() -> Iterator[Scene]:
    """Phases: every thread arrives, a late arrival and a drop decide when the phase ends."""
    body = (
        """
    mov.u32 %bar, barrier;
    setp.ne.u32 %other, %t, 0;
    @%other bra READY;
    mbarrier.init.shared::cta.b64 [%bar], 128;
    READY:
    bar.sync 0;
    mbarrier.test_wait.parity.shared::cta.b64 %q, [%bar], 1;
    selp.b32 %r0, 1, 0, %q;
    mbarrier.test_wait.parity.shared::cta.b64 %q, [%bar], 0;
    selp.b32 %r1, 1, 0, %q;
    bar.sync 0;
    setp.lt.u32 %half, %t, 64;
    @%half mbarrier.arrive.shared::cta.b64 %state, [%bar];
    @!%half mbarrier.arrive_drop.shared::cta.b64 %state, [%bar];
    """
        + WAIT.format(label="WAIT0", parity=0)
        + """
    bar.sync 0;
    mbarrier.test_wait.parity.shared::cta.b64 %q, [%bar], 0;
    selp.b32 %r2, 1, 0, %q;
    bar.sync 0;
    @%half mbarrier.arrive.shared::cta.b64 _, [%bar];
    """
        + WAIT.format(label="WAIT1", parity=1)
        + """
    bar.sync 0;
    mbarrier.test_wait.parity.shared::cta.b64 %q, [%bar], 1;
    selp.b32 %r3, 1, 0, %q;
    mad.wide.u32 %at, %t, 16, %p1; st.global.v4.b32 [%at], {%r0, %r1, %r2, %r3};
    """
    )
    yield Scene(
        "mbarrier.phases", body,
        ("mbarrier.init.shared::cta.b64", "mbarrier.test_wait.parity.shared::cta.b64",
         "mbarrier.arrive.shared::cta.b64",
         "mbarrier.arrive_drop.shared::cta.b64", "mbarrier.try_wait.parity.shared::cta.b64"),
        (np.zeros(16, np.uint8),), (2048,),
        registers=".reg .b32 %bar, %r<4>; .reg .b64 %at, %state; .reg .pred %q, %other, %half;",
        module=".shared .align 8 .b8 barrier[8];",
    )  # fmt: skip


def _clusters() -> Iterator[Scene]:
    """Two blocks read each other's shared memory and complete each other's barrier."""
    body = (
        """
    mov.u32 %s, cells; mad.lo.u32 %k, %t, 4, %s; mov.u32 %bar, barrier;
    mad.wide.u32 %at, %i, 4, %p0; ld.global.b32 %v, [%at];
    mov.u32 %rank, %cluster_ctarank; xor.b32 %peer, %rank, 1;
    st.shared.b32 [%k], %v;
    setp.ne.u32 %other, %t, 0;
    @%other bra READY;
    mbarrier.init.shared::cta.b64 [%bar], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 512;
    READY:
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    mapa.shared::cluster.u32 %far, %k, %peer;
    ld.shared::cluster.b32 %r0, [%far];
    mapa.shared::cluster.u32 %farbar, %bar, %peer;
    xor.b32 %v, %v, -1;
    add.u32 %far, %far, 512;
    st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%far], %v, [%farbar];
    getctarank.shared::cluster.u32 %r2, %far;
    """
        + WAIT.format(label="WAIT", parity=0)
        + """
    ld.shared.b32 %r1, [%k+512];
    mov.u32 %r3, %cluster_nctarank;
    mad.wide.u32 %at, %i, 16, %p1; st.global.v4.b32 [%at], {%r0, %r1, %r2, %r3};
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    """
    )
    yield Scene(
        "cluster", body,
        ("barrier.cluster.arrive.release.aligned", "barrier.cluster.wait.acquire.aligned", "mapa.shared::cluster.u32",
         "ld.shared::cluster.b32", "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32",
         "getctarank.shared::cluster.u32"),
        (as_bytes(operand("u32", 0, 512)),), (512 * 16,), 128, 4, 2,
        registers=".reg .b32 %k, %v, %bar, %rank, %peer, %far, %farbar, %r<4>; .reg .b64 %at; .reg .pred %q, %other;",
        module=".shared .align 8 .b8 cells[1024]; .shared .align 8 .b8 barrier[8];",
    )  # fmt: skip


def scenes() -> tuple[Scene, ...]:
    """Every scene, in a fixed order."""
    from moe_numerics.silicon_atomics import atomics
    from moe_numerics.silicon_bulk import bulk
    from moe_numerics.silicon_maps import changes
    from moe_numerics.silicon_memory import memories
    from moe_numerics.silicon_order import orders
    from moe_numerics.silicon_tensors import tensors
    from moe_numerics.silicon_wgmma import products

    families = (
        memories,
        _barriers,
        _mbarriers,
        _copies,
        _clusters,
        _tiles,
        atomics,
        products,
        orders,
        bulk,
        tensors,
        changes,
    )
    return tuple(scene for family in families for scene in family())
