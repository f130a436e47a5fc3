"""Names, dtypes and shapes of every tensor that a checkpoint of the family holds. Reads and computes nothing.

How numbers are stored, as released: an FP8 weight [N, K] is F8_E4M3 with a `.scale` of F8_E8M0 for every square of
`scale_block`; an FP4 weight of an expert is I8 [N, K / 2], two codes a byte, the even column in the low nibble, with a
scale for every 32 columns of a row; an Engram table is F8_E4M3 with a scale for every 32 columns of a row. A checkpoint
that is not quantised has the same names without `.scale`, in BF16 or F32.

Legend: `C` hidden size, `D` head dim, `S` streams (hc_mult), `E` experts, `W` width of an expert.
"""

from __future__ import annotations

from math import prod
from typing import Final, NamedTuple

from deepinfer_workers.models.deepseek.config import SCALE_GROUP, DeepseekConfig, EngramConfig, VisionConfig
from deepinfer_workers.safetensors_file import DTYPES

GROUPS: Final = (
    "embedding", "head", "norms", "attention", "compressor", "indexer", "hyper-connections", "gate", "routed experts",
    "shared experts", "engram table", "engram projection", "draft stages", "draft experts", "vision",
)  # fmt: skip
DRAFT_GROUPS: Final = frozenset({"draft stages", "draft experts"})
_PLAIN: Final = ("BF16", "F32")


class TensorSpec(NamedTuple):
    """What a tensor must be."""

    dtypes: tuple[str, ...]
    """Any of them, as safetensors files name them; the first is what is written here, and the released one if any."""
    shape: tuple[int, ...]
    group: str
    """One of `GROUPS`."""
    layer: int | None = None
    """Of `layers.N`; `None`: of none, or of a draft stage."""
    expert: int | None = None
    """Of a routed expert, in a layer or in a draft stage."""

    @property
    def is_table(self) -> bool:
        """It stays in its file: rows are fetched when tokens ask for them."""
        return self.group == "engram table"

    @property
    def is_mapped(self) -> bool:
        """It stays in its file, as tables and routed experts do, and is read in parts when tokens ask for them."""
        return self.group in ("engram table", "routed experts", "draft experts")

    @property
    def num_bytes(self) -> int:
        """In the first of `dtypes`."""
        return prod(self.shape) * DTYPES[self.dtypes[0]].itemsize


def expected_tensors(config: DeepseekConfig) -> dict[str, TensorSpec]:
    """All of them, in the order of the forward pass."""
    table = _Table(config)
    table.plain("embed.weight", (config.vocab_size, config.hidden_size), "embedding")
    for layer in range(config.num_layers):
        table.layer = layer
        table.prefix = f"layers.{layer}."
        table.add_layer(config.num_experts, is_hashed=layer < config.num_hash_layers)
        table.add_compressor(layer)
        if config.engram is not None and layer in config.engram.layers:
            table.add_engram(config.engram, config.engram.table_rows[config.engram.layers.index(layer)])
    table.layer, table.prefix = None, ""
    table.plain("norm.weight", (config.hidden_size,), "norms")
    if config.family == "v4":
        table.add_collapse("hyper-connections")
    table.plain("head.weight", (config.vocab_size, config.hidden_size), "head")
    for stage in range(config.num_stages):
        table.prefix = f"mtp.{stage}."
        table.add_stage(stage)
    table.prefix = ""
    if config.vision is not None:
        table.add_vision(config.vision)
    return table.specs


