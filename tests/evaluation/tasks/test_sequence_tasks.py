"""Tasks on token ids: every answer against an independent solver, and the rules that all tasks keep."""

import random
from collections import Counter
from statistics import median

import numpy as np
import pytest

from megalin.errors import ConfigError
from megalin.evaluation.tasks.listops import SYMBOLS, ListOps
from megalin.evaluation.tasks.mqar import MQAR, MQAR_SETTINGS
from megalin.evaluation.tasks.pathfinder import CONNECTED, EQUALS, Pathfinder
from megalin.evaluation.tasks.registry import TASKS, build_task, sequence_tasks
from megalin.evaluation.tasks.state_tracking import PERMUTATIONS, S5, ModularAddition, Palindrome, Parity, Stack

SMALL = {
    "mqar": MQAR(sequence_length=64, num_pairs=16, vocab_size=64),
    "parity": Parity(max_length=30),
    "modular_addition": ModularAddition(modulus=7, max_length=30),
    "s5": S5(max_length=20),
    "palindrome": Palindrome(max_length=30, num_symbols=5),
    "stack": Stack(max_length=40),
    "listops": ListOps(min_length=20, max_length=200),
    "pathfinder": Pathfinder(),
}


def solve_mqar(prompts):
    """Answers by a dictionary of the pairs in the context block."""
    tokens = prompts[-1]
    pairs = dict(zip(tokens[: 2 * len(prompts) : 2], tokens[1 : 2 * len(prompts) : 2], strict=True))
    return [pairs[prompt[-1]] for prompt in prompts]


def solve_sum(modulus):
    return lambda prompts: [sum(prompt[:-1]) % modulus for prompt in prompts]


def solve_s5(prompts):
    """The product of permutation matrices: column x of a matrix is the unit vector of the image of x."""
    (word,) = prompts
    matrix = np.eye(5, dtype=int)
    for letter in word[:-1]:
        matrix = np.eye(5, dtype=int)[:, PERMUTATIONS[letter]] @ matrix
    return [PERMUTATIONS.index(tuple(matrix.argmax(axis=0).tolist()))]


def solve_palindrome(prompts):
    half = prompts[0][:-1]
    return [half[len(half) - 1 - k] for k in range(len(prompts))]


def solve_stack(prompts):
    """The last symbol pushed on the stack that the pops before did not take, searched backwards."""
    answers = []
    for prompt in prompts:
        operations = [prompt[k : k + 3] for k in range(0, len(prompt), 3)]
        stack, to_skip = operations[-1][1], 0
        for operation in reversed(operations[:-1]):
            if operation[1] != stack:
                continue
            if operation[0] == 1:
                to_skip += 1
            elif to_skip:
                to_skip -= 1
            else:
                answers.append(operation[2])
                break
    return answers


def solve_listops(prompts):
    """A recursive parser of the expression's text."""
    symbols = iter([SYMBOLS[token] for token in prompts[0]])
    functions = {"MIN": min, "MAX": max, "MED": lambda v: int(median(v)), "SM": lambda v: sum(v) % 10}

    def value(symbol):
        if not symbol.startswith("["):
            return int(symbol)
        arguments = []
        while (inner := next(symbols)) != "]":
            arguments.append(value(inner))
        assert len(arguments) >= 2
        return functions[symbol[1:]](arguments)

    answer = value(next(symbols))
    assert list(symbols) == ["="]
    return [answer]


SOLVERS = {
    "mqar": solve_mqar,
    "parity": solve_sum(2),
    "modular_addition": solve_sum(7),
    "s5": solve_s5,
    "palindrome": solve_palindrome,
    "stack": solve_stack,
    "listops": solve_listops,
}


@pytest.mark.parametrize("name", SOLVERS)
def test_every_answer_follows_from_the_tokens_before_it(name):
    for number in range(200):
        tokens, label_mask = SMALL[name].example(5, number)
        places = np.flatnonzero(label_mask)
        assert places.size, number
        expected = SOLVERS[name]([tokens[:place].tolist() for place in places])
        assert tokens[places].tolist() == expected, number


@pytest.mark.parametrize("name", sequence_tasks())
def test_an_example_is_a_function_of_seed_and_number(name):
    task, numbers = SMALL[name], list(range(8))
    in_order = {number: task.example(3, number) for number in numbers}
    random.Random(0).shuffle(numbers)
    for number in numbers:
        again = type(task)(**task.model_dump()).example(3, number)
        assert np.array_equal(again.tokens, in_order[number].tokens)
        assert np.array_equal(again.label_mask, in_order[number].label_mask)
    others = [*in_order.values(), task.example(4, 0)]
    assert len({example.tokens.tobytes() for example in others}) > 7  # two words of one bit may be equal


