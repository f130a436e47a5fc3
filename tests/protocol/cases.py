"""Messages of every kind at their usual and at their limits, and frames that are none, each with one thing wrong.

What a golden frame holds is decided here; `protocol.frames` turns it into lines. Knows nothing of files.
"""

from __future__ import annotations

from math import nan
from typing import Any, Final, NamedTuple

import msgspec

from deepinfer_protocol import (
    AnyMessage,
    Fault,
    Hello,
    LogitShaping,
    MaskBatch,
    Progress,
    Ready,
    RowFlag,
    Shutdown,
    SlotAdmit,
    SlotSampling,
    StepCosts,
    StepPlan,
    StepResult,
    WorkerConfig,
    encode,
    encode_config,
    pack_float32,
    pack_int32,
)
from deepinfer_protocol.limits import (
    INT32_MAX,
    INT64_MAX,
    MAX_BIAS_IDS,
    MAX_BLOCKS,
    MAX_COSTS,
    MAX_DRAFTS,
    MAX_LENGTH,
    MAX_SLOTS,
)

Whole = AnyMessage | WorkerConfig
FOREIGN: Final = "not a message of the worker wire"
"""How the refusals begin that msgspec words."""
SAMPLE, WAITS = int(RowFlag.SAMPLE), int(RowFlag.SAMPLE | RowFlag.WAITS_FOR_MASK)


def columns(*values: list[int]) -> bytes:
    return pack_int32([number for column in values for number in column])


GREEDY: Final = SlotSampling()
SEEDED: Final = SlotSampling(0.75, 0.5, 40, 12345, 9, columns([0, 2]), 5, 3)
SHAPING: Final = LogitShaping(
    repetition_penalty=1.25,
    presence_penalty=0.5,
    frequency_penalty=-0.25,
    bias_ids=columns([3, 7, 9]),
    bias_values=pack_float32([1.5, -100.0, float("-inf")]),
    allowed_bits=bytes.fromhex("ffffffff 00000000"),
    bad_words=columns([2, 5, 6, 3, 1, 2, 3]),
)
SHAPED: Final = SlotSampling(0.75, num_prompt=3, min_p=0.125, num_prompt_logprobs=2, shaping=SHAPING)
PLAN: Final = StepPlan(
    epoch=7,
    step_id=3,
    rank=0,
    padded_positions=8,
    retired=columns([4]),
    admits=[SlotAdmit(2, 1, 0, 0, columns([5, 6, 7]), b"", GREEDY)],
    appends=columns([2, 3], [10, 11]),
    rows=columns([2, 3], [1, 4], [3, 1], [SAMPLE, SAMPLE]),
)
RESULT: Final = StepResult(7, 3, 0, 12, 3456, 0, columns([2, 3], [1, 4], [3, 18], [1, 1]), columns([99, 100]))
MASKS: Final = MaskBatch(7, 3, 0, columns([2, 3]), bytes.fromhex("01000000 00000000 ffffffff ffffff00"))
READY: Final = Ready(7, 0, 49_152, 8192, 256, 4096, 16, 368_640, 0, 23_040.0, 0, 0, "sha256:00ff", "cpu")
COSTS: Final = StepCosts(
    columns([1, 8, 64]), pack_float32([500.0, 600.0, 2000.5]), columns([1, 8]), pack_float32([100.0, 110.0])
)
DRAFTING: Final = msgspec.structs.replace(
    PLAN,
    padded_positions=6,
    rows=columns([2, 3], [1, 4], [1, 3], [SAMPLE, SAMPLE]),
    most_drafts=columns([5, 0]),
    verify_budget=2,
    num_drafts=5,
)
VERIFIED: Final = msgspec.structs.replace(
    RESULT,
    rows=columns([2, 3], [1, 4], [6, 18], [3, 1]),
    tokens=columns([9, 8, 7, 6]),
    num_verified=columns([2, 0]),
    survivals=bytes([250, 200, 100, 50, 0, 255, 254, 253, 252, 251]),
    predicted=pack_float32([0.75, 0.5]),
    draft_us=300,
)
CONFIG: Final = WorkerConfig(
    endpoint="ipc:///run/user/1000/deepinfer-0123456789ab/w.sock",
    epoch=7,
    rank=0,
    num_ranks=1,
    runner="fake",
    model="",
    accelerator="cpu",
    num_slots=256,
    block_size=16,
    kv_cache_bytes=0,
    num_blocks=0,
    max_model_len=0,
    max_batch_positions=512,
    batch_invariant=True,
    num_threads=0,
)


