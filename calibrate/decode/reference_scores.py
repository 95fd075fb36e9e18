"""Scores of outputs against references: BLEU and ROUGE-L, the task scores of the papers on lossy methods.

BLEU is that of a corpus by sacrebleu [Post2018], with its default tokenizer 13a and smoothing. ROUGE-L is the mean over sequences
of the F1 of the longest common subsequence by rouge-score [Lin2004], with stemming; of several references the best one counts. Both
are in percent. The libraries are the optional extra `quality`.

[Post2018] M. Post. A Call for Clarity in Reporting BLEU Scores. WMT 2018, arXiv:1804.08771.
[Lin2004] C.-Y. Lin. ROUGE: A Package for Automatic Evaluation of Summaries. Workshop on Text Summarization, ACL 2004.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

from model.base import checks
from model.base.checks import ParameterError

References = Sequence[Sequence[str]]
"""References of each sequence."""


@dataclass(frozen=True)
class ReferenceScores:
    """Scores to compute, and the references of each prompt, at least one.

    `text` returns the text of output tokens after a prompt. Of that text, what stands before `cut_at` is scored, all of it if
    `cut_at` is empty or does not occur.
    """

    scores: tuple[str, ...]
    references: tuple[tuple[str, ...], ...]
    text: Callable[[Sequence[int], Sequence[int]], str]
    cut_at: str = ""

    def __post_init__(self) -> None:
        if not self.scores:
            raise ParameterError(f"scores must name at least one of {', '.join(SCORES)}, got none")
        for name in self.scores:
            checks.one_of("score", name, SCORES)
            library(name)
        for number, each in enumerate(self.references, start=1):
            if not each:
                raise ParameterError(f"prompt {number} must have a reference to be scored, got none; add references to the file")

    @property
    def described(self) -> dict[str, Any]:
        """What determines the scores besides the outputs."""
        return {"scores": [*self.scores], "references": [[*each] for each in self.references], "cut_at": self.cut_at}

    def columns(self, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], prefix: str = "") -> dict[str, float]:
        """Return the scores of outputs by name of the column [percent]."""
        begun = [self.text(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]
        kept = [(text.partition(self.cut_at)[0] if self.cut_at else text).strip() for text in begun]
        return {prefix + name.replace("-", "_"): SCORES[name](kept, self.references) for name in self.scores}


def bleu(outputs: Sequence[str], references: References) -> float:
    """Return the corpus BLEU of outputs with at least one reference each [percent].

    Sequences may have different numbers of references.
    """
    found = library("bleu").corpus_bleu([*outputs], [[*each] for each in zip_longest(*references)])
    return float(found.score)


def rouge_l(outputs: Sequence[str], references: References) -> float:
    """Return the mean ROUGE-L F1 of outputs, each with its best reference [percent]."""
    scorer = library("rouge-l").RougeScorer(["rougeL"], use_stemmer=True)
    found = [scorer.score_multi([*each], text)["rougeL"].fmeasure for text, each in zip(outputs, references, strict=True)]
    return 100.0 * float(sum(found)) / len(found)


def library(score: str) -> Any:
    """Return the module that computes a score, imported when it is first used."""
    name = {"bleu": "sacrebleu", "rouge-l": "rouge_score.rouge_scorer"}[score]
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0].replace("_", "-")
        raise ParameterError(
            f"score {score} needs the package {package}, which is not installed; install it: pip install 'decodesim[quality]'"
        ) from None


SCORES = MappingProxyType({"bleu": bleu, "rouge-l": rouge_l})
"""Functions of outputs and their references, by name."""
