"""Tokenizers of Hugging Face's folders that hold no `tokenizer.json`, made of the vocabulary files that they hold.

`vocab.txt` is BERT's WordPiece, `vocab.json` with `merges.txt` GPT-2's byte-level BPE, `*.model` SentencePiece. What a
class of `transformers` adds to them (prefixes, case, sentinels) is told by `tokenizer_config.json` and the other files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from ftk.errors import UserError, did_you_mean, download_hint, naming_place
from ftk.files import write_whole
from ftk.parsing import parse_json
from ftk.tokenizers.files import MAX_IDS, VocabularyFile, as_text, lines_of, read_file, read_template
from ftk.tokenizers.gpt2_bpe import parse_merges, parse_vocab

TOKENIZER = "tokenizer.json"
WORD_PIECES, BYTE_PAIRS, MERGES = "vocab.txt", "vocab.json", "merges.txt"
SENTENCE_PIECES = ".model"
ROLES = ("bos", "eos", "pad", "unk", "mask", "cls", "sep")

_CONFIG, _ADDED = "tokenizer_config.json", "added_tokens.json"
_GPT2 = "<|endoftext|>"  # its token of all roles
_COMPANIONS = (_CONFIG, "special_tokens_map.json", _ADDED)  # the roles of special tokens, the newer form first
# The classes of `transformers` whose ids follow from their files as they are read here.
_CLASSES = {
    WORD_PIECES: ("Bert", "DistilBert", "Electra"),
    BYTE_PAIRS: ("GPT2", "Roberta", "Bart", "Longformer"),
    SENTENCE_PIECES: ("T5", "MT5", "Llama"),
}
_GENERAL = ("PreTrained", "Tokenizers")  # say nothing about the kind
_ENCODERS = (  # what `transformers` knows by the classes of BERT's and RoBERTa's tokenizers
    {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
    {"bos": "<s>", "eos": "</s>", "pad": "<pad>", "unk": "<unk>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"},
)


class Added(NamedTuple):
    """A token of `added_tokens_decoder`: its id, and how the `tokenizers` library finds it in a text."""

    id: int
    special: bool
    flags: Mapping[str, bool]


@dataclass(frozen=True)
class Companions:
    """The files beside a vocabulary, such as tokenizer_config.json.

    Attributes:
        files: as read, for the copy that a checkpoint keeps.
        config: tokenizer_config.json.
        roles: role -> text of a special token.
        special: texts of further special tokens, in their order.
        added: text -> a token after the vocabulary, or one of it that is never cut.
        chat_template: a template of jinja, as it was found.
    """

    files: tuple[VocabularyFile, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    special: Sequence[str] = ()
    added: Mapping[str, Added] = field(default_factory=dict)
    chat_template: str | None = None


def find_vocabulary(path: Path) -> Path:
    """The vocabulary at a path, which is the file itself or a folder: `tokenizer.json` before the older forms.

    Raises:
        UserError: there is none, or there are several.
    """
    if not path.is_dir():
        return path.with_name(BYTE_PAIRS) if path.name == MERGES else path
    for name in (TOKENIZER, WORD_PIECES, BYTE_PAIRS):
        if (path / name).is_file():
            return path / name
    found = sorted(each for each in path.iterdir() if each.name.endswith(SENTENCE_PIECES))
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"{path}: holds {len(found)} files *{SENTENCE_PIECES}; give one of them, e.g. {found[0]}")
    hint = download_hint(str(path), "model")
    raise UserError(
        f"{path}: holds no tokenizer: no {TOKENIZER}, {WORD_PIECES}, {BYTE_PAIRS} with {MERGES}, "
        f"or *{SENTENCE_PIECES}{hint}"
    )


def why_unreadable(folder: Path) -> str | None:
    """Why a folder's vocabulary is not read as it is; None: it is."""
    try:
        path = find_vocabulary(folder)
        (check_words if path.name == TOKENIZER else check_class)(path, read_companions(path))
    except UserError as error:
        return str(error)
    return None


def read_companions(vocabulary: Path) -> Companions:
    """The files beside a vocabulary.

    Raises:
        UserError: one is damaged.
    """
    files, contents = [], {}
    for name in _COMPANIONS:
        path = vocabulary.with_name(name)
        if path.is_file():
            content, file = read_file(path)
            files.append(file)
            contents[name] = _mapping(content, path)
    config = contents.get(_CONFIG, {})
    roles: dict[str, str] = {}
    special: list[str] = []
    for described in (contents.get(name, {}) for name in _COMPANIONS[:2]):
        roles = {role: text for role in ROLES if (text := _text(described.get(f"{role}_token")))} | roles
        for key in ("additional_special_tokens", "extra_special_tokens"):
            listed = described.get(key)
            listed = listed.values() if isinstance(listed, dict) else listed
            special += [text for each in listed or () if (text := _text(each)) and text not in special]
    template, its_file = read_template(vocabulary)
    if template is None:
        template = config.get("chat_template")
    return Companions(
        files=(*files, *its_file),
        config=config,
        roles=roles,
        special=special,
        added=_added_tokens(config, contents.get(_ADDED, {}), {*roles.values(), *special}, vocabulary),
        chat_template=template if isinstance(template, str) else None,
    )


