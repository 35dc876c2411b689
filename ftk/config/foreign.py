"""Options of other programs that ftk has under other names; docs/coming_from.md shows them."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from collections.abc import Collection, Iterable, Iterator

from ftk.builtins import FOREIGN_MODULES
from ftk.errors import in_python

FAIRSEQ, HF, MEGATRON = "fairseq", "Hugging Face", "Megatron-LM"


@dataclasses.dataclass(frozen=True)
class Foreign:
    """One option of other programs.

    Attributes:
        theirs: its flag, with dashes.
        ours: what to write instead.
        programs: those that have it.
        note: what is different, such as another unit.
        at: the command that is asked for it, where `ours` is no option of that command; None: those with the options
            of `ours`.
    """

    theirs: str
    ours: str
    programs: tuple[str, ...]
    note: str = ""
    at: str | None = None

    def flags(self) -> set[str]:
        """The flags in `ours`."""
        return set(re.findall(r"--[a-z][a-z0-9-]*", self.ours))

    def answer(self) -> str:
        """The hint for a user who types `theirs`."""
        return f"in ftk: {self.ours}" + (f" ({self.note})" if self.note else "")


def names_for(prog: str, known: Collection[str]) -> Iterator[Foreign]:
    """The rows for a command; `known`: all flags that it can have."""
    return (row for row in foreign_rows() if (row.flags() <= set(known) if row.at is None else row.at == prog))


def in_keywords(name: str, known: Iterable[str]) -> str | None:
    """The hint for a caller in Python who gives another program's option; None where there is none.

    Args:
        name: the option, by keyword.
        known: all options of the call, as keywords.
    """
    theirs, flags = _flag(name), set(map(_flag, known))
    rows = (row for row in foreign_rows() if row.at is None and row.theirs == theirs and row.flags() <= flags)
    return next((in_python(row.answer()) for row in rows), None)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@functools.cache
def foreign_rows() -> tuple[Foreign, ...]:
    """`FOREIGN` here and in the modules that `FOREIGN_MODULES` lists."""
    return sum((importlib.import_module(name).FOREIGN for name in FOREIGN_MODULES), FOREIGN)


def as_in(program: str, names: str) -> Iterator[Foreign]:
    """The rows of `FOREIGN` for flags that another program has with the same meaning."""
    flags = {f"--{name}" for name in names.split()}
    return (dataclasses.replace(row, programs=(program,)) for row in FOREIGN if row.theirs in flags and row.at is None)


def rows(*programs: str, at: str | None = None, **ours: str | tuple[str, str]) -> Iterator[Foreign]:
    """Rows from `their_flag="--our-flag"`, or `their_flag=("--our-flag", note)`."""
    for theirs, text in ours.items():
        what, note = (text, "") if isinstance(text, str) else text
        yield Foreign(_flag(theirs), what, programs, note, at)


_AFTER_WARMUP = "counted from the end of the warm-up; by default the rest of the run"
_NO_MINUTES = "hours, not minutes"
_BOTH_BETAS = "both in one list"
_QUANTISED = "a checkpoint for generation and training of adapters on a CPU"
_RANKS = ("nothing", "torchrun and --launch tell each process its rank")

FOREIGN: tuple[Foreign, ...] = (
    *rows(FAIRSEQ, at="ftk-generate", fp16=("--precision bf16", "fp16 is for training")),
    *rows(FAIRSEQ, HF, MEGATRON, fp16="--precision fp16", bf16="--precision bf16"),
    *rows(FAIRSEQ, HF, local_rank=_RANKS),
    *rows(
        FAIRSEQ,
        max_sentences="--batch-size",
        batch_size_valid=("--batch-size", "validation has the batches of training"),
        tokens_per_sample="--seq-length",
        max_tokens_valid=("--max-tokens", "validation has the batches of training"),
        dataset_impl=("nothing", "files are mapped into memory"),
        amp="--precision fp16",
        memory_efficient_fp16=("--precision fp16", "the weights stay in fp32"),
        memory_efficient_bf16=("--weights bf16", "the optimizer keeps them in fp32"),
        min_loss_scale="--fp16-min-scale",
        adam_betas="--betas B1,B2",
        adam_eps="--eps",
        total_num_update=("--decay-updates", _AFTER_WARMUP),
        end_learning_rate="--min-lr",
        restore_file="--restore-from",
        finetune_from_model="--finetune-from",
        keep_last_epochs=("--keep-last", "checkpoints, not epochs"),
        keep_best_checkpoints="--keep-best",
        no_epoch_checkpoints=("--save-interval 0", "which is the default"),
        best_checkpoint_metric="--best-metric",
        maximize_best_checkpoint_metric="--maximize-best-metric",
        disable_validation="--valid-subset none",
        skip_invalid_size_inputs_valid_test="--long-samples drop",
        distributed_world_size=("--launch N", "on several machines torchrun"),
        ddp_backend=("--data-parallel-shard-size N", "for fully_sharded; without it DDP"),
        tensorboard_logdir="--tensorboard-dir",
        no_progress_bar="--log-format simple",
        cpu="--device cpu",
        checkpoint_activations="--activation-checkpointing full",
        decoder_layers=("--num-layers", "after an encoder --num-decoder-layers"),
        decoder_embed_dim="--hidden-size",
        decoder_ffn_embed_dim=("--ffn-hidden-size", "after an encoder --decoder-ffn-hidden-size"),
        decoder_attention_heads=("--num-attention-heads", "after an encoder --num-decoder-attention-heads"),
        encoder_layers="--num-layers",
        encoder_embed_dim="--hidden-size",
        encoder_ffn_embed_dim="--ffn-hidden-size",
        encoder_attention_heads="--num-attention-heads",
        encoder_normalize_before="--norm-first",
        decoder_normalize_before="--norm-first",
        share_all_embeddings="--share-embeddings all",
        share_decoder_input_output_embed="--share-embeddings decoder",
        relu_dropout="--activation-dropout",
        no_scale_embedding="--no-scale-embeddings",
        store_ema="--ema-decay X",
        lenpen="--length-penalty",
        max_len_b="--max-len",
        sampling_topk="--top-k",
        sampling_topp="--top-p",
        unkpen="--unk-penalty",
        diverse_beam_groups=("--diverse-groups", "with --search diverse_beam"),
        diverse_beam_strength=("--diversity-strength", "with --search diverse_beam"),
        srcdict=("--source-tokenizer-path", "with one dictionary for both --tokenizer-path"),
        tgtdict="--tokenizer-path",
        nwordssrc=("--source-vocab-size", "with one dictionary for both --vocab-size"),
        nwordstgt="--vocab-size",
        joined_dictionary=("nothing", "the default: one tokenizer for both sides"),
        model_parallel_size="--tensor-parallel-size",
        ddp_comm_hook="--gradient-compression bf16",
        required_seq_len_multiple="--pad-to-multiple",
        activation_fn="--activation",
        eval_bleu="--evaluate-with 'generation scoring=bleu'",
    ),
    *rows(FAIRSEQ, at="ftk-generate", remove_bpe=("nothing", "answers are always decoded to text")),
    *rows(
        FAIRSEQ, at="ftk-preprocess", padding_factor="ftk-train --make-vocab-size-divisible-by", bpe="--tokenizer NAME"
    ),
    *rows(
        FAIRSEQ,
        at="ftk-train",
        sample_break_mode=("nothing", "as none; --document-mask keeps documents apart"),
        tokenizer="ftk-preprocess --tokenizer NAME",
    ),
    *(
        row
        for command in ("ftk-train", "ftk-generate")
        for row in rows(
            FAIRSEQ, at=command, source_lang="ftk-preprocess --source-lang", target_lang="ftk-preprocess --target-lang"
        )
    ),
    *rows(
        HF,
        learning_rate="--lr",
        num_train_epochs="--max-epoch",
        max_steps="--max-update",
        per_device_train_batch_size="--batch-size",
        per_device_eval_batch_size=("--batch-size", "validation has the batches of training"),
        gradient_accumulation_steps="--update-freq",
        output_dir="--save-dir",
        overwrite_output_dir=("--save-dir ANOTHER", "a run in the folder is continued"),
        resume_from_checkpoint=("--restore-from", "a run in --save-dir is continued without it"),
        warmup_steps="--warmup-updates",
        adam_beta1=("--betas B1,B2", _BOTH_BETAS),
        adam_beta2=("--betas B1,B2", _BOTH_BETAS),
        adam_epsilon="--eps",
        max_grad_norm="--clip-norm",
        lr_scheduler_type="--lr-scheduler",
        optim="--optimizer",
        logging_steps="--log-interval",
        logging_dir="--tensorboard-dir",
        report_to=("--tensorboard-dir DIR", "or --wandb-project NAME"),
        eval_steps="--validate-interval-updates",
        eval_on_start="--validate-at-start",
        eval_strategy=("--validate-interval-updates N", "in epochs: --validate-interval N"),
        evaluation_strategy=("--validate-interval-updates N", "in epochs: --validate-interval N"),
        save_steps="--save-interval-updates",
        save_strategy=("--save-interval-updates N", "in epochs: --save-interval N"),
        save_total_limit="--keep-last",
        metric_for_best_model="--best-metric",
        greater_is_better="--maximize-best-metric",
        early_stopping_patience=("--patience", "in validations"),
        dataloader_num_workers="--num-workers",
        group_by_length=("--bucket-window N", "N samples at a time are sorted"),
        label_smoothing_factor="--label-smoothing",
        gradient_checkpointing="--activation-checkpointing full",
        torch_compile="--compile block",
        attn_implementation="--attention NAME",
        fsdp="--data-parallel-shard-size N",
        deepspeed="--data-parallel-shard-size N --zero-stage STAGE",
        ddp_find_unused_parameters="--find-unused-parameters",
        use_cpu="--device cpu",
        no_cuda="--device cpu",
        block_size="--seq-length",
        max_seq_length="--seq-length",
        max_eval_samples="--max-valid-samples",
        num_beams="--beam",
        max_new_tokens="--max-len",
        max_tokens=("--max-len", "of vLLM"),
        max_length=("--max-len", "tokens of the answer, without the prompt"),
        do_sample="--sampling",
        num_return_sequences="--nbest",
        packing="--pack",
        use_peft="--adapter lora",
        lora_target_modules=("--adapter-targets", "names of ftk's layers"),
        target_modules=("--adapter-targets", "names of ftk's layers"),
        lora_r="--lora-rank",
        use_dora="--weight-decomposed",
        use_rslora="--lora-scaling alpha_over_sqrt_rank",
        modules_to_save=("--train-also", "a classifier is always trained"),
        predict_with_generate="--evaluate-with generation",
        loss_type=("--preference-loss", "of TRL"),
        ref_model=("--reference", "without it the model of --finetune-from"),
        rpo_alpha=("--sft-weight", "of TRL; per answer, not per token of the batch"),
        max_prompt_length="--seq-length",
        max_completion_length="--target-length",
        stage=("--task preference", "of LLaMA-Factory; --task sft for its sft"),
        pref_loss=("--preference-loss", "of LLaMA-Factory"),
        pref_beta=("--beta", "of LLaMA-Factory"),
        pref_ftx=("--sft-weight", "of LLaMA-Factory"),
        simpo_gamma="--simpo-margin",
        dpo_label_smoothing=("--label-smoothing", "of LLaMA-Factory"),
        finetuning_type=("--adapter lora", "of LLaMA-Factory"),
        lora_target=("--adapter-targets", "of LLaMA-Factory; names of ftk's layers"),
        cutoff_len=("--seq-length", "of LLaMA-Factory"),
        flash_attn=("--attention NAME", "of LLaMA-Factory; auto takes the fastest"),
        torch_dtype=("--precision bf16", "in training also --weights bf16"),
        dtype=("--precision bf16", "in training also --weights bf16"),
        deepspeed_config=("--data-parallel-shard-size N --zero-stage STAGE", "options in place of a file"),
        enable_lora=("--adapters NAME=FOLDER", "of vLLM"),
        lora_modules=("--adapters NAME=FOLDER", "of vLLM"),
        model=("--path FOLDER", "of vLLM"),
    ),
    *rows(
        HF,
        at="ftk-serve",
        served_model_name=("--model-name", "of vLLM"),
        max_model_len=("--max-context", "of vLLM"),
        max_num_seqs=("--batch-size", "of vLLM"),
        api_key=("--api-key-file FILE", "of vLLM; a key per line"),
        quantization=("ftk-checkpoint export --quantize int8", "of vLLM; it writes what --path is then given"),
        enable_prefix_caching=("nothing", "of vLLM; what prompts share is read once"),
    ),
    *rows(
        HF,
        at="ftk-generate",
        prompt=("--input FILE", "one prompt per line, - for standard input; or ftk-interactive"),
        limit=("--max-samples", "of lm_eval, as in ftk-evaluate"),
    ),
    *rows(
        HF,
        at="ftk-evaluate",
        max_samples=("--limit", "rows of each file, as in lm_eval"),
        model_args=("--path FOLDER", "of lm_eval"),
        tasks=("--evaluation NAME", "of lm_eval, which runs ftk's models, too"),
        output_path=("--output FOLDER", "of lm_eval"),
        log_samples=("--output FOLDER", "of lm_eval; its predictions.jsonl has every row"),
        apply_chat_template=(
            "--evaluation 'generation chat=true'",
            "of lm_eval; models of --task sft are asked by their template anyway",
        ),
    ),
    *rows(
        HF,
        at="ftk-train",
        model_name_or_path=(
            "--finetune-from FOLDER",
            "the Hugging Face folder, which is read as it is; it says the architecture, too",
        ),
        config_name="--arch NAME",
        model=("--arch NAME", "a new model; of a folder --finetune-from FOLDER"),
        do_train=("nothing", "ftk-train always trains"),
        do_eval=("nothing", "runs are validated; alone: ftk-validate"),
        load_best_model_at_end=("nothing", "a run's folder stands for its best checkpoint"),
        validation_split_percentage=("ftk-preprocess --valid-ratio X", "a share, not percent"),
        train_file="ftk-preprocess --trainpref FILE",
        validation_file="ftk-preprocess --validpref FILE",
        tokenizer_name="ftk-preprocess --tokenizer NAME --tokenizer-path PATH",
    ),
    *(
        row
        for command in ("ftk-train", "ftk-generate")
        for row in rows(
            HF,
            at=command,
            load_in_8bit=("ftk-checkpoint export --quantize int8", _QUANTISED),
            load_in_4bit=("ftk-checkpoint export --quantize int4", _QUANTISED),
            quantization_bit=("ftk-checkpoint export --quantize int8 or int4", _QUANTISED),
        )
    ),
    *rows(HF, at="ftk-preprocess", preprocessing_num_workers="--workers"),
    *rows(
        HF,
        gpus="--launch N",
        num_gpus="--launch N",
        devices="--launch N",
        num_processes="--launch N",
        nproc_per_node=("--launch N", "on several machines torchrun"),
    ),
    *rows(
        MEGATRON,
        micro_batch_size="--batch-size",
        global_batch_size=("--update-freq", "samples of an update: --batch-size x --update-freq x data parallel ranks"),
        train_iters="--max-update",
        lr_decay_style="--lr-scheduler",
        lr_decay_iters=("--decay-updates", _AFTER_WARMUP),
        lr_warmup_iters="--warmup-updates",
        lr_warmup_fraction=("--warmup-ratio", "share of the whole run"),
        clip_grad="--clip-norm",
        fp32_residual_connection=("--residual-precision fp32", "the default"),
        max_position_embeddings="--max-positions",
        hidden_dropout="--dropout",
        num_query_groups="--num-kv-heads",
        kv_channels="--head-dim",
        rotary_base="--rope-theta",
        init_method_std="--init-std",
        norm_epsilon="--layer-norm-eps",
        tensor_model_parallel_size="--tensor-parallel-size",
        pipeline_model_parallel_size="--pipeline-parallel-size",
        num_layers_per_virtual_pipeline_stage=("--pipeline-stages-per-rank", "stages, not layers of a stage"),
        use_distributed_optimizer="--data-parallel-shard-size N --zero-stage 1",
        recompute_activations="--activation-checkpointing selective",
        recompute_granularity="--activation-checkpointing",
        split="--split-ratios",
        load="--restore-from",
        finetune=("--finetune-from CHECKPOINT", "a folder of Megatron-LM, too, which is read as it is"),
        no_load_optim="--reset-optimizer",
        reset_attention_mask="--document-mask",
        distributed_backend=("nothing", "NCCL on GPUs, Gloo on CPUs"),
        eval_interval="--validate-interval-updates",
        eval_iters=("--max-valid-samples", "samples, not batches"),
        initial_loss_scale="--fp16-init-scale",
        loss_scale_window="--fp16-scale-window",
        distributed_timeout_minutes="--collective-timeout-minutes",
        exit_duration_in_mins=("--stop-time-hours", _NO_MINUTES),
        tokenizer_type="--tokenizer",
        tokenizer_model="--tokenizer-path",
        vocab_file="--tokenizer-path",
        json_keys="--text-key",
        output_prefix="--destdir",
        append_eod="--append-eos",
        eod_mask_loss="--no-end-loss",
        world_size="ftk-plan --gpus",
    ),
    *rows(
        MEGATRON,
        at="ftk-train",
        data_path=("DATA", "the first argument, a folder; A,B are blended"),
        rampup_batch_size=("nothing", "not built; continue the run with another --update-freq and --reset-dataloader"),
        context_parallel_size=("nothing", "not built; --sequence-parallel shares norms and dropout alone"),
        num_experts=("nothing", "mixtures of experts are not built"),
        expert_model_parallel_size=("nothing", "mixtures of experts are not built"),
        swiglu=("--arch NAME", "of a family that has it, such as llama"),
        rotary_percent=("--rotary-share", "of some families; fixed in others"),
        use_flash_attn=("--attention NAME", "auto takes the fastest"),
        overlap_grad_reduce=("nothing", "gradients are always sent during the backward pass"),
        tokenizer_type="ftk-preprocess --tokenizer NAME",
        vocab_size=("nothing", "the tokenizer of the data decides"),
    ),
    *rows(
        MEGATRON,
        at="ftk-preprocess",
        input="--trainpref FILE",
        split_sentences=("nothing", "tasks that need sentences find their ends in the tokens"),
    ),
)
