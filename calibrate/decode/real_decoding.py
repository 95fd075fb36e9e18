"""Decoding with real models by the algorithms of this project.

The Python interface of `calibrate decode`. Seconds are measured on this machine, and the device is idle at the start and the end.
"""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from calibrate.decoders.eagle_and_medusa import DraftHead
from calibrate.decoders.transformers_adapter import Decoder
from calibrate.devices.device_failures import failure_of
from calibrate.interpreters.in_one_process import RandomDraws, Real, RunTimes, Sampling
from calibrate.untested_on_gpu import cuda_graphs
from model.base import checks, table_records
from model.base.checks import ParameterError
from model.interpret.simulated_answers import Answers
from model.logs.recorded_decoding import AnsweredRead, Decoding
from model.logs.spans import plain
from model.methods import registry
from model.methods.method_parameters import MethodParameters

if TYPE_CHECKING:
    from calibrate.untested_on_gpu.over_streams import Lanes
    from calibrate.workers.model_processes import ModelProcesses
    from calibrate.workers.worker_pool import Pool

DEPTH_KEYS = MappingProxyType({"target": "layers", "draft": "draft_layers", "medium": "medium_layers"})
"""Parameter that holds the depth of a model, by role."""


def decode(
    method: str, models: Mapping[str, Decoder], prompt: Sequence[int], tokens: int, settings: Mapping[str, Any] | None = None, *,
    sampling: Sampling | None = None, random_draws: RandomDraws | None = None, stop: Collection[int] = (), log: bool = False,
    answers: Answers | None = None, times: RunTimes | None = None, pool: Pool | ModelProcesses | None = None,
    lanes: Lanes | None = None, spans: list[dict[str, Any]] | None = None,
) -> Decoding:
    """Generate `tokens` tokens after a prompt, or fewer until one of the end tokens `stop`.

    Parameters
    ----------
    method
        A folder of `model/methods`, or the dotted path of a module that is allowed (`model.methods.registry.allow_modules`).
    models
        Decoders by role: the target and the other models of the method.
    settings
        Parameters of the method. Depths are read from the models.
    sampling, random_draws
        Distribution of sampled tokens, and the seeded random draws. Greedy without `sampling`.
    log
        Keep every read with its answer.
    pool
        Processes that run the passes of sub-processes (`calibrate.workers.worker_pool`), or one process per model
        (`calibrate.workers.model_processes`). By default this process runs all passes, one after another.
    lanes
        Streams of the target's GPU that run the passes of sub-processes (`calibrate.untested_on_gpu.over_streams`), instead of a
        pool.
    spans
        List to which the measured intervals are added (`model.logs.spans.plain`), for decodings over a pool or over streams.
    answers, times
        See `calibrate.interpreters.in_one_process.Real`. With `answers`, the prompt's tokens are the positions of a sequence, from
        0.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from calibrate.decoders.transformers_adapter import decoder_of
    >>> tiny = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)
    >>> models = {role: decoder_of(LlamaForCausalLM(tiny), role) for role in ("target", "draft")}
    >>> found = decode("speculative", models, [3, 5], 6, {"draft_length": 2})
    >>> len(found.tokens), found.settings["layers"], sum(found.rounds.values()) == len(found.commits)
    (6, 2, True)
    """
    checks.whole("tokens", tokens, 1, checks.MAX_TOKENS)
    text = tuple(int(token) for token in prompt)
    check_prompt(models, (0,) * len(text) if answers is not None else text, tokens)
    table = scheduled(method, {} if settings is None else settings, len(text), tokens)
    parameters = parameters_of(method, models, table, batches=answers is not None)
    check_room(models, parameters, len(text), tokens)
    whole = parameters.total_tokens(tokens)
    reads: list[AnsweredRead] = []
    more_of: dict[str, Any] = {"log": reads if log else None, "answers": answers, "times": times}
    more_of |= {"sampling": sampling, "random_draws": random_draws}
    real: Any
    over = lanes if pool is None else pool
    real = Real(models, **more_of) if over is None else _over(over, parameters, more_of | {"record": spans is not None})
    module = registry.algorithm(method)
    ends = tuple(stop) if takes_stop(method) else ()
    more = {"stop": ends} if ends else {}
    steps = module.decode(parameters, list(text), tokens, **more)
    settle(models)
    start = time.perf_counter()
    if times is not None:
        times.start = start
    before = cuda_graphs.launched_separately(models.values())
    try:
        work = real.run(steps, whole)
        settle(models)
    except RuntimeError as error:
        if not failure_of(error).memory:
            raise
        needed = f"a prompt of {len(text)} tokens and {tokens} more"
        raise ParameterError(f"the device has too little memory for {needed}; take fewer, or --device cpu") from None
    seconds = time.perf_counter() - start if over is None else real.seconds
    why = ["has sub-processes"] * bool(work.forks) + [*(cuda_graphs.launched_separately(models.values()) - before)]
    if why and cuda_graphs.mode_of(models["target"]) != "eager":
        raise ParameterError(f"mode must be eager for method {method}, which {why[0]} with these parameters, got cuda-graph")
    if spans is not None and over is not None:
        spans += plain(real.spans, real.run_start)
    return Decoding(
        method, parameters.table(), text, tokens, tuple(work.committed), work.account, ends, seconds, tuple(reads)
    )  # fmt: skip


