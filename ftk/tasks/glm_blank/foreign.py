"""Options of the original GLM's repository that ftk has under other names, and others that need nothing."""

from __future__ import annotations

from ftk.config.foreign import as_in, rows

ORIGINAL = "THUDM/GLM"

FOREIGN = (
    *as_in(
        ORIGINAL,
        "fp16 local-rank gradient-accumulation-steps checkpoint-activations model-parallel-size adam-beta1 adam-beta2 "
        "adam-eps num-beams train-iters lr-decay-style lr-decay-iters clip-grad max-position-embeddings hidden-dropout "
        "loss-scale-window split load no-load-optim eval-interval eval-iters tokenizer-type "
        "reset-attention-mask distributed-backend",
    ),
    *rows(
        ORIGINAL,
        experiment_name="--save-dir",
        block_lm=("--task glm_blank", "the default of GLM's architectures"),
        epochs="--max-epoch",
        warmup=("--warmup-ratio", "share of the whole run, not of the decay; in updates --warmup-updates"),
        lr_decay_ratio="--min-lr-ratio",
        switch_linear="--reset-lr-scheduler --lr-scheduler linear",
        no_load_lr_scheduler="--reset-lr-scheduler",
        resume_dataloader=("nothing", "a run that is continued goes on in its data"),
        load_pretrained=("--finetune-from CHECKPOINT", "first ftk-checkpoint convert --from glm"),
        finetune=("--finetune-from CHECKPOINT", "first ftk-checkpoint convert --from glm"),
        save_epoch="--save-interval",
        eval_epoch="--validate-interval",
        eval_batch_size=("--batch-size", "validation has the batches of training"),
        validation_metric="--best-metric",
        no_validation="--valid-subset none",
        summary_dir="--tensorboard-dir",
        intermediate_size="--ffn-hidden-size",
        layernorm_epsilon="--layer-norm-eps",
        deep_init=("nothing", "initial output layers are always scaled by the depth"),
        min_scale="--fp16-min-scale",
        cpu_optimizer=("--cpu-offload", "parameters and gradients, too"),
        DDP_impl=("nothing", "replicas are torch's DDP; --data-parallel-shard-size N shards them"),
        deepspeed_activation_checkpointing="--activation-checkpointing full",
        checkpoint_num_layers=(
            "--activation-checkpointing full",
            "each block by itself; --checkpoint-every N leaves out blocks, which takes more memory",
        ),
        no_shuffle_block="--no-shuffle-blocks",
        no_block_position="--no-block-positions",
        sentinel_token=("--sentinel-tokens", "data from ftk-preprocess --special-tokens glm --sentinel-tokens N"),
        masked_lm=("--task masked_lm", "of BERT and RoBERTa"),
        shuffle=("nothing", "training samples are always in random order"),
        no_lazy_loader=("nothing", "files are mapped into memory"),
        half_lazy_loader=("nothing", "files are mapped into memory"),
        loader_scatter=("nothing", "each rank reads its own samples"),
        cloze_eval="--task cloze --cloze NAME",
        pattern_id="--pattern",
        loss_func="--choice-loss",
        multi_token=("nothing", "candidates may have several tokens"),
        fast_decode=("nothing", "a text is read once for all its candidates"),
        pool_token="--pool",
        src_seq_length="--seq-length",
        tgt_seq_length="--target-length",
        continuous_prompt="--adapter p_tuning",
        prompt_func="--prompt-encoder",
        freeze_transformer=("--freeze 'layers.*'", "with an adapter nothing: the model is frozen"),
        out_seq_length="--max-len",
        min_tgt_length="--min-len",
        select_topk=("nothing", "beams keep the likeliest; --search beam_sampling draws them"),
        tokenizer_model_type=("--tokenizer-path", "a file: ftk downloads nothing"),
    ),
    *rows(
        ORIGINAL,
        at="ftk-train",
        task_mask=("nothing", "the default; off by ftk-preprocess --special-tokens glm --no-task-mask"),
        fix_command_token=("nothing", "the default; off by ftk-preprocess --special-tokens glm --no-fix-command-token"),
        train_data="ftk-preprocess --trainpref FILE",
        valid_data="ftk-preprocess --validpref FILE",
        test_data="ftk-preprocess --testpref FILE",
        data_dir=("DATA", "the first argument, a folder"),
    ),
)
