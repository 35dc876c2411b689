"""Plugins, and the changes that make one break a contract, with what the user is told of each."""

from __future__ import annotations

from pathlib import Path

import torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "plugin" / "language_model.py"
GOOD = EXAMPLE.read_text(encoding="utf-8")

CRITERION = """
from ftk.criterions.base import Criterion, LossOutput
from ftk.registry import register_criterion


@register_criterion("mine")
class Mine(Criterion):
    def loss(self, head, hidden, batch):
        loss = head(hidden).logsumexp(-1).sum()
        count = batch.targets.new_full((), len(batch.targets))
        return LossOutput(loss, count, {})
"""
BACKBONE = """
from ftk.models.base import Backbone
from ftk.models.config import TransformerConfig


@register_model("trunk", config=TransformerConfig, task="next_token")
class Trunk(Backbone):
    INPUTS = {"tokens": "B T"}

    def __init__(self, config):
        super().__init__(config)
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList()
        self.head = nn.Linear(config.hidden_size, config.vocab_size)

    def embed(self, tokens):
        return self.token_embedding(tokens)

    def attend(self, tokens):
        return None

    def finish(self, hidden):
        return hidden


@register_architecture("trunk_tiny", model="trunk")
def trunk_tiny():
    return TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2)
"""
DATASET = """
from ftk.config.options import required
from ftk.data.corpora.documents import DocumentList
from ftk.registry import register_dataset
from ftk.tokenizers import load_tokenizer


@dataclass(kw_only=True)
class OwnConfig:
    data: str = required("its folder", positional=True, metavar="DATA")


@register_dataset("own", config=OwnConfig)
class Own:
    def __init__(self, config):
        self.tokenizer_folder = config.data + "/tokenizer"

    def splits(self):
        return ["train"]

    def tokenizer(self):
        return load_tokenizer(self.tokenizer_folder)

    def documents(self, split):
        return DocumentList([[1, 2, 3] * 20])
"""
SCHEDULE = """
from ftk.optim.schedules import LRScheduler, LRSchedulerConfig
from ftk.registry import register_lr_scheduler


@dataclass(kw_only=True)
class SawConfig(LRSchedulerConfig):
    period: int = option(10, "updates of a tooth")


@register_lr_scheduler("saw", config=SawConfig)
class Saw(LRScheduler):
    def decayed(self, num_decayed):
        return self.base_lr * (1 - num_decayed % self.config.period / self.config.period)
"""
SAMPLE = 'return {"tokens": piece[:-1], "targets": piece[1:], "loss_mask": np.ones(len(piece) - 1, dtype=bool)}'
MAKE = "return Windows(documents, self.config.window, self.tokenizer.special.eos)"
STATES = "return self.lstm(self.embedding(tokens))[0]"
IN_TASK = '    special_tokens = "with_end"\n'
ARCHITECTURE = "return LSTMConfig(hidden_size=32, num_layers=1)"

