"""The oracle of DeepSeek-V4.1: NeMo's training model at a tiny size, all at random, and what it holds on its way.

Knows nothing of our model: it writes a checkpoint folder in the released names, and answers with its own tensors.
Importing this module where NeMo is not installed skips the tests that do so.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from doubles.choices import margin

pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("nemo_automodel", minversion="0.7")
with warnings.catch_warnings():  # its imports warn of their own uses of torch
    warnings.simplefilter("ignore")
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.deepseek_v41 import attention as nemo_attention
    from nemo_automodel.components.models.deepseek_v41 import dspark as nemo_dspark
    from nemo_automodel.components.models.deepseek_v41.attention import DeepseekV41AttentionState as State
    from nemo_automodel.components.models.deepseek_v41.config import DeepseekV41Config
    from nemo_automodel.components.models.deepseek_v41.model import DeepseekV41ForCausalLM
    from nemo_automodel.components.models.deepseek_v41.state_dict_adapter import DeepseekV41DSparkStateDictAdapter
    from transformers import PreTrainedTokenizerFast

VOCAB_SIZE: Final = 256
IMAGE_TOKEN: Final = VOCAB_SIZE - 1

_TEXT_CONFIG: Final[Mapping[str, Any]] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 10,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-20,
    "hidden_act": "silu",
    "attention_bias": False,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_lora_rank": 32,
    "o_groups": 2,
    "sliding_window": 16,
    "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1, 1],
    "kv_source_layer_ids": [2, 5],
    "index_source_layer_ids": [2, 4, 5, 7, 9],
    "index_n_heads": 16,  # with fewer, all of a row's heads are often below zero, and its score ties with others
    "index_head_dim": 32,
    "index_topk": 8,
    "candidate_source_layer_id": 5,
    "candidate_topk_blocks": 4,
    "candidate_block_size": 4,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 64,
    },
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 1.5,  # tight enough to cut some of what comes
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1, 4],
    "engram_num_embeddings": [420, 508],  # sums of the primes from 101 on: four, then the next four
    "engram_max_ngram_size": 3,
    "engram_vocab_size": 101,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": VOCAB_SIZE // 2,
    "num_nextn_predict_layers": 0,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 7,
    "dspark_target_layer_ids": [7, 8, 9],
    "dspark_markov_rank": 16,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}


_VISION_CONFIG: Final[Mapping[str, Any]] = {
    "model_type": "deepseek_v41_vision",
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "patch_size": 2,
    "rope_theta": 10000.0,
    "downsample_ratio": 3,
    "max_image_tokens": 64,
    "min_pixels": 64,
}


def nested_config(*, sees_images: bool = False, **text: Any) -> dict[str, Any]:
    """`config.json` in the released form, without quantisation and draft stages; `text` replaces entries."""
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": IMAGE_TOKEN,
        "tie_word_embeddings": False,
        "text_config": {**_TEXT_CONFIG, **text},
        "vision_config": {**_VISION_CONFIG, **({} if sees_images else {"num_hidden_layers": 0})},
    }


def words() -> Tokenizer:
    """t0, T0, t1, T1, ...: two words in one for the Engram."""
    return Tokenizer(WordLevel({f"{'tT'[i % 2]}{i // 2}": i for i in range(VOCAB_SIZE)}, unk_token="t0"))


def write_words(folder: Path) -> None:
    words().save(str(folder / "tokenizer.json"))


def random_ids(length: int, seed: int) -> list[int]:
    """Tokens of a prompt without images."""
    ids: list[int] = torch.randint(IMAGE_TOKEN, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


class Cached(NamedTuple):
    """What the oracle puts into a cache: of one call of its quantiser."""

    format: str
    """`fp8` window rows, `nvfp4` compressed rows, `mxfp4` index keys (3 dims) and index queries (4)."""
    rows: torch.Tensor
    """[1, rows, (heads,) channels]: as attention reads them."""


class Layer(NamedTuple):
    """What the oracle's layer was given, and what it made."""

    streams: torch.Tensor
    """[tokens, streams, hidden]: its input."""
    pre: torch.Tensor
    """[tokens, streams]: the mix that its attention reads the streams by."""
    state: Any
    """What the layers below left for it."""
    made: Any
    """What it leaves for those above: `compressed_kv`, `index_keys`, `topk_indices`, `candidates`."""
    cached: list[Cached]
    gate_margin: float
    """How much the scores of the last chosen and the first not chosen expert differ, at least, over all tokens."""
    index_margin: float
    """As `gate_margin`, of the rows and of the candidate blocks that its own indexer chose among; inf without one."""


