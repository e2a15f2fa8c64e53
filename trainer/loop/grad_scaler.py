"""A check that a script under precision fp16 scales its loss with torch's GradScaler.

Micikevicius et al., "Mixed Precision Training" (2018), section 3.2. Once `Run.backward` has returned, all ranks hold
the same mean gradients, so their scalers skip the same steps and keep the same scale.
"""

from __future__ import annotations

import inspect

from torch.amp import GradScaler

from trainer.errors import TrainerError


def check_step_is_scaled() -> None:
    """Check that a GradScaler called the optimizer step that is running.

    A scaler leaves no mark on an optimizer, so its `step` is searched for in the call stack.

    Raises:
        TrainerError: no enabled scaler has called it.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "step":
            caller = frame.f_locals.get("self")
            if isinstance(caller, GradScaler) and caller.is_enabled():
                return
        frame = frame.f_back
    raise TrainerError(
        "precision is 'fp16', in which small gradients become 0 without a loss scale, and optimizer.step() was not "
        "called by an enabled GradScaler; before the loop: scaler = torch.amp.GradScaler(run.device.type); in it: "
        "run.backward(scaler.scale(loss)); scaler.unscale_(optimizer), before clipping; scaler.step(optimizer); "
        'scaler.update(); and for checkpoints: run.checkpoints(…, state={"scaler": scaler})'
    )