def _over(over: Pool | ModelProcesses | Lanes, parameters: MethodParameters, more: Mapping[str, Any]) -> Any:
    """Return the interpreter over processes or over streams."""
    from calibrate.untested_on_gpu.over_streams import Lanes, Streams
    from calibrate.workers.model_processes import ModelProcesses, OverModels

    if parameters.reads_states:
        raise ParameterError("draft heads read the target's states in its process, got several processes or streams; decode in one")
    if isinstance(over, ModelProcesses):  # models may outnumber units; some then take turns
        return OverModels(over, **more)
    if parameters.units > over.units:
        what = "streams" if isinstance(over, Lanes) else "processes"
        raise ParameterError(f"units must be at least {parameters.units}, which the method reserves, got {over.units} {what}")
    if isinstance(over, Lanes):
        return Streams(over, **more)
    from calibrate.workers.over_processes import Parallel

    return Parallel(over, **more)


def parameters_of(
    method: str, models: Mapping[str, Decoder], settings: Mapping[str, Any], *, batches: bool = False
) -> MethodParameters:
    """Return the checked parameters of a method, with the depths of its models, and refuse missing or unused models.

    `batches` allows several sequences at once, which needs forced outcomes: real models decode one.
    """
    kind = registry.parameters(method)
    table = table_records.renamed(kind, settings)
    wanted = roles(method, table)
    for role in wanted:
        if role not in models:
            option = "model" if role == "target" else role
            raise ParameterError(f"method {method} needs a {role} model and has none; give one with --{option}")
    for role in models:
        if role not in wanted:
            has = f"has no {role} model" if len(wanted) > 1 else "drafts with no other model"
            raise ParameterError(f"--{role} is not used by method {method}, which {has} with these parameters; leave it out")
    for role in wanted:
        key = DEPTH_KEYS[role]
        if key in table and table[key] != models[role].layers:
            name = models[role].name
            given = checks.shown(table[key])
            raise ParameterError(f"{key} must be {models[role].layers}, as {name} has, got {given}; leave it out")
        table[key] = models[role].layers
    parameters: MethodParameters = table_records.build(kind, table, "method", "give it with --set KEY=VALUE")
    parameters.check_vocabulary(models["target"].vocabulary)
    for role in wanted[1:]:
        check_draft(method, parameters, role, models[role])
    if parameters.decoded_sequences > 1 and not batches:
        given = f"{parameters.decoded_sequences} sequences; leave out sequences and lengths"
        raise ParameterError(f"sequences must be 1, as real models decode one at a time, got {given}")
    if parameters.full_batch > 1:
        given = f"sequences={parameters.sequences} with batching={parameters.batching!r}"
        if not parameters.static_batches:
            bound = f"sequences must be 1, as method {method} decodes real sequences one at a time"
            raise ParameterError(f"{bound}, got {given}; leave out sequences")
        remedy = "set batching = 'static'" if batches else "leave out sequences"
        raise ParameterError(f"real batches are static: all sequences of a batch are decoded, got {given}; {remedy}")
    return parameters