@pytest.mark.parametrize("name", sequence_tasks())
def test_ids_are_in_the_vocabulary_and_masks_fit_the_tokens(name):
    for task in (TASKS[name].task(), SMALL[name]):
        tokens, label_mask = task.example(0, 0)
        assert tokens.dtype == np.int32
        assert label_mask.dtype == np.bool_
        assert tokens.shape == label_mask.shape
        assert 0 <= tokens.min() <= tokens.max() < task.num_ids


@pytest.mark.parametrize(
    ("name", "classes", "least"), [("parity", 2, 0.4), ("modular_addition", 7, 0.09), ("listops", 10, 0.03)]
)
def test_all_classes_occur(name, classes, least):
    counts = Counter(int(SMALL[name].example(0, number).tokens[-1]) for number in range(500))
    assert sorted(counts) == list(range(classes))
    assert min(counts.values()) >= least * 500


def test_lengths_of_words_are_uniform():
    counts = np.bincount([Parity(min_length=3, max_length=6).example(0, k).tokens.size - 2 for k in range(2000)])
    assert counts[:3].sum() == 0
    assert abs(counts[3:] - 500).max() < 5 * 500**0.5


def test_mqar_layout_by_hand():
    task = MQAR(sequence_length=12, num_pairs=2, vocab_size=8, filler="padding")
    tokens, label_mask = task.example(0, 0)
    keys, values = tokens[0:4:2], tokens[1:4:2]
    assert set(keys) <= {1, 2, 3}
    assert set(values) <= {4, 5, 6, 7}
    assert len(set(keys)) == len(set(values)) == 2
    rest = tokens[4:].reshape(4, 2).tolist()
    assert sorted(rest) == sorted([[0, 0], [0, 0], *np.stack((keys, values), 1).tolist()])
    assert np.array_equal(label_mask[4:].reshape(4, 2), [[False, pair != [0, 0]] for pair in rest])
    assert not label_mask[:4].any()


