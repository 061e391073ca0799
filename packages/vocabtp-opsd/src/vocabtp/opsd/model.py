"""A Hugging Face causal LM on this layout, with a head that may be cut over the vocabulary."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vocabtp.dist import VocabShard
from vocabtp.opsd.model_files import context_length
from vocabtp.opsd.padding import position_ids, right_padded
from vocabtp.opsd.parallel import Layout
from vocabtp.opsd.tp_plan import is_tied


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    """A causal LM and what this rank holds of it.

    Attributes:
        module: The Hugging Face model, its weights cut over `layout.tp_group` where that helps.
        shard: The columns of the head that `response_logits` and `next_logits` return.
        layout: This process's place.
        name: What messages call the model.
        forward: Called in place of `module` where a backward is to follow; None for `module`.
    """

    module: Any
    shard: VocabShard
    layout: Layout
    name: str
    forward: Callable[..., Any] | None = None

    @property
    def tied(self) -> bool:
        """Whether embedding and head are one parameter."""
        return is_tied(self.module)

    @property
    def context(self) -> int | None:
        """Longest sequence that the model was built for; None if it names none."""
        return context_length(self.module.config)

    def response_logits(
        self, tokens: Tensor, attention_mask: Tensor, response_mask: Tensor
    ) -> Tensor:
        """Logits at the positions that predict response tokens; only those meet the head.

        Each token is scored by the model's output at the token before it. The model sees padding
        on the right alone and no padding mask, so that attention has no row without a key: see
        `vocabtp.opsd.padding`.

        Args:
            tokens: `[B, T]` ids.
            attention_mask: `[B, T]`, 1 for tokens and 0 for padding, wherever it is.
            response_mask: `[B, T]` bool, True on response tokens; never on a row's first token.

        Returns:
            `[rows, L]` in the dtype the model computes, rows in the order of
            `response_mask.nonzero()`; the model's own scaling and soft-capping are in it.

        Raises:
            ValueError: The shapes differ, or the mask marks padding or a row's first token.
        """
        if not tokens.shape == attention_mask.shape == response_mask.shape or tokens.dim() != 2:
            raise ValueError(
                "response_logits: tokens, attention_mask and response_mask must share one [B, T] "
                f"shape, got {list(tokens.shape)}, {list(attention_mask.shape)} and "
                f"{list(response_mask.shape)}"
            )
        packed, columns = right_padded(tokens, attention_mask)
        rows, cols = response_mask.nonzero(as_tuple=True)
        before = columns[rows, cols] - 1
        if bool((before < 0).any()):
            raise ValueError(
                "response_logits: response_mask marks padding, or the first token of a row, which "
                "nothing predicts"
            )
        # causal: what follows a token, padding too, has no part in its logits
        logits, _ = self._logits_at(rows, before, input_ids=packed, use_cache=False)
        return logits

    def idle_logits(self) -> Tensor:
        """`[0, L]`: a forward over no response row, for collectives that other copies need."""
        tokens = torch.zeros((1, 1), dtype=torch.long, device=self.layout.device)
        mask = torch.ones_like(tokens)
        return self.response_logits(tokens, mask, torch.zeros_like(mask, dtype=torch.bool))

    def next_logits(
        self, tokens: Tensor, attention_mask: Tensor, cache: Any = None
    ) -> tuple[Tensor, Any]:
        """Logits of the token after the last column, and the key-value cache grown by `tokens`.

        Args:
            tokens: `[B, n]` ids that the cache does not hold yet.
            attention_mask: `[B, T]` over all columns so far, those in the cache included.
            cache: What the call before returned; None for the first.

        Returns:
            `[B, L]` logits and the cache for the next call.
        """
        key = _cache_argument(self.module)
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        logits, output = self._logits_at(
            rows,
            torch.full_like(rows, tokens.shape[1] - 1),
            input_ids=tokens,
            attention_mask=attention_mask,
            position_ids=position_ids(attention_mask)[:, -tokens.shape[1] :],
            use_cache=True,
            **{key: cache},
        )
        return logits, getattr(output, key)

    def _logits_at(self, rows: Tensor, cols: Tensor, **inputs: Any) -> tuple[Tensor, Any]:
        def select(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (args[0][rows, cols].unsqueeze(0), *args[1:])

        # prepend: a cut head then sums the gradient of these rows over the ranks, not of all
        handle = self.module.get_output_embeddings().register_forward_pre_hook(select, prepend=True)
        call = self.module if self.forward is None or not torch.is_grad_enabled() else self.forward
        try:
            output = call(**inputs)
        finally:
            handle.remove()
        return output.logits.squeeze(0), output


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Run a block in evaluation mode, then give every submodule its own mode back."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _cache_argument(module: Any) -> str:
    # transformers renames past_key_values to cache on the way to 5.40
    names = inspect.signature(type(module).forward).parameters
    return "cache" if "cache" in names else "past_key_values"
