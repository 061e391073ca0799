"""Models cut by DeepSpeed's AutoTP, with a head that is cut over the vocabulary.

AutoTP replaces linear layers by layers of its own, which hold a part of the weights, and goes by
the same plan that the model carries for the torch engine. What it has made of a model is compared
with that plan, because all that AutoTP does not recognise it leaves whole without a word, and a
norm inside of cut heads whose gradient nobody sums goes its own way on every rank.

Which part of a weight a rank holds, and which columns of the head, is read from what AutoTP has
noted down. Its parts are not always those of `torch.chunk`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

from vocabtp.dist import VocabShard
from vocabtp.opsd.engine.deepspeed_start import start
from vocabtp.opsd.engine.places import Place, even_sizes, set_place
from vocabtp.opsd.errors import ConfigError, ModelError
from vocabtp.opsd.parallel import Layout
from vocabtp.opsd.tp_plan import Role, is_tied, module_roles

_INSTEAD = "set parallel.tp_by to plan"
# what AutoTP leaves on a parameter whose gradient it sums
_SUMMED = "_ds_grad_allreduce_registered"


@dataclass(frozen=True, slots=True)
class Cut:
    """A model that AutoTP has cut, perhaps before it has any weights."""

    module: Any
    autotp: Any
    roles: Mapping[str, Role]
    name: str

    def finish(self) -> VocabShard:
        """Sum what ranks have only shares of, and read the head's columns; after the weights.

        Returns:
            The bounds that AutoTP gave the head of this rank.

        Raises:
            ModelError: AutoTP leaves the gradient of some norm to each rank.
        """
        with _quiet():
            # hooks of the weights themselves, which a frozen model has no use for
            if self.module.get_output_embeddings().weight.requires_grad:
                self.autotp.register_replicated_grad_hooks(self.module)
        for path, role in self.roles.items():
            if role == "sum_gradient":
                for key, weight in self.module.get_submodule(path).named_parameters():
                    if weight.requires_grad and not hasattr(weight, _SUMMED):
                        raise ModelError(
                            f"{self.name}: AutoTP does not sum the gradient of {path}.{key} over "
                            f"the ranks: {_INSTEAD}"
                        )
        head = self.module.get_output_embeddings()
        return VocabShard(
            head.vocab_start_index, head.vocab_end_index, head.vocab_size, head.mp_group
        ).check()


def check_model(module: Any, name: str) -> None:
    """Refuse what AutoTP would cut by guessing, or not at all; works on the meta device.

    Raises:
        ModelError: The model carries no plan, or its embedding does more than a look-up.
    """
    if not module.tp_plan:
        raise ModelError(
            f"{name}: carries no tensor-parallel plan, without which AutoTP would guess which "
            f"layers to cut: {_INSTEAD}"
        )
    embedding = module.get_input_embeddings()
    if type(embedding).forward is not nn.Embedding.forward:
        raise ModelError(
            f"{name}: its embedding ({type(embedding).__name__}) does more than a look-up, which "
            f"AutoTP does not cut: {_INSTEAD}"
        )


def cut(module: Any, layout: Layout, name: str) -> Cut:
    """Replace the layers by AutoTP's; nothing is sent.

    Args:
        module: A Hugging Face causal LM, equal on all tensor-parallel ranks, or on the meta device;
            changed in place.
        layout: This process's place; two or more tensor-parallel ranks.
        name: What errors call the model.

    Raises:
        ConfigError: DeepSpeed is not installed, or has another AutoTP.
        ModelError: As `check_model`, a plan with styles or sizes that are not supported, or AutoTP
            makes something else of it than the plan says.
    """
    check_model(module, name)
    roles = module_roles(module, layout.tp, cut_vocab=True, name=name)
    tied = is_tied(module)
    deepspeed = start(layout)
    # layers of AutoTP that are made or run otherwise are for inference, and sum in place
    deepspeed.set_autotp_mode(training=True)
    with _quiet():
        try:
            autotp = _apply(module, layout)
        except (ValueError, NotImplementedError) as error:
            # further sentences advise what is refused here, such as a plan of one's own
            reason = str(error).split(". ")[0]
            raise ModelError(f"{name}: AutoTP refuses it: {reason}: {_INSTEAD}") from error
        except (AttributeError, ImportError, TypeError) as error:
            # much of what is called there has no promise to stay
            raise ConfigError(
                f"parallel.tp_by is autotp, but the AutoTP of DeepSpeed {deepspeed.__version__} is "
                f"another one than that of 0.19.8 ({error}): install that, or {_INSTEAD}"
            ) from error
    _check_layers(module, roles, tied, name)
    _note_places(module, layout)
    return Cut(module, autotp, roles, name)


def _apply(module: Any, layout: Layout) -> Any:
    """What `deepspeed.initialize` does of AutoTP, which also cuts models without weights."""
    plan = _theirs("runtime.tensor_parallel.config")._get_hf_tp_plan(module)
    specs = _theirs("module_inject.tp_plan_converter").TPPlanConverter.convert(plan)
    config = _theirs("module_inject.autotp_config").AutoTPConfig(
        tp_size=layout.tp, layer_specs=specs
    )
    autotp = _theirs("module_inject.auto_tp").AutoTP(
        module=module,
        all_reduce_linears=(),
        prefix="",
        state_dict=None,
        linear_layer_setting=(nn.Linear, nn.Embedding),
        orig_layer_impl=None,
        partition_config=config,
        vocab_parallel_lm_head=True,
        model_config=module.config,
        training_mode=True,
    )
    # the groups of this run, and not others that DeepSpeed would make for itself
    autotp.mp_group, autotp.mp_size = layout.tp_group, layout.tp
    autotp._resolve_vocab_parallel_lm_head()
    autotp.update_linear_policies()
    # a model that carries a plan computes by the sizes that its weights have; it would divide
    # sizes of whole blocks too, such as `embed_dim`, by which some models split their weights
    autotp.update_mp_params = lambda *_args: None
    autotp._replace_module(module)
    return autotp


def _check_layers(module: Any, roles: Mapping[str, Role], tied: bool, name: str) -> None:
    layers = _theirs("module_inject.layers")
    kinds: dict[Role, type[nn.Module]] = {
        "colwise": layers.LinearLayer,
        "rowwise": layers.LinearAllreduce,
        "head": layers.VocabParallelLinear,
        # a whole one is right too, but for one that shares the head's weight
        "embedding": layers.VocabParallelEmbedding if tied else nn.Embedding,
    }
    for path, part in module.named_modules():
        wanted = kinds.get(roles[path]) if path in roles else None
        cut_by_autotp = isinstance(part, layers.TensorParallel_Layer)
        if type(part) is not wanted and (wanted is not None or cut_by_autotp):
            raise ModelError(
                f"{name}: AutoTP makes {type(part).__name__} of {path}, where the model's plan "
                f"asks for {'a whole layer' if wanted is None else wanted.__name__}: {_INSTEAD}"
            )
    if tied != is_tied(module):
        raise ModelError(f"{name}: AutoTP unties its head from its embedding: {_INSTEAD}")


def _note_places(module: nn.Module, layout: Layout) -> None:
    key = _theirs("checkpoint.constants").DS_AUTOTP_UC_META
    assert layout.mesh is not None
    for parameter in module.parameters():
        noted = getattr(parameter, key, None)
        if noted is None or noted["replicated"]:
            continue
        shape, dim = torch.Size(noted["logical_shape"]), noted["partition_dim"]
        sizes = tuple(noted["partition_sizes"])
        assert parameter.shape[dim] == sizes[layout.tp_rank]
        set_place(
            parameter,
            Place(
                mesh=layout.mesh["tp"],
                placements=[Shard(dim)],
                shape=shape,
                stride=torch.empty(shape, device="meta").stride(),
                sizes=None if sizes == even_sizes(shape[dim], layout.tp) else sizes,
            ),
        )


def _theirs(name: str) -> Any:
    return importlib.import_module(f"deepspeed.{name}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """AutoTP tells standard output, which is the user's, what it does."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
