"""What one rank takes from a checkpoint: everything is compared with the config, and only its own tensors are given.

Routed experts are shared out over the expert-parallel ranks, each takes a run of them; draft stages and the vision
encoder are left out where they are not served. Computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from deepinfer_workers.checkpoint import bad_file
from deepinfer_workers.models.deepseek.config import DeepseekConfig
from deepinfer_workers.models.deepseek.tensors import DRAFT_GROUPS, TensorSpec, expected_tensors
from deepinfer_workers.runner import WorkerFault
from deepinfer_workers.safetensors_folder import INDEX, SafetensorsFolder


def experts_of_rank(num_experts: int, num_ranks: int, rank: int, kind: str = "experts") -> range:
    """The routed experts of one of `num_ranks` expert-parallel ranks. Raises `WorkerFault`; `kind` is for its words."""
    if num_ranks < 1 or num_experts % num_ranks:
        raise WorkerFault("setting", f"ep: a divisor of {num_experts} {kind} was expected, {num_ranks} came")
    if not 0 <= rank < num_ranks:
        raise WorkerFault("setting", f"ep: a rank below {num_ranks} was expected, {rank} came")
    share = num_experts // num_ranks
    return range(rank * share, (rank + 1) * share)


def tensors_of_rank(
    config: DeepseekConfig,
    specs: Mapping[str, TensorSpec],
    num_ranks: int = 1,
    rank: int = 0,
    *,
    has_drafts: bool = False,
    has_vision: bool = False,
) -> dict[str, TensorSpec]:
    """Those of `specs` that the rank needs: no experts of other ranks, and only what is served."""
    experts = experts_of_rank(config.num_experts, num_ranks, rank)
    draft_experts = range(0)
    if has_drafts:
        draft_experts = experts_of_rank(config.num_draft_experts, num_ranks, rank, "draft experts")

    def is_wanted(spec: TensorSpec) -> bool:
        is_draft = spec.group in DRAFT_GROUPS
        if (is_draft and not has_drafts) or (spec.group == "vision" and not has_vision):
            return False
        return spec.expert is None or spec.expert in (draft_experts if is_draft else experts)

    return {name: spec for name, spec in specs.items() if is_wanted(spec)}


def check_tensors(folder: SafetensorsFolder, specs: Mapping[str, TensorSpec]) -> None:
    """Every tensor is there, in a dtype and the shape that it should have, and no other is. Raises `WorkerFault`."""
    tensors = folder.tensors
    extra = next((name for name in tensors if name not in specs), None)
    other = "" if extra is None else f"; {extra}, which is none of this model, came"
    for name, spec in specs.items():
        if name not in tensors:
            raise bad_file(folder.name, f"tensor {name}: {_words(spec)} was expected and is missing{other}")
        info = tensors[name]
        if info.shape != spec.shape or info.dtype not in spec.dtypes:
            came = f"{info.dtype} of shape {info.shape}"
            raise bad_file(folder.name, f"tensor {name}: {_words(spec)} was expected, {came} came")
    if extra is not None:
        came = f"{tensors[extra].dtype} of shape {tensors[extra].shape}"
        raise bad_file(folder.name, f"tensor {extra}: none was expected by config.json, {came} came")
    total = sum(info.num_bytes for info in tensors.values())
    if folder.announced_bytes not in (None, total):
        raise bad_file(INDEX, f"total_size: {total} bytes of tensors were expected, {folder.announced_bytes} came")


class RankTensors:
    """The tensors of one rank, by name. The whole checkpoint fits its config, once constructed."""

    def __init__(
        self,
        folder: SafetensorsFolder,
        config: DeepseekConfig,
        num_ranks: int = 1,
        rank: int = 0,
        *,
        has_drafts: bool = False,
        has_vision: bool = False,
        report: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Of expert-parallel rank `rank` of `num_ranks`. `report(done, total)` gets the bytes that were given.

        Raises `WorkerFault`.
        """
        specs = expected_tensors(config)
        check_tensors(folder, specs)
        self.experts = experts_of_rank(config.num_experts, num_ranks, rank)
        self.draft_experts = range(0)
        """None where drafts are not served."""
        if has_drafts:
            self.draft_experts = experts_of_rank(config.num_draft_experts, num_ranks, rank, "draft experts")
        self.path = folder.folder
        self.specs = tensors_of_rank(config, specs, num_ranks, rank, has_drafts=has_drafts, has_vision=has_vision)
        self._folder = folder
        self._report = report
        self._done_bytes = 0
        self.total_bytes = sum(map(self._num_bytes, self.specs))

    def stored(self, name: str) -> Tensor:
        """The tensor as `SafetensorsFolder.stored` gives it. What other ranks have is not given."""
        assert name in self.specs, name
        num_bytes = self._num_bytes(name)
        if num_bytes:
            self._done_bytes += num_bytes
            self._report(self._done_bytes, self.total_bytes)
        return self._folder.stored(name)

    def release(self, name: str) -> None:
        """As `SafetensorsFolder.release`."""
        self._folder.release(name)

    def _num_bytes(self, name: str) -> int:
        """What is read of it at the load."""
        return 0 if self.specs[name].is_mapped else self._folder.tensors[name].num_bytes


def _words(spec: TensorSpec) -> str:
    return f"{' or '.join(spec.dtypes)} of shape {spec.shape}"
