"""openvino-genai on the same GGUF file: run by `cpu_smollm2.py` with an interpreter that has it. Knows nothing of us.

    python benchmarks/openvino_peer.py MODEL.gguf 1,16,64 64 3 < prompts.json

Reads a list of prompts (token ids, all of one length) from its standard input; answers with a JSON object a line.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any


def main() -> None:
    import numpy
    import openvino  # type: ignore[import-not-found, unused-ignore]
    import openvino_genai as genai  # type: ignore[import-not-found, unused-ignore]

    path, counts, num_tokens, num_runs = sys.argv[1], sys.argv[2].split(","), int(sys.argv[3]), int(sys.argv[4])
    prompts = numpy.array(json.load(sys.stdin), numpy.int64)
    pipeline = genai.LLMPipeline(path, "CPU")
    settings = genai.GenerationConfig()
    settings.max_new_tokens, settings.ignore_eos, settings.do_sample = num_tokens, True, False

    def generate(num_streams: int) -> tuple[float, float]:
        ids = numpy.ascontiguousarray(prompts[:num_streams])
        inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(numpy.ones_like(ids)))
        started = time.perf_counter()
        result: Any = pipeline.generate(inputs, settings)
        wall_s = time.perf_counter() - started
        if [len(tokens) for tokens in result.tokens] != [num_tokens] * num_streams:
            raise SystemExit(f"{num_streams} answers of {num_tokens} tokens were expected")
        return wall_s, result.perf_metrics.get_ttft().mean

    for count in map(int, counts):
        generate(count)
        runs = [generate(count) for _ in range(num_runs)]
        figures = {
            "streams": count,
            "tokens_per_s": count * num_tokens / statistics.median(wall_s for wall_s, _ in runs),
            "ttft_ms": statistics.median(ttft_ms for _, ttft_ms in runs),
        }
        print(json.dumps({"engine": f"openvino-genai {genai.__version__}", **figures}), flush=True)


if __name__ == "__main__":
    main()
