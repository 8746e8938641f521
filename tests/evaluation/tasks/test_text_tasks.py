"""Tasks on text: every answer against a solver that reads the prompt, and the lengths and depths of the prompts."""

import random
import re
from collections import Counter

import pytest

from megalin.data.tokenizers.tokenizer import ByteTokenizer
from megalin.errors import ConfigError, DataError
from megalin.evaluation.tasks.draws import ExampleDraws
from megalin.evaluation.tasks.needle import NOISE, Needle, needle_grid
from megalin.evaluation.tasks.registry import build_task, text_tasks
from megalin.evaluation.tasks.ruler import MultikeyNeedle, NoiseNeedle, VariableTracking
from megalin.evaluation.tasks.text_task import fraction_found, longest_prompt
from megalin.evaluation.tasks.words import NUM_WORDS, pseudo_words, uuids

BYTES = ByteTokenizer()
LENGTH = 5000


class WordTokenizer:
    """An id for each word with the white space before it: a tokenizer of other lengths than bytes."""

    def __init__(self):
        self.words = {}

    def encode(self, text):
        return [self.words.setdefault(word, len(self.words)) for word in re.findall(r"\s*\S+|\s+$", text)]

    def decode(self, ids):
        known = list(self.words)
        return "".join(known[number] for number in ids)


def solve_needle(text):
    facts = dict(re.findall(r"The secret number of (\w+) is (\d+)\.", text))
    return [facts[name] for name in re.findall(r"[a-z]{6}", text.rpartition("secret number")[2])]


def solve_code(text):
    facts = dict(re.findall(r"The secret code of (\S+) is (\S+)\.", text))
    return [facts[text.split()[-2]]]


def solve_variables(text):
    asked = re.search(r"have the value (\d+)\.", text)[1]
    values, found = {}, []
    for name, is_variable, source in re.findall(r"VAR (\w+) = (VAR )?(\w+)\.", text):
        values[name] = values[source] if is_variable else source
        if values[name] == asked:
            found.append(name)
    return found


def most_frequent(words, count):
    ranked = Counter(words).most_common(count + 1)
    assert ranked[count - 1][1] > ranked[count][1]
    return [word for word, _ in ranked[:count]]


SOLVERS = {
    "needle": solve_needle,
    "multi_needle": solve_needle,
    "niah_single_1": solve_code,
    "niah_multikey_2": solve_code,
    "niah_multikey_3": solve_code,
    "variable_tracking": solve_variables,
    "common_words": lambda text: most_frequent(re.findall(r"\d\. ([a-z]+)", text), 10),
    "frequent_words": lambda text: most_frequent(text.partition("\n")[0].split(), 3),
}


@pytest.mark.parametrize("tokenizer", [BYTES, WordTokenizer()], ids=["bytes", "words"])
@pytest.mark.parametrize("name", text_tasks())
def test_every_reference_follows_from_the_prompt(name, tokenizer):
    task = build_task(name, {"context_length": LENGTH})
    for number in range(8):
        request = task.request(tokenizer, 1, number)
        text = tokenizer.decode(request.prompt)
        solved = SOLVERS[name](text)
        assert sorted(solved) == sorted(request.references), number
        assert fraction_found(f"It is {', '.join(solved)}.", request.references) == 1
        assert len(request.prompt) + request.new_tokens <= LENGTH
        assert request.length == LENGTH
        assert text.endswith(("Answer:", " is"))


@pytest.mark.parametrize("name", text_tasks())
def test_a_request_is_a_function_of_seed_and_number(name):
    task, numbers = build_task(name, {"context_length": LENGTH}), list(range(4))
    in_order = {number: task.request(BYTES, 3, number) for number in numbers}
    random.Random(0).shuffle(numbers)
    for number in numbers:
        assert build_task(name, {"context_length": LENGTH}).request(BYTES, 3, number) == in_order[number]
    requests = [*in_order.values(), task.request(BYTES, 4, 0)]
    assert len({request.references for request in requests}) == 5


