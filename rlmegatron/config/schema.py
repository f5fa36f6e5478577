"""The configuration of a run: one frozen, strict record per section, one sentence under every field.

In: plain values from YAML. Out: `RunConfig`. Must never import torch or any other package of ours; rules that span
sections live in `rules.py`, the section `algorithm` in `algorithm.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema

from rlmegatron.config.algorithm import AlgorithmConfig
from rlmegatron.config.section import (
    Many,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
)


class ModelConfig(Section):
    """Which model is trained."""

    path: str
    """What actor, reference and critic start from: a Hugging Face directory, or one converted to a dist-checkpoint."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Type of the weights and activations in training; the optimizer keeps fp32 main weights either way."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation: none, only core attention, or every layer."""
    attention_chunk: Positive = 4096
    """Tokens per padded bucket when packed attention runs without a fused kernel (CPU, or no Transformer Engine)."""
    logprob_chunk: Positive = 1024
    """Tokens whose logits exist at the same time in the output layer, which bounds its peak memory."""


class ParallelConfig(Section):
    """How the training model is cut; data parallelism is what remains of the world."""

    tensor: Positive = 1
    """Tensor-parallel size (TP)."""
    pipeline: Positive = 1
    """Pipeline-parallel size (PP)."""
    virtual_pipeline: Positive = 1
    """Model chunks per pipeline stage (VPP, interleaved schedule); 1 turns it off."""
    first_stage_layers: Positive | None = None
    """Layers of the first pipeline stage where they do not come out even (61 of DeepSeek-V3); None cuts evenly."""
    last_stage_layers: Positive | None = None
    """Layers of the last pipeline stage where they do not come out even; None cuts evenly."""
    expert: Positive = 1
    """Expert-parallel size (EP): each rank holds 1 / EP of every layer's experts; its ranks are those of a stage."""
    expert_tensor: Positive = 1
    """Tensor-parallel size of the experts (ETP), which need not be that of the rest; 1 leaves each expert whole."""
    sequence: bool = False
    """Sequence parallelism: cut activations by tokens between TP regions; needs tensor > 1, where experts need it."""
    distributed_optimizer: bool = True
    """Shard optimizer state over data-parallel ranks, that of experts over the ranks that hold the same experts."""


class OptimizerConfig(Section):
    """AdamW with warm-up and a decay."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate that the decay ends at, right after the last step; ignored for a constant schedule."""
    warmup_steps: NonNegative = 0
    """Optimizer steps of linear warm-up from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay after warm-up, over the optimizer steps of the whole run."""
    betas: Annotated[tuple[float, float], Field(strict=False)] = (0.9, 0.95)
    """Adam's exponential decay rates."""
    eps: PositiveFloat = 1e-8
    """Adam's denominator offset."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; norms and biases are exempt."""
    clip_grad: NonNegativeFloat = 1.0
    """Global gradient-norm bound; 0 turns clipping off."""


class ActorConfig(Section):
    """The policy being trained."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """The policy's optimizer."""


class CriticOptimizerConfig(OptimizerConfig):
    """AdamW of the critic, which by default learns faster than the policy."""

    lr: PositiveFloat = 5e-6
    """Peak learning rate."""


class CriticConfig(Section):
    """The value model of PPO."""

    enabled: bool | None = None
    """Train a critic; None: where algorithm.advantage is 'gae'. An advantage of your own that takes `values` needs
    true."""
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    """The critic's optimizer."""
    warmup_steps: NonNegative = 0
    """First steps of the run in which only the critic is updated."""
    epochs: Positive | None = None
    """Passes of the critic over a rollout batch; None means train.epochs."""
    path: str | None = None
    """Directory, of either kind, that the critic starts from; None: model.path. Its value head is that of a reward
    model (Hugging Face's sequence classification with one label) where the directory holds one, else it starts at 0."""
    normalize_returns: bool = False
    """Fit the critic to returns of mean 0 and standard deviation 1 (running over the run); values are scaled back."""


