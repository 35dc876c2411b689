"""ftk-serve: answers over HTTP."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftk.checkpoint.layout import is_adapter
from ftk.config import compose, section
from ftk.errors import UserError, naming_place
from ftk.files import as_user_error, read_bytes
from ftk.generation.config import GenerationConfig
from ftk.generation.processors.config import ProcessorConfig
from ftk.model_parallel.config import InferenceParallelConfig
from ftk.serving.config import LOOPBACK, ServeConfig
from ftk_cli.command import TERMINATING, run
from ftk_cli.inference_options import (
    MODEL,
    DevicePrecisionConfig,
    find_checkpoints,
    open_generator,
    say_proposals,
    with_options_of_task,
)
from ftk_cli.launch import launch
from ftk_cli.progress import say

if TYPE_CHECKING:
    from ftk.generation.text import TextGenerator
    from ftk.model_parallel.world import World

PROG = "ftk-serve"
DESCRIPTION = """Answers over HTTP: /v1/completions and /v1/chat/completions as OpenAI's clients ask, /v1/fill and
/v1/score with all that a model knows about its answers. Options of generation are the defaults of /v1/fill, and limits
of all answers; without --max-len, models that go on with a text answer with up to 256 tokens, others with up to 24.
Example: ftk-serve --path run --max-len 64"""
KEY_VARIABLE = "FTK_API_KEY"
USUAL_LENGTH = 256  # tokens of an answer
_MOST_KEYS = 1 << 20  # bytes of a file of keys


@dataclass(kw_only=True)
class ServedConfig(ServeConfig):
    path: str = MODEL


@dataclass(kw_only=True)
class ServeRoot:
    serve: ServedConfig = section("service")
    generation: GenerationConfig = section("how to search")
    processors: ProcessorConfig = section("logits processors")
    parallel: InferenceParallelConfig = section("parallel")
    common: DevicePrecisionConfig = section("common")

    def validate(self) -> Iterator[str]:
        if self.serve.models and max(self.parallel.tensor_parallel_size, self.parallel.pipeline_parallel_size) > 1:
            yield "--models: several processes can share one model only; start a service for each"
        if self.generation.lm_path is not None:
            yield "--lm-path is for ftk-generate; a service adds no language model"


def name_of(config: ServedConfig) -> str:
    """What clients call the model."""
    return config.model_name or Path(config.path).absolute().name


def main(argv: Sequence[str] | None = None) -> int:
    return run(PROG, body, argv)


def body(argv: list[str]) -> int | None:
    if (code := launch("serve", argv)) is not None:
        return code
    roots = _by_model(argv)
    root, *_ = roots.values()
    config = root.serve
    read_keys = partial(_keys, config.api_key_file)
    if not read_keys() and config.host not in LOOPBACK and not config.open_access:
        raise UserError(
            f"--host {config.host} is open to other machines, and there is no key; give --api-key-file, or say "
            "--open-access"
        )
    try:
        import ftk.serving.server  # noqa: F401
    except ImportError as error:
        if error.name not in ("starlette", "uvicorn", "prometheus_client"):
            raise
        raise UserError(f"a service needs the package {error.name}; install it by: pip install 'ftk[serve]'") from None
    from ftk.model_parallel.same_start import options_by_flag
    from ftk.model_parallel.world import open_world, resolve_device

    device = resolve_device(root.common.device)
    with open_world(root.parallel.whole(), device, options_by_flag(PROG, root)) as world, world.name_missing_ranks():
        for of_model in roots.values():
            find_checkpoints(of_model.serve.path, None, world, of_model.common.base)  # before anything listens
        _answer(roots, read_keys, world, argv)
    return None


def _by_model(argv: Sequence[str]) -> dict[str, ServeRoot]:
    """Name -> options of each model, first that of --path; a further one has those of a command with it as --path.

    An adapter alone as a further model has the model of --path as its base, or the base of that.
    """

    def options(argv: Sequence[str]) -> ServeRoot:
        return compose(with_options_of_task(ServeRoot, argv, _with_long_answers), PROG, DESCRIPTION, argv)

    root = options(argv)
    config, name = root.serve, name_of(root.serve)
    for flag, folders in (("--adapters", config.adapter_folders()), ("--models", config.model_folders())):
        if name in folders:
            raise UserError(f"{flag}: {name} is the name of the model itself; choose another, or --model-name")
    roots = {name: root}
    for name, folder in config.model_folders().items():
        with naming_place(f"--models {name}={folder}"):
            base = (root.common.base or config.path) if is_adapter(Path(folder)) else "none"
            own = options([*argv, "--path", folder, "--base", base])
        roots[name] = replace(own, serve=replace(own.serve, adapters=[]))
    return roots


def _with_long_answers(folder: Path, config: type) -> type:
    """Options whose `max_len` is by default what a conversation needs, or all that the model has positions for.

    A task with options of its own keeps its default.
    """
    if config is not GenerationConfig:
        return config
    from ftk.checkpoint import read_config

    positions = (read_config(folder).get("model") or {}).get("max_positions")
    longest = min(USUAL_LENGTH, positions or USUAL_LENGTH)
    return make_dataclass(
        config.__name__,
        [("max_len", int, field(default=longest, metadata=GenerationConfig.__dataclass_fields__["max_len"].metadata))],
        bases=(config,),
        kw_only=True,
    )


def _open(root: ServeRoot, argv: Sequence[str], world: World) -> TextGenerator[Any]:
    """The generator of this rank, in the thread that uses it; once more after SIGHUP, of the newest checkpoint."""
    checkpoints = find_checkpoints(root.serve.path, None, world, root.common.base)
    if world.is_main:
        longest = root.generation.max_len  # None: of a task that writes no answers, which is refused
        limit = "" if longest is None else f"; answers have at most {longest} tokens"
        say(PROG, f"loading {', '.join(map(str, checkpoints.model))}{limit}")
    if world.device.type == "cuda":  # which a thread must be told
        import torch

        torch.cuda.set_device(world.device)
    adapters = root.serve.adapter_folders()
    generator = open_generator(checkpoints, root.common, root.generation, root.processors, world, adapters)
    say_proposals(PROG, argv, checkpoints, root.generation, root.processors)
    return generator


def _answer(
    roots: Mapping[str, ServeRoot], read_keys: Callable[[], list[str]], world: World, argv: Sequence[str]
) -> None:
    """Serves, or follows the rank that does, until that ends."""
    from ftk.serving.server import serve
    from ftk.serving.service import Service
    from ftk.serving.worker import Worker

    loads = {name: partial(_open, root, argv, world) for name, root in roots.items()}
    config, *_ = (root.serve for root in roots.values())
    if not world.is_main:
        for signum in (signal.SIGINT, *TERMINATING):  # which reach all ranks; the first one says when it is done
            signal.signal(signum, signal.SIG_IGN)
        (load,) = loads.values()
        follower = Worker(load, config.max_context, lambda reports: None, lambda generator: None, lambda error: None)
        follower.follow(lambda: world.broadcast_json(None))
        return
    share = world.broadcast_json if world.size > 1 else None
    models = [partial(Service, root.serve, name, loads[name], share) for name, root in roots.items()]
    if not serve(config, models, read_keys, partial(say, PROG)):
        sys.stdout.flush()
        os._exit(0)


def _keys(path: str | None) -> list[str]:
    """The keys of a file, one per line, or of the environment."""
    if path is None:
        text = os.environ.get(KEY_VARIABLE, "")
    else:
        with as_user_error(f"--api-key-file {path}"):
            text = read_bytes(path, _MOST_KEYS).decode("utf-8")
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    if path is not None and not keys:
        raise UserError(f"{path} holds no key; write one per line")
    return keys


if __name__ == "__main__":
    raise SystemExit(main())
