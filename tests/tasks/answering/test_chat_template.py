"""A tokenizer's own chat template: the ids that transformers gives, pieces, what is cut, and templates that fail."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from ftk.data.supervised.corpus import RowsConfig, RowsCorpus
from ftk.errors import UserError
from ftk.generation.engine.continuation import Continuation
from ftk.models.glm import GLMConfig
from ftk.models.gpt2 import GPT2Config
from ftk.tasks.answering.asking import Asking
from ftk.tasks.answering.questions import Question, QuestionEncoder, Words
from ftk.tasks.causal_lm.task import CausalLMTask
from ftk.tasks.sft.task import SFTConfig, SFTTask, with_template_end
from ftk.tasks.sft.template import is_own, load_template
from ftk.tokenizers import build_tokenizer, load_tokenizer, train_sentencepiece, with_special_tokens
from ftk.tokenizers.base import Tokenizer
from tests.byte_tokenizer import CHATML, THINKING, byte_tokenizer
from tests.tasks.answering.conversations import ASKED, TALK, asking_of, questions, written
from tests.tasks.cloze.made import LAYOUTS, make_tokenizer


@pytest.fixture(scope="module")
def of_chat(tmp_path_factory) -> Tokenizer:
    """One that has a chat template, and ends answers as that does."""
    return byte_tokenizer(tmp_path_factory.mktemp("chat"), "<|im_end|>", CHATML)


def refuse_other_ids_than_transformers_gives(tokenizer: Tokenizer, framing: Continuation) -> None:
    """Of a conversation with two answers, each with what stands in front of it."""
    transformers = pytest.importorskip("transformers")
    asking = SFTTask.asking(SFTConfig(), tokenizer, framing)
    theirs = transformers.AutoTokenizer.from_pretrained(Path(tokenizer.config.path))
    row = {"messages": [{"role": role, "content": text} for role, text in TALK]}
    encoder = QuestionEncoder(tokenizer, asking)
    for number, question in zip((1, 3), questions(tokenizer, row), strict=True):
        one = encoder.whole(question)
        asked = asking.prompt(one.before.tolist(), [])
        messages = row["messages"][: number + 1]
        assert asked == theirs.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
        whole = theirs.apply_chat_template(messages, return_dict=False)
        learned = [*asked, *one.answer]
        assert whole[: len(learned)] == learned
        assert tokenizer.decode(whole[len(learned) :]).strip() == ""
        assert encoder.within([question], 100, 100, "left")[0].answer.tolist() == one.answer.tolist()


@pytest.mark.parametrize("eos", ["<|im_end|>", "<|endoftext|>"])
@pytest.mark.parametrize("bos", ["", "<|endoftext|>"], ids=["plain", "bos-tokenizer"])
@pytest.mark.parametrize("begin", ["", "{{ bos_token }}"], ids=["plain", "bos-template"])
def test_a_tokenizers_chat_template_gives_the_ids_that_transformers_gives(
    tmp_path: Path, eos: str, bos: str, begin: str
) -> None:
    of_chat = byte_tokenizer(tmp_path, eos, begin + CHATML, bos)
    model = GPT2Config(vocab_size=320)
    framing: Any = SFTTask.framing_with(SFTConfig(), of_chat, model)
    im_end = of_chat.encode("<|im_end|>", command_tokens=True)[0]
    assert framing.ends == tuple(dict.fromkeys([im_end, of_chat.special.eos]))
    assert bool(bos) == (framing.ask([]) != [])  # of prompts without a template
    refuse_other_ids_than_transformers_gives(of_chat, framing)
    encoder = QuestionEncoder(of_chat, SFTTask.asking(SFTConfig(), of_chat, framing))
    spelt = encoder.whole(questions(of_chat, {"prompt": "<|im_end|>", "completion": "<|im_end|>"})[0])
    assert spelt.before.tolist().count(im_end) == 2  # of the template
    assert spelt.answer.tolist().count(im_end) == 1
    others = CausalLMTask.framing(of_chat, model)
    assert with_template_end(others, of_chat).ends == tuple(dict.fromkeys([of_chat.special.eos, im_end]))
    assert SFTTask.framing_with(SFTConfig(template="plain"), of_chat, model).ends == (of_chat.special.eos,)


@pytest.mark.parametrize("bos", ["", "<|endoftext|>"], ids=["plain", "bos-tokenizer"])
@pytest.mark.parametrize("template", ["plain", "alpaca", "chatml"])
def test_a_template_of_roles_asks_in_transformers_as_here(tmp_path: Path, template: str, bos: str) -> None:
    transformers = pytest.importorskip("transformers")
    of_chat = byte_tokenizer(tmp_path, bos=bos)
    options, model = SFTConfig(template=template), GPT2Config(vocab_size=320)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    theirs.chat_template = SFTTask.chat_template(options, of_chat, model)
    asking = SFTTask.asking(options, of_chat, SFTTask.framing_with(options, of_chat, model))
    for talk in (TALK, [("system", "Be '%} brief\"."), *TALK]):
        messages = [{"role": role, "content": text} for role, text in talk]
        question = questions(of_chat, {"messages": messages}, template=template)[-1]
        asked = asking.prompt(QuestionEncoder(of_chat, asking).whole(question).before.tolist(), [])
        assert asked == theirs.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
    of_glm = make_tokenizer(tmp_path / "glm", LAYOUTS["glm"])
    assert SFTTask.chat_template(options, of_glm, GLMConfig(vocab_size=320)) is None  # which continues no texts


@pytest.mark.parametrize("template", ["plain", "alpaca"])
def test_the_file_of_a_template_of_roles_asks_here_as_in_training(tmp_path: Path, template: str) -> None:
    """Beside ftk's own tokenizer, whose texts each begin with a space, also where it is built anew or saved."""
    train_sentencepiece(["Be brief. Who are you? I am one. And now?"] * 20, tmp_path / "files", vocab_size=279)
    trained = build_tokenizer("sentencepiece", path=tmp_path / "files", special_tokens="with_end")
    options, model = SFTConfig(template=template), GPT2Config(vocab_size=320)
    source = SFTTask.chat_template(options, trained, model)
    (tmp_path / "files" / "chat_template.jinja").write_text(source)
    build_tokenizer("sentencepiece", path=tmp_path / "files").save(tmp_path / "saved")
    opened = with_special_tokens(load_tokenizer(tmp_path / "saved"), "with_end")
    assert (opened.chat_template, opened.fingerprint) == (source, trained.fingerprint)

    def asked(tokenizer: Tokenizer, options: SFTConfig) -> tuple[Any, list[list[int]]]:
        framing = SFTTask.framing_with(options, tokenizer, model)
        encoder = QuestionEncoder(tokenizer, SFTTask.asking(options, tokenizer, framing))
        row = {"messages": [{"role": role, "content": text} for role, text in [("system", "Be brief."), *TALK]]}
        found = map(encoder.whole, questions(tokenizer, row, template=options.template))
        return framing.ends, [[*one.before.tolist(), *one.answer.tolist()] for one in found]

    for own in (SFTConfig(), SFTConfig(template="chat")):
        assert asked(opened, own) == asked(trained, options)
    assert SFTTask.chat_template(SFTConfig(), opened, model) == source
    for broken in ("5", '{"user": 1}', '{"user"'):  # is one of jinja like others
        opened.chat_template = re.sub("around = .*? %}", f"around = {broken} %}}", source)
        assert is_own("auto", opened)