def valid() -> dict[str, Whole]:
    replace = msgspec.structs.replace
    many = list(range(256))
    resumed = SlotAdmit(2, 9, 32, 32, columns([5, 6, 7] * 20), columns([8, 3]), SEEDED)
    replayed = SlotAdmit(2, 9, 16, 32, columns([5, 6, 7] * 20), columns([8, 3]), SEEDED)
    shaped = SlotAdmit(2, 9, 0, 0, columns([5, 6, 7, 8]), b"", SHAPED)
    most = LogitShaping(
        100.0, 2.0, -2.0, columns(list(range(MAX_BIAS_IDS))), pack_float32([100.0, -100.0] * (MAX_BIAS_IDS // 2)),
        b"\xff" * 1024, columns([1023, *[INT32_MAX] * 1023]),
    )  # fmt: skip
    widest = SlotSampling(
        100.0, 1.0, INT32_MAX, INT64_MAX, MAX_LENGTH, columns([INT32_MAX] * 1024), 20, 2, 1.0, 20, most, True
    )
    return {
        "hello": Hello("0.1.0+wire1", 7, 0, 4242),
        "hello of the second rank": Hello("0.1.0+wire1", 7, 1, 4243),
        "hello at its limits": Hello("v" * 256, INT64_MAX, 1023, INT32_MAX),
        "hello with nothing in it": Hello("", 0, 0, 0),
        "ready": READY,
        "ready of the second rank": replace(READY, rank=1, device="cpu, 2 threads", slot_bytes=64),
        "ready with slots of their own state": replace(
            READY, slot_bytes=3_000_000, global_bytes_per_token=890.5, bounded_replay_tokens=128,
            exact_replay_tokens=7_747,
        ),
        "ready at its limits": Ready(
            INT64_MAX, 1023, INT32_MAX, MAX_LENGTH, MAX_SLOTS - 1, MAX_BLOCKS - 1, 4096, INT64_MAX, INT64_MAX,
            float(INT32_MAX), MAX_LENGTH, MAX_LENGTH, "w" * 256, "", MAX_DRAFTS,
            StepCosts(columns(list(range(1, MAX_COSTS + 1))), bytes(4 * MAX_COSTS)),
        ),
        "ready to draft": replace(READY, num_drafts=5, costs=COSTS),
        "progress": Progress(7, 0, 50_000_000, 97_000_000),
        "progress at its limits": Progress(INT64_MAX, 1023, INT64_MAX, INT64_MAX),
        "fault": Fault(7, 0, "model_file", "model.gguf: ends early"),
        "fault in many scripts": Fault(7, 1, "internal", "ошибка 错误 \N{COLLISION SYMBOL}"),
        "fault at its limits": Fault(7, 0, "", "t" * 4096),
        "shutdown": Shutdown(7),
        "shutdown at its limits": Shutdown(INT64_MAX),
        "plan": PLAN,
        "plan of an empty step": StepPlan(7, 4, 0, 0, b"", [], b"", b""),
        "plan of a rank without rows": StepPlan(7, 4, 1, 256, b"", [], b"", b""),
        "plan of the second rank": replace(PLAN, rank=1, admits=[], retired=b""),
        "plan with a row that waits for a mask": replace(PLAN, rows=columns([2, 3], [1, 4], [3, 1], [WAITS, SAMPLE])),
        "plan with a prompt in the middle": replace(PLAN, rows=columns([2], [1], [2], [0])),
        "plan that admits after a preemption": replace(PLAN, admits=[resumed]),
        "plan that admits to a replay": replace(PLAN, admits=[replayed]),
        "plan that admits with logits shaped": replace(PLAN, admits=[shaped]),
        "plan that only retires": StepPlan(7, 5, 0, 0, columns([0, 1, 2]), [], b"", b""),
        "plan of 256 rows": StepPlan(7, 6, 0, 256, b"", [], b"", columns(many, many, [1] * 256, [SAMPLE] * 256)),
        "plan with drafts": DRAFTING,
        "plan with more budget than drafts": replace(DRAFTING, verify_budget=INT32_MAX, padded_positions=9),
        "plan of rows that only draft": replace(PLAN, num_drafts=MAX_DRAFTS),
        "plan at its limits": StepPlan(
            INT64_MAX, INT64_MAX, 1023, INT32_MAX, columns([MAX_SLOTS - 1]),
            [SlotAdmit(MAX_SLOTS - 1, INT32_MAX, 1, 1, columns([INT32_MAX] * 2), columns([MAX_BLOCKS - 1]), widest)],
            columns([MAX_SLOTS - 1], [MAX_BLOCKS - 1]),
            columns([MAX_SLOTS - 1], [INT32_MAX], [MAX_LENGTH], [WAITS]),
        ),
        "masks": MASKS,
        "masks of nothing": MaskBatch(7, 3, 0, b"", b""),
        "masks behind drafts": replace(MASKS, num_masks=columns([3, 1])),
        "masks at their limits": MaskBatch(INT64_MAX, INT64_MAX, 1023, columns([MAX_SLOTS - 1]), b"\xff" * 4),
        "masks behind the longest draft": MaskBatch(
            7, 3, 0, columns([2]), b"\xff" * 4 * (1 + MAX_DRAFTS), columns([1 + MAX_DRAFTS])
        ),
        "result": RESULT,
        "result of an empty step": StepResult(7, 4, 1, 0, 0, 0, b"", b""),
        "result without a token": StepResult(7, 4, 0, 1, 2, 3, columns([2], [1], [2], [0]), b""),
        "result with several tokens a row": replace(
            RESULT, rows=columns([2, 3], [1, 4], [6, 18], [3, 1]), tokens=columns([9, 8, 7, 6])
        ),
        "result with logprobs": replace(
            RESULT,
            logprob_ids=columns([99, 99, 5]),
            logprobs=bytes.fromhex("000080bf 000080bf 000000c0"),
            logprob_ranks=columns([1]),
        ),
        "result with logprobs of a prompt": replace(
            RESULT,
            prompt_logprob_ids=columns([6, 8, 7, 7]),
            prompt_logprobs=bytes.fromhex("000080bf 000000bf 00000000 00000000"),
            prompt_logprob_ranks=columns([2, 1]),
        ),
        "result with drafts": VERIFIED,
        "result with drafts of a row that waited": replace(VERIFIED, draft_ids=columns([9, 8, 7, 6, INT32_MAX])),
        "result of 256 rows": StepResult(
            7, 6, 0, 40, 5000, 0, columns(many, many, [17] * 256, [1] * 256), columns(many)
        ),
        "result at its limits": StepResult(
            INT64_MAX, INT64_MAX, 1023, INT32_MAX, INT32_MAX, INT32_MAX,
            columns([MAX_SLOTS - 1], [INT32_MAX], [MAX_LENGTH], [1]), columns([INT32_MAX]),
            columns([INT32_MAX] * 21), bytes.fromhex("000080ff") * 21, columns([INT32_MAX]),
            columns([INT32_MAX] * 21), bytes.fromhex("000080ff") * 21, columns([INT32_MAX]),
        ),
        "config": CONFIG,
        "config of the second rank": replace(
            CONFIG, rank=1, num_ranks=2, runner="model", model="models/модель.gguf", fake_step_s=0.25, num_drafts=5,
            measure_costs=True,
        ),
    }  # fmt: skip


class Refused(NamedTuple):
    """A valid message with one thing wrong."""

    base: Whole
    path: tuple[int, ...]
    """Indices into the nested arrays of the message; its kind is at 0."""
    value: Any
    verdict: str = FOREIGN


def spoiled() -> dict[str, Refused]:
    two = [2, 3], [1, 4]
    admit = (6, 0)
    shaped = msgspec.structs.replace(PLAN, admits=[SlotAdmit(2, 9, 0, 0, columns([5, 6, 7, 8]), b"", SHAPED)])
    shaping = (*admit, 6, 10)
    ranked = msgspec.structs.replace(
        RESULT, logprob_ids=columns([99, 99, 5]), logprobs=bytes(12), logprob_ranks=columns([1])
    )
    prompted = msgspec.structs.replace(
        RESULT, prompt_logprob_ids=columns([6, 8]), prompt_logprobs=bytes(8), prompt_logprob_ranks=columns([2])
    )
    ready = msgspec.structs.replace(READY, num_drafts=5, costs=COSTS)
    return {
        "drafts of no row": Refused(DRAFTING, (9,), b"", "verify_budget: 2 came, and no row has drafts"),
        "drafts of one row too few": Refused(DRAFTING, (9,), columns([5]), "most_drafts: 1 came for 2 rows"),
        "drafts beyond a block": Refused(DRAFTING, (9,), columns([MAX_DRAFTS + 1, 0]), "most_drafts: 0 to 65 came"),
        "drafts of a prompt": Refused(DRAFTING, (9,), columns([0, 5]), "row 1 verifies drafts: one sampled position"),
        "drafts beyond the padding": Refused(DRAFTING, (10,), 5, "9 positions in the rows, padded to 6"),
        "drafts to be made beyond a block": Refused(DRAFTING, (11,), MAX_DRAFTS + 1),
        "verified of one row too few": Refused(VERIFIED, (15,), columns([2]), "num_verified: 1 came for 2 rows"),
        "verified beyond a block": Refused(VERIFIED, (15,), columns([MAX_DRAFTS + 1, 0]), "num_verified: 0 to 65 came"),
        "verified fewer than the tokens": Refused(VERIFIED, (15,), columns([1, 0]), "row 0: 3 tokens came of 1 drafts"),
        "a number of drafts that is none": Refused(
            VERIFIED, (17,), pack_float32([nan]), "predicted: a value is no number of drafts"
        ),
        "survivals of half a row": Refused(VERIFIED, (16,), bytes(9), "survivals: 9 came for 2 sampled rows"),
        "predictions of more than a block": Refused(
            VERIFIED, (17,), bytes(4 * (MAX_DRAFTS + 1)), "predicted: more than 64 rows"
        ),
        "costs of nothing": Refused(ready, (16,), [b"", b"", b"", b""], "costs: no positions were measured"),
        "costs without a time": Refused(ready, (16, 1), b"", "costs: 3 positions and 0 times"),
        "costs that fall": Refused(ready, (16, 0), columns([1, 64, 8]), "costs: positions must rise"),
        "costs below zero": Refused(
            ready, (16, 3), pack_float32([-1.0, 1.0]), "costs: a time of draft rows is no number of microseconds"
        ),
        "kind unknown": Refused(PLAN, (0,), 9),
        "kind of another message": Refused(PLAN, (0,), 5),
        "kind as text": Refused(PLAN, (0,), "3"),
        "epoch negative": Refused(PLAN, (1,), -1),
        "epoch of 64 bits": Refused(PLAN, (1,), 2**63),
        "epoch as float": Refused(PLAN, (1,), 7.5),
        "epoch nil": Refused(PLAN, (1,), None),
        "step id of 64 bits": Refused(PLAN, (2,), 2**64 - 1),
        "rank too large": Refused(PLAN, (3,), 1024),
        "padded positions negative": Refused(PLAN, (4,), -(2**31)),
        "padded positions of 32 bits": Refused(PLAN, (4,), 2**31),
        "padded to less than the rows": Refused(PLAN, (4,), 3, "4 positions in the rows, padded to 3"),
        "retired as text": Refused(PLAN, (5,), "abcd"),
        "retired no int32": Refused(PLAN, (5,), b"abc", "retired: 3 bytes are no 1 columns of int32"),
        "retired slot negative": Refused(PLAN, (5,), columns([-1]), "retired slot: -1 to -1 came"),
        "admits nil": Refused(PLAN, (6,), None),
        "admit nil": Refused(PLAN, admit, None),
        "admit slot too large": Refused(PLAN, (*admit, 0), MAX_SLOTS),
        "admit generation negative": Refused(PLAN, (*admit, 1), -1),
        "admit length beyond the floor": Refused(PLAN, (*admit, 2), 1, "admitted at length 1, floor 0 with 3 tokens"),
        "admit floor beyond the tokens": Refused(PLAN, (*admit, 3), 3, "admitted at length 0, floor 3 with 3 tokens"),
        "admit floor negative": Refused(PLAN, (*admit, 3), -1),
        "admit without tokens": Refused(PLAN, (*admit, 4), b"", "an admitted slot has no tokens"),
        "admit token negative": Refused(PLAN, (*admit, 4), columns([-5]), "admit token: -5 to -5 came"),
        "admit block too large": Refused(PLAN, (*admit, 5), columns([MAX_BLOCKS]), "admit block: 1073741824"),
        "temperature not a number": Refused(PLAN, (*admit, 6, 0), float("nan")),
        "temperature infinite": Refused(PLAN, (*admit, 6, 0), float("inf")),
        "temperature negative": Refused(PLAN, (*admit, 6, 0), -0.5),
        "top_p zero": Refused(PLAN, (*admit, 6, 1), 0.0),
        "top_p not a number": Refused(PLAN, (*admit, 6, 1), float("nan")),
        "top_k negative": Refused(PLAN, (*admit, 6, 2), -1),
        "seed of 64 bits": Refused(PLAN, (*admit, 6, 3), 2**63),
        "stop ids too many": Refused(PLAN, (*admit, 6, 5), bytes(4 * 1025)),
        "stop id negative": Refused(PLAN, (*admit, 6, 5), columns([-1]), "admit stop id: -1 to -1 came"),
        "logprobs too many": Refused(PLAN, (*admit, 6, 6), 21),
        "prompt beyond the tokens": Refused(PLAN, (*admit, 6, 7), 4, "a prompt of 4 tokens, 3 tokens came"),
        "min_p above one": Refused(PLAN, (*admit, 6, 8), 1.5),
        "min_p not a number": Refused(PLAN, (*admit, 6, 8), float("nan")),
        "prompt logprobs too many": Refused(PLAN, (*admit, 6, 9), 21),
        "shaping as a map": Refused(PLAN, (*admit, 6, 10), {}),
        "repetition penalty zero": Refused(shaped, (*shaping, 0), 0.0),
        "repetition penalty infinite": Refused(shaped, (*shaping, 0), float("inf")),
        "presence penalty too large": Refused(shaped, (*shaping, 1), 2.5),
        "frequency penalty not a number": Refused(shaped, (*shaping, 2), float("nan")),
        "bias id negative": Refused(shaped, (*shaping, 3), columns([-3, 7, 9]), "bias id: -3 to 9 came"),
        "bias ids too many": Refused(shaped, (*shaping, 3), bytes(4 * 2049)),
        "bias for a token twice": Refused(shaped, (*shaping, 3), columns([3, 7, 3]), "a token has two biases"),
        "bias without an id": Refused(shaped, (*shaping, 3), columns([3, 7]), "bias_ids and bias_values differ"),
        "bias too large": Refused(shaped, (*shaping, 4), pack_float32([1.0, 101.0, 0.0]), "bias: 101.0 came"),
        "bias not a number": Refused(shaped, (*shaping, 4), pack_float32([1.0, float("nan"), 0.0]), "bias: nan came"),
        "bias infinite": Refused(shaped, (*shaping, 4), pack_float32([1.0, float("inf"), 0.0]), "bias: inf came"),
        "allowed bits of half a word": Refused(shaped, (*shaping, 5), bytes(6), "allowed_bits: 6 bytes are no whole"),
        "bad words that end early": Refused(shaped, (*shaping, 6), columns([2, 5]), "bad_words: a word of 2 ids"),
        "bad word without ids": Refused(shaped, (*shaping, 6), columns([0, 1, 5]), "bad_words: a word of 0 ids"),
        "bad word id negative": Refused(shaped, (*shaping, 6), columns([1, -5]), "bad word: -5 to 1 came"),
        "bad words too many": Refused(shaped, (*shaping, 6), columns([1, 5] * 4097)),
        "appends of one column": Refused(PLAN, (7,), columns([2]), "appends: 4 bytes are no 2 columns of int32"),
        "append block too large": Refused(PLAN, (7,), columns([2], [MAX_BLOCKS]), "append block: 1073741824"),
        "rows of three columns": Refused(PLAN, (8,), bytes(12), "rows: 12 bytes are no 4 columns of int32"),
        "row slot too large": Refused(PLAN, (8,), columns([MAX_SLOTS], [1], [1], [1]), "slot: 1048576"),
        "row generation negative": Refused(PLAN, (8,), columns([2], [-1], [1], [1]), "generation: -1"),
        "row without positions": Refused(PLAN, (8,), columns([2], [1], [0], [1]), "positions: 0 to 0 came"),
        "row with unknown flags": Refused(PLAN, (8,), columns([2], [1], [1], [4]), "flags: 4 to 4 came"),
        "two rows for a slot": Refused(PLAN, (8,), columns([2, 2], [1, 1], [1, 1], [1, 1]), "a slot has two rows"),
        "field too many": Refused(PLAN, (9,), 0),
        "masks that do not fit": Refused(MASKS, (5,), bytes(12), "12 bytes of masks for 2 places of 2 rows"),
        "masks without slots": Refused(MASKS, (4,), b"", "16 bytes of masks for 0 places of 0 rows"),
        "masks without bits": Refused(MASKS, (5,), b"", "0 bytes of masks for 2 places of 2 rows"),
        "masks of one row too few": Refused(MASKS, (6,), columns([4]), "num_masks: 1 came for 2 rows"),
        "masks of a row without any": Refused(MASKS, (6,), columns([2, 0]), "num_masks: 0 to 2 came"),
        "masks behind more than a draft": Refused(MASKS, (6,), columns([MAX_DRAFTS + 2, 1]), "num_masks: 1 to 66 came"),
        "masks fewer than told": Refused(MASKS, (6,), columns([4, 1]), "16 bytes of masks for 5 places of 2 rows"),
        "two masks for a slot": Refused(MASKS, (4,), columns([2, 2]), "a slot has two masks"),
        "result length zero": Refused(RESULT, (7,), columns(*two, [0, 18], [1, 1]), "length: 0 to 18 came"),
        "result with fewer tokens": Refused(RESULT, (8,), columns([99]), "rows announce 2 tokens, 1 came"),
        "result token negative": Refused(RESULT, (8,), columns([99, -1]), "token: -1 to 99 came"),
        "result logprobs alone": Refused(RESULT, (10,), bytes(4), "logprob_ids and logprobs differ in length"),
        "result logprobs without ranks": Refused(ranked, (11,), b"", "logprob_ranks: 0 ranks for 3 ids"),
        "result ranks without logprobs": Refused(RESULT, (11,), columns([1]), "logprob_ranks: 1 ranks for 0 ids"),
        "result rank zero": Refused(ranked, (11,), columns([0]), "logprob_ranks: 0 to 0 came"),
        "result prompt logprobs alone": Refused(RESULT, (13,), bytes(4), "prompt_logprob_ids and prompt_logprobs"),
        "result prompt logprobs without ranks": Refused(prompted, (14,), b"", "prompt_logprob_ranks: 0 ranks for 2"),
        "result prompt logprob id negative": Refused(prompted, (12,), columns([-1, 2]), "prompt logprob id: -1 to 2"),
        "draft ids beyond a block": Refused(
            VERIFIED, (19,), bytes(4 * (2 * MAX_DRAFTS + 1)), "draft_ids: more than 128 rows"
        ),
        "draft id negative": Refused(VERIFIED, (19,), columns([-1]), "draft id: -1 to -1 came"),
        "result time negative": Refused(RESULT, (5,), -1),
        "ready without slots": Refused(READY, (5,), 0),
        "ready without vocabulary": Refused(READY, (3,), 0),
        "ready with negative bytes a token": Refused(READY, (10,), -1.0),
        "ready with bytes a token that are no number": Refused(READY, (10,), float("nan")),
        "ready with a negative replay": Refused(READY, (11,), -1),
        "version too long": Refused(Hello("", 7, 0, 1), (1,), "v" * 257),
        "version as bytes": Refused(Hello("", 7, 0, 1), (1,), b"0.1.0"),
        "fault text too long": Refused(Fault(7, 0, "internal", ""), (4,), "t" * 4097),
        "pid of 32 bits": Refused(Hello("", 7, 0, 1), (4,), 2**31),
        "shutdown of no epoch": Refused(Shutdown(7), (1,), None),
    }  # fmt: skip


def raw() -> dict[str, tuple[bytes, str]]:
    plan = encode(PLAN)
    config = encode_config(CONFIG)
    return {
        "nothing": (b"", FOREIGN),
        "nil": (b"\xc0", FOREIGN),
        "a map": (msgspec.msgpack.encode({"kind": 3}), FOREIGN),
        "an empty array": (b"\x90", FOREIGN),
        "a kind alone": (b"\x91\x03", FOREIGN),
        "truncated": (plan[:-1], FOREIGN),
        "truncated in its header": (plan[:3], FOREIGN),
        "a byte behind it": (plan + b"\0", FOREIGN),
        "two messages": (plan + plan, FOREIGN),
        "an array of 2**32 - 1": (b"\xdd\xff\xff\xff\xff" + plan[1:], FOREIGN),
        "bytes of 2**32 - 1": (plan[:5] + b"\xc6\xff\xff\xff\xff", FOREIGN),
        "deep nesting": (b"\x91" * 2000, FOREIGN),
        "an extension type": (b"\xd4\x01\x00", FOREIGN),
        "text that is no UTF-8": (b"\x95\x01\xa2\xff\xfe\x07\x00\x01", FOREIGN),
        "a pickle": (b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00", FOREIGN),
        "a request for a page": (b"GET / HTTP/1.1\r\n\r\n", FOREIGN),
        "config truncated": (config[:-1], "not a worker configuration"),
        "config of no map": (b"\1\0\0\0\x90", "not a worker configuration"),
        "config without fields": (b"\1\0\0\0\x80", "not a worker configuration"),
        "config announced too large": (b"\xff\xff\xff\xff", "configuration of 4294967295 bytes, at most 65536"),
        "config without a length": (b"\1\0", "a length of 2 bytes, 4 were expected"),
        "config of a rank that is none": (
            encode_config(msgspec.structs.replace(CONFIG, rank=2, num_ranks=2)), "rank 2 of 2",
        ),
        "config with a time that is none": (
            encode_config(msgspec.structs.replace(CONFIG, fake_step_s=float("nan"))), "not a worker configuration",
        ),
        "config of another truncation": (
            encode_config(msgspec.structs.replace(CONFIG, prefill_truncation="on")), "not a worker configuration",
        ),
        "config of another cache format": (
            encode_config(msgspec.structs.replace(CONFIG, cache_format="fp8")), "not a worker configuration",
        ),
        "config of another runner": (
            encode_config(msgspec.structs.replace(CONFIG, runner="shell")), "not a worker configuration",
        ),
    }  # fmt: skip