class DynamicSamplingConfig(Section):
    """DAPO's dynamic sampling: draw prompts until enough of them have answers that differ in reward."""

    enabled: bool = False
    """Learn only from prompts whose answers differ; others are replaced by further prompts before the update."""
    by: str = "reward"
    """What must differ within a group: 'reward', or the name of one of the reward's parts."""
    max_prompts_ratio: Annotated[int, Field(gt=1)] = 10
    """Budget: most prompts tried in a step, as a multiple of rollout.prompts_per_step."""
    on_shortage: Literal["stop", "train"] = "stop"
    """When the budget is spent: save and stop the run with a report, or learn from the prompts found so far."""


class RolloutConfig(Section):
    """How answers are generated."""

    prompts_per_step: Positive = 64
    """Distinct prompts drawn for each step."""
    samples_per_prompt: Positive = 8
    """Answers sampled per prompt (the group of GRPO)."""
    max_new_tokens: Positive = 1024
    """Longest answer in tokens, EOS included; a longer one is cut and its finish reason is 'length'."""
    # 0 comes as far as the rule that says why it is refused; editors are told at once.
    temperature: Annotated[NonNegativeFloat, WithJsonSchema({"type": "number", "exclusiveMinimum": 0})] = 1.0
    """Sampling temperature, above 0; the learner's log-probabilities use the same."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling bound; 1 turns it off."""
    top_k: int = -1
    """Sample from the k most likely tokens; -1 turns it off."""
    stop_token_ids: tuple[int, ...] = Many
    """Token ids that end an answer besides the model's EOS tokens."""
    tensor: Positive = 1
    """Ranks per engine (the engine's TP); it must divide the world size."""
    expert: Positive = 1
    """Parts of an engine's ranks over which experts are spread (its EP); the ranks of a part share each of its own."""
    dtype: Literal["bf16", "fp32"] | None = None
    """Type of the engine's weights; None means model.dtype."""
    context_length: Positive | None = None
    """Longest prompt plus answer the engine accepts; None means data.max_prompt_tokens + max_new_tokens."""
    max_running_requests: Positive = 256
    """Requests an engine decodes at the same time."""
    max_total_tokens: Positive | None = None
    """Size of the KV cache in tokens; None lets the engine size it from mem_fraction."""
    mem_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.7
    """Share of the device that the engine may use for weights and KV cache while it is awake."""
    concurrency: Positive = 512
    """Requests a client keeps in flight to one engine."""
    request_timeout_s: PositiveFloat = 600.0
    """Longest wait for one answer before the request counts as failed."""
    startup_timeout_s: PositiveFloat = 600.0
    """Longest wait for an engine to become healthy."""
    retries: NonNegative = 2
    """How often a request that failed for a transient reason is sent again."""
    on_engine_death: Literal["stop", "restart"] = "stop"
    """When an engine dies: stop the run, or restart it once, publish the weights again and go on."""
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    """Draw prompts until enough of them have answers that differ in reward."""
    engine_args: dict[str, str | int | float | bool] = Field(default={}, strict=False)
    """Further SGLang server arguments, by their Python names (see SGLang's ServerArgs); they override ours."""


class DataSource(Section):
    """One file of prompts."""

    path: str
    """JSONL or Parquet file."""
    weight: PositiveFloat = 1.0
    """Share of the draws relative to the other files."""


class DataConfig(Section):
    """Where prompts come from."""

    train: Annotated[tuple[DataSource, ...], Field(strict=False, min_length=1)]
    """Files of training prompts."""
    prompt_key: str = "prompt"
    """Column that holds the prompt: a string, or a list of chat messages with 'role' and 'content'."""
    chat_template: bool = True
    """Render prompts with the tokenizer's chat template, a string as one user turn; False feeds strings as they are."""
    max_prompt_tokens: Positive = 1024
    """Prompts longer than this are dropped, and counted on the console."""
    shuffle: bool = True
    """Draw each file in a new order every epoch, decided by the seed alone."""


