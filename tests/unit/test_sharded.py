"""Parts of sharded tensors: where each rank's lies in the whole, against PyTorch's own answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer.errors import ConfigError
from trainer.models.sharded import local_part, shard_like

RANKS = 6


@contextmanager
def one_of_six(rank: int) -> Iterator[None]:
    """A process group of this process alone, which sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("shape", [(12, 3), (13, 3), (7,), (6, 6), (4, 2), (1, 1), (0, 2)], ids=str)
@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [
        ((6,), (Shard(0),)),
        ((6,), (Shard(-1),)),
        ((6,), (Replicate(),)),
        ((2, 3), (Replicate(), Shard(0))),  # hybrid sharding
        ((3, 2), (Shard(0), Shard(0))),
        ((2, 3), (Shard(-1), Shard(0))),
    ],
    ids=str,
)
def test_a_ranks_part_lies_where_pytorch_says(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Any, ...]
) -> None:
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    placements = tuple(Shard(one.dim % len(shape)) if one.is_shard() else one for one in placements)
    seen = torch.zeros(shape)
    for rank in range(RANKS):
        with one_of_six(rank):
            mesh = init_device_mesh("cpu", mesh_shape)
            like = DTensor.from_local(
                torch.zeros(0), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
            )
            sharded = shard_like(whole, like)
            (expected,) = sharded.__create_chunk_list__()
            local = sharded.to_local()
            assert local.shape == torch.Size(expected.sizes)
            box = tuple(slice(start, start + size) for start, size in zip(expected.offsets, local.shape, strict=True))
            assert torch.equal(local, whole[box])
            if (part := local_part(sharded)) is not None:
                assert part.offset == tuple(expected.offsets)
                seen[box] += 1
    assert torch.equal(seen, torch.ones(shape))


def test_a_part_that_is_no_box_is_refused() -> None:
    """As under tensor parallelism beneath fully_shard: its rows are not consecutive."""
    strided: Any = SimpleNamespace(
        shape=torch.Size([4]),
        dim=lambda: 1,
        placements=(_StridedShard(0, split_factor=2),),
        device_mesh=SimpleNamespace(shape=(2,), get_coordinate=lambda: [1]),
        to_local=lambda: torch.ones(2),
    )
    with pytest.raises(ConfigError, match=r"valid for checkpoints are Shard and Replicate$"):
        local_part(strided)