@pytest.mark.parametrize("name", text_tasks())
def test_prompts_are_as_long_as_the_context_allows(name):
    for length in (4000, 4321, 9999):
        request = build_task(name, {"context_length": length}).request(BYTES, 0, 0)
        unused = length - request.new_tokens - len(request.prompt)
        assert 0 <= unused < 110  # the longest unit, a fact of two uuids, has 97 bytes


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("num_needles", [1, 3])
def test_needles_stand_at_their_depths(depth, num_needles):
    request = Needle(context_length=LENGTH, depth=depth, num_needles=num_needles).request(BYTES, 0, 0)
    lines = BYTES.decode(request.prompt).splitlines()
    haystack = re.sub(r"The secret number of (\w+) is \d+\. ?", "@", lines[1])
    places = [place.start() / (len(haystack) - num_needles) for place in re.finditer("@", haystack)]
    expected = [depth + j * (1 - depth) / num_needles for j in range(num_needles)]
    assert places == pytest.approx(expected, abs=60 / LENGTH)
    assert request.depth == depth
    assert haystack.replace("@", "").startswith(" ".join(NOISE)[:80])


@pytest.mark.parametrize("task", [NoiseNeedle(), MultikeyNeedle(), MultikeyNeedle(kind="uuids"), VariableTracking()])
def test_the_depth_of_a_request_is_that_of_its_first_needle(task):
    for number in range(5):
        request = task.request(BYTES, 0, number)
        text = BYTES.decode(request.prompt).rpartition("\nQuestion")[0]
        needle = f"VAR {request.references[0]} =" if isinstance(task, VariableTracking) else request.references[0]
        assert text.index(needle) / len(text) == pytest.approx(request.depth, abs=200 / 4096)


def test_easy_mode_holds_the_question_and_the_answer_word_for_word():
    for number in range(3):
        request = Needle(mode="easy", context_length=1000).request(BYTES, 0, number)
        text = BYTES.decode(request.prompt)
        question = text.splitlines()[-1]
        assert text.count(question) == 2
        assert f"{question} {request.references[0]}." in text
        standard = BYTES.decode(Needle(context_length=1000).request(BYTES, 0, number).prompt)
        assert standard.count("Question") == 1
        assert standard.endswith(question)


