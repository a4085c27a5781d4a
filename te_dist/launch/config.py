"""What a job is: frozen dataclasses, checked when made. `config_file` fills them from TOML and the command line.

Only values stand here: no mesh, device, tensor or process group. What depends on the number of ranks is checked in
`layout`.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from te_dist.launch.errors import require
from te_dist.launch.home import expanded
from te_dist.offload.host import parse_bytes

RecipeName = Literal[
    "bf16", "float8_current", "float8_delayed", "float8_block", "mxfp8", "nvfp4", "hybrid_float8_mxfp8"
]
BYTE_ALPHABET = 256  # a byte-level vocabulary holds every byte, so any text can be encoded
SPECIAL_TOKENS = 1  # end of text
SMALLEST = 2.0**-126  # normal number above 0 of fp32
LONGEST = 10**8  # seconds: clocks of stores and process groups hold some ten times as many


def _at_least(section: str, config: object, minimum: float, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        key = f"{section}.{name}" if section else name
        require(value >= minimum, key, got=value, wanted=f"at least {minimum}", remedy=f"raise {key}")


def _finite(section: str, config: object, *names: str) -> None:
    for name in names:
        value, key = getattr(config, name), f"{section}.{name}"
        require(math.isfinite(value), key, got=value, wanted="a finite number", remedy=f"change {key}")


def _is_size(text: str) -> bool:
    with suppress(ValueError):
        parse_bytes(text)
        return True
    return False


def _fraction(section: str, config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(
            0.0 <= value < 1.0,
            f"{section}.{name}",
            got=value,
            wanted="a fraction from 0 to below 1",
            remedy="change it",
        )


@dataclass(frozen=True)
class MeshConfig:
    """How the ranks are laid out: `dp` times `tp` of them, tensor-parallel neighbours next to each other."""

    dp: int | Literal["rest"] = "rest"
    """Ranks that shard the parameters and share the batch; "rest" takes all that tp leaves."""
    tp: int = 1
    """Ranks that share each matrix multiplication."""
    ep: int = 1
    """Ranks next to each other that share the experts, of which each has some; with experts a multiple of `tp`."""
    unit_blocks: int = 1
    """Blocks whose parameters are gathered together. More of them: less work for the CPU, more memory."""

    def __post_init__(self) -> None:
        _at_least("mesh", self, 1, "tp", "ep", "unit_blocks")
        if self.dp != "rest":
            _at_least("mesh", self, 1, "dp")


@dataclass(frozen=True)
class ExpertsConfig:
    """Experts in the place of each block's feed-forward part."""

    count: int = 0
    """Experts of a block; 0 for one dense part."""
    top_k: int = 2
    """Experts that a token goes to."""
    ffn: int = 256
    """Width of one expert."""
    shared_ffn: int = 0
    """Width of what every token goes through besides; 0 for nothing."""
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Of the router's logits."""
    normalize: bool = True
    """Whether the chosen scores add up to one."""
    scaling_factor: float = 1.0
    """By which the experts' outputs are multiplied."""
    aux_loss_coefficient: float = 0.0
    """Of the loss that evens out how often experts are chosen."""
    bias_update_rate: float = 0.0
    """Step of the biases that do so without a loss."""
    save_original_input: bool = False
    """Whether backward quantizes the inputs of the experts' maps once more, instead of forward keeping their codes."""
    capacity_factor: float = 0.0
    """With mesh.ep: room for copies from a rank to another (of batches: at one), over the mean; 0: none is dropped."""
    payload: Literal["plain", "quantized"] = "plain"
    """With mesh.ep: whether rows travel to experts in bf16, or as the codes and scales that are multiplied there."""
    travels: Literal["copies", "tokens", "batches"] = "copies"
    """With mesh.ep: a copy of a token for each expert; the token, once to each rank with experts of it; or to all."""

    def __post_init__(self) -> None:
        _at_least("model.experts", self, 0, "count", "shared_ffn", "aux_loss_coefficient", "bias_update_rate")
        _at_least("model.experts", self, 0, "capacity_factor")
        _finite("model.experts", self, "aux_loss_coefficient", "bias_update_rate")
        _at_least("model.experts", self, 1, "top_k", "ffn")
        _finite("model.experts", self, "capacity_factor", "scaling_factor")
        require(
            self.count == 0 or self.top_k <= self.count,
            "model.experts.top_k",
            got=f"{self.top_k} of {self.count} experts",
            wanted="at most model.experts.count",
            remedy="lower it",
        )
        require(
            self.travels != "tokens" or not self.capacity_factor,
            "model.experts.travels",
            got=f"{self.travels} with capacity_factor = {self.capacity_factor}",
            wanted="copies or batches, whose messages are as large whatever they hold",
            remedy="leave out either",
        )


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the decoder."""

    vocab_size: int = 2048
    """Entries of the byte-pair vocabulary, trained on the text."""
    hidden: int = 256
    """Width of the residual stream."""
    ffn: int = 768
    """Width between the projections of the feed-forward part."""
    layers: int = 4
    """Decoder blocks."""
    heads: int = 4
    """Query heads."""
    head_width: int = 0
    """Columns of a head; 0 for hidden / heads."""
    kv_heads: int = 2
    """Key and value heads, each shared by heads / kv_heads query heads."""
    rope_base: float = 10000.0
    """Base of the rotary frequencies."""
    norm_epsilon: float = 1e-5
    """Added under the root of every RMS norm."""
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)

    def __post_init__(self) -> None:
        _at_least("model", self, 1, "hidden", "ffn", "layers", "heads", "kv_heads", "rope_base")
        _at_least("model", self, BYTE_ALPHABET + SPECIAL_TOKENS, "vocab_size")
        _at_least("model", self, 0.0, "norm_epsilon", "head_width")
        _finite("model", self, "rope_base", "norm_epsilon")
        require(
            self.head_width > 0 or self.hidden % (2 * self.heads) == 0,
            "model.hidden",
            got=f"{self.hidden} over {self.heads} heads",
            wanted="an even number of columns per head (rotary embedding turns pairs)",
            remedy="change model.hidden or model.heads",
        )
        require(
            self.head_width % 2 == 0,
            "model.head_width",
            got=self.head_width,
            wanted="an even number of columns per head (rotary embedding turns pairs)",
            remedy="change it",
        )
        require(
            self.heads % self.kv_heads == 0,
            "model.kv_heads",
            got=f"{self.kv_heads} for {self.heads} query heads",
            wanted="a divisor of model.heads",
            remedy="change model.kv_heads or model.heads",
        )

    @property
    def columns_of_a_head(self) -> int:
        """Of query, key and value."""
        return self.head_width or self.hidden // self.heads


@dataclass(frozen=True)
class DataConfig:
    """Which text is read and how it is cut."""

    files: tuple[str, ...] = ("{stdlib}/**/*.py",)
    """Paths or globs of UTF-8 text; {stdlib} is the standard library of the running interpreter, ~ a home directory."""
    exclude: tuple[str, ...] = (
        "{stdlib}/site-packages/*",
        "{stdlib}/test/*",
        "{stdlib}/*/test*/*",
        "{stdlib}/idlelib/*",
    )
    """Shell patterns of paths to leave out (a star crosses slashes)."""
    sequence_length: int = 256
    """Tokens of one sequence."""
    validation_fraction: float = 0.05
    """Part of the files held out; which ones follows from their content alone."""

    def __post_init__(self) -> None:
        require(
            len(self.files) > 0,
            "data.files",
            got="no entry",
            wanted="paths or globs of text",
            remedy="name one or more",
        )
        for name in ("files", "exclude"):
            for index, entry in enumerate(getattr(self, name)):
                expanded(entry, f"data.{name}[{index}]")  # refused here, and expanded where wildcards are
        _at_least("data", self, 2, "sequence_length")
        _fraction("data", self, "validation_fraction")


@dataclass(frozen=True)
class TrainConfig:
    """Length and batch of the run."""

    steps: int = 200
    """Optimizer steps of the whole run, resumed parts included."""
    batch: int = 8
    """Sequences of one step over all ranks; gradients accumulate where it exceeds dp x micro_batch."""
    micro_batch: int = 4
    """Sequences a rank runs forward and backward at a time."""
    log_every: int = 10
    """Steps between two looks at the loss; a loss that is not finite ends the job there."""

    def __post_init__(self) -> None:
        _at_least("train", self, 1, "steps", "batch", "micro_batch", "log_every")


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam with decoupled weight decay, warm-up and cosine decay."""

    learning_rate: float = 2e-3
    """Peak, reached after warm-up."""
    final_fraction: float = 0.1
    """The last step's learning rate as a part of the peak."""
    warmup_steps: int = 20
    """Steps of linear warm-up."""
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    """Decoupled; matrices of the blocks and the head only."""
    clip_norm: float = 1.0
    """Upper limit of the gradient's norm over all parameters."""

    def __post_init__(self) -> None:
        _at_least("optimizer", self, 0, "warmup_steps", "weight_decay", "learning_rate")
        _at_least("optimizer", self, SMALLEST, "epsilon")  # 0 / 0 where a gradient has always been 0
        _finite("optimizer", self, "learning_rate", "epsilon", "weight_decay")
        _fraction("optimizer", self, "beta1", "beta2")
        require(
            self.clip_norm > 0.0,
            "optimizer.clip_norm",
            got=self.clip_norm,
            wanted="a positive number",
            remedy="use inf for no clipping",
        )
        require(
            0.0 <= self.final_fraction <= 1.0,
            "optimizer.final_fraction",
            got=self.final_fraction,
            wanted="a fraction from 0 to 1",
            remedy="change it",
        )