class Trace(NamedTuple):
    """One forward of the whole model."""

    layers: list[Layer]
    streams: torch.Tensor
    """[tokens, streams, hidden]: after the last layer."""
    pre: torch.Tensor
    logits: torch.Tensor
    """[tokens, vocab]"""

    @property
    def margin(self) -> float:
        """Below what a rounding makes, a choice of this forward is a tie."""
        return min(min(layer.gate_margin, layer.index_margin) for layer in self.layers)


class NemoV41:
    """A model with weights of `seed`; `text` replaces entries of its text config.

    `sees_images`: image tokens take the part that text tokens do not have; what is in the image is left out.
    """

    def __init__(self, seed: int = 0, *, sees_images: bool = False, **text: Any) -> None:
        self.config = nested_config(sees_images=sees_images, **text)
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            self.model = _build(self.config)
            _randomize(self.model)

    def tensors(self) -> dict[str, torch.Tensor]:
        """In the released names, by the oracle's own adapter."""
        exported = self.model.state_dict_adapter.to_hf(self.model.state_dict())
        return {name: tensor.detach().clone().contiguous() for name, tensor in exported.items()}

    def write(self, folder: Path) -> Path:
        """A checkpoint folder: config, weights, tokenizer."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors(), folder / "model.safetensors")
        write_words(folder)
        return folder

    def read(self, folder: Path) -> None:
        """Take the weights of a checkpoint in the released format, by the oracle's own adapter."""
        released: dict[str, torch.Tensor] = {}
        for file in folder.glob("*.safetensors"):
            released |= load_file(file)
        self.model.load_state_dict(self.model.state_dict_adapter.from_hf(released))

    def logits(self, ids: Sequence[int], *, quantized: bool = False) -> torch.Tensor:
        """[tokens, vocab] of one full forward of text; `quantized`: what it caches goes through released formats."""
        with _quantization(quantized, []):
            logits: torch.Tensor = self.model(torch.tensor([list(ids)])).logits[0]
        return logits

    def trace(self, ids: Sequence[int], *, quantized: bool = False) -> Trace:
        """A forward, layer by layer."""
        tokens = torch.tensor([list(ids)])
        model, num_streams = self.model.model, self.config["text_config"]["hc_mult"]
        layers = []
        cached: list[Cached] = []
        with _quantization(quantized, cached):
            streams = model.embed_tokens(tokens).unsqueeze(2).expand(-1, -1, num_streams, -1)
            pre = torch.zeros(*tokens.shape, num_streams)
            pre[..., 0] = 1
            state = State()
            for layer in model.layers.values():
                cached.clear()
                given = streams, pre, state
                options = self._options(layer, tokens)
                with _watched(layer, options["image_mask"], cached) as margins:
                    streams, pre, state = layer(*given, **options)
                layers.append(Layer(given[0][0], given[1][0], given[2], state, cached.copy(), *margins()))
            logits = self.model.lm_head(model.norm(layer.attn_hc.collapse(streams, pre)).float())
        return Trace(layers, streams[0], pre[0], logits[0])

    def _options(self, layer: Any, tokens: torch.Tensor) -> dict[str, Any]:
        model = self.model.model
        is_image = (tokens == IMAGE_TOKEN) & (model.vision is not None)
        rows = None
        if layer.engram is not None:
            rows = model.engram_hash(tokens, token_mask=~is_image)[:, :, layer.engram.layer_hash_index]
        positions = torch.arange(tokens.shape[1])[None]
        return {"position_ids": positions, "image_mask": is_image, "engram_hash_ids": rows}


class OracleDrafts(NamedTuple):
    """One block."""

    hidden: torch.Tensor
    """[block, hidden]: before the last norm."""
    logits: torch.Tensor
    """[block, vocab]: with what the token before says."""
    confidences: torch.Tensor
    """[block]"""


