"""A loss that uses more than one model in DistributedDataParallel."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch import BigBatchWarning, Window
from bigbatch.torch import Accumulator
from bigbatch.torch import batch as nest
from tests.torch.training import flat

from .shared import sharded, whole

Step = Callable[[Any], Any]
OTHER = "goes through another model in DistributedDataParallel"


class Net(nn.Module):
    """A layer with a buffer, which DDP broadcasts before forward passes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, outputs)).double()
        self.register_buffer("scale", torch.full((), 1.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale


def nets() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return Net(4, 3), Net(3, 1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3)


def share(shares: list[int], rank: int) -> tuple[Tensor, Tensor] | None:
    parts = list(zip(*(t.split(shares) for t in everything(shares)), strict=True))
    return parts[rank] if shares[rank] else None


def everything(shares: list[int]) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(sum(shares), 4, dtype=torch.float64), torch.randn(sum(shares), 3, dtype=torch.float64)


def losses(generator: Any, discriminator: Any) -> tuple[Any, Any]:
    """The losses of a GAN: that of the generator, and that of the discriminator."""

    def generating(model: Any, batch: Any) -> Tensor:
        return F.softplus(-discriminator(model(batch[0]))).mean()

    def discriminating(model: Any, batch: Any) -> Tensor:
        with torch.no_grad():
            made = generator(batch[0])
        return F.softplus(model(made)).mean() + F.softplus(-model(batch[1])).mean()

    return generating, discriminating


def play(generator: nn.Module, discriminator: nn.Module, steps: tuple[Step, Step], batch: Any) -> None:
    for _ in range(3):
        steps[1](batch)
        generator.zero_grad()
        steps[0](batch)
        discriminator.zero_grad()


def played_alone(shares: list[int]) -> Tensor:
    generator, discriminator = nets()
    kinds = zip((generator, discriminator), losses(generator, discriminator), strict=True)

    def step_of(model: nn.Module, loss: Any) -> Step:
        optimizer = sgd(model)

        def step(batch: Any) -> None:
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()

        return step

    first, second = (step_of(model, loss) for model, loss in kinds)
    play(generator, discriminator, (first, second), everything(shares))
    return torch.cat([flat(generator), flat(discriminator)])


def by_batch(accumulator: Accumulator) -> Step:
    return accumulator.step


def by_window(accumulator: Accumulator) -> Step:
    return lambda batch: accumulator.step(Window([] if batch is None else nest.cut(batch, 2)[0]))


def by_micro_batch(accumulator: Accumulator) -> Step:
    def step(batch: Any) -> None:
        for part in [] if batch is None else nest.cut(batch, 2)[0]:
            with accumulator.micro_batch(weight=len(part[0])) as micro:
                micro.backward(accumulator.loss(accumulator.model, part))
        accumulator.flush()

    return step


WAYS = {"batch": by_batch, "window": by_window, "micro_batch": by_micro_batch}
DDP: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "unused": lambda model: DistributedDataParallel(model, find_unused_parameters=True),
}


@pytest.mark.filterwarnings(f"ignore:.*{OTHER}")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrap", DDP)
@pytest.mark.parametrize("sizes", [(7, 3), (0, 5), (1, 8)])
def test_a_gan_on_ranks_with_uneven_data(rank: int, size: int, sizes: tuple[int, int], wrap: str, way: str) -> None:
    shares = [sizes[r % 2] for r in range(size)]
    models = tuple(map(DDP[wrap], nets()))
    made = [
        WAYS[way](Accumulator(model, sgd(model), loss, 2, accumulation_steps=1000))
        for model, loss in zip(models, losses(*models), strict=True)
    ]
    play(*models, tuple(made), share(shares, rank))
    ours, alone = torch.cat(list(map(flat, models))), played_alone(shares)
    assert float((ours - alone).norm()) <= 1e-12 * float((alone - torch.cat(list(map(flat, nets())))).norm())
    assert all(model.require_backward_grad_sync for model in models)
    assert all(type(model.reducer).__module__ == "torch._C._distributed_c10d" for model in models)


@pytest.mark.filterwarnings(f"ignore:.*{OTHER}")
def test_plain_step_of_the_other_model_is_reduced_as_usual(rank: int, size: int) -> None:
    """DDP rebuilds its buckets after the first backward pass, which must not happen in the step of another model."""
    shares = [4] * size
    generator, discriminator = map(DistributedDataParallel, nets())
    generating, discriminating = losses(generator, discriminator)
    optimizer = sgd(discriminator)

    def plain(batch: Any) -> None:
        optimizer.zero_grad()
        discriminating(discriminator, batch).backward()
        optimizer.step()

    accumulator = Accumulator(generator, sgd(generator), generating, 3 if rank else 1)
    play(generator, discriminator, (accumulator.step, plain), share(shares, rank))
    ours = torch.cat([flat(generator), flat(discriminator)])
    torch.testing.assert_close(ours, played_alone(shares), rtol=1e-11, atol=1e-13)


def test_trainable_other_model_warns_once(rank: int, size: int) -> None:
    generator, discriminator = map(DistributedDataParallel, nets())
    batch = share([5] * size, rank)
    accumulator = Accumulator(generator, sgd(generator), losses(generator, discriminator)[0], 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            accumulator.step(batch)
            discriminator.zero_grad()
        assert [w.category for w in caught if OTHER in str(w.message)] == [BigBatchWarning]
        caught.clear()
        frozen = DistributedDataParallel(nets()[1])
        frozen.requires_grad_(False)
        Accumulator(generator, sgd(generator), losses(generator, frozen)[0], 2).step(batch)
        with torch.no_grad():
            discriminator(batch[1])
        assert not [w for w in caught if OTHER in str(w.message)]


@pytest.mark.parametrize("reduce", ["window", "micro_batch"])
@pytest.mark.filterwarnings(f"ignore:.*{OTHER}")
def test_sharded_model_with_another_in_ddp(rank: int, size: int, reduce: Any) -> None:
    shares = [9 if r else 4 for r in range(size)]
    generator, discriminator = nets()
    full, judge = nets()
    losses(full, judge)[0](full, everything(shares)).backward()
    sgd(full).step()
    generator = sharded(generator)
    discriminator = DistributedDataParallel(discriminator)
    loss = losses(generator, discriminator)[0]
    Accumulator(generator, sgd(generator), loss, 2, reduce=reduce).step(share(shares, rank))
    torch.testing.assert_close(whole(generator), flat(full), rtol=1e-11, atol=1e-13)
