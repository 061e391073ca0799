"""The teacher's head apart from its model: what goes into it, and what the model does behind it.

    logits = softcap * tanh(head(hidden) * scale / softcap)

Models name the two numbers in their configurations. Whether that is all they do is tried out once,
at start: on a real state and on one far larger, where a bend of the logits would show.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vocabtp.cache import TeacherHead
from vocabtp.opsd.errors import ModelError
from vocabtp.opsd.model import LanguageModel
from vocabtp.opsd.sharding import release, sharding_of

# how much larger the second state is, and how far what is found may be off, over its largest number
_LARGER, _ALLOWED = 64.0, 0.02


def scale_and_softcap(config: Any) -> tuple[float, float | None]:
    """What a model of this configuration does to the product with its head."""
    text = config.get_text_config()
    scale = 1.0
    for name, power in (("logit_scale", 1), ("lm_head_multiplier", 1), ("logits_scaling", -1)):
        value = getattr(text, name, None)
        if value is not None:
            scale *= float(value) ** power
    softcap = getattr(text, "final_logit_softcapping", None)
    return scale, None if softcap is None else float(softcap)


def response_states(
    model: LanguageModel, tokens: Tensor, attention_mask: Tensor, response_mask: Tensor
) -> tuple[Tensor, TeacherHead]:
    """What meets the head at the positions that predict response tokens, and the head.

    Args:
        model: The teacher.
        tokens: As for `LanguageModel.response_logits`.
        attention_mask: Likewise.
        response_mask: Likewise.

    Returns:
        `[rows, H]`, and this rank's columns of the head: its weights where they are now, copied
        only if they are gathered for this pass alone.
    """
    states, head, _ = _look(model, lambda x: x[:, :0], tokens, attention_mask, response_mask)
    return states, head


def check_head(model: LanguageModel) -> torch.dtype:
    """Compare what `TeacherHead` makes of a state with what the model makes of it.

    Every rank calls it; costs a forward over two tokens.

    Returns:
        The dtype of what meets the head.

    Raises:
        ModelError: On every rank: the model does something else with its head's output.
    """
    device = model.layout.device
    tokens = torch.zeros((1, 2), dtype=torch.long, device=device)
    response = torch.tensor([[False, True]], device=device)
    states, head, found = _look(
        model,
        lambda x: torch.cat([x, x * _LARGER], dim=1),
        tokens,
        torch.ones_like(tokens),
        response,
    )
    with model.layout.together():
        expected, found = head(torch.cat([states, states * _LARGER])).float(), found.float()
        for one, other in zip(expected, found, strict=True):
            # NaN is refused; an empty shard has nothing to compare
            finite = other[other.isfinite()].abs()
            allowed = _ALLOWED * (finite.max().item() if finite.numel() else 0.0)
            if not torch.isclose(one, other, rtol=0.0, atol=allowed).all():
                raise ModelError(
                    f"{model.name}: what the model does behind its head is more than a scale and "
                    "a soft cap that its configuration names: set teacher.payload to logits"
                )
    return states.dtype


def _look(
    model: LanguageModel, instead: Callable[[Tensor], Tensor], *batch: Tensor
) -> tuple[Tensor, TeacherHead, Tensor]:
    """What meets the head in a pass, the head, and the logits that the model makes of `instead`.

    `instead` takes and returns `[1, rows, H]`.
    """
    module = model.module
    scale, softcap = scale_and_softcap(module.config)
    # gathered over data-parallel ranks, and dropped behind this pass
    gathered = sharding_of(module) is not None
    seen: list[tuple[Tensor, TeacherHead]] = []

    def mine(parameter: Any) -> Any:
        if parameter is None:
            return None
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return local.detach().clone() if gathered else local.detach()

    def look(head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        weight, bias = mine(head.weight), mine(getattr(head, "bias", None))
        kept = TeacherHead(weight=weight, bias=bias, scale=scale, softcap=softcap)
        seen.append((args[0].squeeze(0), kept))
        return (instead(args[0]), *args[1:])

    # the last hook: rows are selected, and the parameters gathered and this rank's
    handle = module.get_output_embeddings().register_forward_pre_hook(look)
    try:
        logits = model.response_logits(*batch)
    finally:
        handle.remove()
        release(module)
    ((states, kept),) = seen
    return states, kept, logits
