"""What a log says of the server that wrote it, as inputs of advice: its model, its draft and its draft length.

Logs of vLLM and SGLang print the server's settings at its start (`model.logs.served_settings`). They are used where the
user says nothing, and a user who says something else is refused: the acceptance and the times of a log are those of its own draft.
"""

from __future__ import annotations

from model.architectures import draft_heads, published_shapes
from model.audit import reported_names
from model.base.checks import ParameterError
from model.hardware import memory_limit
from model.logs.acceptance_record import ServedSettings

DRAFT_MODEL = "draft_model"
"""Kind of a draft that is a model of its own."""
SOURCE = "--log, settings of its server"


def model_of(served: ServedSettings | None) -> str | None:
    """Name of the served model in `sim ls shapes`; None if it is not there.

    >>> model_of(ServedSettings(model="meta-llama/Llama-3.1-8B-Instruct")), model_of(ServedSettings(model="mine/model"))
    ('llama-3.1-8b', None)
    """
    return None if served is None else _shape_named(served.model)


def draft_of(served: ServedSettings | None, model: str | None) -> str | None:
    """Draft of the server as `--draft` names it: a head of the model, or a model of `sim ls shapes`; None if it is neither.

    >>> draft_of(ServedSettings(method="eagle3", draft="any/head"), "llama-3.1-8b")
    'eagle3:llama-3.1-8b'
    """
    kind = kind_of(served)
    if served is None or kind is None or kind in draft_heads.ABOUT:
        return None if kind is None or model is None else f"{kind}:{model}"
    return _shape_named(served.draft) if kind == DRAFT_MODEL else None


def kind_of(served: ServedSettings | None) -> str | None:
    """Kind of the server's draft: a kind of draft head, `draft_model`, or another method's name; None if it is not known.

    >>> kind_of(ServedSettings(method="eagle", draft="a/EAGLE3-head")), kind_of(ServedSettings(draft="a/Llama-3.2-1B"))
    ('eagle3', 'draft_model')
    """
    if served is None or served.method is None:
        return DRAFT_MODEL if served is not None and _shape_named(served.draft) is not None else None
    third = served.draft is not None and "eagle3" in served.draft.lower().replace("-", "")
    return "eagle3" if served.method == "eagle" and third else served.method


def kind_of_draft(draft: str | None) -> str | None:
    """Kind of a draft by its name in advice, as `kind_of` calls it; P-EAGLE heads are EAGLE-3 heads to an engine.

    >>> kind_of_draft("p-eagle:gpt-oss-20b"), kind_of_draft("llama-3.2-1b")
    ('eagle3', 'draft_model')
    """
    if draft is None:
        return None
    kind = memory_limit.of_target(draft, "").partition(":")[0]
    return {"p-eagle": "eagle3"}.get(kind, kind) if kind in draft_heads.ABOUT else DRAFT_MODEL


def check_model(said: str | None, served: ServedSettings | None) -> None:
    """Refuse a model that is another one than the server's."""
    of_log = model_of(served)
    if served is not None and of_log is not None and said in published_shapes.PRESETS and said != of_log:
        raise ParameterError(f"--model must be {of_log}, that of --log ({served.model}), got {said}; leave it out")


def check_law(model: str | None, draft: str | None, served: ServedSettings | None) -> None:
    """Refuse a log of another model, or of another kind of draft, than those of the step law that gives the times."""
    of_log, kind, own = model_of(served), kind_of(served), kind_of_draft(draft)
    for what, of_law, found in (("model", model, of_log), ("draft", own, kind)):
        if of_law is not None and found is not None and of_law != found and (what == "draft" or of_law in published_shapes.PRESETS):
            raise ParameterError(
                f"--log must be of the {what} of --engine-law, {of_law}, got one of {found}; leave one of them out, or give the"
                " acceptance alone (--acceptance)"
            )


def check_draft(said: str | None, served: ServedSettings | None) -> None:
    """Refuse a draft that is another one than the server's."""
    kind, own = kind_of(served), kind_of_draft(said)
    if served is None or kind is None or own is None or said is None:
        return
    of_log = served.draft and _shape_named(served.draft)
    other = kind == DRAFT_MODEL and of_log is not None and said in published_shapes.PRESETS and said != of_log
    if own == kind and not other:
        return
    shown = of_log if kind == DRAFT_MODEL and of_log is not None else kind
    names = " ".join(filter(None, (served.method, served.draft)))
    raise ParameterError(
        f"--draft must be {shown}, that of --log ({names}), whose acceptance and times it has, got {said}; leave it out, or give"
        " the log of that draft"
    )


def _shape_named(name: str | None) -> str | None:
    found = None if name is None else reported_names.shape_name(name)[0]
    return found if found in published_shapes.PRESETS else None