class _Table:
    """Collects specs under a prefix."""

    def __init__(self, config: DeepseekConfig) -> None:
        self.specs: dict[str, TensorSpec] = {}
        self.prefix = ""
        self.layer: int | None = None
        self._config = config

    # The ways of storing

    def plain(self, name: str, shape: tuple[int, ...], group: str, dtype: str = "BF16") -> None:
        is_exact = self._config.is_quantized or dtype not in _PLAIN
        dtypes = (dtype,) if is_exact else tuple(sorted(_PLAIN, key=lambda other: other != dtype))
        self._add(name, dtypes, shape, group)

    def fp8(self, name: str, rows: int, columns: int, group: str) -> None:
        block = self._config.scale_block
        self._add(f"{name}.weight", self._stored("F8_E4M3"), (rows, columns), group)
        if self._config.is_quantized:
            self._add(f"{name}.scale", ("F8_E8M0",), (-(-rows // block), -(-columns // block)), group)

    def fp8_rows(self, name: str, rows: int, columns: int, group: str) -> None:
        self._add(f"{name}.weight", self._stored("F8_E4M3"), (rows, columns), group)
        if self._config.is_quantized:
            self._add(f"{name}.scale", ("F8_E8M0",), (rows, columns // SCALE_GROUP), group)

    def fp4(self, name: str, rows: int, columns: int, group: str, expert: int) -> None:
        is_quantized = self._config.is_quantized
        shape = (rows, columns // 2 if is_quantized else columns)
        self._add(f"{name}.weight", self._stored("I8"), shape, group, expert)
        if is_quantized:
            self._add(f"{name}.scale", ("F8_E8M0",), (rows, columns // SCALE_GROUP), group, expert)

    def _stored(self, dtype: str) -> tuple[str, ...]:
        return (dtype,) if self._config.is_quantized else _PLAIN

    def _add(
        self, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...], group: str, expert: int | None = None
    ) -> None:
        self.specs[self.prefix + name] = TensorSpec(dtypes, shape, group, self.layer, expert)

    # The parts of a model

    def add_layer(self, num_experts: int, *, is_hashed: bool = False, draft: str = "") -> None:
        """Attention over the window, gate, experts and hyper-connections. `draft`: the group, where it is a stage's."""
        config = self._config
        hidden = config.hidden_size
        for name in ("attn_norm", "ffn_norm"):
            self.plain(f"{name}.weight", (hidden,), draft or "norms")
        self._add_streams(draft or "hyper-connections")
        self._add_attention(draft or "attention")
        gate = draft or "gate"
        self.plain("ffn.gate.weight", (num_experts, hidden), gate)
        if is_hashed:
            self.plain("ffn.gate.tid2eid", (config.vocab_size, config.experts_per_token), gate, "I64")
        else:
            self.plain("ffn.gate.bias", (num_experts,), gate, "F32")
        if config.family == "v4.1":
            self.plain("ffn.gate.bias_vl", (num_experts,), gate, "F32")
        width = config.expert_width
        matrices = (("w1", width, hidden), ("w2", hidden, width), ("w3", width, hidden))
        for matrix, rows, columns in matrices:
            self.fp8(f"ffn.shared_experts.{matrix}", rows, columns, draft or "shared experts")
        for expert in range(num_experts):
            for matrix, rows, columns in matrices:
                group = "draft experts" if draft else "routed experts"
                self.fp4(f"ffn.experts.{expert}.{matrix}", rows, columns, group, expert)

    def _add_streams(self, group: str) -> None:
        streams = self._config.hc_mult
        size = 2 * streams + streams * streams  # what goes in, what comes out, how streams mix
        for part in ("attn", "ffn"):
            self.plain(f"hc_{part}_fn", (size, streams * self._config.hidden_size), group, "F32")
            self.plain(f"hc_{part}_base", (size,), group, "F32")
            self.plain(f"hc_{part}_scale", (3,), group, "F32")

    def _add_attention(self, group: str) -> None:
        config = self._config
        hidden, head_dim, rank = config.hidden_size, config.head_dim, config.q_lora_rank
        queries, outputs = config.num_heads * head_dim, config.o_groups * config.o_lora_rank
        self.fp8("attn.wq_a", rank, hidden, group)
        self.plain("attn.q_norm.weight", (rank,), group)
        self.fp8("attn.wq_b", queries, rank, group)
        self.fp8("attn.wkv", head_dim, hidden, group)
        self.plain("attn.kv_norm.weight", (head_dim,), group)
        self.fp8("attn.wo_a", outputs, queries // config.o_groups, group)
        self.fp8("attn.wo_b", hidden, outputs, group)
        self.plain("attn.attn_sink", (config.num_heads,), group, "F32")

    def add_compressor(self, layer: int) -> None:
        """What makes compressed keys and chooses rows of them, where `layer` does."""
        config = self._config
        if layer in config.kv_sources:
            if config.family == "v4":
                self._add_v4_compressor("attn.compressor", config.head_dim, config.ratios[layer], "compressor")
            else:
                self._add_v41_compressor(config.ratios[layer])
        if layer in config.index_sources:
            self.fp8("attn.indexer.wq_b", config.index_heads * config.index_dim, config.q_lora_rank, "indexer")
            self.plain("attn.indexer.weights_proj.weight", (config.index_heads, config.hidden_size), "indexer")
            if config.family == "v4":
                self._add_v4_compressor("attn.indexer.compressor", config.index_dim, config.ratios[layer], "indexer")
            elif layer in config.kv_sources:
                self.plain("attn.indexer.wk.weight", (config.index_dim, config.head_dim), "indexer")
                self.plain("attn.indexer.k_norm.weight", (config.index_dim,), "indexer")

    def _add_v41_compressor(self, ratio: int) -> None:
        shape = self._config.head_dim, self._config.hidden_size
        self.plain("attn.compressor.wkv.weight", shape, "compressor")
        if ratio > 1:
            self.plain("attn.compressor.wgate.weight", shape, "compressor")
        self.plain("attn.compressor.norm.weight", (self._config.head_dim,), "compressor")

    def _add_v4_compressor(self, name: str, dim: int, ratio: int, group: str) -> None:
        rows = 2 * dim if ratio == 4 else dim  # windows that overlap have two series
        for matrix in ("wkv", "wgate"):
            self.plain(f"{name}.{matrix}.weight", (rows, self._config.hidden_size), group)
        self.plain(f"{name}.ape", (ratio, rows), group, "F32")
        self.plain(f"{name}.norm.weight", (dim,), group)

    def add_engram(self, engram: EngramConfig, table_rows: int) -> None:
        hidden, streams = self._config.hidden_size, self._config.hc_mult
        self.fp8_rows("engram.embed", table_rows, engram.head_dim, "engram table")
        columns = (engram.max_ngram - 1) * engram.num_heads * engram.head_dim
        self.fp8("engram.wkv", (streams + 1) * hidden, columns, "engram projection")
        for name in ("q_weight", "k_weight"):
            self.plain(f"engram.{name}", (streams, hidden), "engram projection")

    def add_collapse(self, group: str) -> None:
        """V4: how the streams become one at the end."""
        streams = self._config.hc_mult
        self.plain("hc_head_fn", (streams, streams * self._config.hidden_size), group, "F32")
        self.plain("hc_head_base", (streams,), group, "F32")
        self.plain("hc_head_scale", (1,), group, "F32")

    def add_stage(self, stage: int) -> None:
        config, group = self._config, "draft stages"
        hidden, dspark = config.hidden_size, config.dspark
        is_last = stage == config.num_stages - 1
        self.add_layer(config.num_draft_experts, draft=group)
        if dspark is None:
            for name in ("e_proj", "h_proj"):
                self.fp8(name, hidden, hidden, group)
            for name in ("enorm", "hnorm"):
                self.plain(f"{name}.weight", (hidden,), group)
        elif stage == 0:
            self.fp8("main_proj", hidden, len(dspark.target_layers) * hidden, group)
            self.plain("main_norm.weight", (hidden,), group)
        if is_last or dspark is None:
            self.plain("norm.weight", (hidden,), group)
            if config.family == "v4":
                self.add_collapse(group)
        if is_last and dspark is not None:
            names = ("markov_w1", "markov_w2") if config.family == "v4" else ("embed", "head")
            for name in names:
                self.plain(f"markov_head.{name}.weight", (config.vocab_size, dspark.markov_rank), group)
            self.plain("confidence_head.proj.weight", (1, hidden + dspark.markov_rank), group)

    def add_vision(self, vision: VisionConfig) -> None:
        hidden, width, group = self._config.hidden_size, vision.hidden_size, "vision"
        self._linear("vision.patch_embed.proj", width, 3 * vision.patch_size**2)
        for block in range(vision.num_layers):
            name = f"vision.blocks.{block}"
            self._linear(f"{name}.attn.wqkv", 3 * width, width)
            self._linear(f"{name}.attn.wo", width, width)
            self.plain(f"{name}.mlp.w1.weight", (2 * vision.ffn_size, width), group)
            self.plain(f"{name}.mlp.w2.weight", (width, vision.ffn_size), group)
            for norm in ("norm1", "norm2"):
                self.plain(f"{name}.{norm}.weight", (width,), group)
        self.plain("vision.norm.weight", (width,), group)
        self._linear("aligner.w1", hidden, width * vision.downsample_ratio**2)
        self._linear("aligner.w2", hidden, hidden)
        for name in ("image_start", "image_end", "image_newline"):
            self.plain(name, (hidden,), group)

    def _linear(self, name: str, rows: int, columns: int) -> None:
        self.plain(f"{name}.weight", (rows, columns), "vision")
        self.plain(f"{name}.bias", (rows,), "vision")
