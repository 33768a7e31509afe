"""Turns the documentation that Debian packages ship into prose and tokens for ``train_tiny_gptoss.py``.

Nothing is downloaded here. Get the packages with ``apt-get download PACKAGE``, unpack each with
``dpkg -x FILE.deb DIR`` (no installation needed), then name every source once::

    python examples/tiny_gptoss_corpus.py text corpus/ kjv=kjv.txt rust=DIR/usr/share/doc/rust-doc/html/book ...
    python examples/tiny_gptoss_corpus.py tokens work/ corpus/   # tokenizer and token streams; needs transformers

A source is a folder of HTML pages, or a text file whose paragraphs are separated by blank lines (verse
numbers at line starts are dropped). ``kjv.txt`` is what ``bible -l100000 "ge1:1-re22:21"`` prints. A name given
more than once collects all its paths. The output folder gets one ``NAME.txt`` for each name: one paragraph a
line, one blank line between documents. models/tiny-gptoss/README.md lists the packages and their licences.
"""

from __future__ import annotations

import gzip
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

END, PAD = "<|endoftext|>", "<|pad|>"  # ids 0 and 1
VOCABULARY = 4096
CONTEXT = 1024  # tokens of a training window, the model's longest input
HELD_OUT = 0.03  # of the text of each source, its last documents

# Where prose starts and ends. Everything inside SKIPPED is code, navigation or decoration.
BLOCKS = frozenset("p li dd dt td th h1 h2 h3 h4 h5 h6 blockquote div section article br summary".split())
SKIPPED = frozenset("pre script style nav header footer table svg form button h1 h2 h3 h4 h5 h6 dt".split())
SKIPPED_CLASSES = frozenset(
    "sphinxsidebar related footer toctree-wrapper navheader navfooter programlisting sidebar headerlink"
    " code-attribute highlight".split()
)
VOID = frozenset("area base br col embed hr img input link meta source track wbr".split())
PUNCTUATION = str.maketrans(
    {"“": '"', "”": '"', "‘": "'", "’": "'", "—": " - ", "–": "-", "…": "...", "\xa0": " ", "¶": ""}
)


class ProseParser(HTMLParser):
    """Collects the text of the paragraphs of one page in ``paragraphs``."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.paragraphs: list[str] = []
        self._open_skipped: list[str] = []  # stack of open tags since the outermost skipped one
        self._text: list[str] = []

    def _flush(self) -> None:
        self.paragraphs.append("".join(self._text))
        self._text = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in VOID:
            return
        classes = (dict(attrs).get("class") or "").split()
        if self._open_skipped:
            if tag == self._open_skipped[0]:  # only same-name nesting matters to find the matching end tag
                self._open_skipped.append(tag)
        elif tag in SKIPPED or not SKIPPED_CLASSES.isdisjoint(classes):
            if tag in BLOCKS or tag == "pre":
                self._flush()
            self._open_skipped.append(tag)
        elif tag in BLOCKS:
            self._flush()

    def handle_endtag(self, tag: str) -> None:
        if self._open_skipped:
            if tag == self._open_skipped[0]:
                self._open_skipped.pop()
        elif tag in BLOCKS:
            self._flush()

    def handle_data(self, data: str) -> None:
        if not self._open_skipped:
            self._text.append(data)


def is_prose(paragraph: str) -> bool:
    """At least five words, mostly letters, plain ASCII, ending as a sentence does."""
    letters = sum(character.isalpha() or character == " " for character in paragraph)
    return (
        paragraph.isascii()
        and len(paragraph.split()) >= 5
        and paragraph[-1] in ".?!:;"
        and letters >= 0.85 * len(paragraph)
        and not re.search(r"\S{40}", paragraph)
    )


def documents(path: Path) -> Iterator[list[str]]:
    """The documents of one source, each a list of raw paragraphs, in a fixed order."""
    if path.is_file() and ".htm" not in path.name:
        text = path.read_text(encoding="utf-8", errors="replace")
        for part in re.split(r"\n\s*\n", text):
            yield [" ".join(re.sub(r"^\s*\d+\s", "", line).strip() for line in part.splitlines())]
        return
    found = [path] if path.is_file() else sorted(path.rglob("*"))
    pages = [page for page in found if re.search(r"\.html(\.en)?(\.gz)?$", page.name)]
    for page in pages:
        raw = gzip.decompress(page.read_bytes()) if page.suffix == ".gz" else page.read_bytes()
        parser = ProseParser()
        parser.feed(raw.decode("utf-8", errors="replace"))
        parser.close()
        yield parser.paragraphs


def write_text(output: Path, named_paths: list[str]) -> None:
    """Writes output/NAME.txt for each name of the NAME=PATH arguments."""
    output.mkdir(parents=True, exist_ok=True)
    sources: dict[str, list[Path]] = {}
    for source in named_paths:
        name, _, path = source.partition("=")
        sources.setdefault(name, []).append(Path(path))
    seen: set[str] = set()  # API pages repeat themselves: a paragraph counts once, digits ignored
    for name, paths in sources.items():
        kept: list[str] = []
        for document in (document for path in paths for document in documents(path)):
            paragraphs = []
            for raw in document:
                paragraph = " ".join(raw.translate(PUNCTUATION).split())
                key = re.sub(r"\d+", "0", paragraph.lower())
                if paragraph and key not in seen and is_prose(paragraph):
                    seen.add(key)
                    paragraphs.append(paragraph)
            if paragraphs:
                kept.append("\n".join(paragraphs))
        text = "\n\n".join(kept) + "\n"
        (output / f"{name}.txt").write_text(text, encoding="utf-8")
        print(f"{name}: {len(kept)} documents, {len(text)} bytes", flush=True)


def write_tokens(work: Path, corpus: Path) -> None:
    """Byte-level BPE on the training part; writes work/tokenizer/ and work/tokens.pt (int16, one stream each)."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    training: list[str] = []
    held_out: dict[str, list[str]] = {}
    for source in sorted(corpus.glob("*.txt")):
        documents = source.read_text(encoding="utf-8").strip().split("\n\n")
        keep, budget = len(documents), HELD_OUT * source.stat().st_size
        while budget > 0:
            keep -= 1
            budget -= len(documents[keep])
        training += documents[:keep]
        held_out[source.stem] = documents[keep:]

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END, PAD], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(training, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=PAD, model_max_length=CONTEXT
    )
    fast.save_pretrained(work / "tokenizer")

    def encode(documents: list[str]) -> torch.Tensor:
        encodings = tokenizer.encode_batch_fast(documents)
        return torch.cat([torch.tensor([0, *encoding.ids], dtype=torch.int16) for encoding in encodings])

    streams = {name: encode(documents) for name, documents in held_out.items()}
    bytes_held_out = sum(len(document.encode()) for documents in held_out.values() for document in documents)
    data: dict[str, Any] = {"training": encode(training), "held_out": streams, "bytes": bytes_held_out}
    torch.save(data, work / "tokens.pt")
    num_held_out = sum(len(stream) for stream in streams.values())
    print(f"{len(data['training'])} tokens for training, {num_held_out} held out ({bytes_held_out} bytes)")


def main(arguments: list[str]) -> None:
    command, *rest = arguments or [""]
    if command == "text" and len(rest) > 1 and all("=" in source for source in rest[1:]):
        write_text(Path(rest[0]), rest[1:])
    elif command == "tokens" and len(rest) == 2:
        write_tokens(Path(rest[0]), Path(rest[1]))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
