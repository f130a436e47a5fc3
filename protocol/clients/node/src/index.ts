export { Client, connect } from './client.js';
export type { Completion, Curve, Options, Prompt, Sample, StreamOptions } from './client.js';
export { WireError } from './codec.js';
export { ClientClosed, ConnectionLost, ConnectionRejected, ServerError } from './errors.js';
export { TokenStream } from './stream.js';
export type {
  ChatMessage,
  Chunk,
  Limits,
  Logprob,
  Pong,
  Reason,
  Request,
  Sampling,
  Timings,
  Usage,
  Welcome,
} from './types.js';
