"""WorkerGroup: workers that have been started, shaken hands with and loaded, and the link to them.

One lost rank is a lost group. Knows nothing of scheduling.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Final

from deepinfer.config import EngineConfig
from deepinfer.errors import ConfigError, DeepInferError, ModelFileError, UnsupportedModel, WorkerStartError
from deepinfer.runtime_dir import RuntimeDir
from deepinfer.supervisor import Supervisor
from deepinfer.zmq_link import ZmqWorkerLink
from deepinfer_protocol import AnyMessage, Fault, Hello, Progress, Ready, Shutdown, WorkerConfig

STOP_GRACE_S: Final = 5.0
ProgressReport = Callable[[int, int], None]
"""Gets bytes done and bytes in all, of all ranks."""


class WorkerGroup:
    """The processes, the link and what they said when they were ready."""

    def __init__(self, config: EngineConfig, model_path: str, version: str) -> None:
        """Binds the socket and starts the processes; `wait_ready` is next."""
        self.epoch = secrets.randbits(62)
        self._runtime_dir = RuntimeDir(config.runtime_dir)
        self.supervisor = Supervisor()
        try:
            self.link = ZmqWorkerLink(self._runtime_dir.endpoint, self.epoch, config.num_workers)
            self._handshake = _Handshake(self.epoch, config.num_workers, version)
            self.link.listen(self._handshake)
            configs = [self._worker_config(config, model_path, rank) for rank in range(config.num_workers)]
            self.supervisor.start(configs, self._on_exit)
        except BaseException:
            self.kill()
            raise

    def _worker_config(self, config: EngineConfig, model_path: str, rank: int) -> WorkerConfig:
        return WorkerConfig(
            endpoint=self._runtime_dir.endpoint,
            epoch=self.epoch,
            rank=rank,
            num_ranks=config.num_workers,
            runner="model" if model_path else "fake",
            model=model_path,
            accelerator=config.accelerator,
            num_slots=config.max_num_seqs,
            block_size=config.block_size,
            kv_cache_bytes=config.kv_cache_bytes,
            num_blocks=config.num_blocks,
            max_model_len=config.max_model_len,
            max_batch_positions=config.max_batch_tokens,
            batch_invariant=config.batch_invariant,
            num_threads=config.num_threads,
            fake_step_s=config.fake_step_s,
            fake_vocab_size=config.fake_vocab_size,
            fake_check_stamps=config.fake_check_stamps,
            dtype=config.dtype,
            load_format=config.load_format,
            cuda_graphs=config.cuda_graphs,
            fake_replay_tokens=config.fake_replay_tokens,
            prefill_truncation=config.prefill_truncation,
            prefill_keep_tokens=config.prefill_keep_tokens,
            cache_format=config.cache_format,
            quantize_activations=config.quantize_activations,
            quantize_cache=config.quantize_cache,
            num_drafts=config.num_drafts,
            measure_costs=config.measures_costs,
            fake_num_drafts=config.fake_num_drafts,
        )

    async def wait_ready(self, timeout_s: float, report: ProgressReport | None = None) -> list[Ready]:
        """What each rank can hold. Raises `ModelError` or `WorkerStartError`, and then nothing is left."""
        self._handshake.report = report
        try:
            async with asyncio.timeout(timeout_s):
                return await self._handshake.result
        except TimeoutError:
            self.kill()
            raise WorkerStartError(f"the workers were not ready within {timeout_s} s") from None
        except BaseException:
            self.kill()
            raise

    def _on_exit(self, rank: int, words: str) -> None:
        self.link.read_now()  # its last words first
        self.link.lose(rank, words)

    async def stop(self) -> None:
        """Let the workers finish and end; nothing of them is left."""
        self.supervisor.expect_exit()
        for rank in range(self.link.num_ranks):
            self.link.send(rank, Shutdown(epoch=self.epoch))
        try:
            await self.supervisor.stop(STOP_GRACE_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """Now, without a word and without waiting; also when the loop is gone."""
        self.supervisor.kill_now()
        if hasattr(self, "link"):
            self.link.close()
        self._runtime_dir.close()


class _Handshake:
    """Listens until every rank is ready, or one fails."""

    def __init__(self, epoch: int, num_ranks: int, version: str) -> None:
        self._epoch = epoch
        self.result: asyncio.Future[list[Ready]] = asyncio.get_running_loop().create_future()
        self.report: ProgressReport | None = None
        self._version = version
        self._greeted: set[int] = set()
        self._ready: dict[int, Ready] = {}
        self._progress = dict.fromkeys(range(num_ranks), (0, 0))

    def on_message(self, rank: int, message: AnyMessage) -> None:
        if self.result.done():
            return
        if (getattr(message, "epoch", None), getattr(message, "rank", None)) != (self._epoch, rank):
            self._fail(WorkerStartError(f"worker {rank} sent {type(message).__name__} of another epoch or rank"))
        elif isinstance(message, Hello):
            self._greet(rank, message)
        elif rank not in self._greeted:
            self._fail(WorkerStartError(f"worker {rank} sent {type(message).__name__} before Hello"))
        elif isinstance(message, Progress):
            self._tell(rank, message)
        elif isinstance(message, Fault):
            self._fail(error_of(message))
        elif isinstance(message, Ready) and rank not in self._ready:
            self._complete(rank, message)
        else:
            self._fail(WorkerStartError(f"worker {rank} sent {type(message).__name__} before it was ready"))

    def on_lost(self, rank: int, reason: str) -> None:
        self._fail(WorkerStartError(f"worker {rank} {reason} before it was ready"))

    def _greet(self, rank: int, hello: Hello) -> None:
        if hello.version != self._version:
            self._fail(WorkerStartError(f"worker {rank} is of version {hello.version}, this engine of {self._version}"))
        self._greeted.add(rank)

    def _tell(self, rank: int, progress: Progress) -> None:
        self._progress[rank] = (progress.done, progress.total)
        if self.report is not None:
            done, total = zip(*self._progress.values(), strict=True)
            self.report(sum(done), sum(total))

    def _complete(self, rank: int, ready: Ready) -> None:
        self._ready[rank] = ready
        if len(self._ready) == len(self._progress):
            shapes = {(r.vocab_size, r.max_model_len, r.weights_version) for r in self._ready.values()}
            if len(shapes) > 1:
                self._fail(WorkerStartError(f"the workers have loaded different models: {sorted(shapes)}"))
            else:
                self.result.set_result([self._ready[rank] for rank in sorted(self._ready)])

    def _fail(self, error: DeepInferError) -> None:
        if not self.result.done():
            self.result.set_exception(error)


def error_of(fault: Fault) -> DeepInferError:
    if fault.code == "model_file":
        file, _, reason = fault.text.partition(": ")
        return ModelFileError(file, reason)
    if fault.code == "setting":
        field, _, reason = fault.text.partition(": ")
        return ConfigError(field, reason)
    if fault.code == "unsupported_model":
        return UnsupportedModel(fault.text)
    return WorkerStartError(f"worker {fault.rank}: {fault.text}")
