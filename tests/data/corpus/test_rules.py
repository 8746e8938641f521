"""Cleaning rules: the text that each changes and the text that it preserves, in linear time."""

import time

import pytest

from megalin.data.corpus.rules import RULES, Languages, apply_rule
from megalin.errors import ConfigError

CASES = [
    ("fix-text", "schÃ¶n, donâ€™t", "schön, don\u2019t"),
    ("fix-text", "a < b &amp; c", "a < b &amp; c"),
    ("special-characters", "a\u200bb\u00a0c\u00add\ufeff\x07e\ue000f\r\ng\u2028h", "ab cdef\ng\nh"),
    ("special-characters", "ﬁnd \uff21\uff22\uff11\uff12\uff0c日本\t👩‍🚀", "find AB12\uff0c日本\t👩‍🚀"),
    ("html", "<p class='x'>One &amp; <b>two</b><br/>three</p>", "\nOne & two\nthree\n"),
    ("html", "x<script src=a>if (a<b) alert()</script>y<!-- <b>z -->w", "xyw"),
    (
        "html",
        "a < b and b > c; <T> and List<int>; <!-- never ended",
        "a < b and b > c; <T> and List<int>; <!-- never ended",
    ),
    ("html", "İİİİ keep1 <script>bad</script>keep this text", "İİİİ keep1 keep this text"),
    ("html", "a<STYLE>b</Style>c<style >d</STYLE>e", "ace"),
    ("html", "&lt;b &#65;&#x42; &nosuch; AT&T", "<b AB &nosuch; AT&T"),
    ("urls", "see https://a.org/x?y=1, or www.b.com. Http://c", "see , or . "),
    ("urls", "看http://a.cn/b。然后", "看。然后"),
    ("garbled", "good w\ufffdrd here", "good  here"),
    ("garbled", f"key {'A1b2' * 30} end", "key  end"),
    ("garbled", "text\n#$%^&*()_+{}|:<>?#$%^&*()\nmore", "text\nmore"),
    ("garbled", "日本語のテキストはこのまま残ります、そうですね。", "日本語のテキストはこのまま残ります、そうですね。"),
    ("repeated-punctuation", "What?!! No... yes,, 好。。。 ---- ~~~~~ :: //", "What?! No. yes, 好。 - ~ :: //"),
    (
        "numbers",
        "1,234,567.89 and 1,2,3 and 12,34 and ٣٤ and \uff11\uff12",
        "1234567.89 and 1,2,3 and 12,34 and 34 and 12",
    ),
    ("blanks", "\n\na  \n\n\n\nb\t\n c", "a\n\nb\n c"),
]


@pytest.mark.parametrize(("rule", "text", "expected"), CASES)
def test_rule_changes_what_it_says_and_no_more(rule, text, expected):
    assert apply_rule(rule, text, preserve_markup=False) == expected
    assert apply_rule(rule, expected, preserve_markup=False) == expected


MARKUP = [
    "```\nif a!!!! <b>x</b> www.a.b 1,000\n```\n",
    "~~~~\n<p>,,,,\n~~~~",
    "\\begin{align}\na &= 1,000 \\\\!! <b>\n\\end{align}\n",
    "# Heading!!!!\n",
    "-----\n",
    "| :----- | -----: |\n",
    "`a!!!! 1,000`",
    "$a!!!!b_{1,000}$",
    "$$\na,,,, <b>\n$$",
    "\\(x!!!!\\)",
    "\\[ x!!!! \\]",
    "[name!!](https://a.org/b)",
    "![alt!!](www.a.org)",
    "\\cite[p.,, 1,000]{www.a.b}{!!!!}",
]


@pytest.mark.parametrize("markup", MARKUP)
def test_markdown_and_latex_stay_while_prose_around_is_cleaned(markup):
    text = f"Before!!!! 1,000 www.x.y <i>z</i>\n{markup}\nAfter!!!! 2,000\n"
    for rule in ("html", "urls", "repeated-punctuation", "numbers"):
        cleaned = apply_rule(rule, text, preserve_markup=True)
        assert markup in cleaned
        assert cleaned != text
        assert apply_rule(rule, f"```\n{text}", preserve_markup=True) != f"```\n{text}"  # unterminated code
    unprotected = [apply_rule(rule, text, preserve_markup=False) for rule in ("repeated-punctuation", "urls")]
    assert any(markup not in cleaned for cleaned in unprotected)


@pytest.mark.parametrize("rule", [name for name in RULES if name != "fix-text"])
@pytest.mark.parametrize(
    "unit",
    ["<a ", "<!--", "<script ", "&a", "http://", "\ufffda", "a", "!", "1,", " " * 9999 + "a", " \n", "`a", "$a", "\\(",
     "\\[", "[a](", "\\begin{a}\n", "```\n", "\\a{", "\\end{a}", "| -"],
)  # fmt: skip
def test_no_text_takes_more_than_linear_time(rule, unit):
    text = unit * (100_000 // len(unit)) + "x"  # what looks like markup ends as prose
    start = time.process_time()
    apply_rule(rule, text, preserve_markup=True)
    assert time.process_time() - start < 1  # a quadratic rule takes several seconds


def test_language_of_a_text_is_detected():
    english, chinese = "This is a sentence in the English language.", "这是一个用中文写的句子\uff0c内容比较简单。"
    assert [Languages(["en"]).keeps(text) for text in (english, chinese)] == [True, False]
    assert [Languages(["zh", "en"]).keeps(text) for text in (english, chinese)] == [True, True]


def test_unknown_language_is_refused():
    with pytest.raises(ConfigError, match="--languages eng: not a language of py3langid; did you mean 'en'"):
        Languages(["zh", "eng"])