def check_draft(method: str, parameters: MethodParameters, role: str, draft: Decoder) -> None:
    """Refuse a draft that cannot draft as the method does: a model instead of draft heads, or heads of the other kind."""
    reads = parameters.reads_states and role == "draft"
    if reads and not isinstance(draft, DraftHead):
        what = f"draft must be a file of draft heads for method {method} with these parameters, got the model {draft.name}"
        raise ParameterError(f"{what}; train them with calibrate heads --kind eagle, or set drafter = 'model'")
    if not isinstance(draft, DraftHead):
        return
    if not reads:
        what = f"{role} must be a model for method {method} with these parameters, got {draft.name}"
        raise ParameterError(f"{what}; give a model, or set drafter = 'heads' or 'parallel' of method speculative or tree")
    if draft.drafts_in_one_pass != parameters.drafts_in_one_pass:
        per = "all tokens in one pass" if draft.drafts_in_one_pass else "one token per pass"
        drafter = "parallel" if draft.drafts_in_one_pass else "heads"
        raise ParameterError(f"drafter must be '{drafter}' with {draft.name}, which drafts {per}; set drafter, or give other heads")
    depth = len(parameters.ranks_by_depth)  # of a tree, all of whose nodes at one depth are candidates of one head
    longest, name = (depth, "draft_depth") if depth else (parameters.longest_draft, "draft_length")
    if draft.longest_draft is not None and longest > draft.longest_draft:
        bound = f"{name} must be at most {draft.longest_draft}, the heads of {draft.name}"
        raise ParameterError(f"{bound}, got {longest}; draft fewer, or train more heads")


def scheduled(method: str, settings: Mapping[str, Any], prompt: int, tokens: int) -> dict[str, Any]:
    """Return the settings, with the lengths of prompt and sequence for a method whose schedule depends on positions.

    >>> scheduled("skipdecode", {"min_layers": 2}, 5, 16)
    {'prompt': 5, 'sequence_length': 21, 'min_layers': 2}
    """
    known = {field.name for field in dataclasses.fields(registry.parameters(method))}
    bounds = {"prompt": prompt, "sequence_length": prompt + tokens} if {"prompt", "sequence_length"} <= known else {}
    return bounds | dict(settings)


def exits_early(parameters: MethodParameters) -> bool:
    """True if tokens are read at layers before the last, where trained heads apply; assumed for outside methods."""
    if not type(parameters).__module__.startswith("model.methods."):
        return True
    return parameters.reads_early


def roles(method: str, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the roles of a method's models with these parameters, the target first."""
    kind = registry.parameters(method)
    return ("target", *kind.roles_for(table_records.renamed(kind, settings)))


def takes_stop(method: str) -> bool:
    """True if end tokens can stop the method, as they can all of `model/methods`."""
    return "stop" in inspect.signature(registry.algorithm(method).decode).parameters


def check_prompt(models: Mapping[str, Decoder], prompt: Sequence[int], tokens: int) -> None:
    """Refuse a prompt that is empty, has tokens outside a vocabulary, or exceeds a model's positions with the new tokens."""
    if not prompt:
        raise ParameterError("prompt must have at least one token, got none; begin with the model's start token")
    for role, decoder in models.items():
        wrong = [token for token in prompt if not 0 <= token < decoder.vocabulary]
        if wrong:
            bound = f"between 0 and {decoder.vocabulary - 1}, the vocabulary of model {decoder.name}"
            raise ParameterError(f"prompt must hold tokens {bound}, got {wrong[0]}; tokenize it with that model's tokenizer")
        needed = len(prompt) + tokens - 1  # no pass reads the last token
        if decoder.max_positions is not None and needed > decoder.max_positions:
            raise ParameterError(
                f"prompt and tokens must fit the {decoder.max_positions} positions of model {decoder.name} ({role}), got"
                f" {len(prompt)} and {tokens} tokens; take a shorter prompt or fewer tokens"
            )


def check_room(models: Mapping[str, Decoder], parameters: MethodParameters, prompt: int, tokens: int) -> None:
    """Refuse a context budget beyond prompt and tokens, and a batch whose drafts can exceed a model's positions.

    All sequences of a batch draft as long as any of them does.
    """
    parameters.check_context(prompt + tokens)
    beyond = parameters.overrun
    for role, decoder in models.items() if beyond else ():
        if decoder.max_positions is not None and prompt + tokens - 1 + beyond > decoder.max_positions:
            raise ParameterError(
                f"prompt, tokens and draft_length must fit the {decoder.max_positions} positions of model {decoder.name} ({role})"
                f" in a batch, all of whose sequences draft as long as any, got {prompt}, {tokens} and {beyond}; take fewer tokens"
            )


def warm(models: Mapping[str, Decoder]) -> None:
    """Run a token through every model, so that one-time work of the libraries is done."""
    for decoder in {id(decoder): decoder for decoder in models.values()}.values():
        decoder.warm()


def settle(models: Mapping[str, Decoder]) -> None:
    """Wait until all devices are idle."""
    for decoder in models.values():
        decoder.settle()
