"""Replicas: descriptions from which any process makes the same model, by loading it or by drawing random weights."""

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
    """Description of a model that any process can reproduce bit by bit.

    Parameters
    ----------
    model
        A directory, `family:target` or OWNER/NAME, as for `calibrate decode`; with random weights an architecture: the name of a
        preset, or a configuration of the transformers library in JSON.
    random
        Seed of random weights. None loads the model.
    spread
        Factor of random weight matrices: without one, the library's random models repeat a single token.
    heads
        File of trained heads, for a loaded model.

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
            bound = "spread is used only with random weights"
            raise ParameterError(f"{bound}, and these are loaded; leave it out, got {self.spread:g}")
        checks.number("spread", self.spread, 0)

    def load(self) -> Decoder:
        """Load or draw the model in this process."""
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
        # For a GPU, draw on the GPU and in the final dtype: drawing billions of numbers on the host takes minutes.
        cuda = self.device.startswith("cuda")
        there = {"dtype": getattr(torch, self.dtype)} if cuda else {}
        with torch.random.fork_rng(devices=[self.device] if cuda else []), torch.device(self.device):
            torch.manual_seed(seed)
            full = of.from_config(config, **there)
        with torch.no_grad():
            for parameter in full.parameters():
                if parameter.ndim > 1:
                    parameter *= self.spread
        full.generation_config.eos_token_id = None  # random weights shall not end a sequence
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
            raise ParameterError(f"model must be a configuration that transformers accepts: {checks.shown(said)}") from None
