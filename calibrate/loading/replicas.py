"""What a process needs to have the same model as another: where it is loaded from, or what random weights are drawn from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.base import checks
from model.base.checks import ParameterError

if TYPE_CHECKING:
    from calibrate.decoders.transformers_adapter import Decoder


@dataclass(frozen=True)
class Replica:
    """A model that any process can make again, to the last bit.

    Parameters
    ----------
    model
        A directory, `family:target` or OWNER/NAME, as `calibrate decode` takes it; or, of random weights, an architecture: the name
        of a preset, or a configuration of the transformers library in JSON.
    random
        The seed of random weights. None: the model is loaded.
    spread
        What random matrices are multiplied by: as they are drawn, the library's models say one token over and over.
    heads
        A file of trained heads, of a model that is loaded.

    >>> Replica("family:target").random is None, Replica("family:target", random=1, heads="heads.safetensors")
    Traceback (most recent call last):
        ...
    model.base.checks.ParameterError: heads are trained for a model's weights, and these are random; leave them out
    """

    model: str
    device: str = "cpu"
    dtype: str = "float32"
    random: int | None = None
    spread: float = 1.0
    heads: str | None = None

    def __post_init__(self) -> None:
        if self.random is not None:
            checks.whole("random", self.random, 0)
            if self.heads is not None:
                raise ParameterError("heads are trained for a model's weights, and these are random; leave them out")
        elif self.spread != 1.0:
            raise ParameterError(f"spread is of random weights, and these are loaded; leave it out, got {self.spread:g}")
        checks.number("spread", self.spread, 0)

    def load(self) -> Decoder:
        """The model, in this process; its name and tokenizer are with it where it has any."""
        if self.random is not None:
            return self._drawn(self.random)
        from calibrate.loading import load_models

        found = load_models.model(self.model, self.device, self.dtype)
        if self.heads is not None:
            load_models.use_heads(found, Path(self.heads))
        return found.decoder

    def _drawn(self, seed: int) -> Decoder:
        import torch
        import transformers

        from calibrate.decoders.transformers_adapter import decoder_of
        from calibrate.family import model_directory

        name, config = self._architecture()
        checks.one_of("dtype", self.dtype, model_directory.DTYPES)
        of: Any = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
        # On a GPU they are drawn where they stay and as they stay: tens of billions of numbers would take minutes elsewhere.
        cuda = self.device.startswith("cuda")
        there = {"dtype": getattr(torch, self.dtype)} if cuda else {}
        with torch.random.fork_rng(devices=[self.device] if cuda else []), torch.device(self.device):
            torch.manual_seed(seed)
            full = of.from_config(config, **there)
        with torch.no_grad():
            for parameter in full.parameters():
                if parameter.ndim > 1:
                    parameter *= self.spread
        full.generation_config.eos_token_id = None  # what random weights write does not end
        return decoder_of(full.to(getattr(torch, self.dtype)).to(self.device), name)

    def _architecture(self) -> tuple[str, Any]:
        if not self.model.lstrip().startswith("{"):
            from calibrate.loading.architectures import architecture

            found = architecture(self.model)
            return found.name, found.config
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        try:
            said = json.loads(self.model)
            return f"random {said['model_type']}", CONFIG_MAPPING[said["model_type"]].from_dict(said)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            said = (str(error).splitlines() or [""])[0]
            raise ParameterError(f"model is no configuration that transformers takes: {checks.shown(said)}") from None
