"""Simulated answers: correct tokens equal their positions, wrong tokens are negative, and only wrong tokens follow a wrong one."""

import itertools

import pytest

from model.interpret import interpreter
from model.interpret.simulated_answers import DraftOutcomes, World
from model.methods import registry
from model.methods.worlds import world_of
from model.steps import Forward, LayerSpan, Read

PROMPT, LAYERS = 3, 8
WORLD = World(PROMPT, LAYERS, [True, False, True])


def after(*tokens: int, at: int, layer: int, role: str = "target") -> Forward:
    """Output of a pass over these tokens up to a layer, which is the pass itself."""
    return Forward(role, tokens, at, LayerSpan(0, layer))


def test_every_token_of_a_pass_can_be_read() -> None:
    verified = after(2, 3, -4, -5, at=2, layer=LAYERS)
    assert [WORLD.read(Read("next", verified, offset)) for offset in (-4, -3, -2, -1)] == [3, 4, -5, -6]


def test_draft_is_correct_while_it_survives_from_its_start() -> None:
    world = World(PROMPT, LAYERS, drafts={"draft": DraftOutcomes("target", [2, 0, 3, 1, 0])})

    def draft(token: int, at: int) -> object:
        return world.read(Read("next", after(token, at=at, layer=1, role="draft")))

    assert [draft(2, 2), draft(3, 3)] == [3, 4]  # two survive from output position 0 on,
    assert draft(4, 4) < 0  # and no third
    world.written = [3, 4, 5]  # the next draft starts at output position 3
    assert draft(5, 5) == 6
    assert draft(6, 6) < 0


def test_draft_of_a_draft_may_agree_where_that_draft_is_wrong() -> None:
    world = World(1, LAYERS, drafts={"medium": DraftOutcomes("target", [0, 1]), "draft": DraftOutcomes("medium", [1, 0])})
    medium, draft, target = (
        world.read(Read("next", after(0, at=0, layer=LAYERS, role=role))) for role in ("medium", "draft", "target")
    )
    assert draft == medium != target == 1
    world.written = [1]
    medium, draft = (world.read(Read("next", after(1, at=1, layer=1, role=role))) for role in ("medium", "draft"))
    assert (medium, draft < 0) == (2, True)


def test_probability_and_uniform_number_accept_exactly_the_correct_tokens() -> None:
    verified = after(2, 3, -4, at=2, layer=LAYERS)
    for offset, token in ((-3, 3), (-2, -4)):
        chance = WORLD.read(Read("probability", verified, offset, token=token))
        assert (WORLD.read(Read("uniform", verified, offset)) < chance) == (token > 0)


def test_last_layer_after_a_correct_token_is_correct() -> None:
    assert WORLD.read(Read("next", after(2, at=2, layer=LAYERS))) == 3
    assert WORLD.read(Read("next", after(0, 1, 2, at=0, layer=LAYERS))) == 3
    assert WORLD.read(Read("next", after(0, at=0, layer=LAYERS))) == 1


def test_earlier_layer_or_wrong_input_gives_a_wrong_token() -> None:
    for output_ in (after(2, at=2, layer=LAYERS - 1), after(-3, at=2, layer=LAYERS), after(7, at=2, layer=LAYERS)):
        assert WORLD.read(Read("next", output_)) < 0


def test_correct_token_is_the_first_candidate_of_a_match() -> None:
    for position, match in enumerate([True, False, True, False, False]):  # beyond `matches` nothing matches
        true = PROMPT + position
        for count in (1, 2, 5):
            found = WORLD.read(Read("top", after(true - 1, at=true - 1, layer=4), width=count))
            assert len(set(found)) == count
            assert [token == true for token in found] == [match and index == 0 for index in range(count)]
            assert all(token < 0 for token in found[1:])


def test_match_may_be_the_rank_of_the_correct_candidate() -> None:
    for right in (1, 2, 3):
        found = World(1, 8, [right]).read(Read("top", after(0, at=0, layer=4), width=3))
        assert [token == 1 for token in found] == [index == right for index in (1, 2, 3)]


def test_candidates_after_a_wrong_token_are_wrong() -> None:
    found = WORLD.read(Read("top", after(-7, at=2, layer=4), width=3))
    assert len({token for token in found if token < 0}) == 3


def test_wrong_tokens_never_coincide() -> None:
    """A wrong candidate differs from the wrong token of the last layer and is correct at no later position."""
    for at, count in itertools.product(range(2, 9), (1, 3)):
        wrong = WORLD.read(Read("next", after(-99, at=at, layer=LAYERS)))
        candidates = WORLD.read(Read("top", after(-99, at=at, layer=4), width=count))
        assert wrong not in candidates
        assert all(token != position for token in candidates for position in range(99))


@pytest.mark.parametrize(("method", "table"), [
    ("autoregressive", {}), ("skipdecode", {"max_layers": 6, "min_layers": 3, "prompt": 1, "sequence_length": 6}),
    ("early_exit", {"exit_layer": 3}),
])  # fmt: skip
def test_methods_without_random_outcomes_generate_the_correct_tokens(method: str, table: dict[str, int]) -> None:
    """Also lossy methods, for which their own output counts as correct."""
    algorithm = registry.algorithm(method)
    parameters = algorithm.Parameters(LAYERS, **table)
    work = interpreter.count(algorithm.decode(parameters, [0], 5), world_of(parameters, 1, {}), 5)
    assert [token for commit in work.committed for token in commit.tokens] == [1, 2, 3, 4, 5]
