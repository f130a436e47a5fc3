/** What users give and get. Names are those of the wire: docs/wire.md says what each means. */

export type Reason = 'stop' | 'length' | 'abort' | 'queue_timeout' | 'timeout' | 'slow_consumer';

export interface Sampling {
  max_tokens?: number | null;
  min_tokens?: number;
  /** 0 is greedy. */
  temperature?: number;
  top_p?: number;
  top_k?: number;
  min_p?: number;
  repetition_penalty?: number;
  presence_penalty?: number;
  frequency_penalty?: number;
  /** From token id, as text, to what is added to its logit. */
  logit_bias?: Record<string, number> | null;
  allowed_token_ids?: readonly number[] | null;
  banned_token_ids?: readonly number[] | null;
  bad_words?: ReadonlyArray<string | readonly number[]> | null;
  /** The output is JSON that this schema accepts, text or an object. At most one of this and the next three. */
  json_schema?: string | boolean | Record<string, unknown> | null;
  /** The whole output matches it. */
  regex?: string | null;
  /** The output is one of these. */
  choice?: readonly string[] | null;
  /** The output is of this grammar, in Lark's notation. */
  grammar?: string | null;
  /** How many samples of the prompt. */
  n?: number;
  stop?: string | readonly string[] | null;
  stop_token_ids?: readonly number[] | null;
  include_stop_str_in_output?: boolean;
  ignore_eos?: boolean;
  logprobs?: number | null;
  /** 63 bits: a `bigint` beyond 2^53. */
  seq_seed?: number | bigint | null;
  skip_special_tokens?: boolean;
  skip_reading_prefix_cache?: boolean | null;
  detokenize?: boolean;
}

/** A message of a chat, as OpenAI's clients have it. */
export type ChatMessage = { role: string; content?: unknown } & Record<string, unknown>;

/** Exactly one of `prompt`, `token_ids` and `messages` is given. */
export interface Request {
  /** New in this client; made up if it is not given. */
  id?: string;
  prompt?: string | null;
  token_ids?: readonly number[] | Int32Array | null;
  messages?: readonly ChatMessage[] | null;
  sampling?: Sampling;
  thinking?: boolean | null;
  reasoning_effort?: string | null;
  tools?: ReadonlyArray<Record<string, unknown>> | null;
  tool_choice?: string | Record<string, unknown> | null;
  /** Lower goes first. */
  priority?: number;
  queue_timeout_ms?: number | null;
  timeout_ms?: number | null;
  /** The stream survives a cut of its connection. True if it is not given. */
  resumable?: boolean;
  /** What your own trace calls this request (W3C Trace Context). */
  traceparent?: string | null;
}

/** Token id, log probability, rank (1 is the most probable), the best alternatives with theirs. */
export type Logprob = [id: number, logprob: number, rank: number, top: Array<[id: number, logprob: number]>];

/** What is new of one sample. */
export interface Chunk {
  sample: number;
  /** Place of the first of `token_ids` among the sample's tokens. */
  index: number;
  token_ids: number[];
  /** New text, never the text so far. */
  text: string;
  /** One a token. */
  logprobs: Logprob[] | null;
  /** On the last chunk of a sample. */
  reason: Reason | null;
  /** With the reason `stop`: the stop string or token that ended it; null: the model itself. */
  stop: string | number | null;
}

export interface Usage {
  prompt_tokens: number;
  cached_tokens: number;
  generated_tokens: number;
  preemptions: number;
}

export interface Timings {
  first_token_us: number;
  total_us: number;
}

export interface Limits {
  max_frame_bytes: number;
  max_streams: number;
  retention_ms: number;
  max_unacked_tokens: number;
  ping_ms: number;
  idle_ms: number;
}

// ---- messages

export interface Hello {
  kind: 'hello';
  min_version: number;
  max_version: number;
  session: string;
  client?: string;
  token?: string;
}

export interface Submit extends Request {
  kind: 'submit';
  id: string;
  credit?: number;
}

export type ClientMessage =
  | Hello
  | Submit
  | { kind: 'cancel'; id: string }
  | { kind: 'credit'; id: string; limit: number; ack?: number }
  | { kind: 'resume'; id: string; next: number; limit: number }
  | { kind: 'ping'; nonce?: number }
  | { kind: 'bye' };

export interface Welcome {
  kind: 'welcome';
  version: number;
  /** This run of the server. */
  engine: string;
  server: string;
  model: string;
  vocab_size: number;
  /** Tokens of a prompt and its answer together. */
  max_length: number;
  limits: Limits;
  has_tokenizer: boolean;
  has_chat: boolean;
}

export interface Reject {
  kind: 'reject';
  code: number;
  name: string;
  text: string;
  min_version: number;
  max_version: number;
  retryable: boolean;
  retry_after_ms: number;
}

export interface Delta extends Chunk {
  kind: 'delta';
  id: string;
  seq: number;
}

export interface Finish {
  kind: 'finish';
  id: string;
  reason: Reason;
  seq: number;
  usage: Usage;
  timings: Timings;
}

export interface ErrorMessage {
  kind: 'error';
  code: number;
  name: string;
  text: string;
  id: string;
  seq: number;
  retryable: boolean;
  retry_after_ms: number;
  field: string;
  detail: string;
}

export interface Pong {
  kind: 'pong';
  nonce: number;
  steps: number;
  running: number;
  waiting: number;
}

export type ServerMessage =
  | Welcome
  | Reject
  | Delta
  | Finish
  | ErrorMessage
  | Pong
  | { kind: 'goaway'; deadline_ms: number };
