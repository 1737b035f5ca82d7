"""Small tokenizers of each kind that detokenizing has to deal with, trained or built here."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from vmserve.text.tokenizer import Tokenizer, load_tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog and the other quick dogs",
    "naïve café, 5 €, 日本語のテキスト, 🙂🙂 emoji, Привет мир",
    "a stop string is a string that stops",
] * 20
SPECIAL = ["<s>", "</s>", "<|turn|>", "<|end|>"]


def _wrap(backend: Backend) -> Tokenizer:
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        clean_up_tokenization_spaces=False,
    )
    return Tokenizer(hf)


@cache
def byte_level() -> Tokenizer:
    """Byte-level BPE with special tokens, and added tokens that are ordinary text."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("two words é", normalized=False), AddedToken("<think>")])
    return _wrap(backend)


@cache
def metaspace() -> Tokenizer:
    """Words that begin with ▁; a text's first space is not written."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=160, special_tokens=[*SPECIAL, "<unk>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return _wrap(backend)


@cache
def byte_fallback() -> Tokenizer:
    """The shape of Llama 2's: ▁ for spaces, a byte token for each byte, one space stripped."""
    words = ["▁the", "▁quick", "the", "quick", "▁", "a", "b", "é", ",", "▁a", "\n\n"]
    tokens = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {token: place for place, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(SPECIAL)
    return _wrap(backend)


@cache
def word_piece() -> Tokenizer:
    """Words in pieces that begin with ##, joined with spaces."""
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=[*SPECIAL, "<unk>"], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return _wrap(backend)


@cache
def embedded() -> Tokenizer:
    """The tokenizer of the model that ships with the package."""
    from importlib.resources import files

    return load_tokenizer(str(files("vmserve") / "assets" / "embedded"))


KINDS = {
    "byte_level": byte_level,
    "metaspace": metaspace,
    "byte_fallback": byte_fallback,
    "word_piece": word_piece,
    "embedded": embedded,
}