class NemoDrafts(NemoV41):
    """The oracle with NeMo's trainable draft backbone behind it, also at random. Its checkpoints have the stages."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        text = self.config["text_config"]
        num_stages = 3
        text["num_nextn_predict_layers"] = num_stages
        text["compress_ratios"] = [*text["compress_ratios"], *[0] * num_stages]
        backend = self.model.backend
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            parsed = DeepseekV41Config({**text, "dtype": "float32"}, self.config["vision_config"], dtype="float32")
            torch.manual_seed(1000 + seed)
            self.drafter = nemo_dspark.DeepseekV41DSparkBackbone(parsed.text_config, backend)
            self.drafter.initialize_weights(torch.device("cpu"))
            _randomize(self.drafter)
        self.drafter.eval()
        self._adapter = DeepseekV41DSparkStateDictAdapter(
            parsed.text_config, self.drafter.moe_config, backend, dtype=torch.float32
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        exported = self._adapter.to_hf(self.drafter.state_dict())
        return super().tensors() | {name: tensor.detach().clone().contiguous() for name, tensor in exported.items()}

    @torch.no_grad()
    def draft(
        self, ids: Sequence[int], anchor: int, drafted: Sequence[int], order: Sequence[int] = (0, 1, 2)
    ) -> OracleDrafts:
        """The block of `anchor` behind `ids`, whose places follow `anchor` and `drafted`; taps in `order`.

        The confidence is put together from the oracle's parts: its trainer reads what is behind the norm.
        """
        text, drafter = self.config["text_config"], self.drafter
        trace = self.trace(ids)
        targets = text["dspark_target_layer_ids"]
        taps = [self._tap(trace.layers[targets[i]], targets[i], ids) for i in order]
        block = torch.tensor([[anchor, *[text["dspark_noise_token_id"]] * (text["dspark_block_size"] - 1)]])
        anchors = torch.tensor([[len(ids)]])
        previous = torch.tensor([[anchor, *drafted[:-1]]])
        given: list[torch.Tensor] = []
        last = drafter.mtp[-1]
        handle = last.norm.register_forward_hook(lambda norm, args, made: given.append(args[0]))
        keep = torch.ones(1, 1, dtype=torch.bool)
        with _quantization(False, []):
            made = drafter(
                self.model.model.embed_tokens(block),
                torch.cat(taps, -1)[None],
                position_ids=drafter.build_position_ids(anchors, len(ids)),
                attention_mask=drafter.build_attention_mask(anchors, keep, len(ids), torch.float32),
                previous_token_ids=previous,
            )
        handle.remove()
        base = self.model.lm_head(made.normalized_hidden_states.float())
        confidence = last.confidence_head(given[0], last.markov_head.embed(previous))
        return OracleDrafts(given[0][0], (base + made.transition_logits)[0], confidence.sigmoid()[0])

    def _tap(self, layer: Layer, index: int, ids: Sequence[int]) -> torch.Tensor:
        """[tokens, hidden] of a target layer's streams. None of the targets has an Engram, which would come first."""
        assert index not in self.config["text_config"]["engram_layer_ids"]
        return layer.streams.mean(1)


def _build(config: Mapping[str, Any]) -> Any:
    text, dtype = {**config["text_config"], "dtype": config["dtype"]}, config["dtype"]
    vision = config["vision_config"]
    parsed = DeepseekV41Config(text, vision, image_token_id=config["image_token_id"], dtype=dtype)
    backend = BackendConfig(
        attn="eager",
        linear="torch",
        rms_norm="torch_fp32",
        experts="torch",
        dispatcher="torch",
        rope_fusion=False,
        enable_hf_state_dict_adapter=True,
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words())
    model = DeepseekV41ForCausalLM(parsed, backend=backend, tokenizer=tokenizer)
    model.initialize_weights(dtype=torch.float32)
    model.eval()
    return model


