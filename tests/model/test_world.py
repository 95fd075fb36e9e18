"""The hidden text: true tokens are their positions, wrong ones are negative, and nothing right follows a wrong one."""

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
    """The output of a pass of these tokens up to a layer: the pass itself."""
    return Forward(role, tokens, at, LayerSpan(0, layer))


def test_each_token_of_a_pass_can_be_asked_about() -> None:
    verified = after(2, 3, -4, -5, at=2, layer=LAYERS)
    assert [WORLD.read(Read("next", verified, offset)) for offset in (-4, -3, -2, -1)] == [3, 4, -5, -6]


def test_a_draft_is_right_as_long_as_it_survives_from_where_it_started() -> None:
    world = World(PROMPT, LAYERS, drafts={"draft": DraftOutcomes("target", [2, 0, 3, 1, 0])})

    def says(token: int, at: int) -> object:
        return world.read(Read("next", after(token, at=at, layer=1, role="draft")))

    assert [says(2, 2), says(3, 3)] == [3, 4]  # two survive from place 0 on,
    assert says(4, 4) < 0  # and no third
    world.written = [3, 4, 5]  # the next draft starts at place 3
    assert says(5, 5) == 6
    assert says(6, 6) < 0


def test_a_draft_of_a_draft_may_agree_with_it_where_it_is_wrong() -> None:
    world = World(1, LAYERS, drafts={"medium": DraftOutcomes("target", [0, 1]), "draft": DraftOutcomes("medium", [1, 0])})
    medium, draft, target = (
        world.read(Read("next", after(0, at=0, layer=LAYERS, role=role))) for role in ("medium", "draft", "target")
    )
    assert draft == medium != target == 1
    world.written = [1]
    medium, draft = (world.read(Read("next", after(1, at=1, layer=1, role=role))) for role in ("medium", "draft"))
    assert (medium, draft < 0) == (2, True)


def test_chances_and_the_uniform_number_accept_just_the_right_tokens() -> None:
    verified = after(2, 3, -4, at=2, layer=LAYERS)
    for offset, token in ((-3, 3), (-2, -4)):
        chance = WORLD.read(Read("probability", verified, offset, token=token))
        assert (WORLD.read(Read("uniform", verified, offset)) < chance) == (token > 0)


def test_the_last_layer_tells_the_next_true_token_of_a_true_one() -> None:
    assert WORLD.read(Read("next", after(2, at=2, layer=LAYERS))) == 3
    assert WORLD.read(Read("next", after(0, 1, 2, at=0, layer=LAYERS))) == 3
    assert WORLD.read(Read("next", after(0, at=0, layer=LAYERS))) == 1


def test_an_earlier_layer_or_a_wrong_token_tells_a_wrong_one() -> None:
    for output_ in (after(2, at=2, layer=LAYERS - 1), after(-3, at=2, layer=LAYERS), after(7, at=2, layer=LAYERS)):
        assert WORLD.read(Read("next", output_)) < 0


def test_candidates_hold_the_true_token_first_where_the_coin_says_so() -> None:
    for place, match in enumerate([True, False, True, False, False]):  # beyond the coins nothing matches
        true = PROMPT + place
        for count in (1, 2, 5):
            found = WORLD.read(Read("top", after(true - 1, at=true - 1, layer=4), width=count))
            assert len(set(found)) == count
            assert [token == true for token in found] == [match and index == 0 for index in range(count)]
            assert all(token < 0 for token in found[1:])


def test_a_coin_may_say_which_candidate_is_right() -> None:
    for right in (1, 2, 3):
        found = World(1, 8, [right]).read(Read("top", after(0, at=0, layer=4), width=3))
        assert [token == 1 for token in found] == [index == right for index in (1, 2, 3)]


def test_candidates_after_a_wrong_token_are_wrong() -> None:
    found = WORLD.read(Read("top", after(-7, at=2, layer=4), width=3))
    assert len({token for token in found if token < 0}) == 3


def test_wrong_answers_never_meet() -> None:
    """A wrong candidate is neither the wrong answer of the last layer nor taken for right at any later position."""
    for at, count in itertools.product(range(2, 9), (1, 3)):
        wrong = WORLD.read(Read("next", after(-99, at=at, layer=LAYERS)))
        candidates = WORLD.read(Read("top", after(-99, at=at, layer=4), width=count))
        assert wrong not in candidates
        assert all(token != place for token in candidates for place in range(99))


@pytest.mark.parametrize(("method", "table"), [
    ("autoregressive", {}), ("skipdecode", {"max_layers": 6, "min_layers": 3, "prompt": 1, "sequence_length": 6}),
    ("early_exit", {"exit_layer": 3}),
])  # fmt: skip
def test_where_nothing_is_drawn_what_a_method_writes_is_the_text(method: str, table: dict[str, int]) -> None:
    """A lossy method too, whose text is its own and not the target's."""
    algorithm = registry.algorithm(method)
    parameters = algorithm.Parameters(LAYERS, **table)
    work = interpreter.count(algorithm.decode(parameters, [0], 5), world_of(parameters, 1, {}), 5)
    assert [token for commit in work.committed for token in commit.tokens] == [1, 2, 3, 4, 5]