class RewardConfig(Section):
    """How answers are judged."""

    name: str = "exact_answer"
    """A name from rlmegatron/rewards/table.py, or 'package.module:function'."""
    args: dict[str, str | int | float | bool | None] = Field(default={}, strict=False)
    """Keyword arguments of the reward, checked against its signature at start."""
    timeout_s: PositiveFloat = 30.0
    """Longest time a judgement may take; verifiers of the table that take linear time run without a limit."""
    workers: Positive = 8
    """Answers judged at the same time."""
    on_error: Literal["stop", "score"] = "stop"
    """When a reward raises or times out: stop and name the sample, or give it error_score and count it."""
    error_score: float = 0.0
    """Reward of a sample whose judgement failed, when on_error is 'score'."""
    clip: Annotated[tuple[float, float], Field(strict=False)] | None = None
    """Bounds that rewards are cut to before credit is given; metrics and files show them as they were judged."""
    whiten: bool = False
    """Give the rewards of a step mean 0 and standard deviation 1, after clipping and before credit is given."""


class TrainConfig(Section):
    """The schedule of updates."""

    steps: Positive
    """Rollout steps of the run; 'done' means this many, also after a resume."""
    mini_batches: Positive = 1
    """Optimizer steps per pass over a rollout batch."""
    epochs: Positive = 1
    """Passes over a rollout batch."""
    split: Literal["group", "sample"] = "group"
    """Mini-batches keep all answers to a prompt together, or deal single answers in an order that the seed decides."""
    max_kl: PositiveFloat | None = None
    """End a step's policy updates early, before the optimizer step whose mini-batch shows a mean divergence (k3) from
    the policy that sampled above this; None never does."""
    micro_batch_tokens: Positive = 16384
    """Tokens of one packed micro-batch (prompt and answer); a single longer sample gets a micro-batch of its own."""
    resume: Literal["auto", "never"] = "auto"
    """'auto' goes on from the newest whole checkpoint of the run directory; 'never' refuses one that has any."""
    collective_timeout_s: PositiveFloat = 1800.0
    """Longest wait in one collective before the job counts as hung."""


class MoeConfig(Section):
    """How a mixture of experts is routed and balanced during reinforcement learning."""

    router_replay: bool = False
    """The learner sends each token to the experts that the engine chose, in scoring and in the update."""
    aux_loss_coef: NonNegativeFloat = 0.0
    """Weight of the sequence-wise balance loss (DeepSeek-V3, eq. 17) in the policy's update; 0 leaves it out."""
    bias_update_rate: NonNegativeFloat = 0.0
    """Step by which the routing bias of overloaded experts falls and that of others rises after each optimizer step;
    0 freezes it."""


class EvalConfig(Section):
    """Held-out evaluation; every prompt of every set counts."""

    sets: dict[str, str] = Field(default={}, strict=False)
    """Name to JSONL or Parquet file, with the same columns as the training data."""
    every: NonNegative = 0
    """Steps between evaluations; 0 evaluates only at the start and the end."""
    at_start: bool = True
    """Evaluate before the first step."""
    greedy: bool = True
    """Evaluate the most likely answer to every prompt."""
    samples: NonNegative = 0
    """Sampled answers per prompt, n: their mean is avg@n, and pass@k is estimated without bias for k up to n."""
    pass_at: tuple[Positive, ...] = Many
    """The k of pass@k; none means the powers of 2 up to `samples`."""
    temperature: PositiveFloat | None = None
    """Temperature of sampled answers; None means rollout.temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Nucleus sampling bound of sampled answers; None means rollout.top_p."""
    max_new_tokens: Positive | None = None
    """Longest answer; None means rollout.max_new_tokens."""
    accuracy_threshold: float = 0.5
    """An answer whose reward is at least this counts as correct."""


