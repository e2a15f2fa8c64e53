"""GlobalBatchNorm: PyTorch's own BatchNorm in a world of one, and the global batch's statistics in a larger one."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

from tests.unit.ranks_as_threads import Threads
from trainer.errors import ConfigError, TrainerError
from trainer.models.global_batch import GlobalBatch
from trainer.models.sync_batch_norm import GlobalBatchNorm, convert_sync_batch_norm
from trainer.strategies.base import Strategy


def assert_equal(first: Tensor | None, other: Tensor | None) -> None:
    torch.testing.assert_close(first, other, rtol=1e-12, atol=1e-12)


def assert_equal_buffers(first: nn.Module, other: nn.Module) -> None:
    for ours, theirs in zip(first.buffers(), other.buffers(), strict=True):
        assert_equal(ours, theirs)


def alone(tensor: Tensor) -> Tensor:
    """The all-reduce of a world of one."""
    return tensor


def twins(kind: type[nn.Module], **settings: object) -> tuple[nn.Module, GlobalBatchNorm]:
    """The same layer twice, with weights of its own: PyTorch's and ours."""
    layers = [kind(3, **settings).double() for _ in range(2)]
    for layer in layers:
        with torch.no_grad():
            for number, parameter in enumerate(layer.parameters()):
                parameter.copy_(torch.tensor([0.5, -1.5, 2.0]) + number)
    ours = convert_sync_batch_norm(layers[1], GlobalBatch(alone))
    assert isinstance(ours, GlobalBatchNorm)
    return layers[0], ours