def check_words(vocabulary: Path, companions: Companions) -> None:
    """Refuses a `tokenizer.json` whose class in `transformers` cuts a text into words before it is looked up there.

    Raises:
        UserError: it is CPM-1's.
    """
    path = vocabulary.with_name("config.json")  # older folders name the class there
    model = _mapping(read_file(path)[0], path) if path.is_file() else {}
    found = companions.config.get("tokenizer_class") or model.get("tokenizer_class")
    if found in ("CpmTokenizer", "CpmTokenizerFast"):
        raise UserError(
            f"{vocabulary}: is of {found}, which first cuts texts into words with jieba; ftk does not, and would give "
            "other ids. A tokenizer that does is a plugin (docs/plugins.md)"
        )


def check_class(vocabulary: Path, companions: Companions) -> None:
    """Refuses a vocabulary whose class in `transformers` gives other ids than its files alone.

    Raises:
        UserError: it is of such a class, or of no kind that is known here.
    """
    kind = next((kind for kind in _CLASSES if vocabulary.name.endswith(kind)), None)
    if kind is None:
        known = [TOKENIZER, WORD_PIECES, BYTE_PAIRS, f"*{SENTENCE_PIECES}"]
        hint = "" if vocabulary.exists() else download_hint(str(vocabulary), "model")
        known_names = did_you_mean(vocabulary.name, known)
        raise UserError(f"{vocabulary}: is no vocabulary of the tokenizer hf; {known_names}{hint}")
    found = companions.config.get("tokenizer_class")
    stem = str(found or "").removesuffix("Fast").removesuffix("Backend").removesuffix("Tokenizer")
    if stem and stem not in (*_CLASSES[kind], *_GENERAL):
        raise UserError(
            f"{vocabulary}: its tokenizer_config.json names {found!r:.60}, which may give other ids than "
            f"{', '.join(f'{name}Tokenizer' for name in _CLASSES[kind])}; another `tokenizer` of ftk may read this "
            f"vocabulary, or save a {TOKENIZER} with transformers"
        )


def roles_of(companions: Companions, has: Any) -> dict[str, str]:
    """Role -> text, where the files name none by the tokens of BERT and RoBERTa and then by GPT-2's.

    Args:
        companions: the files.
        has: text -> whether the vocabulary has it.
    """
    roles = dict(companions.roles)
    # Older published folders name no special tokens. GPT-2's class has none of these, though OPT's vocabulary is
    # RoBERTa's.
    of_gpt2 = str(companions.config.get("tokenizer_class")).startswith("GPT2Tokenizer")
    for named in () if of_gpt2 else _ENCODERS:
        if has(named["mask"]):
            roles = named | roles
    # GPT-2's name no end token: `transformers` knows it by the tokenizer's class.
    roles.setdefault("eos", _GPT2)
    return roles


def read_backend(vocabulary: Path, companions: Companions) -> tuple[tokenizers.Tokenizer, tuple[VocabularyFile, ...]]:
    """The tokenizer of `vocab.txt`, or of `vocab.json` and `merges.txt`; and these files.

    Raises:
        UserError: they are damaged, or of a class that gives other ids.
    """
    check_class(vocabulary, companions)
    backend, files = (
        _word_pieces(vocabulary, companions) if vocabulary.name == WORD_PIECES else _byte_pairs(vocabulary, companions)
    )
    roles = roles_of(companions, lambda text: backend.token_to_id(text) is not None)
    in_place = [text for text in dict.fromkeys(roles.values()) if backend.token_to_id(text) is not None]
    backend.add_special_tokens([_special(text, lstrip=text == _ENCODERS[1]["mask"]) for text in in_place])
    for text, token in sorted(companions.added.items(), key=lambda item: item[1].id):
        backend.add_tokens([AddedToken(text, special=token.special, **token.flags)])
        if backend.token_to_id(text) != token.id:
            raise UserError(
                f"{vocabulary}: the files next to it map {text!r:.60} to the id {token.id}, but here it would "
                f"get {backend.token_to_id(text)}; do the files belong together?"
            )
    known = {*in_place, *companions.added}
    further = [text for text in dict.fromkeys((*companions.roles.values(), *companions.special)) if text not in known]
    backend.add_special_tokens([_special(text) for text in further])  # of the vocabulary or new
    backend.post_processor = _post_processor(backend, roles, companions.config, vocabulary)
    return backend, files


