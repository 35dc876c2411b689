"""Corpora composed of folders: DATA's grammar, weights, shards, splits by ratio; what does not fit is refused."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from number_corpus import NumberTokenizer, random_documents

from ftk.config.build import build_options
from ftk.config.options import mistakes
from ftk.data.batches.dataloader_config import DataloaderConfig
from ftk.data.corpora.blending import weights_by_size
from ftk.data.corpora.composition import ComposedCorpus, CompositionConfig, parse_data
from ftk.data.corpora.documents import DocumentList
from ftk.data.corpora.split import DocumentSubset, split_documents, split_sizes
from ftk.data.indexed.dataset import IndexedDataset, IndexedDatasetWriter
from ftk.errors import UserError
from ftk.tasks.glm_blank.config import BlankInfillingConfig
from ftk.tasks.glm_blank.samples.dataset import GLMBlankDataset


class Memory:
    """A corpus in memory; its name says the seed, the splits and the tokenizer: 1-train-valid."""

    def __init__(self, name):
        seed, *self.names = name.split("-")
        self.seed = int(seed)
        self.made_by = "other" if "other" in self.names else "numbers"
        self.names = [name for name in self.names if name != "other"]

    def splits(self):
        return self.names

    def documents(self, split):
        assert split in self.names
        return random_documents([5 + self.seed] * (10 * self.seed), seed=self.seed)

    def tokenizer(self):
        tokenizer = NumberTokenizer()
        tokenizer.fingerprint = self.made_by
        return tokenizer


def compose(data, **options):
    return ComposedCorpus(data, CompositionConfig(**options), Memory)


def glm(documents, seed):
    return GLMBlankDataset(documents, NumberTokenizer(), BlankInfillingConfig(seq_length=16), seed)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("a", [["a"]]),
        ("a,b", [["a"], ["b"]]),
        ("a:b", [["a", "b"]]),
        ("a:b, c", [["a", "b"], ["c"]]),
        ("odd,name", [["odd,name"]]),
        ("time12:30,b", [["time12:30"], ["b"]]),
    ],
)
def test_commas_blend_and_colons_shard_unless_a_path_has_them(tmp_path, monkeypatch, data, expected):
    monkeypatch.chdir(tmp_path)
    for name in ("odd,name", "time12:30"):
        (tmp_path / name).mkdir()
    assert parse_data(data) == expected


@pytest.mark.parametrize("data", ["", "a,", ":a", "a,,b", "a: ,b"])
def test_an_empty_name_is_refused(data):
    if data:
        with pytest.raises(UserError, match="a name is empty"):
            parse_data(data)


def test_one_corpus_alone_gives_the_samples_it_always_gave():
    made = compose("3-train").samples("train", glm, 7)
    plain = glm(Memory("3-train").documents("train"), 7)
    assert type(made) is GLMBlankDataset
    assert all(
        made.sample(1, index)["tokens"].tolist() == plain.sample(1, index)["tokens"].tolist() for index in range(5)
    )


def test_weights_decide_what_an_epoch_holds():
    made = compose("1-train,2-train,3-train", data_weights=[1, 0, 3]).samples("train", glm, 1)
    assert [share.samples / made.samples_per_epoch for share in made.table()] == pytest.approx(
        [0.25, 0, 0.75], abs=0.05
    )
    warm = compose("1-train,3-train", data_temperature=100.0).samples("train", glm, 1)
    assert [share.weight for share in warm.table()] == pytest.approx([0.5, 0.5], abs=0.01)


def test_a_corpus_named_twice_gives_other_samples_the_second_time():
    made = compose("2-train,2-train").samples("train", glm, 1)
    half = len(made) // 2
    first, second = ([made.sample(1, n)["tokens"].tolist() for n in range(s, s + half)] for s in (0, half))
    assert not any(sample in second for sample in first)


def test_documents_are_all_of_all_corpora():
    made = compose("1-train:2-train,3-train").documents("train")
    parts = [Memory(f"{n}-train").documents("train") for n in (1, 2, 3)]
    assert len(made) == 60
    assert made.sizes.tolist() == [6] * 10 + [7] * 20 + [8] * 30
    expected = [part[n].tolist() for part in parts for n in range(len(part))]
    assert [made[n].tolist() for n in range(60)] == expected
    with pytest.raises(IndexError):
        made[60]


def test_a_split_that_some_corpora_lack_is_refused():
    made = compose("1-train-valid,2-train")
    assert made.splits() == ["train"]
    with pytest.raises(UserError, match="2-train has no split 'valid'"):
        made.samples("valid", glm, 1)
    with pytest.raises(UserError, match="1-valid has no split 'train'; either all shards"):
        compose("2-train:1-valid:3-train").samples("train", glm, 1)


def test_validation_data_may_be_in_the_first_shard_alone():
    made = compose("1-train-valid:2-train")
    assert len(made.documents("valid")) == 10
    assert made.samples("train", glm, 1).lengths == [len(glm(random_documents([5 + n] * 10 * n), 1)) for n in (1, 2)]


def test_different_tokenizers_are_refused():
    with pytest.raises(UserError, match="1-train and 2-train-other were made by different tokenizers"):
        compose("1-train,2-train-other").tokenizer()
    assert compose("1-train,2-train").tokenizer().fingerprint == "numbers"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_weights": [1.0, -1.0]}, "data_weights is 1,-1"),
        ({"data_weights": [0.0, 0.0]}, "data_weights is 0,0"),
        ({"data_temperature": 0.0}, "data_temperature is 0"),
        ({"data_temperature": 2.0, "data_weights": [1.0]}, "both given"),
        ({"split_ratios": [1.0]}, "two or three"),
        ({"split_ratios": [1.0, -1.0]}, "split_ratios is 1,-1"),
        ({"split_ratios": [1.0] * 4}, "two or three"),
    ],
)
def test_wrong_options_are_said(options, message):
    assert any(message in found for found in mistakes(CompositionConfig(**options)))


@pytest.mark.parametrize(
    "name", ["batch_size", "max_tokens", "required_batch_size_multiple", "max_valid_samples", "bucket_window"]
)
def test_huge_numbers_are_said_before_anything_is_made(name):
    with pytest.raises(UserError, match=rf"^dataloader\.{name} is 2147483648; it must be at most 2,147,483,647$"):
        build_options("dataloader", DataloaderConfig, {name: 2**31})


@pytest.mark.parametrize("weights", [[1e308, 1e308], [float("inf"), 1.0], [float("nan"), 1.0]])
def test_weights_have_a_sum(weights):
    for name in ("data_weights", "split_ratios"):
        assert any(name in found for found in mistakes(CompositionConfig(**{name: weights})))


def test_the_smallest_temperature_takes_the_largest_corpus_alone():
    assert weights_by_size([10, 20], 5e-324).tolist() == [0.0, 1.0]


def test_names_of_many_corpora_are_longer_than_that_of_a_file():
    names = [f"corpus-{number}" for number in range(1000)]
    assert parse_data(",".join(names)) == [[name] for name in names]


def test_as_many_weights_as_corpora():
    with pytest.raises(UserError, match="`data_weights` 1,2,3 are 3 weights, 1-train,2-train names 2 corpora"):
        compose("1-train,2-train", data_weights=[1, 2, 3])
    with pytest.raises(UserError, match="`data_weights` 5 has no effect, as 1-train is one corpus; leave it out"):
        compose("1-train", data_weights=[5])


@given(
    st.integers(0, 300),
    st.lists(st.floats(0, 1000).filter(lambda r: r == 0 or r > 1e-3), min_size=2, max_size=3).filter(any),
)
def test_a_division_gives_every_document_to_one_split(count, ratios):
    sizes = split_sizes(count, ratios)
    assert sum(sizes) == count
    assert min(sizes) >= 0
    present = sum(ratio > 0 for ratio in ratios)
    assert all(size > 0 or count < 2 * present for size, ratio in zip(sizes, ratios, strict=True) if ratio > 0)
    documents = random_documents(list(range(1, count + 1)))
    made = split_documents(documents, ratios, seed=5)
    lengths = [size for part in made.values() for size in part.sizes.tolist()]
    assert sorted(lengths) == list(range(1, count + 1))
    for part in made.values():
        assert [len(part[n]) for n in range(len(part))] == part.sizes.tolist() == sorted(part.sizes)


def test_a_division_is_fixed_by_its_own_seed():
    documents = random_documents(range(1, 201))
    first, again, other = (split_documents(documents, [90, 10], seed)["valid"].sizes.tolist() for seed in (1, 1, 2))
    assert len(first) == 20
    assert first == again != other


def test_a_corpus_of_one_split_is_divided_and_others_keep_theirs(caplog):
    made = compose("2-all,3-train-valid", split_ratios=[80, 20])
    assert made.splits() == ["train", "valid"]
    assert len(made.documents("train")) == 16 + 30
    assert len(made.documents("valid")) == 4 + 30
    seeds = [compose("2-all", split_ratios=[80, 20], split_seed=seed).documents("valid") for seed in (1234, 5)]
    alone = compose("2-all", split_ratios=[80, 20]).documents("valid")
    assert [document.tolist() for document in alone] == [document.tolist() for document in seeds[0]]
    assert [document.tolist() for document in alone] != [document.tolist() for document in seeds[1]]
    with pytest.raises(UserError, match="has no split 'test'"):
        made.samples("test", glm, 1)
    assert caplog.messages == []
    compose("3-train-valid", split_ratios=[80, 20])
    assert caplog.messages == ["`split_ratios` 80,20 has no effect, as 3-train-valid has several splits (train, valid)"]


def samples_of(documents, **options):
    dataset = GLMBlankDataset(documents, NumberTokenizer(), BlankInfillingConfig(seq_length=24, **options), 1)
    return {name: array.tolist() for name, array in dataset.samples(2, np.arange(len(dataset))).arrays.items()}


def one_by_one(documents):
    return DocumentList([documents[number] for number in range(len(documents))])


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
def test_a_part_of_a_file_gives_its_documents_samples_without_python(tmp_path, dtype, monkeypatch):
    whole = random_documents([9, 0, 30, 4, 50, 11, 7, 23], seed=3)
    with IndexedDatasetWriter(tmp_path / "d", dtype) as writer:
        for number in range(len(whole)):
            writer.add(whole[number])
    part = split_documents(IndexedDataset(tmp_path / "d"), [3, 1], seed=4)["train"]
    expected = samples_of(one_by_one(part))
    shorter = np.flatnonzero(part.sizes <= 22)
    expected_short = samples_of(one_by_one(DocumentSubset(part, shorter)), sample_one_document=True)
    packed = pickle.dumps(part)

    def refuse(self, index):
        raise AssertionError("a document was read by Python")

    monkeypatch.setattr(DocumentSubset, "__getitem__", refuse)
    assert samples_of(part) == expected
    assert samples_of(pickle.loads(packed)) == expected
    assert samples_of(part, sample_one_document=True, long_documents="drop") == expected_short


def test_a_part_of_what_lies_elsewhere_is_read_by_python():
    documents = random_documents([9, 30, 4, 50, 11], seed=3)
    documents.tokens = np.arange(7)  # whatever that may be: these are not all documents back to back
    part = DocumentSubset(documents, np.array([0, 3, 4]))
    assert part.pool is None
    assert samples_of(part) == samples_of(one_by_one(part))


def test_documents_beyond_their_pool_are_refused():
    class Wrong(DocumentSubset):
        pool = np.zeros(20, dtype=np.int64)
        starts = np.array([0, 15])

    with pytest.raises(ValueError, match="do not lie within their pool"):
        samples_of(Wrong(random_documents([10, 10]), np.arange(2)))


def test_long_documents_are_cut_or_dropped_and_counted(caplog):
    caplog.set_level("INFO")
    documents = random_documents([5, 40, 6, 14, 15])
    options = {"seq_length": 16, "sample_one_document": True}
    dropped = GLMBlankDataset(documents, NumberTokenizer(), BlankInfillingConfig(**options, long_documents="drop"), 1)
    assert dropped.packer.total_tokens == 25
    assert "2 of 5 documents have more than the 14 tokens that `seq_length` 16 holds and are dropped" in caplog.text
    cut = GLMBlankDataset(documents, NumberTokenizer(), BlankInfillingConfig(**options), 1)
    assert cut.packer.total_tokens == 80
    assert "a sample gets a part of one" in caplog.text
    config = BlankInfillingConfig(seq_length=16, long_documents="drop")
    with pytest.raises(UserError, match="leaves nothing"):
        GLMBlankDataset(random_documents([40]), NumberTokenizer(), config, 1)


# -- by the command, on real folders ----------------------------------------------------------------------------

TRAIN = ("--arch", "glm_tiny", "--seq-length", "32", "--batch-size", "4", "--max-update", "6", "--log-interval", "3")


@pytest.fixture(scope="module")
def second(tmp_path_factory, command, data_bin):
    """Another folder by the same tokenizer, with a split of one name only."""
    folder = tmp_path_factory.mktemp("second")
    text = data_bin.parent / "valid.txt"
    tokenizer = ("--tokenizer", "sentencepiece", "--tokenizer-path", data_bin / "tokenizer")
    command("ftk-preprocess", "--trainpref", text, "--destdir", folder / "data", *tokenizer, code=0)
    return folder / "data"


def test_dry_run_shows_the_mixture(command, data_bin, second):
    done = command("ftk-train", f"{data_bin},{second}", "--data-weights", "3,1", *TRAIN, "--dry-run", code=0)
    lines = done.stdout.splitlines()
    head = next(n for n, line in enumerate(lines) if line.startswith("corpus"))
    assert [line.split()[0] for line in lines[head + 1 : head + 3]] == [str(data_bin), str(second)]
    assert [line.split()[3] for line in lines[head + 1 : head + 3]] == ["75.00%", "25.00%"]


def test_a_run_on_a_blend_ends_and_is_validated_on_what_was_split_off(tmp_path, command, data_bin, second):
    data = f"{second}:{second},{second}"
    flags = ("--split-ratios", "80,20", "--data-temperature", "2", "--num-workers", "1", "--log-format", "json")
    done = command("ftk-train", data, *TRAIN, *flags, "--bucket-window", "16", "--save-dir", tmp_path / "run", code=0)
    assert "no effect of --bucket-window" in done.stderr
    assert '"event": "valid"' in done.stdout
    assert '"data_share": 0.' in done.stdout
    command("ftk-validate", data_bin, "--path", tmp_path / "run", code=0)


def test_a_blend_of_different_tokenizers_is_refused(tmp_path, command, data_bin):
    command(
        *("ftk-preprocess", "--trainpref", data_bin.parent / "train.txt", "--vocab-size", 500),
        *("--destdir", tmp_path / "other"),
        code=0,
    )
    done = command("ftk-train", f"{data_bin},{tmp_path / 'other'}", *TRAIN, "--save-dir", tmp_path / "run", code=2)
    assert "were made by different tokenizers" in done.stderr
    assert not (tmp_path / "run").exists()


def test_sharded_runs_count_the_updates_of_each_shard(command, data_bin, second):
    flags = ("--arch", "glm_tiny", "--seq-length", "32", "--batch-size", "4", "--max-epoch", "3", "--dry-run")
    done = command("ftk-train", f"{data_bin}:{second}", *flags, "--valid-subset", "none", code=0)
    assert "updates in total" in done.stdout