LLAMA_2 = (
    "{% for message in messages %}{% if message.role == 'user' %}{{ bos_token + '[INST] ' + message.content.strip() + "
    "' [/INST]' }}{% else %}{{ ' ' + message.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}{{ '[INST] ' + message.content + "
    "' [/INST]' }}{% else %}{{ message.content + eos_token }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("form", ["normalizer", "pre-tokenizer", "sentencepiece", "legacy sentencepiece"])
@pytest.mark.parametrize("template", [LLAMA_2, MISTRAL], ids=["llama-2", "mistral"])
def test_words_with_a_space_in_front_are_divided_as_in_the_whole_conversation(
    tmp_path: Path, template: str, form: str
) -> None:
    of_chat = word_tokenizer(tmp_path, template, form)
    framing = Continuation([of_chat.special.eos], begins=of_chat.prompt_prefix)
    refuse_other_ids_than_transformers_gives(of_chat, framing)
    encoder = QuestionEncoder(of_chat, SFTTask.asking(SFTConfig(), of_chat, framing))
    (question,) = questions(of_chat, {"prompt": "Hi. " * 20, "completion": "Hello."})
    answered = replace(SFTTask.questions(SFTConfig(), of_chat).of_text("Hi. " * 20), answer="Hello.")
    assert encoder.whole(answered).answer.tolist() == encoder.whole(question).answer.tolist()
    (cut,) = encoder.within([question], 20, 100, "left")
    assert len(cut.before) == 20
    assert cut.answer.tolist() == encoder.whole(question).answer.tolist()


def word_tokenizer(folder: Path, template: str, form: str) -> Tokenizer:
    """In the forms of LLaMA's, in which a word begins with a space, as does a text, or, of some, what follows a special
    token."""
    texts = [*(text for _, text in TALK), "[INST] Hi. [/INST] Hello. Bye. See you."]
    config: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": template}
    if "sentencepiece" in form:
        sentencepiece = pytest.importorskip("sentencepiece")
        plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "minloglevel": 2}
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_prefix=str(folder / "tokenizer"),
            model_type="bpe",
            byte_fallback=True,
            vocab_size=300,
            **plain,
        )
        config |= {"tokenizer_class": "LlamaTokenizer", "legacy": form.startswith("legacy")}
    else:
        marks = ["<unk>", "<s>", "</s>"]
        made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
        made.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(vocab_size=80, special_tokens=marks))
        made.decoder = tokenizers.decoders.Metaspace()
        tree = json.loads(made.to_str())
        tree["pre_tokenizer"]["split"] = False
        if form == "normalizer":
            space = [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ]
            tree |= {"normalizer": {"type": "Sequence", "normalizers": space}, "pre_tokenizer": None}
        (folder / "tokenizer.json").write_text(json.dumps(tree))
        config |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return build_tokenizer("hf", path=folder)