def test_needles_do_not_change_with_depth_and_length():
    grid = needle_grid(Needle(num_needles=2, mode="easy"), [1000, 2000, 4000], 5)
    assert [[(needle.depth, needle.context_length) for needle in row] for row in grid] == [
        [(depth, length) for length in (1000, 2000, 4000)] for depth in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    assert {needle.request(BYTES, 0, 7).references for row in grid for needle in row} == {
        grid[0][0].request(BYTES, 0, 7).references
    }
    assert all(needle.mode == "easy" for row in grid for needle in row)


@pytest.mark.parametrize("depth", [0.0, 0.25, 1.0])
def test_needles_in_documents_fill_the_context_exactly(depth):
    documents = [BYTES.encode(f"<{chr(65 + k)}>" * (50 + k)) for k in range(20)]
    needle = Needle(context_length=1500, depth=depth)
    requests = [needle.request(BYTES, 0, number, documents) for number in range(6)]
    starts = set()
    for request in requests:
        assert len(request.prompt) + request.new_tokens == 1500
        text = BYTES.decode(request.prompt)
        assert solve_needle(text) == list(request.references)
        inside = text.partition("them.\n")[2].rpartition("\nQuestion")[0]
        before, needle_text, after = re.split(r"(\nThe secret.*\n)", inside)
        assert needle_text
        assert len(before) == round(depth * len(before + after))
        whole = BYTES.decode([token for document in documents * 2 for token in document])
        assert before + after in whole
        starts.add((before + after)[:2])
    assert len(starts) > 1


def test_variable_chains_stand_in_order_and_do_not_mix_values():
    task = VariableTracking(context_length=3000, num_chains=3, num_hops=2)
    for number in range(10):
        request = task.request(BYTES, 0, number)
        text = BYTES.decode(request.prompt)
        assert len(set(re.findall(r"VAR (\w+) =", text))) == 9
        assert solve_variables(text) == list(request.references)  # reads once, from the start
        assert len(request.references) == 3


def test_keys_of_a_haystack_of_facts_are_distinct():
    for kind in ("words", "uuids"):
        text = BYTES.decode(MultikeyNeedle(kind=kind, context_length=30_000).request(BYTES, 0, 0).prompt)
        keys = re.findall(r"The secret code of (\S+) is \S+\.", text)
        assert len(set(keys)) == len(keys) > 250


def test_word_frequencies_fall_with_the_square_of_the_rank():
    orders = []
    for number in range(2):
        text = BYTES.decode(build_task("frequent_words").request(BYTES, 0, number).prompt)
        words = text.partition("\n")[0].split()
        counts = [count for _, count in Counter(words).most_common()]
        assert counts == [int(counts[0] / rank**2) for rank in range(1, len(counts) + 1)]
        assert counts[0] < (len(counts) + 1) ** 2
        orders.append([Counter(words)[word] for word in words])
    assert orders[0] != orders[1]


def test_fraction_found_ignores_case_and_counts_each_reference():
    assert fraction_found("the ABCDE and 123.", ["abcde", "123", "4567"]) == pytest.approx(2 / 3)
    assert fraction_found("", ["a"]) == 0


def test_longest_prompt_is_the_longest():
    steps = random.Random(0)
    for trial in range(200):
        costs = [steps.randint(1, 1 + trial % 40) for _ in range(300)]
        least, limit, calls = trial % 3, trial * 5, []

        def encode(count, costs=costs, calls=calls):
            calls.append(count)
            return [0] * (10 + sum(costs[:count]) + max(0, count - len(costs)) * 20)

        fitting = [count for count in range(least, 400) if len(encode(count)) <= limit]
        calls.clear()
        found = longest_prompt(encode, limit, least=least)
        assert (None if found is None else len(found)) == (len(encode(fitting[-1])) if fitting else None)
        assert len(calls) <= 24


def test_words_are_distinct_and_pinned():
    words = pseudo_words(ExampleDraws("test", 0, 0), 2000)
    assert len(set(words)) == 2000
    assert all(re.fullmatch("([bdfgklmnprstvz][aeiou]){3}", word) for word in words)
    assert words[:3] == pseudo_words(ExampleDraws("test", 0, 0), 3)
    assert NUM_WORDS == (14 * 5) ** 3
    assert re.fullmatch(
        r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", uuids(ExampleDraws("test", 0, 0), 1)[0]
    )


@pytest.mark.parametrize("name", text_tasks())
def test_a_context_without_room_is_refused_with_the_length_that_has(name):
    with pytest.raises(ConfigError, match=r"context_length = 64: .* \d+ tokens; raise it") as error:
        build_task(name, {"context_length": 64}).request(BYTES, 0, 0)
    enough = int(re.search(r"(\d+) tokens; raise it to that", str(error.value))[1])
    request = build_task(name, {"context_length": enough}).request(BYTES, 0, 0)
    assert sorted(SOLVERS[name](BYTES.decode(request.prompt))) == sorted(request.references)
    with pytest.raises(ConfigError, match="raise it"):
        build_task(name, {"context_length": enough - 1}).request(BYTES, 0, 0)


BAD = [
    ("needle", {"depth": 1.5}, "depth = 1.5: input should be less than or equal to 1"),
    ("needle", {"num_needles": 0}, "num_needles = 0: input should be greater"),
    ("needle", {"mode": "hard"}, "mode = 'hard': input should be 'easy' or 'standard'"),
    ("needle", {"context_length": 0}, "context_length = 0: input should be greater"),
    ("niah_multikey_2", {"kind": "ids"}, "kind = 'ids': input should be 'words' or 'uuids'"),
    ("common_words", {"common_repeats": 3}, "common_repeats = 3 must be above rare_repeats = 3"),
    ("frequent_words", {"alpha": 1.0}, "alpha = 1.0: input should be greater than 1"),
    ("variable_tracking", {"num_hops": 0}, "num_hops = 0: input should be greater"),
]


@pytest.mark.parametrize(("name", "values", "message"), BAD)
def test_bad_parameters_are_refused(name, values, message):
    with pytest.raises(ConfigError, match=message):
        build_task(name, values)


def test_documents_that_do_not_fill_the_context_are_refused():
    with pytest.raises(DataError, match=r"have 30 tokens, but context_length = 1000 takes \d+; give more documents"):
        Needle(context_length=1000).request(BYTES, 0, 0, [[1] * 10] * 3)
    with pytest.raises(DataError, match="have 0 tokens"):
        Needle(context_length=1000).request(BYTES, 0, 0, [])
    with pytest.raises(ConfigError, match=r"needles, question and answer alone have \d+ tokens"):
        Needle(context_length=64).request(BYTES, 0, 0, [[1] * 10])


@pytest.mark.parametrize("lengths", [[], [2000, 1000], [1000, 1000]])
def test_grids_without_rising_lengths_are_refused(lengths):
    with pytest.raises(ConfigError, match="give at least one context length, in rising order"):
        needle_grid(Needle(), lengths, 3)


def test_grids_of_one_depth_are_refused():
    with pytest.raises(ConfigError, match="num_depths = 1: a grid needs at least 2"):
        needle_grid(Needle(), [1000], 1)