def write_listed(added: Mapping[str, int], folder: Path) -> None:
    """Add tokens, text -> id, to those that the files of a folder list: in `added_tokens_decoder`, if there is one."""
    path = folder / _CONFIG
    config = _mapping(read_file(path)[0], path) if path.is_file() else {}
    if isinstance(config.get("added_tokens_decoder"), dict):
        flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word", "special"), False)
        config["added_tokens_decoder"] |= {str(id_): {"content": text, **flags} for text, id_ in added.items()}
        write_whole(path, json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        return
    path = folder / _ADDED
    listed = _mapping(read_file(path)[0], path) if path.is_file() else {}
    write_whole(path, json.dumps(listed | dict(added), indent=2, ensure_ascii=False) + "\n")


def _word_pieces(path: Path, companions: Companions) -> tuple[tokenizers.Tokenizer, tuple[VocabularyFile, ...]]:
    content, file = read_file(path)
    vocab = {line.rstrip("\r"): number for number, line in enumerate(lines_of(as_text(content, path)))}
    unknown = companions.roles.get("unk", _ENCODERS[0]["unk"])
    if unknown not in vocab:
        raise UserError(f"{path}: holds no {unknown}; is this the vocabulary of another kind of tokenizer?")
    config = companions.config
    backend = tokenizers.Tokenizer(models.WordPiece(vocab=vocab, unk_token=unknown))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=config.get("tokenize_chinese_chars") is not False,
        strip_accents=config.get("strip_accents"),
        lowercase=config.get("do_lower_case") is not False,
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    return backend, (file,)


def _byte_pairs(path: Path, companions: Companions) -> tuple[tokenizers.Tokenizer, tuple[VocabularyFile, ...]]:
    merges_path = path.with_name(MERGES)
    content, file = read_file(path)
    merges_content, merges_file = read_file(merges_path)
    vocab = parse_vocab(as_text(content, path), path)
    merges = parse_merges(as_text(merges_content, merges_path), merges_path, vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    spaced = companions.config.get("add_prefix_space") is True
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=spaced)
    backend.decoder = decoders.ByteLevel()
    return backend, (file, merges_file)


def _post_processor(
    backend: tokenizers.Tokenizer, roles: Mapping[str, str], config: Mapping[str, Any], vocabulary: Path
) -> processors.PostProcessor:
    """What `transformers` puts around a text: [CLS] and [SEP] of encoders, else the tokens that the files ask for."""
    if "cls" in roles and "sep" in roles:
        first, last = roles["cls"], roles["sep"]
    else:
        first, last = (
            roles.get(role, _GPT2) if config.get(f"add_{role}_token") is True else "" for role in ("bos", "eos")
        )
    ids = {text: backend.token_to_id(text) for text in (first, last) if text}
    if missing := [text for text, id_ in ids.items() if id_ is None]:
        raise UserError(
            f"{vocabulary}: by {_CONFIG} a text is to have {missing[0]!r} around it, which is not in the vocabulary; "
            f"name the token by bos_token and eos_token, or leave add_bos_token and add_eos_token out"
        )
    template = " ".join(each for each in (first, "$A", last) if each)
    return processors.TemplateProcessing(single=template, special_tokens=list(ids.items()))


def _special(text: str, lstrip: bool = False) -> AddedToken:
    return AddedToken(text, special=True, normalized=False, lstrip=lstrip)


def _added_tokens(
    config: Mapping[str, Any], listed: Mapping[str, Any], special: set[str], vocabulary: Path
) -> dict[str, Added]:
    """Those of `added_tokens_decoder` and of the older added_tokens.json, by their texts."""
    found: dict[str, Added] = {}
    for text, id_ in listed.items():
        if type(id_) is not int or id_ < 0 or not text:
            raise UserError(
                f"{vocabulary.with_name(_ADDED)}: {text!r:.60} has the id {id_!r:.20}; ids are whole numbers"
            )
        found[text] = Added(id_, text in special, {"normalized": text not in special})
    decoder = config.get("added_tokens_decoder")
    for key, token in decoder.items() if isinstance(decoder, dict) else ():
        text = _text(token)
        if not text or not (key.isascii() and key.isdecimal() and len(key) < 10) or not isinstance(token, dict):
            raise UserError(f"{vocabulary.with_name(_CONFIG)}: added_tokens_decoder has {key!r:.20}: {token!r:.60}")
        flags = {name: token.get(name) is True for name in ("normalized", "lstrip", "rstrip", "single_word")}
        found[text] = Added(int(key), token.get("special") is True or text in special, flags)
    for text, added in found.items():
        if added.id >= MAX_IDS:
            raise UserError(
                f"{vocabulary}: the files next to it map {text!r:.60} to the id {added.id!r:.20}; "
                f"ids are below {MAX_IDS}"
            )
    return found


def _text(token: Any) -> str:
    """Of "</s>" or {"content": "</s>", ...}; "": it is neither."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _mapping(content: bytes, path: Path) -> dict[str, Any]:
    with naming_place(path, ValueError):
        found = parse_json(as_text(content, path))
    return found if isinstance(found, dict) else {}
