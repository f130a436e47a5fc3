"""An offline script as a vLLM user has it. Two lines are not vLLM's: the import, and the class that is made.

    python examples/migrate_from_vllm.py [MODEL]

docs/migrating.md says what else may differ.
"""
# mypy: disable-error-code="call-arg"
# The names are vLLM's: the constructors know them, type checkers do not.

from __future__ import annotations

import sys

from deepinfer import SamplingParams, SyncEngine

MODEL = sys.argv[1] if len(sys.argv) > 1 else "v41-nano"
PROMPTS = ["The capital of France is", "Once upon a time, in a small village by the sea,"]


def main() -> None:
    sampling_params = SamplingParams(
        n=2,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        repetition_penalty=1.05,
        temperature=0.8,
        top_p=0.95,
        top_k=50,
        min_p=0.02,
        seed=1234,
        stop=["\n\n", "THE END"],
        stop_token_ids=[0],
        bad_words=["London", "Berlin"],
        include_stop_str_in_output=False,
        ignore_eos=False,
        max_tokens=24,
        min_tokens=4,
        logprobs=3,
        prompt_logprobs=1,
        detokenize=True,
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
        logit_bias={28: -1.5, 30: 0.5},
        allowed_token_ids=None,
        skip_reading_prefix_cache=False,
    )
    llm = SyncEngine(
        model=MODEL,
        dtype="float32",
        seed=0,
        max_model_len=2048,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        block_size=16,
        tensor_parallel_size=1,
        gpu_memory_utilization=0.9,
        enforce_eager=True,
        enable_prefix_caching=True,
        trust_remote_code=False,
    )

    for output in llm.generate(PROMPTS, sampling_params, use_tqdm=False):
        assert output.finished
        print(f"\nprompt: {output.prompt!r}, {len(output.prompt_token_ids)} tokens")
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        for token_id, entry in list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[1:3]:
            assert entry is not None
            print(f"  in the prompt: {entry[token_id].decoded_token!r} {entry[token_id].logprob:.2f}")
        for sample in output.outputs:
            print(f"  {sample.index}: {sample.text!r}")
            print(f"     {sample.finish_reason}, {sample.stop_reason!r}, {sample.cumulative_logprob:.2f} in all")
            assert sample.logprobs is not None
            first = sample.logprobs[0][sample.token_ids[0]]
            print(f"     first token: {first.decoded_token!r}, rank {first.rank}, {first.logprob:.2f}")

    messages = [{"role": "user", "content": "What is the capital of France?"}]
    [output] = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=16), use_tqdm=False)
    print(f"\nchat: {output.outputs[0].text}")


if __name__ == "__main__":
    main()