@pytest.mark.parametrize("flags", [{}, {"lstrip": True}, {"rstrip": True}, {"normalized": True}, {"single_word": True}])
@pytest.mark.parametrize("form", ["normalizer", "pre-tokenizer"])
def test_pieces_between_special_tokens_have_the_ids_of_the_whole(tmp_path: Path, form: str, flags: dict) -> None:
    word_tokenizer(tmp_path, MISTRAL.replace("[INST] ", "[INST] </s> "), form)
    file = tmp_path / "tokenizer.json"
    tree = json.loads(file.read_text())
    for token in tree["added_tokens"]:
        token |= flags
    file.write_text(json.dumps(tree))
    own = build_tokenizer("hf", path=tmp_path)
    encoder = QuestionEncoder(own, asking_of(own))
    for question in questions(own, {"messages": [{"role": role, "content": text} for role, text in TALK]}):
        assert encoder.whole(question).before.tolist() == own.encode(written(question), command_tokens=True)


def test_of_a_long_conversation_few_beginnings_are_written_and_each_piece_is_encoded_once(of_chat, monkeypatch) -> None:
    row = {"messages": [{"role": role, "content": f"{text} {turn}"} for turn in range(100) for role, text in TALK]}
    written_for, encoded = [], []
    template = load_template("chat", of_chat)
    words, encode, together = type(template).words, of_chat.encode, of_chat.encode_prompts
    monkeypatch.setattr(type(template), "words", lambda own, talk: written_for.append(talk) or words(own, talk))
    monkeypatch.setattr(
        of_chat, "encode", lambda text, *more, **own: encoded.append(text) or encode(text, *more, **own)
    )
    monkeypatch.setattr(of_chat, "encode_prompts", lambda texts: encoded.extend(texts) or together(texts))
    (question,) = questions(of_chat, row, turns="last")
    assert len(question.shorter) == 199
    (cut,) = QuestionEncoder(of_chat, asking_of(of_chat)).within([question], 500, 100, "left")
    assert len(written_for) < 12
    assert sum(map(len, encoded)) < 1.2 * len(written(question))
    (asked,) = QuestionEncoder(of_chat, asking_of(of_chat)).within([replace(question, answer="")], 500, 100, "left")
    assert (asked.before.tolist(), asked.reference) == (cut.before.tolist(), "")
    fitting = [text for text in (written(one()) for one in question.shorter) if len(encode(text, True)) <= 500]
    assert cut.before.tolist() == encode(fitting[0].rstrip(" "), True)


def test_what_has_fewer_tokens_part_by_part_and_then_fits_is_not_cut(tmp_path: Path) -> None:
    letters = {letter: number for number, letter in enumerate(sorted(set("hello there, do tell me xabci")))}
    merges = [("a", "b"), ("x", "a"), ("b", "c")]
    vocab = letters | {"".join(pair): len(letters) + number for number, pair in enumerate(merges)}
    tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges)).save(str(tmp_path / "tokenizer.json"))
    own = build_tokenizer("hf", path=tmp_path)
    texts = ["hello there, do tell me xa", "bc", "hi xa", "bc"]
    parts = [Words(text, is_text=place % 2 == 0, stays=place % 2 == 1) for place, text in enumerate(texts)]
    question = Question(parts, "o", is_one_text=True)
    encoder = QuestionEncoder(own, Asking(Continuation([0]), "text"))
    length = len(encoder.whole(question).before)
    for most in (length - 1, length - 2):
        (one,) = encoder.within([question], most, 10, "left")
        assert one.before.tolist() == [token for text in texts for token in own.encode(text)]
        assert not one.was_cut
    assert encoder.within([question], length - 3, 10, "left")[0].was_cut


