"""An elastic training, as a program: it ends after the steps that it took with the number of ranks in WAIT_FOR_SIZE."""

from __future__ import annotations

import os
import time
from typing import Any

STEPS = 5
_TIMEOUT_STEPS = 400


def main() -> None:
    """Train until there have been enough steps with all ranks."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def train(state: Any) -> None:
        while state.together < STEPS and state.step < _TIMEOUT_STEPS:
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            state.step += 1
            state.together += hvd.size() == int(os.environ["WAIT_FOR_SIZE"])
            if hvd.rank() == 0:
                print(f"step {state.step} of {hvd.size()}", flush=True)
            time.sleep(0.2)
            state.commit()

    state = hvd.elastic.TorchState(model, optimizer, step=0, together=0)
    train(state)
    print(f"finished with {state.together} together of {hvd.size()}", flush=True)


if __name__ == "__main__":
    main()
