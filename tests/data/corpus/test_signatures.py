"""MinHash sketches and bands against word sets computed in plain Python."""

import numpy as np
import pytest

from megalin.data.corpus.signatures import scheme, sign, similarity


def _runs(text):
    words = text.lower().split()
    return {tuple(words[k : k + 5]) for k in range(max(len(words) - 4, 1))}


def _jaccard(one, other):
    return len(_runs(one) & _runs(other)) / len(_runs(one) | _runs(other))


def _pairs(count, seed=0):
    """Pairs of a text of 200 words and a copy with up to 30 words replaced."""
    rng = np.random.default_rng(seed)
    for k in range(count):
        words = [f"w{n}" for n in rng.integers(0, 1000, 200)]
        copy = list(words)
        for place in rng.integers(0, 200, k % 31):
            copy[place] = f"x{rng.integers(0, 1000)}"
        yield " ".join(words), " ".join(copy)


def test_similarity_estimates_the_jaccard_index():
    how = scheme("minhash", 0.7)
    pairs = list(_pairs(310))
    one, other = (sign([pair[side] for pair in pairs], how) for side in (0, 1))
    error = similarity(one.sketches, other.sketches, how) - [_jaccard(*pair) for pair in pairs]
    assert abs(error.mean()) < 0.01
    assert error.std() < 0.045  # sqrt(J (1 - J) / 128) is 0.044 at most


@pytest.mark.parametrize(("threshold", "bands", "rows"), [(0.5, 42, 3), (0.7, 21, 6), (0.9, 9, 14)])
def test_bands_find_pairs_as_likely_as_their_formula_says(threshold, bands, rows):
    how = scheme("minhash", threshold)
    assert (how.bands, how.rows) == (bands, rows)
    pairs = list(_pairs(620, seed=1))
    one, other = (sign([pair[side] for pair in pairs], how) for side in (0, 1))
    found = (one.bands == other.bands).any(axis=1)
    expected = np.array([1 - (1 - _jaccard(*pair) ** rows) ** bands for pair in pairs])
    assert abs(found.sum() - expected.sum()) < 4 * np.sqrt((expected * (1 - expected)).sum()) + 1


def test_signature_of_a_text_does_not_depend_on_the_others():
    texts = ["", "  ", "!!!", "one", "one two three four five six", "日本語のテキスト", "x" * 10_000]
    for method in ("exact", "minhash"):
        how = scheme(method, 0.7)
        together = sign(texts, how)
        for k, text in enumerate(texts):
            alone = sign([text], how)
            assert (alone.bands[0] == together.bands[k]).all()
            assert (alone.sketches[0] == together.sketches[k]).all()
        assert together.bands.shape == (len(texts), how.bands)
        assert together.sketches.shape == (len(texts), how.width)


@pytest.mark.parametrize(
    ("method", "one", "other", "duplicate"),
    [
        ("exact", "a  b\nc", "a b c ", True),
        ("exact", "a b", "A b", False),
        ("minhash", "One, two: three.", "one two three", True),
        ("minhash", "one two three", "one two four", False),
        ("minhash", "日本語の文章です", "日本語の文章でした", False),
        ("minhash", "!!!", "???", False),
    ],
)
def test_what_counts_as_a_duplicate(method, one, other, duplicate):
    how = scheme(method, 0.7)
    signed = sign([one, other], how)
    assert (similarity(signed.sketches[:1], signed.sketches[1:], how)[0] >= how.threshold) == duplicate
