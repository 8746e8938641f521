"""Small tokenizers of every kind, trained on a few lines, for properties that all of them have."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from megalin.data.tokenizers.tokenizer import BytePairTrainer, TokenizerFiles, tokenizer_files

TEXTS = [
    "the cat sat on the mat and the other cat sat too, is it not so?",
    "héllo wörld, a naïve café in the Ångström street of the ﬁrst city",
    "def function(argument):\n\treturn argument + 1  \n\n",
    "日本語のテキスト 🙂 and the rest",
]
NORMALIZERS = {
    "nfc": normalizers.NFC(),
    "nfkc": normalizers.NFKC(),
    "strip": normalizers.Strip(),
    "lowercase": normalizers.Lowercase(),
    "replace": normalizers.Replace(Regex(" {2,}"), " "),
}
BEGIN, END = "<s>", "<|endoftext|>"


def _byte_level(folder: Path) -> Tokenizer:
    BytePairTrainer(340, special_tokens=[BEGIN]).train(TEXTS * 3).save(folder / "trained.json")
    return Tokenizer.from_file(str(folder / "trained.json"))


def _trained(model: Any, trainer: Any, before: Any, decoder: Any) -> Tokenizer:
    library = Tokenizer(model)
    library.pre_tokenizer, library.decoder = before, decoder
    library.train_from_iterator(TEXTS * 3, trainer)
    return library


def _byte_fallback(_: Path) -> Tokenizer:
    """As LLaMA 2's: pieces that begin with a space mark, bytes for characters without a piece, the first space cut."""
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz,.?()+1:", "▁the", "▁c"]
    vocabulary = {piece: number for number, piece in enumerate(["<unk>", BEGIN, END, *pieces])}
    for piece in ("th", "▁th", "▁t", "he"):
        vocabulary[piece] = len(vocabulary)
    merges = [("▁", "c"), ("t", "h"), ("h", "e"), ("▁", "th"), ("▁th", "e")]
    library = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(steps)
    library.add_special_tokens([BEGIN, END])
    return library


def _metaspace(_: Path) -> Tokenizer:
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", BEGIN, END], unk_token="<unk>", show_progress=False
    )
    return _trained(models.Unigram(), trainer, pre_tokenizers.Metaspace(), decoders.Metaspace())


def _word_piece(_: Path) -> Tokenizer:
    trainer = trainers.WordPieceTrainer(vocab_size=160, special_tokens=["[UNK]", BEGIN, END], show_progress=False)
    return _trained(
        models.WordPiece(unk_token="[UNK]"), trainer, pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    )


LIBRARY = {
    "byte level": _byte_level,
    "byte fallback": _byte_fallback,
    "metaspace": _metaspace,
    "word piece": _word_piece,
}


def library_tokenizer(name: str, folder: Path) -> Tokenizer:
    """A tokenizer of `LIBRARY`, with the words after it: a normalizer, "begin" for a template that adds BOS."""
    kind, *options = name.split(" + ")
    library = LIBRARY[kind](folder)
    for option in options:
        if option == "begin":
            library.post_processor = processors.TemplateProcessing(
                single=f"{BEGIN} $A", special_tokens=[(BEGIN, library.token_to_id(BEGIN))]
            )
        else:
            library.normalizer = NORMALIZERS[option]
    return library


def make(name: str, folder: Path) -> TokenizerFiles:
    """Writes a tokenizer of KINDS into `folder`."""
    if name == "bytes":
        return tokenizer_files("bytes")
    if name == "sentencepiece":
        path = folder / "t.model"
        with path.open("wb") as file:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(TEXTS * 3), model_writer=file, vocab_size=310, byte_fallback=True, minloglevel=2
            )
        return tokenizer_files(str(path))
    if name == "tiktoken":
        path, pieces = folder / "t.tiktoken", [bytes([byte]) for byte in range(256)]
        pieces += [b"th", b"the", b" the", b" c", b"at", b" cat"]
        path.write_bytes(b"".join(b"%b %d\n" % (base64.b64encode(piece), rank) for rank, piece in enumerate(pieces)))
        return TokenizerFiles("tiktoken", (str(path),), "llama3", 400)
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(library_tokenizer(name, folder).to_str())))
    return tokenizer_files(str(folder))


KINDS = [
    *("bytes", "sentencepiece", "tiktoken"),
    *(f"{kind}{begin}" for kind in LIBRARY for begin in ("", " + begin")),
    *(f"byte level + {normalizer}" for normalizer in NORMALIZERS),
]
