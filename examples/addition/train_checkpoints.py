"""Make all that the addition demo starts from: data, tokenizer, teacher and student.

Plain supervised training with cross-entropy on the answer and the end token, on the CPU in fp32.
The teacher trains until it is good; the student is a smaller model of the same kind, trained by the
same loop and stopped as soon as it answers enough of a fixed sample of training prompts. Only sums
on the training side of the split are ever seen; held-out sums are counted at the end, no more.

    python examples/addition/train_checkpoints.py

It takes about five minutes on one core, and the same machine makes the same files.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from task import ANSWER_DIGITS, FILE_SIZES, HERE, write_answer, write_files, write_prompt
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
# 15 ids: a vocabulary that two tensor-parallel ranks cannot share evenly
VOCABULARY = [PAD, EOS, UNK, *"0123456789", "+", "="]
CHECK_SUMS = 1000


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One model and its training.

    `smoothing` keeps a teacher from a certainty that nobody can learn: with it a wrong token costs
    the student some 6 nats, without it 20. `stop_at` is the share of right answers that ends the
    training early.
    """

    name: str
    seed: int
    hidden: int
    layers: int
    intermediate: int
    tied: bool
    initial_std: float
    learning_rate: float
    steps: int
    smoothing: float
    batch: int
    stop_at: float


TEACHER = Recipe(
    name="teacher",
    seed=1,
    hidden=128,
    layers=3,
    intermediate=256,
    tied=False,
    initial_std=0.02,
    learning_rate=1e-3,
    steps=500,
    smoothing=0.02,
    batch=128,
    stop_at=2.0,
)
STUDENT = Recipe(
    name="student",
    seed=2,
    hidden=96,
    layers=2,
    intermediate=256,
    tied=True,
    # rows of a tied head that start small can only be sharpened slowly
    initial_std=0.06,
    learning_rate=2e-3,
    steps=3000,
    smoothing=0.0,
    batch=128,
    stop_at=0.4,
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A character-level tokenizer: one id a character, nothing added around the text."""
    ids = {token: number for number, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        model_max_length=64,
        clean_up_tokenization_spaces=False,
    )


def make_model(recipe: Recipe) -> PreTrainedModel:
    """A Qwen2 model of the recipe's size with fresh weights."""
    config = Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=recipe.intermediate,
        max_position_embeddings=64,
        tie_word_embeddings=recipe.tied,
        initializer_range=recipe.initial_std,
        bos_token_id=None,
        eos_token_id=VOCABULARY.index(EOS),
        pad_token_id=VOCABULARY.index(PAD),
    )
    torch.manual_seed(recipe.seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(
        eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id, do_sample=False
    )
    return model


def encode_sums(tokenizer: PreTrainedTokenizerFast, sums: list[tuple[int, int]]) -> Tensor:
    """`[N, T]` ids: prompt, answer, end token; every sum has the same length."""
    texts = [write_prompt(a, b) + write_answer(a, b) + EOS for a, b in sums]
    return torch.tensor(tokenizer(texts)["input_ids"])


def answer_logits(model: PreTrainedModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits `[N, A, V]` and targets `[N, A]` of the answer's digits and the end token."""
    length = ANSWER_DIGITS + 1
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return logits[:, -length:], tokens[:, -length:]


def right_share(logits: Tensor, targets: Tensor) -> float:
    """Share of rows of `[N, A, V]` logits whose first choices are all the targets `[N, A]`."""
    return (logits.argmax(-1) == targets).all(-1).double().mean().item()


@torch.no_grad()
def right_answers(model: PreTrainedModel, tokens: Tensor) -> float:
    """Share of sums answered exactly.

    One teacher-forced forward is enough: greedy decoding is right as long as, and only as long as,
    every token of the right answer is the first choice after the right ones before it.
    """
    return right_share(*answer_logits(model, tokens))


def train(recipe: Recipe, tokens: Tensor) -> PreTrainedModel:
    """Train a fresh model on rows of `tokens` until the recipe's last step or `stop_at`."""
    model = make_model(recipe)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    warmup, rate = 50, recipe.learning_rate
    order = torch.Generator().manual_seed(recipe.seed)
    # the last rows are kept for the checks, so that a check is not a memory test
    check, rows = tokens[-CHECK_SUMS:], tokens[:-CHECK_SUMS]
    began = time.perf_counter()
    for step in range(1, recipe.steps + 1):
        batch = rows[torch.randint(len(rows), (recipe.batch,), generator=order)]
        logits, targets = answer_logits(model, batch)
        loss = cross_entropy(
            logits.flatten(0, 1), targets.flatten(), label_smoothing=recipe.smoothing
        )
        # a linear decay for the one that trains to the end, constant for the one cut short
        decay = (1 - step / recipe.steps) if recipe.stop_at > 1 else 1.0
        optimizer.param_groups[0]["lr"] = rate * min(step / warmup, decay + 0.02, 1.0)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        batch_share = right_share(logits.detach(), targets)
        if step % 100 == 0 or batch_share >= recipe.stop_at - 0.1:
            share = right_answers(model, check)
            seconds = time.perf_counter() - began
            print(
                f"{recipe.name} step {step}: loss {loss.item():.4f}, "
                f"right {share:.1%}, {seconds:.0f} s",
                flush=True,
            )
            if share >= recipe.stop_at:
                break
    return model


def save(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, folder: Path
) -> None:
    """Write the model and the tokenizer to `folder / recipe.name`."""
    model.save_pretrained(folder / recipe.name)
    tokenizer.save_pretrained(folder / recipe.name)


def main() -> None:
    """Write data, tokenizer and the models asked for, and print what they know."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["teacher", "student"], help="train one of the two")
    parser.add_argument("--folder", type=Path, default=HERE, help="where to write (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)

    sides = write_files(options.folder)
    tokenizer = make_tokenizer()
    train_tokens = encode_sums(tokenizer, sides["train"][:200_000])
    heldout_tokens = encode_sums(tokenizer, sides["heldout"][: FILE_SIZES["heldout"]])
    for recipe in (TEACHER, STUDENT):
        if options.only in (None, recipe.name):
            model = train(recipe, train_tokens)
            save(model, tokenizer, recipe, options.folder)
            print(f"{recipe.name}: held-out exact match {right_answers(model, heldout_tokens):.1%}")


if __name__ == "__main__":
    main()
