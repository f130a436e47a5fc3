/** The messages of the client wire: the tables of docs/wire.md. Knows nothing of sockets or of what a message does. */

import * as f from './fields.js';
import type { Field, Fields, Type } from './fields.js';

const INT32 = 2 ** 31 - 1;

const ID = /^[A-Za-z0-9_-]{1,64}$/;
const count = f.int(0, INT32);
const int53 = f.int(0, Number.MAX_SAFE_INTEGER);
const version = f.int(1, 65_535);
const name = f.text(256);
const detail = f.text(512);
const reason = f.oneOf('stop', 'length', 'abort', 'queue_timeout', 'timeout', 'slow_consumer');
const anyMap = f.mapOf(f.anything);

function required(type: Type): Field {
  return { type };
}

function optional(type: Type, fallback: unknown): Field {
  return { type, fallback };
}

/** May be nil, which is its default. */
function nilable(type: Type): Field {
  return { type: f.orNil(type), fallback: null };
}

/** A map that is there even when it is empty. */
function written(type: Type): Field {
  return { type, fallback: {}, isWritten: true };
}

const sampling: Fields = {
  max_tokens: nilable(f.int64),
  min_tokens: optional(f.int64, 0),
  temperature: optional(f.float, 1),
  top_p: optional(f.float, 1),
  top_k: optional(f.int64, 0),
  min_p: optional(f.float, 0),
  repetition_penalty: optional(f.float, 1),
  presence_penalty: optional(f.float, 0),
  frequency_penalty: optional(f.float, 0),
  logit_bias: nilable(f.mapOf(f.float)),
  allowed_token_ids: nilable(f.array(f.int64)),
  banned_token_ids: nilable(f.array(f.int64)),
  bad_words: nilable(f.array(f.either(f.text(), f.array(f.int64)))),
  json_schema: nilable(f.either(f.text(), f.bool, anyMap)),
  regex: nilable(f.text()),
  choice: nilable(f.array(f.text())),
  grammar: nilable(f.text()),
  n: optional(f.int64, 1),
  stop: optional(f.orNil(f.either(f.text(), f.array(f.text()))), []),
  stop_token_ids: optional(f.orNil(f.array(f.int64)), []),
  include_stop_str_in_output: optional(f.bool, false),
  ignore_eos: optional(f.bool, false),
  logprobs: nilable(f.int64),
  prompt_logprobs: nilable(f.int64),
  seq_seed: nilable(f.int64),
  skip_special_tokens: optional(f.bool, true),
  skip_reading_prefix_cache: optional(f.orNil(f.bool), false),
  detokenize: optional(f.bool, true),
};

const limits: Fields = {
  max_frame_bytes: required(count),
  max_streams: required(count),
  retention_ms: required(count),
  max_unacked_tokens: required(count),
  ping_ms: required(count),
  idle_ms: required(count),
};

const usage: Fields = {
  prompt_tokens: optional(count, 0),
  cached_tokens: optional(count, 0),
  generated_tokens: optional(count, 0),
  preemptions: optional(count, 0),
};

const timings: Fields = { first_token_us: optional(int53, 0), total_us: optional(int53, 0) };

const logprob = f.tuple([count, f.float, count, f.array(f.tuple([count, f.float], false), 0, 20)], true);

export interface Kind {
  readonly fields: Fields;
  /** A field that is not known is refused. */
  readonly isStrict: boolean;
}

export const FROM_CLIENT: Readonly<Record<string, Kind>> = {
  hello: {
    isStrict: false,
    fields: {
      min_version: required(version),
      max_version: required(version),
      session: required(f.text(64, /^[A-Za-z0-9_-]{16,64}$/)),
      client: optional(name, ''),
      token: optional(name, ''),
    },
  },
  submit: {
    isStrict: true,
    fields: {
      id: required(f.text(64, ID)),
      prompt: nilable(f.text()),
      token_ids: nilable(f.tokenIds),
      messages: nilable(f.array(anyMap, 1, 4096)),
      sampling: written(f.struct(sampling, true)),
      thinking: nilable(f.bool),
      reasoning_effort: nilable(name),
      tools: nilable(f.array(anyMap, 0, 1024)),
      tool_choice: nilable(f.either(name, anyMap)),
      priority: optional(f.int(-1_000_000, 1_000_000), 0),
      queue_timeout_ms: nilable(count),
      timeout_ms: nilable(count),
      resumable: optional(f.bool, false),
      credit: optional(count, 1024),
      traceparent: nilable(f.text(55, /^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$/)),
    },
  },
  cancel: { isStrict: true, fields: { id: required(f.text(64, ID)) } },
  credit: {
    isStrict: true,
    fields: { id: required(f.text(64, ID)), limit: required(count), ack: optional(count, 0) },
  },
  resume: {
    isStrict: true,
    fields: { id: required(f.text(64, ID)), next: required(count), limit: required(count) },
  },
  ping: { isStrict: true, fields: { nonce: optional(int53, 0) } },
  bye: { isStrict: true, fields: {} },
};

export const FROM_SERVER: Readonly<Record<string, Kind>> = {
  welcome: {
    isStrict: false,
    fields: {
      version: required(version),
      engine: required(name),
      server: required(name),
      model: required(name),
      vocab_size: required(count),
      max_length: required(count),
      limits: required(f.struct(limits, false)),
      has_tokenizer: optional(f.bool, false),
      has_chat: optional(f.bool, false),
    },
  },
  reject: {
    isStrict: false,
    fields: {
      code: required(count),
      name: required(name),
      text: required(detail),
      min_version: required(version),
      max_version: required(version),
      retryable: optional(f.bool, false),
      retry_after_ms: optional(count, 0),
    },
  },
  delta: {
    isStrict: false,
    fields: {
      id: required(f.text(64, ID)),
      seq: required(count),
      sample: optional(f.int(0, 127), 0),
      index: optional(count, 0),
      token_ids: optional(f.tokenIds, []),
      text: optional(f.text(), ''),
      logprobs: nilable(f.array(logprob)),
      reason: nilable(reason),
      stop: nilable(f.either(count, f.text())),
    },
  },
  finish: {
    isStrict: false,
    fields: {
      id: required(f.text(64, ID)),
      reason: required(reason),
      seq: optional(count, 0),
      usage: written(f.struct(usage, false)),
      timings: written(f.struct(timings, false)),
    },
  },
  error: {
    isStrict: false,
    fields: {
      code: required(count),
      name: required(name),
      text: required(detail),
      id: optional(f.text(64, /^[A-Za-z0-9_-]{0,64}$/), ''),
      seq: optional(count, 0),
      retryable: optional(f.bool, false),
      retry_after_ms: optional(count, 0),
      field: optional(name, ''),
      detail: optional(detail, ''),
    },
  },
  pong: {
    isStrict: false,
    fields: {
      nonce: optional(int53, 0),
      steps: optional(int53, 0),
      running: optional(count, 0),
      waiting: optional(count, 0),
    },
  },
  goaway: { isStrict: false, fields: { deadline_ms: optional(count, 0) } },
};