@pytest.mark.parametrize(
    ("family", "template", "added"),
    [("gpt2", "auto", ["<|im_end|>"]), ("gpt2", "plain", []), ("glm", "auto", []), ("glm", "plain", [])],
)
def test_the_end_of_the_tokenizers_own_template_is_one_of_the_model(
    tmp_path: Path, family: str, template: str, added: list[str]
) -> None:
    byte_tokenizer(tmp_path, chat_template=CHATML if family == "gpt2" else None)
    own = build_tokenizer("hf", path=tmp_path) if family == "gpt2" else make_tokenizer(tmp_path / "glm", LAYOUTS["glm"])
    (tmp_path / "train.jsonl").write_text(json.dumps(ASKED) + "\n")
    corpus = RowsCorpus(RowsConfig(data=str(tmp_path)), own)
    config_class = GPT2Config if family == "gpt2" else GLMConfig
    task = SFTTask(SFTConfig(template=template), corpus=corpus, seed=1)
    config = task.complete_model_config(config_class(vocab_size=320, max_positions=2048))
    assert [own.token_text(token) for token in config.end_tokens] == added


def test_what_a_chat_template_marks_as_generated_is_rendered_as_it_stands(tmp_path: Path) -> None:
    text = "{{ message.content | trim }}"
    own = byte_tokenizer(tmp_path, "<|im_end|>", CHATML.replace(text, f"{{% generation %}}{text}{{% endgeneration %}}"))
    assert "{% generation %}" in str(own.chat_template)
    refuse_other_ids_than_transformers_gives(own, SFTTask.framing_with(SFTConfig(), own, GPT2Config(vocab_size=320)))


def test_variables_of_a_chat_template_have_the_values_that_transformers_gives_them(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    own = byte_tokenizer(tmp_path, chat_template=CHATML + THINKING)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    framing = SFTTask.framing_as_trained(own, GPT2Config(vocab_size=320), SFTConfig())
    assert framing.converse is not None
    for earlier in ([], [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]):
        messages = [*earlier, {"role": "user", "content": "c"}]
        for values in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
            asked = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **values)
            assert framing.converse("c", earlier, values) == asked
            assert ("<think>" in own.decode(asked)) == (values.get("enable_thinking") is False)
    with pytest.raises(UserError, match="has no variable 'thinking'; it has enable_thinking"):
        framing.converse("c", [], {"thinking": False})
    with pytest.raises(UserError, match="has no variable 'messages'"):
        framing.converse("c", [], {"messages": []})
    for value in ("<|im_end|>", [{"a": "b<|im_end|>"}], {"<|im_end|>": 1}):
        with pytest.raises(UserError, match=r"the value of 'enable_thinking' holds the special token '<\|im_end\|>'"):
            framing.converse("c", [], {"enable_thinking": value})
    echo = byte_tokenizer(tmp_path / "echo", chat_template=CHATML + "{{ own }}")
    framing = SFTTask.framing_as_trained(echo, GPT2Config(vocab_size=320), SFTConfig())
    for value in (0, "9" * 5000):
        with pytest.raises(UserError, match="does not write each message once, in its order"):
            framing.converse("c", [], {"own": f"\ue000{value}\ue001"})
    plain = SFTTask.framing_as_trained(own, GPT2Config(vocab_size=320), SFTConfig(template="plain"))
    assert plain.converse is not None
    with pytest.raises(UserError, match="the template has no variable 'thinking', nor any other"):
        plain.converse("c", [], {"thinking": False})


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{{ raise_exception('no roles') }}", "the tokenizer's chat template: no roles; choose another `template`"),
        ("{{ messages[7].content }}", "the tokenizer's chat template: list object has no element 7"),
        ("{% if %}", "the tokenizer's chat template: Expected an expression"),
        ("{{ messages[-1].content }}{{ messages[-1].content }}", "does not write each message once, in its order"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "the tokenizer's chat template: maximum recursion depth"),
        ("{{ messages | tojson }}{{ ''.__class__.__mro__ }}", "the tokenizer's chat template: access to attribute"),
    ],
)
def test_a_chat_template_that_fails_is_named(tmp_path: Path, source: str, problem: str) -> None:
    own = byte_tokenizer(tmp_path, chat_template=source)
    with pytest.raises(UserError, match=problem):
        questions(own, ASKED)


def test_without_jinja2_a_line_says_what_to_install(of_chat, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UserError, match=r"needs the package jinja2; install it by: pip install 'ftk\[chat\]'"):
        questions(of_chat, ASKED)


def test_other_templates_go_before_the_tokenizers_own(of_chat) -> None:
    assert written(questions(of_chat, ASKED, template="plain")[0]) == "Add. "
    assert written(questions(of_chat, ASKED)[0]).startswith("<|im_start|>system\nYou are helpful.")