# What is replaced in the plugin, by what, and the message; CLASS is a class with its file and line.
MISTAKES: list[tuple[str, str, str]] = [
    # samples
    (SAMPLE, "return None", "CLASS Windows: sample(1, 0) is None; it must be a dictionary of NumPy arrays and numbers"),
    (
        SAMPLE,
        "return {}",
        "CLASS Windows: sample(1, 0) has no 'tokens'; the task's collater needs tokens int64 [T], tar",
    ),
    (
        "piece[:-1]",
        "piece[:-1].astype(float)",
        "CLASS Windows: sample(1, 0)['tokens'] is float64 [16]; it must be int64 [T]",
    ),
    ("piece[:-1]", "piece[:-1][None]", "CLASS Windows: sample(1, 0)['tokens'] is int64 [1, 16]; it must be int64 [T]"),
    ("piece[1:]", "piece[2:]", "['targets'] is int64 [15]; it must be as long as the tokens, [..., 16]"),
    (
        "piece[1:]",
        "[1, 2]",
        "CLASS Windows: sample(1, 0)['targets'] is of type list; it must be a NumPy array or a number",
    ),
    (
        "piece[1:]",
        "piece[1:] * 0 - 100",
        "has -100 where loss_mask is True; where nothing is learned it is ",
    ),
    (
        "piece[:-1]",
        "np.random.permutation(piece[:-1])",
        "CLASS Windows: sample(1, 0) is not the same again; draw by se",
    ),
    ("piece[1:]", "piece[1]['x']", "CLASS Windows fails: IndexError: "),
    (
        "piece[:-1]",
        "piece[:-1] * 0 + 999 * min(index, 1)",
        "CLASS Windows has the token 999, but the model's vocabulary",
    ),
    ("piece[:-1]", "piece[:-1] * 0 - min(index, 1)", "CLASS Windows has the token -1, but the model's vocabulary"),
    ("self.window, dtype=np.int32)", "3, dtype=np.int32)", "has 16 tokens, but sizes(1)[0] is 3; it must be a maximum"),
    ("np.full(len(self), self.window, dtype=np.int32)", "[1.5]", "sizes(1) is float64 [1]; it must be int32 ["),
    (
        "def sizes",
        "def size",
        "CLASS NextToken are CLASS Windows, which has no 'sizes'; a dataset of samples has __len__, si",
    ),
    (
        "return max(1, (len(self.text) - 1) // self.window)",
        "return 0",
        "CLASS Windows has no sample of train: its length",
    ),
    # the task
    (MAKE, "return None", "the samples of CLASS NextToken are None; a dataset of samples has"),
    (
        MAKE,
        "return Window(documents)",
        "CLASS NextToken cannot make the samples of train: NameError: name 'Window' is not",
    ),
    (
        "def make_samples",
        "def make_sample",
        "CLASS NextToken has no 'make_samples'; a task has that, or else 'load_split'",
    ),
    (
        "class NextToken(Task)",
        "class NextToken",
        "CLASS NextToken cannot be built as NextToken(config, corpus=..., seed=...): ",
    ),
    (
        IN_TASK,
        "    def complete_model_config(self, config): return config\n",
        "a vocab_size of 1, but the tokenizer has ",
    ),
    (
        IN_TASK,
        "    def complete_model_config(self, config): ...\n",
        "CLASS NextToken: what complete_model_config returns is ",
    ),
    (
        IN_TASK,
        "    def collater(self): return list\n",
        "the collater of CLASS NextToken: what it returns is of type list; it",
    ),
    (
        IN_TASK,
        "    def collater(self):\n        from ftk.data.batches.collate import Collater\n"
        "        return Collater(self.tokenizer.special, {'kind': ('short', 'long')})\n",
        "CLASS Windows: sample(1, 0)['kind'] is None; it must be the number of its group: 0 to 1",
    ),
    (
        IN_TASK,
        "    def collater(self): return None\n",
        "what collater() returns is None; it must be a function from a list",
    ),
    # the model
    (
        STATES,
        STATES[:-3],
        "CLASS LSTM: what hidden_states returns is of type tuple; it must be one tensor of floats [B, T, H]",
    ),
    (STATES, f"{STATES}.mean(1)", "what hidden_states returns is float32 [1, 32]; it must be one tensor of floats"),
    (STATES, "return self.lstm(self.embed(tokens))", "CLASS LSTM fails on the first sample, 16 tokens from "),
    (
        "def hidden_states(self, tokens)",
        "def hidden_states(self, tokens, mask)",
        "missing a required argument: 'mask'; the ",
    ),
    ("self.head", "self.output", "CLASS LSTM has 'hidden_states' but no 'head', which makes scores [N, V] of them"),
    ("class LSTM(nn.Module)", "class LSTM", "CLASS LSTM has no 'named_parameters'; a model, a `torch.nn.Module`, has"),
    (
        "        super().__init__()\n        self.embedding",
        "        self.embedding",
        "AttributeError: cannot assign module ",
    ),
    (
        "self.head = nn.Linear(config.hidden_size, config.vocab_size)",
        "self.head = nn.Identity()",
        "CLASS LSTM: its scores are [16, 32]; the last axis must be the vocabulary, at least 300",
    ),
    ("nn.Embedding(config.vocab_size", "nn.Embedding(3", "CLASS LSTM fails on the first sample, 16 tokens from "),
    # options and names
    ("@dataclass(kw_only=True)\nclass LSTMConfig", "class LSTMConfig", "CLASS LSTM: config must be a dataclass, got "),
    (
        "num_layers: int",
        "num_layers: dict",
        "CLASS LSTMConfig: model.num_layers: <class 'dict'> is not an option type; ",
    ),
    ("num_layers: int", "num_layers: 'Int'", "CLASS LSTMConfig: name 'Int' is not defined"),
    (
        "num_layers: int = option(2",
        "num_layers: int = option('2'",
        "CLASS LSTMConfig: model.num_layers is of type int, but its default is '2'",
    ),
    (
        ARCHITECTURE,
        "return {}",
        "architecture 'lstm_tiny', CLASS lstm_tiny: it must return the model's LSTMConfig, got {}",
    ),
    (
        'model="lstm_lm"',
        'model="lstm_lm", recipe={"optimizer": {"lrr": 1}}',
        "the recipe of architecture 'lstm_tiny', CLASS lstm_tiny: unknown option optimizer.lrr; did ",
    ),
    (
        'option(2, "LSTM layers")',
        "2\n\n    def __post_init__(self):\n        raise ValueError('odd')",
        "architecture 'lstm_tiny', CLASS lstm_tiny: odd",
    ),
    ('model="lstm_lm"', 'model="lstm"', "architecture 'lstm_tiny', CLASS lstm_tiny: model 'lstm' is not registered"),
    (', task="next_token"', ', task="next"', "model 'lstm_lm', CLASS LSTM: task 'next' is not registered"),
    ('register_task("next_token"', 'register_task("causal_lm"', "'causal_lm' is registered twice: "),
    (
        "import numpy as np",
        "import numpy as np\nx = 1 / 0",
        "failed to import: ZeroDivisionError: division by zero (at ",
    ),
    (
        "import numpy as np",
        "import numpy as np\ndef f(:",
        "failed to import: SyntaxError: invalid syntax (broken.py, line 6)",
    ),
    (
        "import numpy as np",
        "import numpy as np\nraise SystemExit(3)",
        "failed to import: it ends the program, by sys.exit(3) (at ",
    ),
]
OF_CRITERIONS: list[tuple[str, str, str]] = [
    (
        "return LossOutput(loss, count, {})",
        "return loss",
        "CLASS Mine: what it returns is float32 []; it must be an ftk.c",
    ),
    (
        ".logsumexp(-1).sum()",
        ".logsumexp(-1)",
        "CLASS Mine: the loss that it returns is float32 [16]; it must be a sum ",
    ),
    (".sum()", ".mean()", "CLASS Mine: the loss of twice the targets is no greater; it must be a sum over them, not a"),
    (
        "class Mine(Criterion):",
        "class Mine(Criterion):\n    def __init__(self): self.scale = nn.LayerNorm(1).weight\n",
        "CLASS Mine has parameters of its own, which are neither trained nor saved; put them into the model",
    ),
    (".sum()", ".sum().detach()", "CLASS Mine: the loss that it returns has no gradient; it must depend on the hidden"),
    (
        "new_full((), len(batch.targets))",
        "new_full((), 1)",
        "num_targets is 1, but count(batch) is 16; they must be equal",
    ),
    (
        "count, {})",
        "count, {'nll_loss': loss})",
        "CLASS Mine: the meter 'nll_loss' is float32 []; it must be (sum, count)",
    ),
    (
        "count, {})",
        "count, {'lr': (loss.detach(), count)})",
        "CLASS Mine: the meter 'lr' has the name of a figure of every record; give it another",
    ),
    (
        "class Mine(Criterion):",
        "class Mine(Criterion):\n    def __init__(self, config): ...\n",
        "CLASS Mine cannot be built as Mine() (registered without config=): TypeError: ",
    ),
    ('register_criterion("mine")', "register_criterion", "CLASS Mine is registered without a name; write @register_cr"),
    (
        "def loss",
        "def losses",
        "CLASS Mine cannot be built as Mine() (registered without config=): TypeError: Can't instantiate",
    ),
    ("class Mine(Criterion)", "class Mine", "CLASS Mine has no 'count'; a criterion, an `ftk.criterions.base.C"),
    (
        "batch.targets.new_full",
        "batch.labels.new_full",
        "CLASS Mine fails on the first sample: AttributeError: 'Batch' obj",
    ),
]
OF_BACKBONES: list[tuple[str, str, str]] = [
    (
        '    INPUTS = {"tokens": "B T"}\n',
        "",
        "CLASS Trunk has no 'INPUTS', the names of its inputs and their axes; the bat",
    ),
    ("def finish", "def finished", "CLASS Trunk has no 'finish'; a Backbone has INPUTS, layers, embed, attend, finish"),
    (
        "def attend(self, tokens)",
        "def attend(self, tokens, mask)",
        "INPUTS names tokens, but embed and attend take tokens, mask",
    ),
    (
        'INPUTS = {"tokens": "B T"}\n\n    def __init__(self, config):',
        'INPUTS = {"tokens": "B T", "mask": "B T"}\n\n    def around(self, mask): ...\n    def __init__(self, config):',
        "INPUTS names tokens, mask, but embed and attend take tokens; they must be the same",
    ),
    (
        '@register_model("trunk", config=TransformerConfig',
        'class TrunkConfig(TransformerConfig):\n    width: int = 3\n\n\n@register_model("trunk", config=TrunkConfig',
        "CLASS TrunkConfig adds 'width' to a dataclass, but is none itself; put @dataclass(kw_only=True) above it",
    ),
    (
        '@register_model("trunk", config=TransformerConfig',
        "class Between(TransformerConfig):\n    width: int = 3\n\n\n@dataclass(kw_only=True)\nclass Own(Between):"
        '\n    depth: int = 3\n\n\n@register_model("trunk", config=Own',
        "CLASS Between adds 'width' to a dataclass, but is none itself; put @dataclass(kw_only=True) above it",
    ),
    ("        self.layers = nn.ModuleList()\n", "", "'Trunk' object has no attribute 'layers'"),
]
OF_DATASETS: list[tuple[str, str, str]] = [
    ("def documents", "def document", "CLASS Own has neither 'documents' nor 'samples'; a dataset has one of them"),
    ("return DocumentList([[1, 2, 3] * 20])", "return [[1, 2, 3]]", "what documents(split) returns has no 'sizes'; "),
    (
        "return load_tokenizer(self.tokenizer_folder)",
        "return None",
        "CLASS Own: what tokenizer() returns is None; it must",
    ),
    ("def splits", "def split", "CLASS Own has no 'splits'; a dataset, besides "),
    (
        "[[1, 2, 3] * 20]",
        "['a text']",
        "CLASS Own cannot make the documents of train: TypeError: document 0 holds <U6; ",
    ),
    (
        "return DocumentList([[1, 2, 3] * 20])",
        "return type('Texts', (list,), {'sizes': np.array([6])})(['a text'])",
        "CLASS Own: the first document is of type str; it must be token ids, integers [T], as the tokenizer makes ",
    ),
    (
        "return DocumentList([[1, 2, 3] * 20])",
        "return type('Floats', (list,), {'sizes': np.array([2])})([np.ones(2)])",
        "CLASS Own: the first document is float64 [2]; it must be token ids, integers [T], ",
    ),
]
OPTIMIZER = """
import torch
from ftk.optim.schedules import LRScheduler, LRSchedulerConfig
from ftk.registry import register_hook, register_lr_scheduler, register_optimizer
from ftk.trainer import Hook


@dataclass(kw_only=True)
class SlowConfig:
    lr: float = 0.1


@register_optimizer("slow", config=SlowConfig)
class Slow(torch.optim.Optimizer):
    def __init__(self, config, param_groups):
        super().__init__(param_groups, {"lr": config.lr})

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["kept"] = 1


@register_lr_scheduler("same", config=LRSchedulerConfig)
class Same(LRScheduler):
    def decayed(self, num_decayed):
        return 0.1

    def state_dict(self):
        return {"kept": 1}


@register_hook("look")
class Look(Hook):
    def before_step(self, step, micro_batches):
        micro_batches[0].places
"""
OF_OPTIMIZERS: list[tuple[str, str, str]] = [
    (
        '["kept"] = 1',
        '["kept"] = {1}',
        "CLASS Slow: a value of type set cannot be saved in a checkpoint: {1}; states hold",
    ),
    (
        '{"kept": 1}',
        '{"kept": {1}}',
        "CLASS Same: a value of type set cannot be saved in a checkpoint: {1}; states hold",
    ),
    ("micro_batches[0].places", "micro_batches.clear()", "CLASS Look: before_step has emptied the list of batches; "),
]
ATTENTION = """
from ftk.registry import register_attention


@register_attention("short")
def short(visibility, num_tokens, device, dropout, dtype):
    return lambda query, key, value, *, bias=None, scale=None: query * 0
"""
OF_ATTENTIONS: list[tuple[str, str, str]] = [
    ("query * 0", "query[..., :-1]", ", with the attention of CLASS short: RuntimeError: "),
    ("return lambda query, key", "lambda query, key", ", with the attention of CLASS short: TypeError: "),
]
if torch.cuda.is_available():  # a form may be for the GPU alone, and is not tried on the CPU
    OF_ATTENTIONS.clear()
CASES = [
    *((GOOD, "", *case) for case in MISTAKES),
    *((GOOD + CRITERION, "--criterion mine", *case) for case in OF_CRITERIONS),
    *((GOOD + BACKBONE, "--arch trunk_tiny", *case) for case in OF_BACKBONES),
    *((GOOD + DATASET, "--dataset own", *case) for case in OF_DATASETS),
    *((GOOD + OPTIMIZER, "--optimizer slow --lr-scheduler same --hooks look", *case) for case in OF_OPTIMIZERS),
    (GOOD + OPTIMIZER, "--optimizer sgd --momentum 0 --lr-scheduler same", *OF_OPTIMIZERS[1]),  # keeps no state
    (
        GOOD + SCHEDULE,
        "--lr-scheduler saw --warmup-updates 3",
        "(LRSchedulerConfig)",
        "",
        "CLASS SawConfig must derive from ftk.optim.schedules.LRSchedulerConfig",
    ),
    *((GOOD + ATTENTION, "--arch glm_tiny --attention short --task glm_blank", *case) for case in OF_ATTENTIONS),
]