@pytest.mark.parametrize("power", [0.01, 1.0])
def test_mqar_gaps_follow_the_power_law(power):
    task, tries = MQAR(sequence_length=12, num_pairs=1, vocab_size=8, power=power), 4000
    gaps = [(int(task.example(0, k).label_mask.argmax()) - 3) // 2 for k in range(tries)]
    weights = np.arange(1, 6) ** (power - 1.0)
    expected = weights / weights.sum()
    assert np.bincount(gaps, minlength=5) / tries == pytest.approx(expected, abs=5 * (0.25 / tries) ** 0.5)


def test_mqar_settings_are_the_published_ones():
    sizes = {
        year: [[(s.task.sequence_length, s.task.num_pairs, s.num_examples) for s in sets] for sets in setting]
        for year, setting in MQAR_SETTINGS.items()
    }
    old = [(64, 4), (128, 8), (256, 16), (512, 64)]
    assert sizes["2023"] == [[(*size, 100_000) for size in old], [(*size, 3_000) for size in old]]
    assert sizes["2026"][0] == [
        (64, 4, 100_000),
        *((length, pairs, 20_000) for length, pairs in [(128, 8), (256, 16), (256, 32), (256, 64)]),
    ]
    assert sizes["2026"][1][0][:2] == (64, 4)
    assert sizes["2026"][1][-1][:2] == (1024, 256)


def test_stack_examples_end_with_a_pop_and_use_all_stacks():
    seen = set()
    for number in range(100):
        tokens, label_mask = SMALL["stack"].example(1, number)
        assert tokens.size % 3 == 0
        assert label_mask[-1]
        seen |= set(tokens[1::3].tolist())
    assert seen == {2, 3, 4, 5}


def test_listops_keeps_its_lengths_and_depth():
    depths, lengths = set(), []
    for number in range(60):
        tokens, _ = ListOps(min_length=100, max_length=110, max_depth=4).example(0, number)
        text = [SYMBOLS[token] for token in tokens[:-2]]
        nested = np.cumsum([symbol.startswith("[") for symbol in text]) - np.cumsum([symbol == "]" for symbol in text])
        depths.add(int(nested.max()))
        lengths.append(len(text))
    assert max(depths) == 3  # lists; their digits have depth 4
    assert min(lengths) >= 100
    assert max(lengths) <= 110


def _linked(points, start, end):
    """True where steps of at most 2 pixels lead from `start` to `end`: a search over all points of all contours."""
    near = np.linalg.norm(points[:, None] - points[None], axis=-1) < 2
    reached = np.linalg.norm(points - start, axis=-1) < 1e-9
    while (grown := near[reached].any(axis=0)).sum() > reached.sum():
        reached = grown
    return bool(reached[np.linalg.norm(points - end, axis=-1) < 1e-9].any())


def test_pathfinder_answers_follow_from_the_geometry():
    answers = Counter()
    for number in range(60):
        image = SMALL["pathfinder"].image(2, number)
        tokens, label_mask = SMALL["pathfinder"].example(2, number)
        assert np.array_equal(tokens[:1024].reshape(32, 32), image.pixels)
        assert tokens[1024] == EQUALS
        assert np.flatnonzero(label_mask).tolist() == [1025]
        assert _linked(np.concatenate(image.contours), *image.dots) == (tokens[1025] == CONNECTED) == image.connected
        answers[image.connected] += 1
    assert min(answers.values()) > 18


def test_pathfinder_pixels_show_dots_and_dashes_with_gaps():
    pixel = np.indices((32, 32)).reshape(2, -1).T
    for number in range(20):
        image = SMALL["pathfinder"].image(0, number)
        level = image.pixels.reshape(-1)
        from_dots = np.linalg.norm(pixel[:, None] - image.dots, axis=-1).min(axis=1)
        assert (level[from_dots < 1.2] == 255).all()
        lines = [np.linalg.norm(pixel[:, None] - contour, axis=-1).min(axis=1) for contour in image.contours]
        assert (level[np.minimum(np.min(lines, axis=0), from_dots - 1) > 1.4] == 0).all()
        for contour in image.contours:
            nearest = np.round(contour).astype(int)
            levels = image.pixels[nearest[:, 0], nearest[:, 1]]
            assert levels.max() > 200
            assert levels.min() < 128


def test_pathfinder_contours_keep_their_distance():
    for number in range(20):
        contours = SMALL["pathfinder"].image(1, number).contours
        assert [len(contour) for contour in contours] == [28, 28, *[8] * 4]
        for k, contour in enumerate(contours):
            others = np.concatenate(contours[:k] + contours[k + 1 :])
            assert np.linalg.norm(contour[:, None] - others, axis=-1).min() >= 4.5


def test_pathfinder_dots_of_separate_contours_are_about_as_far_apart_as_connected_ones():
    images = [SMALL["pathfinder"].image(3, number) for number in range(40)]
    for image in (image for image in images if not image.connected):
        first, second = image.contours[:2]
        pairs = [np.linalg.norm(first[i] - second[j]) for i in (0, -1) for j in (0, -1)]
        errors = np.abs(np.array(pairs) - np.linalg.norm(first[0] - first[-1]))
        assert np.isclose(pairs[errors.argmin()], np.linalg.norm(image.dots[0] - image.dots[1]))


BAD = [
    ("mqar", {"num_pairs": 17}, "num_pairs = 17 do not fit sequence_length = 64: .* at most 16 pairs"),
    ("mqar", {"num_pairs": 0}, "num_pairs = 0: input should be greater than or equal to 1"),
    ("mqar", {"sequence_length": 65}, "sequence_length = 65 is odd"),
    ("mqar", {"vocab_size": 8}, "vocab_size = 8 has 3 keys for num_pairs = 4; use at least 10"),
    ("mqar", {"vocab_size": 63}, "vocab_size = 63 is odd"),
    ("mqar", {"power": 0.0}, "power = 0.0: input should be greater than 0"),
    ("mqar", {"filler": "zero"}, "filler = 'zero': input should be 'random' or 'padding'"),
    ("mqar", {"num_pair": 4}, "num_pair: unknown key; did you mean 'num_pairs'"),
    ("parity", {"max_length": 0}, "max_length = 0: input should be greater"),
    ("s5", {"min_length": 17}, "min_length = 17 is above max_length = 16; lower it"),
    ("modular_addition", {"modulus": 1}, "modulus = 1: input should be greater"),
    ("palindrome", {"num_symbols": 1}, "num_symbols = 1: input should be greater"),
    ("stack", {"num_stacks": 0}, "num_stacks = 0: input should be greater"),
    ("stack", {"min_length": 1}, "min_length = 1: input should be greater"),
    ("listops", {"min_length": 2001}, "min_length = 2001 is above max_length = 2000"),
    ("listops", {"max_depth": 1}, "max_depth = 1: input should be greater"),
    ("pathfinder", {"contour_length": 200}, "image_size = 32 has 784 square pixels .* take 1926; lower contour_length"),
    ("pathfinder", {"clearance": 1.0}, "clearance = 1.0: input should be greater"),
]


@pytest.mark.parametrize(("name", "values", "message"), BAD)
def test_bad_parameters_are_refused(name, values, message):
    with pytest.raises(ConfigError, match=message):
        build_task(name, values)


def test_unknown_tasks_are_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"task 'modular-addition': no such task; did you mean 'modular_addition'\?"):
        build_task("modular-addition")


def test_listops_without_an_expression_of_the_asked_length_is_refused():
    with pytest.raises(ConfigError, match="none with min_length = 500 to max_length = 2000 tokens; widen this range"):
        ListOps(max_depth=2).example(0, 0)


def test_a_pathfinder_without_room_is_refused():
    with pytest.raises(ConfigError, match="attempts to place 6 contours in image_size = 32 failed"):
        Pathfinder(contour_length=60, max_turn_degrees=0.0).image(0, 0)
