"""`calibrate decode`: decode with real models by any method; report tokens by source, acceptance, passes and seconds."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calibrate.commands import common_options as options
from model.base import strict_json

if TYPE_CHECKING:
    from calibrate.decode.decode_report import Result
    from calibrate.decoders.transformers_adapter import Decoder
    from calibrate.interpreters.in_one_process import Sampling
    from calibrate.loading.load_models import LoadedModel, TokenizedPrompt
    from calibrate.loading.prompts import Prompt
    from calibrate.loading.replicas import Replica
    from calibrate.workers.model_processes import ModelProcesses
    from model.methods.method_parameters import MethodParameters

_FROM = "A directory, OWNER/NAME of the hub, or a bundled model such as family:target."


@options.guarded
def decode(
    method: Annotated[str, typer.Argument(help="speculative, ppd, bild, ... (`sim ls methods`), or a dotted module.")],
    model: Annotated[str, typer.Option(help=f"Target model. {_FROM} `family`: the bundled models for all roles.")],
    draft: Annotated[
        str | None, typer.Option(help="The draft model, for methods that have one; or a file of draft heads: see calibrate heads.")
    ] = None,
    medium: Annotated[str | None, typer.Option(help="The medium model of hierarchical drafting.")] = None,
    heads: Annotated[Path | None, typer.Option(help="Trained exit heads of the target: see calibrate heads.")] = None,
    set: Annotated[
        list[str] | None, typer.Option("--set", help="Set a parameter: --set draft_length=4. `layers` is read from the model.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="One prompt, as text. An encoder-decoder reads it with its encoder.")] = None,
    prompts: Annotated[str | None, typer.Option(help="A file of prompts (.txt, .jsonl, ...), or a data set by name.")] = None,
    template: options.Template = None,
    limit: Annotated[int | None, typer.Option(help="Maximum number of prompts.")] = None,
    tokens: Annotated[int, typer.Option(help="Maximum number of tokens to generate, fewer if an end token comes.")] = 64,
    sample: Annotated[bool, typer.Option("--sample", help="Sample tokens, for methods that can. Default: greedy.")] = False,
    temperature: Annotated[float | None, typer.Option(help="Temperature, with --sample. Default: 1.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k likeliest tokens, with --sample. Default: all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling probability, with --sample. Default: 1.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed, with --sample. Default: 0.")] = None,
    dtype: options.Dtype = "float32",
    device: options.Device = None,
    threads: options.Threads = None,
    processes: Annotated[bool, typer.Option("--processes", help="Run each model in a process on a separate core.")] = False,
    log: Annotated[Path | None, typer.Option(help="FILE.parquet to log every read and its answer, with FILE.json.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Also run plain decoding, and compare outputs and times.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
    quiet: options.Quiet = False,
) -> None:
    """Decode with real models: tokens by source, accepted lengths, acceptance rates, passes and seconds.

    calibrate decode speculative --model family --set draft_length=4 --prompt "def main(" --plain

    calibrate decode speculative --model family:target --draft family:eagle --set drafter=heads --set draft_length=4 --prompt "a"

    calibrate decode ppd --model family:target --heads heads.safetensors --set exit_layer=8 --set candidates=3 --prompt "import "

    calibrate decode bild --model BIG --draft SMALL --set fallback_threshold=0.5 --set rollback_threshold=3 --prompts prompts.txt

    calibrate decode pearl --model family --set draft_length=4 --processes --prompt "def main("

    Parameters are those of scenarios: `sim ls methods NAME`. The prompt and sequence length of SkipDecode default to those of each
    prompt. Prompts are decoded one after another.
    """
    from calibrate.decode import real_decoding
    from calibrate.loading import load_models
    from calibrate.loading.prompts import CHAT
    from calibrate.loading.replicas import Replica
    from model.base import checks
    from model.base.checks import ParameterError

    checks.whole("tokens", tokens, 1, checks.MAX_TOKENS)
    settings = _settings(method, set or [], sample)
    sampling = _sampling(settings.get("sampled") is True, temperature, top_k, top_p, seed)
    roles = real_decoding.roles(method, settings)
    names = load_models.named({"target": model, "draft": draft, "medium": medium}, roles, method)
    _refuse_existing(log)
    asked = _prompts(prompt, prompts, template, limit)
    where = options.prepare_device(device, threads)
    models = load_models.models(names, where, dtype)
    run = _Run(method, settings, models, tokens, sampling, seed or 0, plain, log is not None)
    tokenized = run.tokenize(asked, chat=template == CHAT)
    read_by = run.use_heads(heads, tokenized[0])
    parameters = run.parameters(tokenized[0].prompt)
    if processes and parameters.reads_states:
        raise ParameterError("--processes is not for draft heads, which read the target's states in its process; leave it out")
    replicas = {role: Replica(name, where, dtype) for role, name in names.items()} if processes else {}
    head = {
        "method": method, "exact": run.exact, "settings": settings, "tokens": tokens, "seed": run.seed,
        "sampling": None if sampling is None else vars(sampling), "heads": read_by, "device": where, "dtype": dtype,
        "models": run.about, "versions": run.versions,
    }  # fmt: skip
    with _apart(replicas, parameters.target_replicas) as pool:
        _follow(replace(run, pool=pool), asked, tokenized, head | {"processes": processes}, log, as_json, quiet)


@contextlib.contextmanager
def _apart(replicas: Mapping[str, Replica], copies: int) -> Iterator[ModelProcesses | None]:
    """Start one process per model, if there are any, and `copies` of the target."""
    if not replicas:
        yield None
        return
    from calibrate.workers.model_processes import started

    with started(replicas, copies={"target": copies}) as found:
        yield found


def _settings(method: str, pairs: Sequence[str], sample: bool) -> dict[str, Any]:
    """Return the parameters under their present names. Refuse unknown ones before any model is loaded."""
    from model.base import table_records
    from model.base.checks import ParameterError
    from model.methods import registry

    kind = registry.parameters(method)
    table = table_records.renamed(kind, {key: value for key, (value,) in options.assignments("set", pairs)})
    table_records.refuse_unknown(kind, table, "method")
    if sample:
        if "sampled" not in kind.names():
            raise ParameterError(f"--sample is not used by method {method}, which is greedy; leave it out")
        if table.get("sampled") is False:
            raise ParameterError("--sample and --set sampled=false contradict each other; leave one out")
        table["sampled"] = True
    return table


def _sampling(
    sampled: bool, temperature: float | None, top_k: int | None, top_p: float | None, seed: int | None
) -> Sampling | None:
    """Return the sampling parameters, or None for greedy decoding."""
    from calibrate.interpreters.in_one_process import Sampling
    from model.base import checks
    from model.base.checks import ParameterError

    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    law: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if not sampled:
        for name in law:
            raise ParameterError(f"--{name.replace('_', '-')} is used only with --sample; add that, or leave it out")
        return None
    checks.whole("seed", law.pop("seed", 0), 0)
    return Sampling(**law)


def _prompts(prompt: str | None, prompts: str | None, template: str | None, limit: int | None) -> list[Prompt | str]:
    """Return the prompts: the text of the command line, or those of a file."""
    from calibrate.loading import prompts as files
    from model.base import checks
    from model.base.checks import ParameterError

    if (prompt is None) == (prompts is None):
        given = "got both" if prompt is not None else "got neither"
        raise ParameterError(f"one of --prompt TEXT and --prompts FILE must be given, {given}")
    if prompts is not None:
        return [*files.load(prompts, template=template, limit=limit)]
    if limit is not None:
        raise ParameterError("--limit is used only with --prompts; leave it out")
    if template not in (None, files.CHAT):
        checks.one_of("template", template, files.CHOICES)
        raise ParameterError(f"--template {template} is used only with --prompts; take chat, or leave it out")
    assert prompt is not None
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise ParameterError("--prompt must be text in UTF-8, got other bytes") from None
    return [prompt]


def _refuse_existing(log: Path | None) -> None:
    """Refuse to overwrite a log, before anything is decoded."""
    from calibrate.family import model_directory
    from model.logs import read_log

    if log is not None:
        path = read_log.json_of(log)
        for each in (path, path.with_suffix(".parquet")):
            model_directory.refuse_existing(each, "--log")


_SIZES = ("layers", "vocabulary")


@dataclass(frozen=True, eq=False)
class _Run:
    """Settings and models that all prompts share."""

    method: str
    settings: Mapping[str, Any]
    models: Mapping[str, LoadedModel]
    tokens: int
    sampling: Sampling | None
    seed: int
    plain: bool
    log: bool
    pool: ModelProcesses | None = None

    @property
    def decoders(self) -> dict[str, Decoder]:
        """Decoders by role."""
        return {role: each.decoder for role, each in self.models.items()}

    @property
    def target(self) -> LoadedModel:
        """The target model."""
        return self.models["target"]

    @property
    def about(self) -> dict[str, dict[str, Any]]:
        """Name, checksum and sizes of each model, by role."""
        return {
            role: {"name": each.name, "checksum": each.checksum} | {name: getattr(each.decoder, name) for name in _SIZES}
            for role, each in self.models.items()
        }

    @property
    def versions(self) -> dict[str, str]:
        """Versions of Python and of the libraries."""
        import platform

        from calibrate.devices import machine

        return {"python": platform.python_version(), **machine.versions()}

    @property
    def exact(self) -> bool:
        """True if the output is that of the target alone."""
        return self.parameters((0,)).exact

    def parameters(self, prompt: Sequence[int]) -> MethodParameters:
        """Parameters of the method for this prompt."""
        from calibrate.decode import real_decoding

        settings = real_decoding.scheduled(self.method, self.settings, len(prompt), self.tokens)
        return real_decoding.parameters_of(self.method, self.decoders, settings)

    def tokenize(self, asked: Sequence[Prompt | str], *, chat: bool) -> list[TokenizedPrompt]:
        """Tokenize all prompts, and refuse those that cannot be decoded before any is."""
        from calibrate.decode import real_decoding
        from calibrate.loading import load_models
        from model.base.checks import ParameterError

        found = []
        for each in asked:
            named = "prompt" if isinstance(each, str) else f"prompt {each.id}"
            one = load_models.tokenize(self.target, each if isinstance(each, str) else each.text, named, chat=chat)
            try:
                real_decoding.check_prompt(self.decoders, one.prompt, self.tokens)
            except ParameterError as error:
                raise ParameterError(str(error) if isinstance(each, str) else f"{named}: {error}") from None
            found.append(one)
        self.parameters(found[0].prompt)
        return found

    def use_heads(self, heads: Path | None, tokenized: TokenizedPrompt) -> list[int]:
        """Attach trained heads to the target, and return their layers."""
        from calibrate.decode import real_decoding
        from calibrate.loading import load_models
        from model.base.checks import ParameterError

        if heads is None:
            return []
        if not real_decoding.exits_early(self.parameters(tokenized.prompt)):
            raise ParameterError(f"--heads is not used by method {self.method} here, which exits at no early layer; leave it out")
        return [*load_models.use_heads(self.target, heads)]

    def warm(self) -> None:
        """Run one pass of every model, so that the first timed pass is warm."""
        from calibrate.decode import real_decoding

        real_decoding.warm(self.decoders)

    def decode(self, number: int, prompt: Prompt | str, tokenized: TokenizedPrompt) -> Result:
        """Decode a prompt, and also by plain decoding if wanted."""
        from calibrate.decode import real_decoding
        from calibrate.decode.decode_report import Result
        from calibrate.interpreters.in_one_process import RandomDraws
        from calibrate.loading import load_models
        from model.methods import registry

        load_models.read_source(self.models, tokenized.source)
        stop, random_draws = self.target.decoder.ends, RandomDraws(self.seed, number)
        own = real_decoding.decode(
            self.method, self.decoders, tokenized.prompt, self.tokens, self.settings, sampling=self.sampling,
            random_draws=random_draws, stop=stop,
            log=self.log, pool=self.pool,
        )  # fmt: skip
        plainly = None
        if self.plain:
            plainly = real_decoding.decode(
                registry.PLAIN, {"target": self.target.decoder}, tokenized.prompt, self.tokens,
                {"sampled": self.sampling is not None},
                sampling=self.sampling, random_draws=RandomDraws(self.seed, number), stop=own.stop, pool=self.pool,
            )  # fmt: skip
        pieces = load_models.pieces(self.target.tokenizer, tokenized.prompt, own.tokens)
        if isinstance(prompt, str):
            return Result("prompt", "the command line", own, pieces, plainly)
        return Result(prompt.id, prompt.source, own, pieces, plainly)


def _follow(
    run: _Run, asked: Sequence[Prompt | str], tokenized: Sequence[TokenizedPrompt], head: Mapping[str, Any], log: Path | None,
    as_json: bool, quiet: bool,
) -> None:
    """Decode prompt by prompt and show each result, then the totals; an interrupt keeps the results so far."""
    from calibrate.decode.decode_report import Printer, document

    results: list[Result] = []
    layers = run.target.decoder.layers
    printer = Printer(layers, sampled=run.sampling is not None, exact=run.exact)
    stopped = False
    try:
        # Results that are printed as they finish need no progress bar.
        with options.progress(quiet or len(asked) == 1 or (printer.styled and not as_json), "prompts") as bar:
            run.warm()
            for number, (prompt, one) in enumerate(zip(asked, tokenized, strict=True)):
                results.append(run.decode(number, prompt, one))
                if not as_json:
                    printer.result(results[-1], several=len(asked) > 1)
                if bar is not None:
                    bar(len(results), len(asked), results[-1].name)
    except KeyboardInterrupt:
        stopped = True
    finally:
        if log is not None and results:
            _save(run, results, log)
    if as_json:
        print(strict_json.dumps(document(results, {**head, "interrupted": stopped}, layers), indent=1))
    elif len(results) > 1:
        printer.line(f"--- all {len(results)} prompts ---")
        printer.numbers(results)
    if stopped:
        print(f"interrupted after {len(results)} of {len(asked)} prompts; what was decoded is kept", file=sys.stderr)
        raise typer.Exit(130)


def _save(run: _Run, results: Sequence[Result], log: Path) -> None:
    from model.logs import read_log

    path = read_log.save(
        read_log.ReadLog(
            tuple(each.decoding for each in results), tuple(each.name for each in results), run.about,
            None if run.sampling is None else vars(run.sampling), run.seed, time.strftime("%Y-%m-%d", time.gmtime()), run.versions,
        ),
        log,
    )  # fmt: skip
    print(f"log: {path.with_suffix('.parquet')} and {path.name}", file=sys.stderr)