class CheckpointConfig(Section):
    """What is kept of a run."""

    every: NonNegative = 0
    """Steps between checkpoints; 0 saves only at the end."""
    keep: Positive = 2
    """Newest checkpoints kept."""
    export: bool = True
    """Write the final policy as a Hugging Face directory under export/."""
    export_dtype: Literal["bf16", "fp32"] | None = None
    """Type of the exported weights; None means model.dtype."""


class WeightSyncConfig(Section):
    """How new weights reach the engines."""

    transport: Literal["auto", "peer", "collective", "hf_stream"] = "auto"
    """'peer' copies from the training ranks' memory straight into the engines' parameters, and does as 'collective'
    where ranks that exchange weights are on different nodes; 'collective' all-gathers buckets among them; 'hf_stream'
    gathers whole Hugging Face tensors, slowly; 'auto' takes the fastest that works."""
    bucket_mb: Positive = 512
    """Size of one bucket in MiB; 'collective' has two at a time."""
    verify: bool = True
    """Compare a checksum of every parameter between the learner and every engine rank after each publish."""


class LoggingConfig(Section):
    """Where metrics go besides metrics.jsonl."""

    console: bool = True
    """One line per step on the console."""
    tensorboard: bool = True
    """Write event files to tensorboard/."""
    wandb_project: str | None = None
    """Weights & Biases project; nothing is sent unless it is set."""
    mlflow_uri: str | None = None
    """MLflow tracking URI; nothing is sent unless it is set."""
    rollout_samples: NonNegative = 64
    """Sampled answers written to rollouts/ per step; 0 writes none."""


class RunConfig(Section):
    """A whole run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the run, also of its directory."""
    run_dir: str | None = None
    """Directory of the run; None means runs/<name>."""
    seed: NonNegative = 1
    """Seed of everything random."""
    model: ModelConfig
    """Which model is trained."""
    parallel: ParallelConfig = ParallelConfig()
    """How the training model is cut."""
    actor: ActorConfig = ActorConfig()
    """The policy being trained."""
    critic: CriticConfig = CriticConfig()
    """The value model of PPO."""
    rollout: RolloutConfig = RolloutConfig()
    """How answers are generated."""
    data: DataConfig
    """Where prompts come from."""
    reward: RewardConfig = RewardConfig()
    """How answers are judged."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """How rewards become gradients."""
    train: TrainConfig
    """The schedule of updates."""
    moe: MoeConfig = MoeConfig()
    """How a mixture of experts is routed and balanced."""
    eval: EvalConfig = EvalConfig()
    """Held-out evaluation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What is kept of a run."""
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    """How new weights reach the engines."""
    logging: LoggingConfig = LoggingConfig()
    """Where metrics go."""

    @property
    def directory(self) -> str:
        """The run directory."""
        return self.run_dir or f"runs/{self.name}"

    @property
    def trains_critic(self) -> bool:
        """Whether there is a critic: as asked, or as the advantage needs."""
        return self.algorithm.traits.uses_values if self.critic.enabled is None else self.critic.enabled

    @property
    def updates_per_step(self) -> dict[str, int]:
        """Most optimizer steps of each model in a step of the loop."""
        epochs = {"actor": self.train.epochs, "critic": self.critic.epochs or self.train.epochs}
        return {name: self.train.mini_batches * passes for name, passes in epochs.items()}

    @property
    def num_actor_updates(self) -> int:
        """Most optimizer steps of the policy in the whole run, which set the length of its schedule."""
        return (self.train.steps - self.critic.warmup_steps) * self.updates_per_step["actor"]

    @property
    def num_critic_updates(self) -> int:
        """The same of the critic."""
        return self.train.steps * self.updates_per_step["critic"]

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen reference model is built."""
        return self.algorithm.kl.where != "none"

    @property
    def engine_dtype(self) -> Literal["bf16", "fp32"]:
        """Type of the engines' weights."""
        return self.rollout.dtype or self.model.dtype

    @property
    def context_length(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return self.rollout.context_length or self.data.max_prompt_tokens + self.rollout.max_new_tokens