INPUTS: dict[type[nn.Module], tuple[int, ...]] = {
    nn.BatchNorm1d: (6, 3),
    nn.BatchNorm2d: (5, 3, 4, 2),
    nn.BatchNorm3d: (2, 3, 2, 2, 3),
}


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize(
    "settings",
    [{}, {"affine": False}, {"momentum": None}, {"momentum": 0.3, "eps": 0.1}, {"track_running_stats": False}],
    ids=str,
)
def test_alone_it_equals_pytorchs_in_output_gradients_and_running_statistics(
    kind: type[nn.Module], settings: dict[str, object]
) -> None:
    theirs, ours = twins(kind, **settings)
    for step in range(3):
        # Far from 0, where a variance as a difference of squares would lose its digits.
        inputs = torch.randn(INPUTS[kind], dtype=torch.float64) * (step + 1) + 100
        taken = [inputs.clone().requires_grad_() for _ in range(2)]
        outputs = [layer(tensor) for layer, tensor in zip((theirs, ours), taken, strict=True)]
        assert_equal(outputs[1], outputs[0])
        for output in outputs:
            (output * torch.arange(output.numel()).reshape(output.shape).sin()).sum().backward()
        assert_equal(taken[1].grad, taken[0].grad)
    for first, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_equal(first.grad, other.grad)
    assert_equal_buffers(ours, theirs)
    inputs = torch.randn(INPUTS[kind], dtype=torch.float64)
    assert_equal(ours.eval()(inputs), theirs.eval()(inputs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_goes_in_and_out_with_sums_in_float32(dtype: torch.dtype) -> None:
    seen: list[torch.dtype] = []

    def all_reduce(tensor: Tensor) -> Tensor:
        seen.append(tensor.dtype)
        return tensor

    layer = convert_sync_batch_norm(nn.BatchNorm2d(3), GlobalBatch(all_reduce))
    inputs = (torch.randn(8, 3, 32, 32) + 5).to(dtype)
    output = layer(inputs)
    assert output.dtype == dtype
    assert set(seen) == {torch.float32}
    torch.testing.assert_close(output.float(), nn.BatchNorm2d(3)(inputs.float()), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("first", [4, 2, 1])
def test_two_ranks_with_uneven_pieces_equal_one_with_the_whole_batch(first: int) -> None:
    inputs = torch.randn(6, 3, 4, dtype=torch.float64) + 10
    factors = torch.randn(6, 3, 4, dtype=torch.float64)
    whole, _ = twins(nn.BatchNorm1d)
    taken = inputs.clone().requires_grad_()
    expected = whole(taken)
    (expected * factors).sum().backward()

    layers = [twins(nn.BatchNorm1d)[1] for _ in range(2)]
    parts = [part.clone().requires_grad_() for part in (inputs[:first], inputs[first:])]

    def work(rank: int, strategy: Strategy) -> Tensor:
        layers[rank].batch = GlobalBatch(strategy.all_reduce)
        output: Tensor = layers[rank](parts[rank])
        (output * (factors[:first] if rank == 0 else factors[first:])).sum().backward()
        return output

    assert_equal(torch.cat(Threads(2).run(work)), expected)
    assert_equal(torch.cat([part.grad for part in parts if part.grad is not None]), taken.grad)
    for layer in layers:
        assert_equal_buffers(layer, whole)


def test_a_penalty_on_gradients_has_the_second_derivatives_of_the_whole_batch() -> None:
    inputs = torch.randn(4, 3, dtype=torch.float64)

    def penalty(layer: nn.Module, taken: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(layer(taken).pow(3).sum(), taken, create_graph=True)
        return slope.square().sum()

    whole, _ = twins(nn.BatchNorm1d)
    taken = inputs.clone().requires_grad_()
    penalty(whole, taken).backward()

    layers = [twins(nn.BatchNorm1d)[1] for _ in range(2)]
    parts = [part.clone().requires_grad_() for part in inputs.split(2)]

    def work(rank: int, strategy: Strategy) -> None:
        layers[rank].batch = GlobalBatch(strategy.all_reduce)
        penalty(layers[rank], parts[rank]).backward()

    Threads(2).run(work)
    torch.testing.assert_close(torch.cat([part.grad for part in parts if part.grad is not None]), taken.grad)


class InAJob:
    """What a strategy is: neither to be copied nor to be pickled."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def __reduce__(self) -> str:
        raise TypeError("cannot pickle a strategy")


def test_a_model_can_be_copied_averaged_and_saved() -> None:
    model = convert_sync_batch_norm(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), GlobalBatch(InAJob().all_reduce))
    inputs = torch.randn(5, 3)
    expected = copy.deepcopy(model)(inputs)  # trains on, in the job
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    assert_equal(average(inputs), expected)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert_equal(loaded.eval()(inputs), model.eval()(inputs))
    with pytest.raises(TrainerError, match="build the model anew, load its state_dict"):
        loaded.train()(inputs)


def test_a_layer_in_several_places_is_one_layer_in_all_of_them_with_the_same_tensors() -> None:
    layer, root = nn.BatchNorm1d(3).eval(), nn.BatchNorm1d(3)
    inner = nn.ModuleDict({"first": layer, "again": layer})
    model = nn.Sequential(layer, inner, inner, nn.Linear(3, 3))
    parameters, keys = list(model.parameters()), list(model.state_dict())
    assert convert_sync_batch_norm(model, GlobalBatch(alone)) is model
    assert isinstance(model[0], GlobalBatchNorm)
    assert model[0] is inner["first"] is inner["again"]
    assert model[1] is model[2] is inner
    assert not model[0].training
    assert model[0].running_mean is layer.running_mean
    assert all(now is before for now, before in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == keys
    converted = convert_sync_batch_norm(root, GlobalBatch(alone))
    assert isinstance(converted, GlobalBatchNorm)
    assert converted.weight is root.weight
    assert convert_sync_batch_norm(converted, GlobalBatch(alone)) is converted


class BatchNormWithMore(nn.BatchNorm1d):
    """A layer of the user's."""


def test_a_subclass_is_refused_also_as_the_whole_model() -> None:
    for model in (BatchNormWithMore(3), nn.Sequential(BatchNormWithMore(3))):
        with pytest.raises(ConfigError, match="sync_batch_norm cannot replace BatchNormWithMore"):
            convert_sync_batch_norm(model, GlobalBatch(alone))