@torch.no_grad()
def _randomize(model: Any) -> None:
    """Every tensor, so that no zero hides a sum and no one a product; matrices keep the size of what they turn."""
    for name, tensor in model.state_dict().items():
        leaf = name.rsplit(".", 2)[-2:]
        if "norm" in leaf[0] or leaf[-1] in ("scale", "q_weight", "k_weight"):
            tensor.copy_(1 + 0.2 * torch.randn(tensor.shape))
        elif tensor.ndim == 1:  # sinks, biases of the gates, bases of the stream mixes
            tensor.copy_(0.5 * torch.randn(tensor.shape))
        elif "embed" in leaf[0] or leaf[0] == "embed_tokens":
            tensor.copy_(torch.randn(tensor.shape))
        else:  # [out, in], but [experts, in, out] where the experts are one tensor
            tensor.copy_(torch.randn(tensor.shape) * tensor.shape[1] ** -0.5)


@contextmanager
def _quantization(on: bool, cached: list[Cached]) -> Iterator[None]:
    """What goes through the oracle's quantiser ends up in `cached`, also where it is off."""
    original = nemo_attention.quantize_cache

    def quantize(values: torch.Tensor, *, format: str, block_size: int) -> torch.Tensor:
        rows = original(values, format=format, block_size=block_size) if on else values
        cached.append(Cached(format, rows))
        return rows

    with (
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),  # its activation is compiled, which takes a minute
        mock.patch.object(nemo_attention, "quantize_cache", quantize),
        mock.patch.object(nemo_dspark, "quantize_cache", quantize),
    ):
        yield


@contextmanager
def _watched(layer: Any, is_image: torch.Tensor, cached: list[Cached]) -> Iterator[Any]:
    """Records how close the choices of a layer were: a callable that gives (gate margin, index margin)."""
    margins = {"gate": float("inf"), "index": float("inf")}
    handles = [layer.ffn.gate.register_forward_hook(_gate_hook(margins, is_image))]
    if layer.attn.indexer is not None:
        handles.append(layer.attn.indexer.register_forward_hook(_indexer_hook(margins, cached), with_kwargs=True))
    try:
        yield lambda: (margins["gate"], margins["index"])
    finally:
        for handle in handles:
            handle.remove()


def _gate_hook(margins: dict[str, float], is_image: torch.Tensor) -> Any:
    def hook(gate: Any, given: Any, _made: Any) -> None:
        scores = torch.nn.functional.linear(given[0].float(), gate.weight.float())
        bias = torch.where(is_image.flatten()[:, None], gate.bias_vl, gate.e_score_correction_bias)
        margins["gate"] = margin(torch.nn.functional.softplus(scores).sqrt() + bias, gate.topk)

    return hook


def _indexer_hook(margins: dict[str, float], cached: list[Cached]) -> Any:
    def hook(indexer: Any, given: Any, options: Any, made: Any) -> None:
        if made.index_keys.shape[1] == 0:
            return
        scores = _index_scores(indexer, given[0], cached[-1].rows, options["position_ids"], made)
        if indexer.is_candidate_source:
            blocks = _block_scores(scores, indexer.candidate_block_size)
            margins["index"] = margin(blocks, indexer.candidate_topk_blocks)
        elif indexer.uses_candidates:
            scores = scores.masked_fill(~made.candidates, -torch.inf)
        margins["index"] = min(margins["index"], margin(scores, indexer.topk))

    return hook


def _block_scores(scores: torch.Tensor, size: int) -> torch.Tensor:
    """The best of every `size` rows; the newest visible block comes before all."""
    padded = torch.nn.functional.pad(scores, (0, -scores.shape[-1] % size), value=-torch.inf)
    blocks: torch.Tensor = padded.unflatten(-1, (-1, size)).amax(-1)
    newest = (scores.isfinite().sum(-1, keepdim=True) - 1) // size
    return blocks.masked_fill(torch.arange(blocks.shape[-1]) == newest, torch.finfo(scores.dtype).max)


def _index_scores(
    indexer: Any, hidden: torch.Tensor, queries: torch.Tensor, positions: torch.Tensor, made: Any
) -> torch.Tensor:
    """[1, tokens, rows]; -inf where the row is not visible."""
    weights: torch.Tensor = indexer.weights_proj(hidden) * (indexer.head_dim**-0.5 * indexer.num_heads**-0.5)
    scores = torch.einsum("bshd,btd->bsht", queries, made.index_keys).relu()
    scores = torch.einsum("bsht,bsh->bst", scores, weights)
    visible = torch.arange(scores.shape[-1]) < ((positions + 1) // made.compression_ratio)[..., None]
    return scores.masked_fill(~visible, -torch.inf)