@dataclass(frozen=True)
class EvaluationConfig:
    """Loss on the held-out files."""

    every: int = 100
    """Steps between two evaluations; the last step is always evaluated."""
    sequences: int = 64
    """Held-out sequences, spread evenly over the held-out text; fewer where there are fewer."""

    def __post_init__(self) -> None:
        _at_least("evaluation", self, 1, "every", "sequences")


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state is written and where a run starts from."""

    every: int = 100
    """Steps between two checkpoints; the last step always writes one."""
    keep: int = 2
    """Newest checkpoints kept in the run directory."""
    resume: str = "auto"
    """"auto": the newest checkpoint of the run directory if there is one; "none": start anew; else a checkpoint."""

    def __post_init__(self) -> None:
        _at_least("checkpoint", self, 1, "every", "keep")
        require(
            self.resume != "",
            "checkpoint.resume",
            got="an empty text",
            wanted='"auto", "none" or the path of a checkpoint',
            remedy="name one of them",
        )
        object.__setattr__(self, "resume", expanded(self.resume, "checkpoint.resume"))


@dataclass(frozen=True)
class Config:
    """A training job."""

    recipe: RecipeName = "bf16"
    """Format of the weights and of the matrix multiplications."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    offload: Literal[False] | str = False
    """Host memory for activations saved for backward, such as "2GiB"; false keeps them on the device."""
    recompute: Literal[False, "full"] = False
    """"full": a block's activations are computed again in backward instead of saved."""
    seed: int = 0
    """Of initialization, of the order of the text and of stochastic rounding."""
    run_dir: str = "runs/default"
    """Where everything the job writes lies; shared by all nodes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto": the GPU of the local rank where there is one."""
    timeout_seconds: int = 600
    """A collective that takes longer ends the job; preparation of the text may take ten times as long."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        _at_least("", self, 1, "timeout_seconds")
        require(
            self.timeout_seconds <= LONGEST,
            "timeout_seconds",
            got=self.timeout_seconds,
            wanted=f"at most {LONGEST}, which are three years",
            remedy="lower it",
        )
        _at_least("", self, 0, "seed")
        require(self.seed < 2**63, "seed", got=self.seed, wanted="less than 2^63", remedy="lower seed")
        require(self.run_dir != "", "run_dir", got="an empty text", wanted="a directory", remedy="name one")
        object.__setattr__(self, "run_dir", expanded(self.run_dir, "run_dir"))
        require(
            self.offload is False or _is_size(self.offload),
            "offload",
            got=repr(self.offload),
            wanted='false (False on the command line) or a size such as "2GiB" (KiB, MiB, GiB)',
            remedy="write the budget with its unit",
        )
